"""The connection to one replica: submissions and aborts out, frames in, and a verdict on whether it still lives."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from shoal.core.plan import View
from shoal.core.request import RequestSpec
from shoal.core.stepcost import DEFAULT_COEFFICIENTS
from shoal.fleet import health
from shoal.fleet.directory import Directory
from shoal.fleet.view import ReplicaRole, ReplicaView
from shoal.wire.connection import Cause, Connection, ConnectionClosed, dial
from shoal.wire.messages import (
    Abort,
    Announce,
    EngineInfo,
    Frame,
    KeepAlive,
    KvNews,
    Message,
    Refusing,
    Role,
    Submit,
    Update,
    Welcome,
)

RECONNECT_S = 1.0  # longest pause between two tries

log = logging.getLogger("shoal.gateway")


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """How this gateway introduces itself to replicas and to the controller."""

    name: str
    incarnation: str
    secret: bytes
    sessions: Iterator[int] = field(default_factory=lambda: itertools.count(1))  # one number per connection, ever


class Sink(Protocol):
    """Who hears what a replica says of a choice: `RequestSpec.choice`."""

    def on_update(self, choice: int, update: Update) -> None: ...

    def on_refused(self, choice: int, refusing: Refusing) -> None: ...

    def on_lost(self, message: str) -> None:
        """Once for all choices of the sink that the link still had."""


class _Sent(NamedTuple):
    """What was sent in some time: choices, tokens of their prompts, and those of them that must be computed."""

    choices: int = 0
    tokens: int = 0
    new_tokens: int = 0

    def and_also(self, other: _Sent) -> _Sent:
        return _Sent(*(a + b for a, b in zip(self, other, strict=True)))


class EngineLink:
    """Dials again for as long as `run` lives. Owns which choice each core id belongs to."""

    def __init__(self, name: str, address: str, identity: Identity, directory: Directory) -> None:
        self.name = name
        self.address = address
        self.role = ReplicaRole.BOTH  # as the controller says
        self.info: EngineInfo | None = None  # of the latest handshake
        self.incarnation = ""  # of the replica; the same
        self.view: View | None = None  # of the latest frame of the open connection
        self.draining = False  # by the latest frame: it is about to end
        self.retired = False  # no longer a member: served until its connection ends, then not dialled again
        self._identity = identity
        self._directory = directory
        self._kv_told = 0  # blocks that the session has told of
        self._costs: tuple[float, ...] = DEFAULT_COEFFICIENTS
        self._connection: Connection | None = None
        self._ready = False
        self._sinks: dict[str, tuple[Sink, int]] = {}
        self._outgoing: deque[Message] = deque()
        self._heard_s = 0.0  # last message
        self._progress_s = 0.0  # last frame with a new step, or without work
        self._announced_ns = 0
        self._unreported = (_Sent(), _Sent())  # since the last frame, and between the two last ones
        self._trouble = ""

    @property
    def ready(self) -> bool:
        """Connected, can take work, and was heard from as recently as it should."""
        return self._connection is not None and self._ready and not self._suspect()

    @property
    def num_streams(self) -> int:
        return len(self._sinks)

    def replica_view(self) -> ReplicaView:
        view = self.view
        unreported = self._unreported[0].and_also(self._unreported[1])
        return ReplicaView(
            name=self.name,
            ready=self._connection is not None and self._ready,
            suspect=self._suspect(),
            num_running=view.num_running if view else 0,
            num_waiting=view.num_waiting if view else 0,
            waiting_tokens=view.waiting_tokens if view else 0,
            context_tokens=view.context_tokens if view else 0,
            num_unreported=unreported.choices,
            unreported_tokens=unreported.tokens,
            unreported_new_tokens=unreported.new_tokens,
            costs=self._costs,
            role=self.role,
            kv_root=self.info.hash_root if self.info is not None and self.info.peers else b"",
            fetch_token_ns=self.info.fetch_token_ns if self.info is not None else 0.0,
        )

    def lends(self, hash_root: bytes) -> bool:
        """Whether others can fetch from it blocks whose keys have this root."""
        info = self.info
        return self.ready and info is not None and bool(info.peers) and info.hash_root == hash_root

    @property
    def costs(self) -> tuple[float, ...]:
        """Its own coefficients (core.stepcost), as it said last."""
        return self._costs

    def num_waiting(self, service_class: str) -> int:
        """Of the class, by the latest frame."""
        found = self.view.classes.get(service_class) if self.view is not None else None
        return 0 if found is None else found.num_waiting

    # -- towards the replica -------------------------------------------------------------------------------------------

    def submit(self, specs: Sequence[RequestSpec], sink: Sink, *, cached_tokens: int = 0) -> None:
        """Sends choices of one prompt, leader first. The sink hears of them by `RequestSpec.choice`.

        `cached_tokens`: of the prompt and what is there of the output, that need not be computed as far as is known.
        """
        num_tokens = len(specs[0].prompt) + len(specs[0].output)
        sent = _Sent(len(specs), len(specs) * num_tokens, num_tokens - cached_tokens)  # computed once for all of them
        self._unreported = (self._unreported[0].and_also(sent), self._unreported[1])
        self._submit(specs, sink)

    def prefetch(self, specs: Sequence[RequestSpec], sink: Sink) -> None:
        """`submit` for specs that compute nothing."""
        self._submit(specs, sink)

    def _submit(self, specs: Sequence[RequestSpec], sink: Sink) -> None:
        self._sinks.update({spec.id: (sink, spec.choice) for spec in specs})
        self._send(Submit(specs=tuple(specs)))

    def abort(self, ids: Iterable[str], reason: str) -> None:
        """Forgets these choices and tells the replica to. Ids that it does not have any more do no harm."""
        known = tuple(id for id in ids if self._sinks.pop(id, None) is not None)
        if known:
            self._send(Abort(ids=known, reason=reason))

    def _send(self, message: Message) -> None:
        """In order, and never more than the connection takes: a large prompt must not overflow its outbox."""
        self._outgoing.append(message)
        self._flush()

    def _flush(self) -> None:
        connection = self._connection
        while connection is not None and self._outgoing and connection.writable:
            connection.send(self._outgoing.popleft())

    # -- the connection's life -----------------------------------------------------------------------------------------

    async def run(self) -> None:
        failures = 0
        while not self.retired:
            try:
                connection = await self._dial()
            except (ConnectionClosed, OSError, TimeoutError, ValueError) as e:  # ValueError: listed with a bad address
                self._report(str(e) or type(e).__name__)
                failures += 1
            else:
                failures = 0
                await self._serve(connection)
            await asyncio.sleep(min(RECONNECT_S, 0.05 * 2 ** min(failures, 6)) * random.uniform(0.5, 1.0))

    async def _dial(self) -> Connection:
        return await dial(
            self.address,
            role=Role.GATEWAY,
            name=self._identity.name,
            incarnation=self._identity.incarnation,
            session=next(self._identity.sessions),
            secret=self._identity.secret,
        )

    async def _serve(self, connection: Connection) -> None:
        welcome = connection.peer
        assert isinstance(welcome, Welcome)
        self._connection, self.info, self._trouble = connection, welcome.engine or self.info, ""
        self.incarnation = welcome.incarnation
        self._heard_s = self._progress_s = time.monotonic()
        self._announced_ns = 0
        self._directory.forget(self.name)
        self._kv_told = 0
        connection.on_writable = self._flush
        log.info("replica.connected", {"replica": self.name, "incarnation": welcome.incarnation})
        try:
            while True:
                self._receive(await connection.receive())
        except ConnectionClosed as e:
            self._report(str(e))
            self._disconnected(str(e))
        finally:  # also when this task is cancelled
            connection.close()
            self._disconnected("the gateway gave up the connection")

    def _disconnected(self, why: str) -> None:
        self._connection, self.view, self._ready, self.draining = None, None, False, False
        self._directory.forget(self.name)
        self._outgoing.clear()
        self._unreported = (_Sent(), _Sent())
        sinks = dict.fromkeys(sink for sink, _ in self._sinks.values())
        self._sinks.clear()
        for sink in sinks:
            sink.on_lost(f"replica {self.name}: {why}")

    def _receive(self, message: Message) -> None:
        now = self._heard_s = time.monotonic()
        if isinstance(message, Announce):
            self._announced_ns = message.predicted_ns
            self._progress_s = now
        elif isinstance(message, Frame):
            self._frame(message, now)

    def _frame(self, frame: Frame, now: float) -> None:
        view = frame.view
        if self.view is None or view.step != self.view.step or view.num_running + view.num_waiting == 0:
            self._progress_s = now
            self._announced_ns = 0
        self.view, self._ready, self.draining = view, frame.ready, frame.draining
        self._unreported = (_Sent(), self._unreported[0])
        if frame.costs is not None and _sane(frame.costs.coefficients):
            self._costs = frame.costs.coefficients
        for update in frame.updates:
            entry = self._sinks.get(update.id)
            if entry is None:
                continue  # withdrawn meanwhile
            if update.ending is not None:
                del self._sinks[update.id]
            entry[0].on_update(entry[1], update)
        for refusing in frame.refused:
            entry = self._sinks.pop(refusing.id, None)
            if entry is not None:
                entry[0].on_refused(entry[1], refusing)
        if frame.kv is not None:  # after the tokens, which somebody waits for
            self._kv_news(frame.kv)

    def _kv_news(self, news: KvNews) -> None:
        """What is told is only of use without a gap, from the beginning on."""
        if not news.first:
            self._directory.forget(self.name)
        elif news.first != self._kv_told:
            if self._kv_told >= 0:
                log.warning("replica.kv_gap", {"replica": self.name, "expected": self._kv_told, "got": news.first})
                self._directory.forget(self.name)
                self._kv_told = -1  # nothing continues that but a new beginning
            return
        self._kv_told = news.first + len(news.tiers)
        try:
            self._directory.tell(self.name, news.keys, news.parents, news.tiers)
        except ValueError as e:
            if self._connection is not None:
                self._connection.close(Cause.MALFORMED, str(e))

    # -- signs of life -------------------------------------------------------------------------------------------------

    def _suspect(self) -> bool:
        return time.monotonic() - self._progress_s > health.suspect_after_ns(self._announced_ns) / 1e9

    def check_silence(self) -> None:
        """Gives up a replica that was silent for too long.

        One that speaks but makes no steps is suspect, not dead: it is slow, or its own supervision ends it.
        """
        silent_s = time.monotonic() - self._heard_s
        if self._connection is not None and silent_s > health.dead_after_ns(self._announced_ns) / 1e9:
            self._connection.close(Cause.SILENT, f"nothing heard for {silent_s:.1f} s")

    def keep_alive(self) -> None:
        if self._connection is not None:
            self._send(KeepAlive())

    def _report(self, trouble: str) -> None:
        """One line per kind of trouble: a replica that stays away must not fill the log."""
        if trouble != self._trouble:
            self._trouble = trouble
            log.warning("replica.disconnected", {"replica": self.name, "detail": trouble})


def _sane(coefficients: tuple[float, ...]) -> bool:
    """Such as a StepCost has; the router computes with them."""
    return len(coefficients) == len(DEFAULT_COEFFICIENTS) and all(0 <= each < 1e18 for each in coefficients)
