"""Weights as int8 with one scale per row: how they are made, and their product where torch computes it.

    scale = max |w of the row| / 127, rounded to bfloat16        w ≈ q · scale, q = round(w / scale) in -127 .. 127

A scale that bfloat16 holds is the same number in every kernel, so a quantised model is one model on all machines. No
data is looked at, and activations stay as they are: a scale for them would be shared by the rows of a step, and a
request would then see its neighbours. On SmolLM2-135M a search for each row's best clipping point gained less than
0.15 % of perplexity over this (bench/perplexity.py), so there is none.

Shape letters: M rows, N rows of W (outputs), K columns of W (inputs).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

# Up to so many rows torch's own product of bfloat16 and int8 is faster than widening the weights first: 2.5 times as
# fast as plain bfloat16 at 1 row, even at 8, and half as fast at 16.
_FEW_ROWS = 8
_FEW_ROWS_COLUMNS = 32  # K must be a multiple: it reads beyond the rows' ends otherwise
_PIECE_VALUES = 1 << 20  # widened at once: fewer, and calls cost more than they compute; more, and the cache is left
_QUANTIZED_ROWS = 1024  # at once, in float32


def quantize(weight_NK: Tensor, largest_N: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """int8 [N, K], and scales in float32 [N] that bfloat16 holds exactly. `largest_N`: of the whole rows, where these
    are parts of them."""
    largest_N = weight_NK.abs().amax(1) if largest_N is None else largest_N
    scale_N = largest_N.float().div(127).clamp_(min=torch.finfo(torch.float32).tiny)
    scale_N = scale_N.bfloat16().float()
    ints_NK = torch.empty(weight_NK.shape, dtype=torch.int8, device=weight_NK.device)
    parts = (ints_NK.split(_QUANTIZED_ROWS), weight_NK.split(_QUANTIZED_ROWS), scale_N.split(_QUANTIZED_ROWS))
    for ints, weight, scale in zip(*parts, strict=True):
        ints.copy_((weight.float() / scale.unsqueeze(1)).round_())  # at most 127.25 before rounding
    return ints_NK, scale_N


def multiply(x_MK: Tensor, ints_NK: Tensor, scale_N: Tensor) -> Tensor:
    """[M, N] in the format of x, bfloat16 or float32, which is also that of the scales."""
    if x_MK.dtype == torch.bfloat16 and len(x_MK) <= _FEW_ROWS and x_MK.shape[1] % _FEW_ROWS_COLUMNS == 0:
        return torch.ops.aten._weight_int8pack_mm(x_MK, ints_NK, scale_N)
    out_MN = x_MK.new_empty((len(x_MK), len(ints_NK)))
    step = max(16, _PIECE_VALUES // ints_NK.shape[1])
    pieces = (out_MN.split(step, 1), ints_NK.split(step), scale_N.split(step))
    for out, ints, scale in zip(*pieces, strict=True):
        torch.mul(linear(x_MK, ints.to(x_MK.dtype)), scale, out=out)
    return out_MN
