"""From logits to tokens, for a whole batch at once.

A token is drawn by the Gumbel-max rule: argmax of logit / temperature + noise over the tokens that the filters leave.
Noise belongs to (seed, choice, position, token id) and to nothing else, so neighbours, batch order, chunking,
preemption and replay on another replica do not change it:

    key   = mix(mix(mix(seed) + choice) + position)      position: index of the new token in prompt + output
    hash  = mix(key + token · G)                         all in 64-bit integers, wrapping
    W     = (top 53 bits of hash) / 2^53                 uniform in (0, 1)
    noise = -log(-log1p(-W))                             Gumbel; exact in its upper tail, which decides who wins

`mix` is the finaliser of splitmix64 (Steele, Lea, Flood 2014, constants by Stafford), G its increment.

Order of the steps, as vLLM does them: logit bias and min_tokens, penalties, temperature, min-p, top-k, top-p.
On a CPU our own kernel draws (kernels/sample.h), else torch does; both give the same tokens, since they follow the same
formulas, up to rounding where two tokens are as good as equal.
Shape letters: R rows (requests that sample), V vocabulary, C candidates, P rows with penalties, L longest history.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shoal.engine.device import Device
from shoal.engine.kernels.library import Kernels, address
from shoal.engine.kernels.library import Sampling as Settings

GREEDY_BELOW = 1e-5  # temperatures under this mean greedy
_INCREMENT = 0x9E3779B97F4A7C15 - (1 << 64)
_MULTIPLIERS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))
# top-k and top-p are looked for among so many first; sorting a whole vocabulary costs eight times as much
_CANDIDATES = 1024
_PIECE_ELEMENTS = 1 << 20  # noise for a whole vocabulary is made for so many elements at a time, to stay in cache


@dataclass(slots=True)
class History:
    """Prompt and output of the rows that have penalties."""

    rows_P: np.ndarray
    tokens_PL: Tensor  # on the device; beyond `lengths` anything
    lengths_P: np.ndarray
    num_prompt_P: np.ndarray


@dataclass(slots=True)
class SamplingBatch:
    """What to do with R rows of logits. Host arrays; float32 or int64."""

    temperature_R: np.ndarray
    top_p_R: np.ndarray
    top_k_R: np.ndarray
    min_p_R: np.ndarray
    repetition_R: np.ndarray
    presence_R: np.ndarray
    frequency_R: np.ndarray
    seed_R: np.ndarray
    choice_R: np.ndarray
    position_R: np.ndarray  # of the token to sample
    bias: tuple[np.ndarray, np.ndarray, np.ndarray]  # rows, token ids, values to add
    banned: tuple[np.ndarray, np.ndarray]  # rows, token ids: stop tokens before min_tokens
    history: History | None
    for_kernel: tuple[Settings, bool] | None = None  # made of the settings when first needed; whether a row is drawn


@dataclass(slots=True)
class Scores:
    """Log-probabilities of given tokens and of the likeliest ones, on the device. M scored tokens, A alternatives."""

    logprob_M: Tensor
    top_ids_MA: Tensor
    top_logprobs_MA: Tensor


def sample(logits_RV: Tensor, batch: SamplingBatch, device: Device) -> Tensor:
    """Token ids [R], int64. Changes the logits in place."""
    _adjust(logits_RV, batch, device)
    if device.kernels is not None:
        return _draw_by_kernel(logits_RV, batch, device, device.kernels)
    greedy_R = batch.temperature_R < GREEDY_BELOW
    if greedy_R.all():
        return logits_RV.argmax(-1)
    filtered_R = ((batch.top_k_R > 0) | (batch.top_p_R < 1)) & ~greedy_R
    tokens_R = torch.empty(len(logits_RV), dtype=torch.int64, device=logits_RV.device)
    if greedy_R.any():
        rows = device.tensor(np.flatnonzero(greedy_R))
        tokens_R.index_copy_(0, rows, logits_RV.index_select(0, rows).argmax(-1))
    for chosen_R, draw in ((filtered_R, _draw_filtered), (~filtered_R & ~greedy_R, _draw_unfiltered)):
        where = np.flatnonzero(chosen_R)
        if len(where):
            rows = device.tensor(where)
            scaled = logits_RV.index_select(0, rows)
            scaled.div_(device.tensor(batch.temperature_R[where]).unsqueeze(1))
            _drop_below_min_p(scaled, batch.min_p_R[where], device)
            tokens_R.index_copy_(0, rows, draw(scaled, _noise_keys(batch, where, device), batch, where, device))
    return tokens_R


def score(logprobs_MV: Tensor, targets_M: Tensor, num_top: int) -> Scores:
    """`logprobs_MV`: log-softmax of the model's own logits in float32: before bias, penalties, temperature, filters."""
    top = logprobs_MV.topk(num_top, dim=-1)
    return Scores(logprobs_MV.gather(1, targets_M.unsqueeze(1)).squeeze(1), top.indices, top.values)


