"""Every message between processes: length-prefixed msgpack, schema-checked on arrival; a bad one ends the connection.

Who dials whom: gateways dial engines; engines and gateways dial the controller; an engine that wants blocks dials the
engine that has them. The side that listens speaks first:

    listener: Challenge     dialler: Hello     listener: Welcome | Rejected     then freely, both ways
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from shoal.core.plan import Logprobs, View
from shoal.core.request import Finish, Refusal, RequestSpec
from shoal.fleet.view import ReplicaRole

PROTOCOL = 3
MAX_FRAME_BYTES = 16 << 20
MAX_CHOICES = 16  # specs in one Submit


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="t"):
    pass


# -- handshake ---------------------------------------------------------------------------------------------------------


class Role(StrEnum):
    GATEWAY = "gateway"
    ENGINE = "engine"
    CONTROLLER = "controller"
    SUPERVISOR = "supervisor"  # starts the others on one machine; tells the controller how they are


class Challenge(Message, frozen=True, tag="challenge"):
    protocol: int
    nonce: bytes  # 16 random bytes


class Hello(Message, frozen=True, tag="hello"):
    protocol: int
    role: Role
    name: str
    incarnation: str  # made at the dialler's start
    session: int  # counted by the dialler, one per connection
    nonce: bytes
    proof: bytes  # HMAC-SHA256(secret, "dial" + listener's nonce + own nonce)


class EngineInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: str  # served name
    model_digest: str
    hash_root: bytes  # root of the prefix keys: model, KV dtype and format, block size (core.kv.hashing)
    hash_block_tokens: int
    max_model_len: int
    vocab_size: int
    capabilities: tuple[str, ...] = ()
    peers: str = ""  # address where it lends blocks to other engines; empty: it does not
    fetch_token_ns: float = 0.0  # believed time to bring a token's KV from another engine; 0: it brings none


class Welcome(Message, frozen=True, tag="welcome"):
    incarnation: str
    proof: bytes  # HMAC-SHA256(secret, "listen" + dialler's nonce + own nonce)
    engine: EngineInfo | None = None


class Rejected(Message, frozen=True, tag="rejected"):
    reason: str


# -- gateway → engine --------------------------------------------------------------------------------------------------


class Submit(Message, frozen=True, tag="submit"):
    specs: tuple[RequestSpec, ...]  # the choices of one client request, leader first


class Abort(Message, frozen=True, tag="abort"):
    ids: tuple[str, ...]
    reason: str  # "client_disconnect", "stop_string", "deadline", ...


class KeepAlive(Message, frozen=True, tag="keepalive"):
    """Each second. An engine that hears nothing from a session for 5 s aborts the streams of that session."""


# -- engine → gateway --------------------------------------------------------------------------------------------------


class Ending(msgspec.Struct, frozen=True, array_like=True):
    reason: Finish
    stop_token: int | None
    cached_tokens: int
    message: str = ""  # for Finish.ERROR


class Update(msgspec.Struct, frozen=True, array_like=True):
    """What one step did for one stream."""

    id: str
    index: int  # output position of tokens[0]
    tokens: tuple[int, ...]
    logprobs: tuple[Logprobs, ...] = ()  # as long as tokens where asked for, else empty
    prompt_start: int = 0
    prompt_logprobs: tuple[Logprobs, ...] = ()
    ending: Ending | None = None
    waited_ns: int | None = None  # until its first slice; told once
    parked: bool | None = None  # True: preempted, with its KV kept or without; False: back among the running


class Refusing(msgspec.Struct, frozen=True, array_like=True):
    id: str
    reason: Refusal
    message: str
    retry_after_ms: int = 0  # when a place is predicted to be free; 0: nobody knows


class Costs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """stepcost's coefficients, nanoseconds per unit of each feature, in the order of core.stepcost.FEATURES."""

    coefficients: tuple[float, ...]


class KvNews(msgspec.Struct, frozen=True, array_like=True):
    """Prefix blocks whose place has changed, and where they are now; first of all, everything that is there.

    In columns, since a piece of 64 KB has 1,900 blocks. Told in the order in which they depend on each other.
    """

    first: int  # number of the first block in the gateway's session; 0: nothing told before counts any more
    keys: bytes  # 16 a block, one after the other
    parents: bytes  # 16 a block: key of the one before it; zeros where it is a prompt's first or is dropped
    tiers: bytes  # 1 a block: bits of core.kv.news; 0: dropped


