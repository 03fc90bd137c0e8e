"""Where the largest step is measured before the pool is sized, all ranks compute it with each other."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.engine.device import Device
from tests.engine.parallel.test_tensor_parallel import requests
from tests.support.drive import make_scheduler, run_requests
from tests.support.ranks import ranks
from tests.support.tiny_model import make_tiny_model

pytestmark = [pytest.mark.torch, pytest.mark.processes]

MEASURING = (
    sys.executable,
    "-c",
    "from shoal.engine.device import Device\n"
    "from shoal.engine.parallel.rank import main\n"
    "Device.peak_bytes = lambda device, work: [work(), 0][1]\n"
    "main()",
)


@pytest.mark.parametrize("axis", ["tensor", "context", "pipeline"])
def test_ranks_that_measure_their_largest_step_start_and_serve(
    axis: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []

    def peak_bytes(device: Device, work: Any) -> int:
        measured.append(work())
        return 0

    monkeypatch.setattr(Device, "peak_bytes", peak_bytes)
    folder = make_tiny_model(tmp_path / "model", num_heads=8, num_kv_heads=4)
    limits = {"num_stages": 2, "max_steps_in_flight": 2} if axis == "pipeline" else {}
    with ranks(folder, command=MEASURING, **{f"{axis}_parallel_size": 2}) as several:
        assert len(measured) == 1
        found = run_requests(several, make_scheduler(several, **limits), requests())
    assert all(len(outcome.tokens) == 24 for outcome in found.values())