# -- noise -------------------------------------------------------------------------------------------------------------


def noise_keys(seed_R: Tensor, choice_R: Tensor, position_R: Tensor) -> Tensor:
    """One key per row, int64."""
    return _mix(_mix(_mix(seed_R) + choice_R) + position_R)


def gumbel(keys_R: Tensor, tokens: Tensor) -> Tensor:
    """Noise in float32 of tokens [C] or [R, C]: [R, C]."""
    top_bits = _mix(keys_R.unsqueeze(1) + tokens * _INCREMENT).bitwise_right_shift_(11).bitwise_and_((1 << 53) - 1)
    uniform = top_bits.float().add_(0.5).mul_(2.0**-53).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _mix(x: Tensor) -> Tensor:
    """A bijection of 64-bit integers. torch shifts arithmetically, hence the masks."""
    x = x ^ ((x >> 30) & ((1 << 34) - 1))
    x.mul_(_MULTIPLIERS[0])
    x.bitwise_xor_((x >> 27).bitwise_and_((1 << 37) - 1))
    x.mul_(_MULTIPLIERS[1])
    return x.bitwise_xor_((x >> 31).bitwise_and_((1 << 33) - 1))


def _noise_keys(batch: SamplingBatch, where: np.ndarray, device: Device) -> Tensor:
    return noise_keys(*(device.tensor(column[where]) for column in (batch.seed_R, batch.choice_R, batch.position_R)))


# -- draws -------------------------------------------------------------------------------------------------------------


def _draw_by_kernel(logits_RV: Tensor, batch: SamplingBatch, device: Device, kernels: Kernels) -> Tensor:
    if logits_RV.dtype != torch.float32:
        logits_RV = logits_RV.float()
    if batch.for_kernel is None:
        filters = (batch.temperature_R, batch.top_p_R, batch.min_p_R, batch.top_k_R)
        draws = bool((batch.temperature_R >= GREEDY_BELOW).any())
        batch.for_kernel = Settings(*map(address, filters), None, GREEDY_BELOW), draws
    settings, draws = batch.for_kernel
    if draws:
        keys_R = noise_keys(*map(device.tensor, (batch.seed_R, batch.choice_R, batch.position_R)))
        settings.keys = keys_R.data_ptr()
    num_rows, vocab_size = logits_RV.shape
    tokens_R = torch.empty(num_rows, dtype=torch.int64)
    kernels.sample(logits_RV.data_ptr(), num_rows, vocab_size, settings, tokens_R.data_ptr())
    return tokens_R


