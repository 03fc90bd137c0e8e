"""The bytes of one fetch: read piece after piece, checked part after part, and placed. `run` has a thread to itself.

loop:    expect, put ─► pieces ─►      thread: read (all that are announced) ─► poll the oldest ─► digest ─► place
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence

from shoal.engine.transfer.digest import digest
from shoal.engine.transfer.transport import Memory, Reader, Transport, TransportError, place_of
from shoal.wire.messages import Piece

OPEN_S = 2.0  # most that one way in may take

log = logging.getLogger("shoal.engine")

Place = Callable[[int, int, memoryview], None]


class Arrival:
    def __init__(self, num_blocks: int, num_layers: int, block_bytes: int, place: Place) -> None:
        self.num_good = 0  # blocks from the first on
        self.num_bytes = 0
        self.num_taken = 0  # pieces
        self.way = ""
        self.why = ""  # why it ended early; the first cause stays
        self.corrupt = False
        self.quiet = True  # nothing lands in its memory any more
        self._num_layers = num_layers
        self._layer_bytes = block_bytes // num_layers
        self._place = place
        self._announced = [0] * num_blocks  # layers of each block; the event loop's
        self._placed = [0] * num_blocks  # the same, the thread's
        self._pieces: queue.SimpleQueue[Piece | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._asked: deque[Piece] = deque()  # on their way here; the thread's
        self._all_announced = False

    # -- on the event loop ---------------------------------------------------------------------------------------------

    def expect(self, piece: Piece) -> int | None:
        """Bytes of a piece that continues what came before; None: it does not."""
        num_layers = 0
        for part in piece.parts:
            if not (0 <= part.index < len(self._announced) and part.first_layer == self._announced[part.index]):
                return None
            if not 0 < part.num_layers <= self._num_layers - part.first_layer:
                return None
            self._announced[part.index] += part.num_layers
            num_layers += part.num_layers
        return num_layers * self._layer_bytes

    def put(self, piece: Piece) -> None:
        self._pieces.put(piece)

    def no_more(self, why: str) -> None:
        """What was put is still read."""
        self.give_up(why)
        self._pieces.put(None)

    def stop(self) -> None:
        """`run` returns after a poll and a copy at most."""
        self._stopped.set()
        self._pieces.put(None)

    def give_up(self, why: str) -> None:
        self.why = self.why or why

    # -- the thread ----------------------------------------------------------------------------------------------------

    def run(
        self,
        transports: Sequence[Transport],
        doors: dict[str, bytes],
        memory: Memory,
        taken: Callable[[int], None],
    ) -> None:
        reader: Reader | None = None
        try:
            reader = self._open(transports, doors, memory)
            while not self._stopped.is_set() and self._take_next(reader, memory, taken):
                pass
        except TransportError as e:
            self.give_up(str(e))
        except Exception as e:
            log.exception("peers.arrival_failed")
            self.give_up(type(e).__name__)
        finally:
            if reader is not None:
                self.quiet = reader.close()

    def _open(self, transports: Sequence[Transport], doors: dict[str, bytes], memory: Memory) -> Reader:
        """The first way that leads there."""
        troubles = []
        for transport in transports:
            if transport.name in doors:
                try:
                    reader = transport.open(doors[transport.name], memory, OPEN_S)
                except TransportError as e:
                    troubles.append(f"{transport.name}: {e}")
                else:
                    self.way = transport.name
                    return reader
        raise TransportError("; ".join(troubles) or "both sides know no transport in common")

    def _take_next(self, reader: Reader, memory: Memory, taken: Callable[[int], None]) -> bool:
        """Waits for the next piece, checks and places it. False: that was all."""
        while not self._all_announced:
            try:
                piece = self._pieces.get(block=not self._asked)
            except queue.Empty:
                break
            if piece is None:
                self._all_announced = True
                break
            self._asked.append(piece)
            if piece.parts:
                reader.read(place_of(piece.number), self._num_bytes(piece))
        if not self._asked:
            return False
        piece = self._asked[0]
        while piece.parts and not reader.poll():
            if self._stopped.is_set():
                return False
        self._asked.popleft()
        if not self._accept(piece, memory):
            return False
        self.num_taken += 1
        taken(piece.number)
        return not piece.last

    def _accept(self, piece: Piece, memory: Memory) -> bool:
        """False: a part is not what was sent, or the time is over; no part from there on was placed."""
        offset = place_of(piece.number)
        for part in piece.parts:
            end = offset + part.num_layers * self._layer_bytes
            arrived = memory.view[offset:end]
            if digest(arrived) != part.digest:
                self.corrupt = True
                self.give_up(f"block {part.index} came with another digest than it left with")
                return False
            if self._stopped.is_set():
                return False
            self._place(part.index, part.first_layer, arrived)
            self._placed[part.index] += part.num_layers
            self.num_bytes += end - offset
            offset = end
            while self.num_good < len(self._placed) and self._placed[self.num_good] == self._num_layers:
                self.num_good += 1
        return True

    def _num_bytes(self, piece: Piece) -> int:
        return sum(part.num_layers for part in piece.parts) * self._layer_bytes
