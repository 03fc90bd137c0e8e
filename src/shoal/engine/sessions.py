"""One gateway's session at this engine: its connection, and what it has not been told yet.

While the gateway reads, each turn becomes one frame. While it does not, updates merge per stream and leave as one
frame when the connection is writable again, or never, when the outbox's limits close it. News of prefix blocks ride in
these frames, at most 64 KB in each; where no frame is due, they get one of their own after KV_S.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from shoal.core.plan import View
from shoal.engine.holdings import Feed
from shoal.engine.updates import merge
from shoal.wire.connection import Connection
from shoal.wire.messages import Announce, Costs, Frame, Hello, KvNews, Refusing, Update

BEAT_S = 0.5  # longest silence while idle; also the shortest time between two reports of changed costs
KV_S = 0.05  # between two pieces of all that is held, so that telling 100,000 blocks takes little from any step


@dataclass(frozen=True, slots=True)
class Pulse:
    """What every frame says about the engine as a whole."""

    view: View
    ready: bool
    draining: bool
    costs: Costs


class Session:
    def __init__(self, key: int, hello: Hello, connection: Connection, pulse: Callable[[], Pulse], feed: Feed) -> None:
        self.key = key
        self.hello = hello
        self.connection = connection
        self._pulse = pulse
        self.feed = feed
        self._updates: dict[str, Update] = {}
        self._refused: list[Refusing] = []
        self._loop = asyncio.get_running_loop()
        self._sent_s = 0.0
        self._costs: Costs | None = None
        self._costs_sent_s = 0.0
        self._kv_due_s = 0.0
        self._kv_timer: asyncio.TimerHandle | None = None
        self._beat = self._loop.call_later(0, self._on_beat)
        connection.on_writable = self._on_writable

    def close(self) -> None:
        self._beat.cancel()
        if self._kv_timer is not None:
            self._kv_timer.cancel()
        self.connection.on_writable = None
        self.connection.close()

    def add(self, updates: Iterable[Update], refused: Iterable[Refusing]) -> None:
        for update in updates:
            earlier = self._updates.get(update.id)
            self._updates[update.id] = update if earlier is None else merge(earlier, update)
        self._refused += refused
        self._on_writable()

    def kv_changed(self) -> None:
        """There is news in the feed. It goes with the next frame, or soon by itself."""
        if self._kv_timer is None and self.feed:
            self._kv_timer = self._loop.call_later(KV_S, self._on_kv)

    def beat(self) -> None:
        """A frame now, whether or not there is news of a stream."""
        if self.connection.writable:
            self._send()

    def announce(self, what: str, predicted_ns: int) -> None:
        if self.connection.writable:
            self.connection.send(Announce(what=what, predicted_ns=predicted_ns))

    def _on_writable(self) -> None:
        if self.connection.writable and (self._updates or self._refused):
            self._send()

    def _on_kv(self) -> None:
        self._kv_timer = None
        if self.feed:
            self._kv_due_s = 0.0  # now; a timer may be a little early
            self.beat()
            self.kv_changed()

    def _kv(self, now_s: float) -> KvNews | None:
        if not self.feed or (self.feed.in_full and now_s < self._kv_due_s):
            return None
        self._kv_due_s = now_s + KV_S
        return self.feed.piece()

    def _on_beat(self) -> None:
        due_s = self._sent_s + BEAT_S
        if self._loop.time() >= due_s:
            due_s = self._loop.time() + BEAT_S
            self.beat()
        self._beat = self._loop.call_at(due_s, self._on_beat)

    def _send(self) -> None:
        now_s = self._loop.time()
        pulse = self._pulse()
        costs = None
        if pulse.costs != self._costs and now_s - self._costs_sent_s >= BEAT_S:
            costs = self._costs = pulse.costs
            self._costs_sent_s = now_s
        frame = Frame(
            view=pulse.view,
            updates=tuple(self._updates.values()),
            refused=tuple(self._refused),
            costs=costs,
            ready=pulse.ready,
            draining=pulse.draining,
            kv=self._kv(now_s),
        )
        self._updates.clear()
        self._refused.clear()
        self._sent_s = now_s
        self.connection.send(frame)
        self.kv_changed()