class Frame(Message, frozen=True, tag="frame"):
    """One per engine step and gateway, with that gateway's streams only; also the heartbeat, every 500 ms when idle."""

    view: View
    updates: tuple[Update, ...] = ()
    refused: tuple[Refusing, ...] = ()
    costs: Costs | None = None  # when they changed since the last frame
    ready: bool = True
    draining: bool = False  # it ends soon: streams had better go on elsewhere
    kv: KvNews | None = None


class Announce(Message, frozen=True, tag="announce"):
    """Sent before something that keeps the engine silent for longer than 250 ms."""

    what: str  # "step", "loading", "compiling", "warming"
    predicted_ns: int


# -- engine → engine that has blocks (engine/transfer/fetch.py → lend.py) ----------------------------------------------


class Ask(Message, frozen=True, tag="ask"):
    """The one question of a connection.

    KeepAlive follows each second; an owner that hears nothing for 5 s, or whose connection ends, lends no longer.
    """

    incarnation: str  # of the engine that is believed to have them; another one declines
    keys: tuple[bytes, ...]


class Taken(Message, frozen=True, tag="taken"):
    """A piece was read, so its place may be filled again. In the order of pieces."""

    number: int


class Release(Message, frozen=True, tag="release"):
    """Nothing more is wanted."""


# -- engine that has blocks → engine -----------------------------------------------------------------------------------


class Offer(Message, frozen=True, tag="offer"):
    """These blocks are lent from here on."""

    num_layers: int
    block_bytes: int
    doors: dict[str, bytes]  # ways to read the owner's window, by name of transport


class Declined(Message, frozen=True, tag="declined"):
    """Nothing is lent, or no longer."""

    reason: str


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Layers [first_layer, first_layer + num_layers) of one block, one behind the other."""

    index: int  # of the block among those asked for
    first_layer: int
    num_layers: int
    digest: bytes  # of these bytes (engine/transfer/digest.py)


class Piece(Message, frozen=True, tag="piece"):
    """Parts that lie one behind the other in the owner's window, in the piece's place, until they are taken."""

    number: int  # from 0 on; its place follows from it (engine/transfer/transport.py)
    parts: tuple[Part, ...]
    last: bool = False  # all there is was lent


# -- engine, gateway, supervisor ↔ controller --------------------------------------------------------------------------


class Replica(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One engine as the controller lists it."""

    name: str
    incarnation: str
    address: str  # "unix:/path" or "tcp:host:port"
    state: str  # "loading" or "serving"
    info: EngineInfo | None = None
    pid: int = 0
    metrics: str = ""  # URL
    role: ReplicaRole = ReplicaRole.BOTH  # as the engine has it; in Members as the controller was told last


class Supervised(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One process as its supervisor sees it."""

    name: str
    state: str  # fleet.lifecycle.Life
    pid: int = 0
    restarts: int = 0
    cause: str = ""  # how it ended last


class Register(Message, frozen=True, tag="register"):
    """First message after the handshake, and again whenever a field changed. The role is the handshake's."""

    pid: int
    metrics: str = ""
    replica: Replica | None = None  # engines
    url: str = ""  # gateways: the public API
    processes: tuple[Supervised, ...] = ()  # supervisors


class Report(Message, frozen=True, tag="report"):
    """Every 500 ms: renews the lease (5 s)."""

    view: View | None = None  # engines
    gateway: dict[str, float | dict[str, float]] | None = None  # queue by class and model, refusals, SLO attainment


class Members(Message, frozen=True, tag="members"):
    """Controller → gateways: the whole list, on every change and every 2 s. `version` only grows."""

    version: int
    replicas: tuple[Replica, ...]


class Assign(Message, frozen=True, tag="assign"):
    """Controller → engine: its role from now on. It registers with it, so that a new controller knows it too."""

    role: ReplicaRole


ToListener = Hello | Submit | Abort | KeepAlive | Ask | Taken | Release | Register | Report
ToDialler = Challenge | Welcome | Rejected | Frame | Announce | Offer | Declined | Piece | Members | Assign
