"""Who is there: both sides prove that they hold the shared secret, without sending it.

Nonces are fresh on both sides, so a recorded Hello or Welcome proves nothing a second time.
"""

from __future__ import annotations

import hmac
import secrets

from shoal.wire.messages import PROTOCOL, Challenge, EngineInfo, Hello, Rejected, Role, Welcome

NONCE_BYTES = 16


def challenge() -> Challenge:
    return Challenge(protocol=PROTOCOL, nonce=secrets.token_bytes(NONCE_BYTES))


def unspeakable(asked: Challenge) -> str | None:
    """Why the dialler cannot even answer the listener's first message."""
    if asked.protocol != PROTOCOL:
        return f"the listener speaks protocol {asked.protocol}, this process speaks {PROTOCOL}"
    if len(asked.nonce) != NONCE_BYTES:
        return f"a nonce has {NONCE_BYTES} bytes"
    return None


def hello(asked: Challenge, *, secret: bytes, role: Role, name: str, incarnation: str, session: int) -> Hello:
    nonce = secrets.token_bytes(NONCE_BYTES)
    return Hello(
        protocol=PROTOCOL,
        role=role,
        name=name,
        incarnation=incarnation,
        session=session,
        nonce=nonce,
        proof=_proof(secret, b"dial", asked.nonce, nonce),
    )


def refusal(asked: Challenge, answer: Hello, *, secret: bytes) -> str | None:
    """Why the listener turns the dialler away; None: it is one of us."""
    if answer.protocol != PROTOCOL:
        return f"protocol {answer.protocol} is not spoken here, {PROTOCOL} is"
    if len(answer.nonce) != NONCE_BYTES:
        return f"a nonce has {NONCE_BYTES} bytes"
    if not hmac.compare_digest(answer.proof, _proof(secret, b"dial", asked.nonce, answer.nonce)):
        return "the shared secret does not match"
    return None


def welcome(asked: Challenge, answer: Hello, *, secret: bytes, incarnation: str, engine: EngineInfo | None) -> Welcome:
    return Welcome(incarnation=incarnation, proof=_proof(secret, b"listen", answer.nonce, asked.nonce), engine=engine)


def distrust(asked: Challenge, sent: Hello, answer: Welcome | Rejected, *, secret: bytes) -> str | None:
    """Why the dialler does not go on; None: the listener is one of us and takes us."""
    if isinstance(answer, Rejected):
        return f"rejected: {answer.reason[:200]}"
    if not hmac.compare_digest(answer.proof, _proof(secret, b"listen", sent.nonce, asked.nonce)):
        return "the listener does not hold the shared secret"
    return None


def _proof(secret: bytes, side: bytes, theirs: bytes, own: bytes) -> bytes:
    return hmac.digest(secret, side + theirs + own, "sha256")
