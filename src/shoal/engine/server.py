"""What an engine says to gateways: sessions, leases and frames. It carries requests and tokens, and decides nothing.

A session is one connection of one gateway. Its streams die with it: when the socket closes, when nothing was heard for
LEASE_S, or when the same gateway opens a newer session (fencing). Other gateways' streams live on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from shoal.core.plan import View
from shoal.core.request import Refusal
from shoal.engine.holdings import Holdings
from shoal.engine.loop import StepLoop, Turn
from shoal.engine.sessions import Pulse, Session
from shoal.fleet import health
from shoal.wire.connection import Cause, Connection
from shoal.wire.listener import Listener, listen
from shoal.wire.messages import (
    MAX_CHOICES,
    Abort,
    Costs,
    EngineInfo,
    Hello,
    KeepAlive,
    Message,
    Refusing,
    Role,
    Submit,
)

LEASE_S = health.LEASE_NS / 1e9

log = logging.getLogger("shoal.engine")


class Server:
    """`on_turn` and `on_announce` run on the event loop; the step thread reaches them by call_soon_threadsafe."""

    def __init__(
        self, steps: StepLoop, view: View, *, info: EngineInfo, costs: Callable[[], tuple[float, ...]]
    ) -> None:
        self.listener: Listener
        self.info = info
        self.draining = False
        self._steps = steps
        self._view = view
        self._costs = costs
        self._holdings = Holdings()
        self._sessions: dict[int, Session] = {}
        self._num_sessions = 0
        self._newest: dict[str, tuple[str, int]] = {}  # gateway -> incarnation and number of its newest session

    async def listen(self, address: str, *, secret: bytes, incarnation: str) -> None:
        self.listener = await listen(
            address,
            secret=secret,
            incarnation=incarnation,
            welcome=lambda: self.info,
            handler=self._serve,
            admit=self._refusal,
        )

    def drain(self) -> None:
        """Refuse new requests from here on, and let every gateway know at once."""
        self.draining = True
        for session in self._sessions.values():
            session.beat()

    async def close(self) -> None:
        """What the gateways have not read yet is still sent, within the outbox's limits."""
        await self.listener.close()

    @property
    def ready(self) -> bool:
        return not self.draining and self._steps.turning()

    @property
    def view(self) -> View:
        return self._view

    @property
    def ended(self) -> Mapping[Cause, int]:
        """How connections ended."""
        return self.listener.ended

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    def on_turn(self, turn: Turn) -> None:
        self._view = turn.view
        self._holdings.take(turn.kv)
        for key in turn.updates.keys() | turn.refused.keys():
            session = self._sessions.get(key)
            if session is not None:
                session.add(turn.updates.get(key, ()), turn.refused.get(key, ()))
        if turn.kv:
            for session in self._sessions.values():
                session.kv_changed()

    def on_announce(self, predicted_ns: int) -> None:
        for session in self._sessions.values():
            session.announce("step", predicted_ns)

    def _pulse(self) -> Pulse:
        return Pulse(self._view, self.ready, self.draining, Costs(coefficients=self._costs()))

    def _refusal(self, hello: Hello) -> str | None:
        if hello.role is not Role.GATEWAY:
            return f"an engine serves gateways, not a {hello.role}"
        incarnation, newest = self._newest.get(hello.name, ("", 0))
        if hello.incarnation == incarnation and hello.session <= newest:
            return f"session {hello.session} of {hello.name} is not newer than {newest}"
        return None

    async def _serve(self, connection: Connection) -> None:
        hello = connection.peer
        assert isinstance(hello, Hello)
        self._fence(hello)
        self._num_sessions += 1
        session = Session(self._num_sessions, hello, connection, self._pulse, self._holdings.follow())
        self._sessions[session.key] = session
        log.info("engine.session_opened", {"gateway": hello.name, "session": hello.session})
        try:
            while True:
                async with asyncio.timeout(LEASE_S):
                    message = await connection.receive()
                self._take(session, message)
        except TimeoutError:
            log.warning("engine.lease_expired", {"gateway": hello.name, "session": hello.session})
        finally:
            self._sessions.pop(session.key, None)
            session.close()
            self._holdings.leave(session.feed)
            self._steps.end_session(session.key)
            log.info("engine.session_closed", {"gateway": hello.name, "session": hello.session})

    def _fence(self, hello: Hello) -> None:
        """The gateway has a new session, so nobody listens to its old one, whatever the old socket looks like."""
        self._newest[hello.name] = (hello.incarnation, hello.session)
        for old in [s for s in self._sessions.values() if s.hello.name == hello.name]:
            log.warning("engine.session_fenced", {"gateway": hello.name, "session": old.hello.session})
            old.close()
            self._sessions.pop(old.key)
            self._steps.end_session(old.key)

    def _take(self, session: Session, message: Message) -> None:
        match message:
            case Submit(specs=specs):
                if not 1 <= len(specs) <= MAX_CHOICES:
                    session.connection.close(Cause.MALFORMED, f"{len(specs)} choices in one submit")
                elif self.draining:
                    text = "the engine is shutting down"
                    session.add((), [Refusing(spec.id, Refusal.DRAINING, text) for spec in specs])
                else:
                    self._steps.submit(session.key, specs)
            case Abort(ids=ids):
                self._steps.abort(session.key, ids)
            case KeepAlive():
                pass
            case _:
                session.connection.close(Cause.MALFORMED, f"a {type(message).__name__} is not for an engine")
