"""The n choices of one prompt: what a replica is asked for each, and what makes text of its tokens."""

from __future__ import annotations

import secrets
from dataclasses import replace

from shoal.core.request import RequestSpec
from shoal.gateway.output import ChoiceOutput
from shoal.gateway.params import Params
from shoal.gateway.terms import Terms
from shoal.gateway.text.decode import IncrementalDecoder
from shoal.gateway.text.stop import StopMatcher
from shoal.gateway.text.tokenizer import Tokenizer


def specs(
    id: str,
    prompt: tuple[int, ...],
    max_tokens: int,
    params: Params,
    tokenizer: Tokenizer,
    *,
    first: int = 0,
    prefix_keys: tuple[bytes, ...] = (),
    terms: Terms = Terms(),
) -> list[RequestSpec]:
    """Leader first; their ids are `id`.`first`, `id`.`first + 1` … Without a seed one is drawn, for all of them."""
    seed = (params.seed if params.seed is not None else secrets.randbits(63)) % (1 << 64)
    eos = () if params.ignore_eos else tokenizer.eos_token_ids
    sampling = replace(params.sampling, seed=seed)
    unscored = replace(sampling, prompt_logprobs=None)  # the prompt is the same for all
    return [
        RequestSpec(
            id=f"{id}.{first + choice}",
            prompt=prompt,
            max_tokens=max_tokens,
            min_tokens=params.min_tokens,
            stop_token_ids=tuple(dict.fromkeys((*params.stop_token_ids, *eos))),
            sampling=unscored if choice else sampling,
            choice=choice,
            leader=f"{id}.{first}" if choice else None,
            service_class=terms.service_class,
            priority=terms.order(params.priority),
            ttft_ms=terms.ttft_ms,
            tpot_ms=terms.tpot_ms,
            tenant=terms.tenant,
            salt=terms.tenant,
            prefix_keys=prefix_keys,
        )
        for choice in range(params.n)
    ]


def output(
    number: int, prompt: tuple[int, ...], params: Params, tokenizer: Tokenizer, *, offset: int = 0
) -> ChoiceOutput:
    """`number`: of the choice in its answer; `offset`: see ChoiceOutput."""
    return ChoiceOutput(
        number,
        IncrementalDecoder(tokenizer, prompt, skip_special_tokens=params.skip_special_tokens),
        StopMatcher(params.stops, include_stop_str_in_output=params.include_stop) if params.stops else None,
        offset=offset,
        min_tokens=params.min_tokens,
    )
