"""API-07 f against a real model: a scored prompt equals a teacher-forced reference, cached or not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.gateways import MODEL, Service, gateway_process
from tests.support.processes import running, socket_folder, wait_until

TEXT = "one two three, and the sea is all that there is to see; one two three"


@pytest.mark.torch
@pytest.mark.processes
def test_api_07_f_scores_equal_a_reference(model_dir: Path) -> None:
    with socket_folder() as folder:
        address = f"unix:{folder}/e.sock"
        command = [sys.executable, "-m", "shoal.cli", "engine", "--model", str(model_dir), "--dtype", "float32"]
        with (
            running([*command, "--listen", address, "--served-model-name", MODEL]) as engine,
            gateway_process(model_dir, [address]) as (url, gateway),
        ):
            s = Service(url, gateway, [engine])
            wait_until(lambda: s.call("/ready").status == 200, 60, lambda: engine.text)
            ids = s.call("/tokenize", {"prompt": TEXT}).json["tokens"]
            expected = _reference(model_dir, ids)
            for _ in range(2):  # the second time the prompt's blocks are cached
                body = s.complete(TEXT, echo=True, max_tokens=0, logprobs=2).json
                scores = body["choices"][0]["logprobs"]["token_logprobs"]
                assert body["choices"][0]["text"] == TEXT and len(scores) == len(ids)
                assert scores[0] is None
                assert sum(scores[1:]) == pytest.approx(expected, abs=1e-4)
            assert s.complete(TEXT, max_tokens=3).status == 200
            assert gateway.stop() == 0
            assert engine.stop() == 0


def _reference(model_dir: Path, ids: list[int]) -> float:
    import torch

    from tests.support.reference import load_reference

    with torch.inference_mode():
        logprobs = torch.log_softmax(load_reference(model_dir)(torch.tensor([ids])).logits[0], dim=-1)
    return float(sum(logprobs[position, token] for position, token in enumerate(ids[1:])))
