"""What a step's attention is told about its rows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Spans(NamedTuple):
    """New tokens [start, start + length) of S sequences; rows [row, row + length) of the step. int32, contiguous."""

    row_S: np.ndarray
    start_S: np.ndarray
    length_S: np.ndarray
    table_SB: np.ndarray  # block ids, at least as many as start + length tokens need; beyond a row's own: 0
