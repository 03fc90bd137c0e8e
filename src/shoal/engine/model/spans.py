"""What a step's attention is told about its rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class Spans(NamedTuple):
    """New tokens [start, start + length) of S sequences; rows [row, row + length) of the step. int32, contiguous."""

    row_S: np.ndarray
    start_S: np.ndarray
    length_S: np.ndarray
    table_SB: np.ndarray  # block ids, at least as many as start + length tokens need; beyond a row's own: 0


class Shard(NamedTuple):
    """Whose keys and values are here: of each sequence the tokens at positions `index`, `index + count`, ..., side by
    side in its blocks. A block has room for `count` times as many tokens as each shard keeps of it."""

    count: int = 1  # type: ignore[assignment]  # hides tuple.count
    index: int = 0  # type: ignore[assignment]  # hides tuple.index

    def here(self, num_tokens: Any) -> Any:
        """Of a sequence's first so many tokens (a number, or an array of them), those that are here."""
        return (num_tokens + self.count - 1 - self.index) // self.count


WHOLE = Shard()