def _draw_unfiltered(scaled_RV: Tensor, keys_R: Tensor, *_: object) -> Tensor:
    num_rows, vocab_size = scaled_RV.shape
    all_tokens = torch.arange(vocab_size, device=scaled_RV.device)
    step = max(1, _PIECE_ELEMENTS // vocab_size)
    for first in range(0, num_rows, step):
        scaled_RV[first : first + step] += gumbel(keys_R[first : first + step], all_tokens)
    return scaled_RV.argmax(-1)


def _draw_filtered(
    scaled_RV: Tensor, keys_R: Tensor, batch: SamplingBatch, where: np.ndarray, device: Device, width: int = _CANDIDATES
) -> Tensor:
    """Looks at the `width` likeliest tokens; where those do not settle a row's filters, at all of them."""
    vocab_size = scaled_RV.shape[1]
    top_k_R = np.where(batch.top_k_R[where] > 0, batch.top_k_R[where], vocab_size)
    top_k_R1 = device.tensor(top_k_R).unsqueeze(1)
    top_p_R1 = device.tensor(batch.top_p_R[where]).unsqueeze(1)
    values_RC, ids_RC = scaled_RV.topk(min(width, vocab_size), dim=-1)
    threshold_R1 = _threshold(values_RC, scaled_RV.logsumexp(-1, keepdim=True), top_k_R1, top_p_R1, vocab_size)
    noisy_RC = (values_RC + gumbel(keys_R, ids_RC)).masked_fill_(values_RC < threshold_R1, -torch.inf)
    tokens_R = ids_RC.gather(1, noisy_RC.argmax(-1, keepdim=True)).squeeze(1)
    if width < vocab_size:
        # The list may have been cut at the threshold's value, or within the k. The device is waited for here.
        cut_R1 = (threshold_R1 <= values_RC[:, -1:]) | ((top_k_R1 > width) & (top_k_R1 < vocab_size))
        open_rows = cut_R1.squeeze(1).nonzero().squeeze(1)
        if len(open_rows):
            mine = where[open_rows.cpu().numpy()]
            some = _draw_filtered(scaled_RV[open_rows], keys_R[open_rows], batch, mine, device, vocab_size)
            tokens_R.index_copy_(0, open_rows, some)
    return tokens_R


def _threshold(values_RC: Tensor, total_R1: Tensor, top_k_R1: Tensor, top_p_R1: Tensor, vocab_size: int) -> Tensor:
    """[R, 1]: the least value that stays. `values` descend; `total` is the log-sum-exp of the whole row.

    Of the k likeliest, those whose more likely ones together hold less than top_p of the k's probability. Equal
    values stay or go together, so the outcome does not depend on how ties were sorted.
    """
    in_k_RC = torch.arange(values_RC.shape[1], device=values_RC.device) < top_k_R1
    probability_RC = (values_RC - total_R1).exp_().masked_fill_(~in_k_RC, 0)
    up_to_RC = probability_RC.cumsum(-1)
    whole_R1 = up_to_RC[:, -1:].masked_fill(top_k_R1 >= vocab_size, 1)
    stays_RC = in_k_RC & (up_to_RC - probability_RC < top_p_R1 * whole_R1)
    last_R1 = stays_RC.sum(-1, keepdim=True).sub_(1).clamp_(min=0)
    return values_RC.gather(1, last_R1)


def _drop_below_min_p(scaled_RV: Tensor, min_p_R: np.ndarray, device: Device) -> None:
    if (min_p_R > 0).any():
        with np.errstate(divide="ignore"):
            distance_R1 = device.tensor(np.log(min_p_R)).unsqueeze(1)
        scaled_RV.masked_fill_(scaled_RV < scaled_RV.amax(-1, keepdim=True) + distance_R1, -torch.inf)


# -- what is done to the logits first ----------------------------------------------------------------------------------


def _adjust(logits_RV: Tensor, batch: SamplingBatch, device: Device) -> None:
    rows, ids, values = batch.bias
    if len(rows):
        logits_RV.index_put_((device.tensor(rows), device.tensor(ids)), device.tensor(values), accumulate=True)
    rows, ids = batch.banned
    if len(rows):
        banned = torch.tensor(-torch.inf, device=logits_RV.device)
        logits_RV.index_put_((device.tensor(rows), device.tensor(ids)), banned)
    if batch.history is not None:
        rows_P = device.tensor(batch.history.rows_P)
        logits_RV.index_copy_(0, rows_P, _penalised(logits_RV.index_select(0, rows_P), batch, batch.history, device))


def _penalised(logits_PV: Tensor, batch: SamplingBatch, history: History, device: Device) -> Tensor:
    """Repetition: over prompt and output, divides positive logits and multiplies negative ones. Frequency and presence:
    over output, subtract per occurrence and once. Counted from the tokens in each step: no state that could be lost."""

    def column(values_R: np.ndarray) -> Tensor:
        return device.tensor(values_R[history.rows_P]).unsqueeze(1)

    index_L = torch.arange(history.tokens_PL.shape[1], device=logits_PV.device)
    known_PL = index_L < device.tensor(history.lengths_P).unsqueeze(1)
    output_PL = known_PL & (index_L >= device.tensor(history.num_prompt_P).unsqueeze(1))
    tokens_PL = history.tokens_PL.masked_fill(~known_PL, 0)
    seen_PV = torch.zeros_like(logits_PV).scatter_add_(1, tokens_PL, known_PL.float()) > 0
    count_PV = torch.zeros_like(logits_PV).scatter_add_(1, tokens_PL, output_PL.float())
    repetition_P1 = column(batch.repetition_R)
    repeated_PV = torch.where(logits_PV > 0, logits_PV / repetition_P1, logits_PV * repetition_P1)
    logits_PV = torch.where(seen_PV, repeated_PV, logits_PV)
    return logits_PV - column(batch.frequency_R) * count_PV - column(batch.presence_R) * (count_PV > 0)
