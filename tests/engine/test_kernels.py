"""Compiling the kernels: once, for this processor, never from a place that others can write; torch where it fails."""

from __future__ import annotations

import logging
import subprocess
from pathlib import Path

import pytest
import torch

from shoal.engine.config import EngineConfig
from shoal.engine.device import Device, choose
from shoal.engine.kernels import build, library
from shoal.engine.model.linear import KernelLinear, TorchLinear, make_linear

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(
        not any(build.shutil.which(name) for name in build.COMPILERS), reason="there is no C++ compiler to test with"
    ),
]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def device(**settings: object) -> Device:
    return choose(EngineConfig(dtype="bfloat16", device="cpu", threads=2, **settings))  # type: ignore[arg-type]


def test_a_machine_compiles_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build.library()
    made = first.stat().st_mtime_ns
    monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("compiled again"))
    assert build.library() == first
    assert first.stat().st_mtime_ns == made
    assert [path.name for path in (home / "kernels").iterdir()] == [first.name]


def test_other_sources_or_processors_have_another_file(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_compile", lambda _, target: target.touch(mode=0o600))
    names = {build.library().name}
    monkeypatch.setattr(build, "_processor", lambda: "another")
    names.add(build.library().name)
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g"))
    names.add(build.library().name)
    assert len(names) == 3


@pytest.mark.parametrize("loose", ["file", "folder"])
def test_a_library_that_others_can_write_is_not_loaded(home: Path, loose: str) -> None:
    path = build.library()
    (path if loose == "file" else path.parent).chmod(0o777)
    with pytest.raises(build.Unavailable, match="can be written by other users"):
        build.library()


def test_without_a_compiler_torch_computes(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(home))
    with caplog.at_level(logging.WARNING, "shoal.engine"):
        chosen = device()
    assert chosen.kernels is None and chosen.attention == "sdpa"
    assert [record.message for record in caplog.records] == ["kernels.unavailable"]
    assert isinstance(make_linear(torch.ones(8, 8).bfloat16(), None, chosen, epsilon=1e-5), TorchLinear)


def test_a_compiler_that_fails_is_quoted(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "FLAGS", ("-no-such-flag",))
    with pytest.raises(build.Unavailable, match="no-such-flag"):
        build.library()


def test_kernels_can_be_switched_off() -> None:
    assert device(kernels="off").kernels is None


def test_a_processor_without_avx512_has_no_linear_kernel(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("needs an x86 processor with AVX2")
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-march=haswell"))
    assert not library.Kernels(1).has_linear


@pytest.mark.parametrize("num_rows", [1, 21, 70])
@pytest.mark.parametrize("int8", [False, True])
def test_vectors_give_what_the_matrix_unit_gives(
    int8: bool, num_rows: int, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = device()
    if here.kernels is None or not here.kernels.has_linear:
        pytest.skip("this processor has no AVX-512 BF16")
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-mno-amx-tile", "-mno-amx-bf16", "-mno-amx-int8"))
    x, norm = torch.randn(num_rows, 96).bfloat16(), torch.ones(96).bfloat16()
    weight, scale = (
        (torch.randint(-127, 128, (80, 96), dtype=torch.int8), torch.rand(80))
        if int8
        else (torch.randn(80, 96).bfloat16(), None)
    )
    found = [
        KernelLinear(weight, scale, None, chosen, 1e-5, False).scores(x, norm).clone() for chosen in (here, device())
    ]
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)


def test_the_matrix_unit_is_left_to_others(home: Path) -> None:
    """torch's own library configures it too, on the same thread, and releases it behind itself."""
    chosen = device()
    if chosen.kernels is None or not chosen.kernels.has_linear:
        pytest.skip("this processor has no AVX-512 BF16")
    weight, x, norm = torch.randn(64, 64).bfloat16(), torch.randn(40, 64).bfloat16(), torch.ones(64).bfloat16()
    layer = KernelLinear(weight, None, None, chosen, 1e-5, False)
    first = layer.scores(x, norm).clone()
    for _ in range(3):
        torch.nn.functional.linear(x, weight)
        assert torch.equal(layer.scores(x, norm), first)


def test_sources_compile_without_warnings(tmp_path: Path) -> None:
    compiler = next(found for name in build.COMPILERS if (found := build.shutil.which(name)))
    source = Path(build.__file__).with_name("kernels.cpp")
    flags = [flag for flag in build.FLAGS if flag != "-O3"]  # optimised, the compiler's own headers warn
    command = [compiler, *flags, "-Wall", "-Wextra", "-Werror", str(source), "-o", str(tmp_path / "out.so")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=build.LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr[:2000]
