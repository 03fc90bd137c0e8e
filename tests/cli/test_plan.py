"""`shoal plan` as people and programs call it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shoal import config as configuration
from tests.support.command import flat, shoal_here


def document(*args: str) -> dict:
    done = shoal_here("plan", *args, "--json")
    assert done.returncode in (0, 1), done.stderr
    return json.loads(done.stdout)


def test_it_starts_without_torch() -> None:
    code = (
        "import sys\nsys.argv = ['shoal', 'plan', 'llama-3.1-70b', '--gpu', 'h100-80gb', '--nodes', '2', '--json']\n"
        "from shoal.cli.app import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print('heavy:', [n for n in ('torch', 'numpy', 'transformers', 'aiohttp') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "heavy: []"


def test_a_model_alone() -> None:
    found = document("llama-3.1-70b")
    assert found["model"]["weight_bytes"] == 141_107_412_992
    assert found["model"]["kv_bytes_per_token"] == 327_680
    assert found["fewest_gpus"]["h100-80gb"] == 2
    assert "328 kB (320.0 KiB)" in shoal_here("plan", "llama-3.1-70b").stdout


def test_layouts_and_a_recommendation() -> None:
    args = ("llama-3.1-70b", "--gpu", "h100-80gb", "--gpus", "8", "--nodes", "2", "--concurrency", "128")
    found = document(*args)
    best = found["recommended"]
    assert (best["tp"], best["pp"], best["replicas"], best["gpus"]) == (8, 1, 2, 16)
    assert best["tokens_per_s"] > 0 and 0 < best["tpot_s"] < 1
    assert {"weight_bytes", "activation_bytes", "workspace_bytes", "kv_pool_bytes"} <= set(best)
    shown = flat(shoal_here("plan", *args).stdout)
    assert "TP=8 inside each node, 2 replicas." in shown
    assert "2 x 80 all-reduces a token over 100 GbE" in shown


def test_what_does_not_fit_is_refused_with_what_does() -> None:
    done = shoal_here("plan", "llama-3.1-70b", "--gpu", "h100-80gb", "--gpus", "1", "--dtype", "float16")
    assert done.returncode == 1
    assert "needs 141 GB (131.4 GiB) for its weights alone in float16" in flat(done.stdout)
    assert "Fits: 2 x h100-80gb" in flat(done.stdout)


def test_the_smallest_fleet_of_each_kind() -> None:
    found = document("llama-3.1-8b", "--rate", "20", "--slo", "ttft=1000,tpot=50")
    by_kind = {each["gpu"]: each for each in found["fleets"]}
    assert by_kind["l4-24gb"]["gpus"] > by_kind["h100-80gb"]["gpus"] >= 1
    for each in found["fleets"]:
        assert each["ttft_p99_s"] <= 1.0 and each["tpot_s"] <= 0.05 and each["host_tier_bytes_per_node"] > 0
    two = document("llama-3.1-8b", "--rate", "20", "--gpu", "l4-24gb,t4-16gb", "--slo", "tpot=1")
    assert {each["gpu"] for each in two["fleets"]} | set(two["cannot"]) == {"l4-24gb", "t4-16gb"}
    none = shoal_here("plan", "llama-3.1-8b", "--rate", "1", "--slo", "tpot=0.01")
    assert none.returncode == 1
    assert "keeps these targets" in none.stdout


@pytest.mark.parametrize(
    ("gpu", "gpus", "dtype"), [("h100-80gb", 2, "bfloat16"), ("l4-24gb", 4, "bfloat16"), ("t4-16gb", 4, "float16")]
)
def test_a_plan_becomes_a_configuration(tmp_path: Path, gpu: str, gpus: int, dtype: str) -> None:
    path = tmp_path / "shoal.yaml"
    args = ("llama-3.1-8b", "--gpu", gpu, "--gpus", str(gpus), "--context", "4096", "--emit", str(path))
    found = document(*args)["recommended"]
    values = configuration.load(path)
    assert values.model.name == "meta-llama/Llama-3.1-8B"
    assert (values.engine.dtype, values.engine.max_model_len, values.engine.device) == (dtype, 4096, "cuda")
    assert values.engine.tensor_parallel_size == found["tp"]
    assert values.cluster.replicas == found["replicas"]
    assert values.engine.host_cache_bytes == found["host_tier_bytes_per_replica"]


def test_a_folder_is_planned_and_emitted_as_it_is(tmp_path: Path) -> None:
    from shoal.planner import catalogue

    (tmp_path / "config.json").write_text(json.dumps(catalogue.models()["qwen3-8b"]["config"]), encoding="utf-8")
    done = shoal_here("plan", str(tmp_path), "--gpu", "l40s-48gb", "--gpus", "1", "--emit", "-")
    assert done.returncode == 0, done.stderr
    path = tmp_path / "shoal.yaml"
    path.write_text(done.stdout, encoding="utf-8")
    assert configuration.load(path).model.name == str(tmp_path)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "MODEL is missing"),
        (("llama-3.1-8",), "did you mean llama-3.1-8b?"),
        (("llama-3.1-8b", "--gpu", "h100"), "'h100' is not in the catalogue; did you mean h100-80gb?"),
        (("llama-3.1-8b", "--gpu", "l4-24gb", "--link", "wifi"), "link 'wifi' is not in the catalogue"),
        (("llama-3.1-8b", "--gpu", "l4-24gb", "--tp", "3"), "--tp: tp is 3; must divide the 32 attention heads"),
        (("llama-3.1-8b", "--gpu", "l4-24gb", "--pp", "33"), "--pp is 33; llama-3.1-8b has 32 layers"),
        (("llama-3.1-8b", "--slo", "ttft=fast"), "--slo has 'ttft=fast'; allowed: ttft=MS and tpot=MS"),
        (("llama-3.1-8b", "--slo", "p99=3"), "--slo has 'p99=3'"),
        (("llama-3.1-8b", "--context", "200000"), "--context is 200000; llama-3.1-8b has at most 131072 tokens"),
        (("llama-3.1-8b", "--context", "100"), "--context is 100; --prompt and --output need 1280 tokens"),
        (("llama-3.1-8b", "--quantization", "fp6"), "--quantization is 'fp6'; allowed: auto, none, int8, fp8"),
        (("llama-3.1-8b", "--dtype", "bf16"), "--dtype is 'bf16'; allowed: auto, bfloat16"),
        (("llama-3.1-8b", "--gpu", "t4-16gb", "--dtype", "bfloat16"), "no matrix rate of t4-16gb for it: allowed"),
        (("llama-3.1-8b", "--gpu", "t4-16gb,l4-24gb"), "several kinds are compared with --rate"),
        (("llama-3.1-8b", "--emit", "x.yaml"), "--emit needs --gpu"),
        (("llama-3.1-8b", "--kv-allocator", "best"), "--kv-allocator is 'best'; allowed: pages, windows"),
    ],
)
def test_what_is_wrong_is_named(args: tuple[str, ...], message: str) -> None:
    done = shoal_here("plan", *args)
    assert done.returncode == 2
    assert message in flat(done.stderr)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("gemma-2-27b", "--gpu", "h100-80gb"), "shoal's engine does not serve Gemma2ForCausalLM"),
        (
            ("llama-3.1-8b", "--gpu", "h100-80gb", "--quantization", "fp8"),
            "the weights are fp8; on GPUs shoal's engine",
        ),
        (("llama-3.1-405b", "--gpu", "h100-80gb", "--nodes", "2", "--link", "ib-ndr"), "is larger than a node"),
    ],
)
def test_what_this_version_cannot_start_is_not_emitted(tmp_path: Path, args: tuple[str, ...], message: str) -> None:
    done = shoal_here("plan", *args, "--emit", str(tmp_path / "shoal.yaml"))
    assert done.returncode == 1
    assert message in flat(done.stderr)
    assert not (tmp_path / "shoal.yaml").exists()


def test_what_is_known_is_listed_with_its_sources() -> None:
    done = shoal_here("plan", "--list")
    assert done.returncode == 0
    assert "h100-80gb" in done.stdout and "deepseek-v3" in done.stdout and "ib-ndr" in done.stdout
    assert document("--list")["gpus"]["h100-80gb"]["url"].startswith("https://")
