"""What lend.py keeps of one connection that borrows blocks."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from shoal.engine.transfer.transport import PIECE_BYTES, Memory
from shoal.wire.connection import Connection


class Range(NamedTuple):
    """Layers of one block that are to be sent."""

    number: int  # of the block, for the reader
    block: int  # where it is, for the store
    first_layer: int
    num_layers: int


class Lease:
    """Beside `over`, which the event loop sets, it belongs to the lender's thread."""

    def __init__(self, number: int, connection: Connection) -> None:
        self.number = number
        self.connection = connection
        self.over = False
        self.open = False  # it counts
        self.pinned = False
        self.parts: deque[Range] = deque()  # not sent yet
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
