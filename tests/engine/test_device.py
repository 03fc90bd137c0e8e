"""The device file reads the machine: cores, memory, number formats."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from shoal.engine import device as device_module
from shoal.engine.config import EngineConfig
from shoal.engine.device import choose, kv_pool_bytes, memory_bytes, num_cores

pytestmark = pytest.mark.torch

GB = 1 << 30


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of /sys/fs/cgroup and /proc, on a machine with 8 cores and 64 GB."""
    read = device_module._read
    monkeypatch.setattr(device_module, "_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(
        device_module,
        "_read",
        lambda path: read(tmp_path / path.relative_to("/") if path.is_relative_to("/proc") else path),
    )
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(device_module.psutil, "virtual_memory", lambda: type("Memory", (), {"total": 64 * GB}))
    (tmp_path / "proc/self").mkdir(parents=True)
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="ascii")


def test_without_control_groups_the_machine_counts(machine: Path) -> None:
    assert (num_cores(), memory_bytes()) == (8, 64 * GB)


def test_control_groups_version_2_limit_cores_and_memory_also_from_above(machine: Path) -> None:
    write(machine / "proc/self/cgroup", "0::/slice/box")
    write(machine / "cgroup/slice/cpu.max", "250000 100000")
    write(machine / "cgroup/slice/box/cpu.max", "max 100000")
    write(machine / "cgroup/slice/box/memory.max", str(4 * GB))
    write(machine / "cgroup/slice/memory.max", "max")
    assert (num_cores(), memory_bytes()) == (3, 4 * GB)


def test_control_groups_version_1_limit_cores_and_memory(machine: Path) -> None:
    write(machine / "proc/self/cgroup", "3:memory:/box\n2:cpu,cpuacct:/box\n0::/")
    write(machine / "cgroup/cpu/box/cpu.cfs_quota_us", "150000")
    write(machine / "cgroup/cpu/box/cpu.cfs_period_us", "100000")
    write(machine / "cgroup/cpu/cpu.cfs_quota_us", "-1")
    write(machine / "cgroup/memory/box/memory.limit_in_bytes", str(6 * GB))
    write(machine / "cgroup/memory/memory.limit_in_bytes", str(2**63 - 4096))
    assert (num_cores(), memory_bytes()) == (2, 6 * GB)


def test_the_pool_of_a_cpu_is_a_quarter_of_memory_up_to_two_gigabytes(machine: Path) -> None:
    device = choose(EngineConfig(device="cpu", threads=1))
    assert kv_pool_bytes(EngineConfig(), device, 0) == 2 * GB
    write(machine / "proc/self/cgroup", "0::/")
    write(machine / "cgroup/memory.max", str(4 * GB))
    assert kv_pool_bytes(EngineConfig(), device, 0) == 1 * GB
    assert kv_pool_bytes(EngineConfig(kv_cache_bytes=12345), device, 0) == 12345


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16", torch.bfloat16),
        ("flags\t\t: fpu amx_bf16 amx_tile", torch.bfloat16),
        ("Features\t: fp asimd bf16", torch.bfloat16),
        ("flags\t\t: fpu avx2 avx512f", torch.float32),
    ],
)
def test_a_cpu_computes_in_bfloat16_where_it_can(machine: Path, flags: str, dtype: torch.dtype) -> None:
    write(machine / "proc/cpuinfo", f"processor\t: 0\n{flags}")
    assert choose(EngineConfig(device="cpu", threads=1)).dtype == dtype


def test_what_is_asked_for_is_taken(machine: Path) -> None:
    device = choose(EngineConfig(device="cpu", dtype="float16", threads=1))
    assert (device.dtype, torch.get_num_threads()) == (torch.float16, 1)
    assert torch.get_float32_matmul_precision() == "highest"


def test_nothing_but_the_device_file_names_hardware() -> None:
    package = Path(device_module.__file__).parent
    for path in [*package.rglob("*.py")]:
        if path.name not in ("device.py", "config.py"):
            text = path.read_text(encoding="utf-8")
            assert '"cpu"' not in text and '"cuda' not in text and "torch.cuda" not in text, path
