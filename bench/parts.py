"""Times the parts of something that runs in turns, from outside: it wraps the functions that do them."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any


class Parts:
    """Seconds per turn of each part; of parts within each other, each counts without the inner ones.

    What was spent between the parts of a turn is in the part `rest`. Used on one thread.
    """

    def __init__(self, rest: str) -> None:
        self.turns: list[dict[str, float]] = []
        self._rest = rest
        self._now: defaultdict[str, float] = defaultdict(float)
        self._inner = [0.0]  # seconds spent in wrapped calls, at each depth
        self._turned = time.perf_counter()

    def wrap(self, owner: Any, name: str, part: str) -> None:
        """`owner` is an object, a class or a module; the function stays wrapped."""
        call: Callable[..., Any] = getattr(owner, name)
        clock, inner, now = time.perf_counter, self._inner, self._now

        def timed(*args: Any, **named: Any) -> Any:
            inner.append(0.0)
            began = clock()
            try:
                return call(*args, **named)
            finally:
                took = clock() - began
                now[part] += took - inner.pop()
                inner[-1] += took

        setattr(owner, name, timed)

    def wrap_methods(self, owner: object, part: str) -> None:
        """All public ones that the object's class defines."""
        for name in dir(type(owner)):
            if not name.startswith("_") and callable(getattr(type(owner), name)):
                self.wrap(owner, name, part)

    def start_turn(self) -> None:
        """Called outside of every part."""
        self._now.clear()
        self._inner[0] = 0.0
        self._turned = time.perf_counter()

    def end_turn(self) -> None:
        """Called outside of every part; the next turn begins."""
        seconds = time.perf_counter() - self._turned
        self.turns.append({**self._now, self._rest: seconds - self._inner[0]})
        self.start_turn()
