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

    def __init__(self, rest: str, clock: Callable[[], float] = time.perf_counter) -> None:
        self.turns: list[dict[str, float]] = []
        self._rest = rest
        self._now: defaultdict[str, float] = defaultdict(float)
        self._inner = [0.0]  # seconds spent in wrapped calls, at each depth
        self._replaced: list[
            tuple[Any, str, bool, Any]
        ] = []  # owner, name, whether it was the owner's own, what it was
        self._clock = clock
        self._turned = clock()

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """`owner` is an object, a class or a module; until `unwrap`."""
        self._replaced.append((owner, name, name in vars(owner), getattr(owner, name)))
        setattr(owner, name, value)

    def wrap(self, owner: Any, name: str, part: str) -> None:
        """Its calls are timed, until `unwrap`."""
        call: Callable[..., Any] = getattr(owner, name)
        clock, inner, now = self._clock, self._inner, self._now

        def timed(*args: Any, **named: Any) -> Any:
            inner.append(0.0)
            began = clock()
            try:
                return call(*args, **named)
            finally:
                took = clock() - began
                now[part] += took - inner.pop()
                inner[-1] += took

        self.replace(owner, name, timed)

    def wrap_methods(self, owner: object, part: str) -> None:
        """All public ones that the object's class defines."""
        for name in dir(type(owner)):
            if not name.startswith("_") and callable(getattr(type(owner), name)):
                self.wrap(owner, name, part)

    def unwrap(self) -> None:
        """Everything is as it was before."""
        while self._replaced:
            owner, name, own, value = self._replaced.pop()
            if own:
                setattr(owner, name, value)
            else:
                delattr(owner, name)

    def start_turn(self) -> None:
        """Called outside of every part."""
        self._now.clear()
        self._inner[0] = 0.0
        self._turned = self._clock()

    def end_turn(self) -> None:
        """Called outside of every part; the next turn begins."""
        seconds = self._clock() - self._turned
        self.turns.append({**self._now, self._rest: seconds - self._inner[0]})
        self.start_turn()
