"""What lend.py keeps of one connection that borrows blocks, and of one stream of blocks that fill."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from shoal.engine.transfer.transport import PIECE_BYTES, Memory
from shoal.wire.connection import Connection


class Range(NamedTuple):
    """Layers of one block that are to be sent."""

    number: int  # of the block, for the reader
    block: int  # where it is, for the store
    first_layer: int
    num_layers: int


class Stream:
    """Blocks that are lent as they fill. Whoever made it keeps them as they are until `tell` was called.

    Made by Lender.stream; `add`, `end` and `withdraw` may be called on any thread. `tell` is called once, on the
    lender's thread: with the number of blocks, from the first on, that came whole at the reader.
    """

    def __init__(
        self,
        id: str,
        tell: Callable[[int], None],
        *,
        post: Callable[..., None],
        changed: Callable[[Stream], None],
    ) -> None:
        """`post`: has a job done on the lender's thread, to which all that follows belongs."""
        self.id = id
        self.tell = tell
        self.parts: deque[Range] = deque()  # not sent yet
        self.ended = False
        self.withdrawn = False
        self.over = False  # `tell` was called
        self.lease: Lease | None = None
        self._post = post
        self._changed = changed

    def add(self, number: int, block: int, first_layer: int, num_layers: int) -> None:
        """Layers that are final. Those of one block come in their order; blocks may take turns."""
        self._post(self._add, Range(number, block, first_layer, num_layers))

    def end(self) -> None:
        """All was added."""
        self._post(self._end)

    def withdraw(self) -> None:
        """Cuts the reader off, where there is one; `tell` comes then too."""
        self._post(self._withdraw)

    def _add(self, part: Range) -> None:
        if not self.over:
            self.parts.append(part)
            self._changed(self)

    def _end(self) -> None:
        self.ended = True
        self._changed(self)

    def _withdraw(self) -> None:
        self.withdrawn = True
        self._changed(self)


class Lease:
    """Beside `over` and `num_good`, which the event loop sets, it belongs to the lender's thread."""

    def __init__(self, number: int, connection: Connection) -> None:
        self.number = number
        self.connection = connection
        self.over = False
        self.num_good = 0  # as the reader said
        self.open = False  # it counts
        self.pinned = False
        self.stream: Stream | None = None
        self.memory: Memory | None = None
        self.num_sent = self.num_taken = 0  # pieces
        self.last_sent = False
        self.waiting = False  # a piece has its turn already


def cut_piece(parts: deque[Range], layer_bytes: int) -> list[Range]:
    """Takes as much from the front as fits into one piece. Only a block that is larger than a piece is cut."""
    room = PIECE_BYTES // layer_bytes  # layers
    chosen: list[Range] = []
    while parts and room:
        part = parts[0]
        if part.num_layers > room and chosen:
            break
        count = min(part.num_layers, room)
        chosen.append(part._replace(num_layers=count))
        room -= count
        if count == part.num_layers:
            parts.popleft()
        else:
            parts[0] = part._replace(first_layer=part.first_layer + count, num_layers=part.num_layers - count)
    return chosen
