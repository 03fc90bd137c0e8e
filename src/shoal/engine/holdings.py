"""Which prefix blocks this engine holds, as its gateways are told: everything once, in pieces, then every change.

    step thread ─ KvEvents of a turn ─► Holdings (one an engine) ─ key ─► Feed (one a gateway's session) ─► KvNews

A feed keeps the keys of which its gateway has to hear, not what happened to them: where they are now is looked up when
a piece is made. So changes that wait become one, a gateway that reads slowly costs no more than a list of keys, and
telling everything goes on while blocks come and go.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shoal.core.kv.hashing import KEY_BYTES, NO_KEY
from shoal.core.kv.news import KvEvent
from shoal.wire.messages import KvNews

PIECE_BLOCKS = (64 << 10) // (2 * KEY_BYTES + 1) - 32  # with what else is in a frame, below 64 KB
MAX_WAITING = 50_000  # changed blocks that a gateway has not heard of, beyond which it is told everything anew


class Holdings:
    """What the core's index holds, on the event loop's side. Memory grows with the blocks that are held."""

    def __init__(self) -> None:
        self._held: dict[bytes, tuple[bytes, int]] = {}  # key -> (parent, tiers); parents before children
        self._feeds: list[Feed] = []

    def take(self, events: Iterable[KvEvent]) -> None:
        """What a turn of the step loop brought, in order."""
        held = self._held
        changes = []
        for key, parent, tier, stored in events:
            before = held.get(key)
            tiers = 0 if before is None else before[1]
            tiers = tiers | tier if stored else tiers & ~tier
            if tiers:
                held[key] = (before[0] if before is not None else parent or NO_KEY, tiers)
            elif before is not None:
                del held[key]
            changes.append((key, before is None))
        if changes:
            for feed in self._feeds:
                feed.changed(changes)

    def follow(self) -> Feed:
        """For a session that begins; `leave` must follow."""
        feed = Feed(self._held)
        self._feeds.append(feed)
        return feed

    def leave(self, feed: Feed) -> None:
        self._feeds.remove(feed)


class Feed:
    """What one session has to hear of, and how far it is."""

    def __init__(self, held: Mapping[bytes, tuple[bytes, int]]) -> None:
        self._held = held
        self._start()

    def _start(self) -> None:
        """From here on everything is told anew."""
        self._number = 0  # blocks told
        self._begun = False
        self._all = list(self._held)
        self._next = 0  # of them
        self._changed: dict[bytes, bool] = {}  # key -> it was held nowhere in between

    @property
    def in_full(self) -> bool:
        """It is still being told everything; changes wait until that is done, so that no block comes before the one it
        depends on."""
        return not self._begun or self._next < len(self._all)

    def __bool__(self) -> bool:
        """There is something to tell."""
        return self.in_full or bool(self._changed)

    def changed(self, changes: Iterable[tuple[bytes, bool]]) -> None:
        """Keys, and whether it was held nowhere before. Such a one comes after what changed earlier, however long its
        end as it was before has been waiting to be told: the block that it depends on may have come back just now."""
        waiting = self._changed
        for key, is_new in changes:
            if is_new:
                waiting.pop(key, None)
                waiting[key] = True
            else:
                waiting.setdefault(key, False)
        if len(self._changed) > MAX_WAITING:
            self._start()

    def piece(self) -> KvNews:
        """The next blocks, at most PIECE_BLOCKS of them."""
        if self.in_full:
            # What was gone and came back is told in its turn: the block that it depends on may have been gone with it.
            part = self._all[self._next : self._next + PIECE_BLOCKS]
            keys = [key for key in part if not self._changed.get(key)]
            self._next = min(self._next + PIECE_BLOCKS, len(self._all))
            if self._next == len(self._all):
                self._all, self._next = [], 0
        elif len(self._changed) <= PIECE_BLOCKS:
            keys = list(self._changed)
            self._changed = {}
        else:
            keys = [key for key, _ in zip(self._changed, range(PIECE_BLOCKS), strict=False)]
            for key in keys:
                del self._changed[key]
        self._begun = True
        gone = (NO_KEY, 0)
        states = [self._held.get(key, gone) for key in keys]
        news = KvNews(
            self._number,
            b"".join(keys),
            b"".join([parent for parent, _ in states]),
            bytes([tiers for _, tiers in states]),
        )
        self._number += len(keys)
        return news
