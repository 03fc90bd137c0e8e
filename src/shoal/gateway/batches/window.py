"""How many lines are at work at once, and whose turn it is."""

from __future__ import annotations

import asyncio
from collections import deque


class Window:
    """So many places, given to tenants in turn, and within a tenant in the order of asking."""

    def __init__(self, num_places: int) -> None:
        self._num_free = num_places
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by tenant; whose turn it is comes first

    async def enter(self, tenant: str) -> None:
        """Waits for a place. `leave` must follow."""
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(place)
        self._hand_out()
        try:
            await place
        except asyncio.CancelledError:
            if not place.cancelled():  # it was given in the same moment
                self.leave()
            raise

    def leave(self) -> None:
        self._num_free += 1
        self._hand_out()

    def _hand_out(self) -> None:
        while self._num_free and self._waiting:
            tenant = next(iter(self._waiting))
            places = self._waiting.pop(tenant)
            place = places.popleft()
            if places:
                self._waiting[tenant] = places  # behind the others
            if not place.cancelled():
                place.set_result(None)
                self._num_free -= 1
