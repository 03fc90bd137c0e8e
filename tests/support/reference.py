"""transformers as the oracle: what a model folder answers by its authors' code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def load_reference(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@torch.inference_mode()
def greedy(model: Any, prompt: list[int], max_tokens: int) -> tuple[list[int], list[float]]:
    """Tokens, none of which ends the answer, and each one's margin over the second best logit."""
    known = torch.tensor([prompt])
    out = model.generate(
        known,
        attention_mask=torch.ones_like(known),
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.cat(out.logits).topk(2).values
    return out.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).tolist()


@torch.inference_mode()
def all_logits(model: Any, tokens: list[int]) -> Tensor:
    """[tokens, vocabulary] in float32; row p scores token p + 1."""
    return model(torch.tensor([tokens])).logits[0].float()
