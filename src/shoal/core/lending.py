"""Prefix blocks that other engines read: they stay where they are and as they are until the lease is over."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.core.kv.prefix import Entry
from shoal.core.limits import Limits
from shoal.core.tables import BlockTables

LENT_SHARE = 4  # one of so many blocks is lent at most: requests need the others


class Lending:
    def __init__(self, limits: Limits, tables: BlockTables) -> None:
        self._most = limits.num_blocks // LENT_SHARE
        self._tables = tables
        self._leases: dict[int, list[int]] = {}  # with the blocks before those that were asked for

    def lend(self, lease: int, keys: Sequence[bytes]) -> list[int]:
        """The blocks of these keys, from the first on, as far as they are here one behind the other."""
        if lease in self._leases:
            raise ValueError(f"lease {lease} is there already")
        found: list[Entry] = []
        for key in keys:
            entry = self._tables.index.find(key)
            if entry is None or (found and entry.parent is not found[-1]):
                break
            found.append(entry)
        before = found[0].path()[:-1] if found else []
        room = self._most - sum(map(len, self._leases.values())) - len(before)
        found = found[: max(0, room)]
        # Whoever holds a block holds those before it too: of a prefix, its end is given up first.
        self._leases[lease] = self._tables.pool.acquire(before + found) if found else []
        return [entry.block for entry in found]

    def unlend(self, lease: int) -> None:
        """ValueError: there is no such lease."""
        if lease not in self._leases:
            raise ValueError(f"there is no lease {lease}")
        self._tables.pool.release(self._leases.pop(lease))

    @property
    def num_blocks(self) -> int:
        return sum(map(len, self._leases.values()))

    @property
    def num_coming(self) -> int:
        """Blocks that are available when the leases are over."""
        num_sole = self._tables.pool.num_sole
        return sum([num_sole(table) for table in self._leases.values()]) if self._leases else 0

    def device_tables(self) -> list[list[int]]:
        return list(self._leases.values())
