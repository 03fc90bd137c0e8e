"""GPUs and links: each with its source, dense rates, and sizes as the driver reports them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.planner import catalogue

# What data sheets give without sparsity, in TFLOP/s: bfloat16 (float16 for the T4), fp8.
DENSE = {
    "h100-80gb": (989, 1979),
    "h200-141gb": (989, 1979),
    "b200-180gb": (2250, 4500),
    "a100-80gb": (312, None),
    "l40s-48gb": (362, 733),
    "l4-24gb": (121, 242),
    "a10-24gb": (125, None),
    "t4-16gb": (65, None),
    "mi300x-192gb": (1307, 2615),
}


@pytest.mark.parametrize("name", DENSE)
def test_matrix_rates_are_dense(name: str) -> None:
    rates = catalogue.gpu(name).flops_per_s
    plain, fp8 = DENSE[name]
    assert rates.get("bfloat16", rates["float16"]) == pytest.approx(plain * 1e12, rel=0.01)
    assert rates.get("fp8", 0) == pytest.approx((fp8 or 0) * 1e12, rel=0.01)


def test_every_row_has_a_source() -> None:
    for row in (*catalogue.gpus().values(), *catalogue.links().values()):
        assert row.source and row.url.startswith("https://"), row.name
    assert all(row["source"].startswith("https://huggingface.co/") for row in catalogue.models().values())


def test_memory_is_about_what_the_name_says() -> None:
    for name, gpu in catalogue.gpus().items():
        sold = int(name.rpartition("-")[2].removesuffix("gb"))
        assert 0.92 <= gpu.memory_bytes / (sold << 30) <= 1.0 + 1e-9, name


def test_a_gpu_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    row = {"memory_mib": 1000, "bytes_per_s": 1e11, "flops_per_s": {"float16": 1e13}, "link": "pcie4", "host": "pcie4"}
    path.write_text(json.dumps(row), encoding="utf-8")
    gpu = catalogue.gpu(str(path))
    assert (gpu.name, gpu.memory_bytes, gpu.per_node) == ("mine", 1000 << 20, 8)
    for broken, message in (
        ({"link": "string"}, "link is 'string'; allowed: nvlink3"),
        ({"memory_mib": -1}, "memory_mib is -1; must be a number above 0"),
        ({"flops": 2}, "flops is 2; must be above 0 and at most 1"),
    ):
        path.write_text(json.dumps({**row, **broken}), encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            catalogue.gpu(str(path))
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match="lacks the field 'link'"):
        catalogue.gpu(str(path))


def test_an_unknown_gpu_and_link_name_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"--gpu 'h100-80' is not in the catalogue; did you mean h100-80gb\?"):
        catalogue.gpu("h100-80")
    with pytest.raises(ValueError, match="link '100gbs' is not in the catalogue; did you mean 100gbe"):
        catalogue.link("100gbs")
