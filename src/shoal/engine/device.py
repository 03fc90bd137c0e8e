"""The one place that picks device, number format, attention backend, threads and the size of the KV pool.

The rest of the engine asks a `Device` for tensors and never names a kind of hardware.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from shoal.engine import memory
from shoal.engine.config import EngineConfig
from shoal.engine.kernels.build import Unavailable
from shoal.engine.kernels.library import Kernels
from shoal.planner.memory import pool_bytes

CPU_KV_BYTES = 2 << 30
CPU_KV_SHARE = 0.25
_CGROUP = Path("/sys/fs/cgroup")
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_BF16_CPU_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # the last is Arm's name

log = logging.getLogger("shoal.engine")


@dataclass(frozen=True, slots=True)
class Device:
    torch_device: torch.device
    dtype: torch.dtype  # of weights, activations, keys and values
    attention: str  # a key of model.attention.ATTENTION
    kernels: Kernels | None  # ours, for CPUs
    quantization: str = "none"  # of the matrices: "none" or "int8"
    batch_invariant: bool = False  # a row's numbers must not depend on the rows beside it
    _buffers: dict[tuple[int, torch.dtype], Tensor] = field(default_factory=dict)
    _arena: memory.Arena = field(default_factory=memory.Arena)

    @property
    def is_cuda(self) -> bool:
        return self.torch_device.type == "cuda"

    def make_current(self) -> None:
        """What does not name a device takes this one."""
        if self.is_cuda:
            torch.cuda.set_device(self.torch_device)

    def tensor(self, values: np.ndarray | Tensor) -> Tensor:
        """Same numbers and format, on the device; the copy is ordered before what is computed next."""
        tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
        return tensor.to(self.torch_device, non_blocking=True) if self.is_cuda else tensor

    def cells(self, table: Tensor) -> memoryview | None:
        """The same memory, an int64 table's, as one row of Python numbers; None where Python cannot reach it."""
        return None if self.is_cuda else table.numpy().reshape(-1).data

    def arange(self, end: int) -> Tensor:
        return torch.arange(end, device=self.torch_device)

    def empty(self, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.torch_device)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        return torch.zeros(shape, dtype=dtype or self.dtype, device=self.torch_device)

    def buffer(self, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Memory that the next call with this width and format gives out again: for what lives within a step.

        Fresh pages for each result would cost more than filling them.
        """
        buffer = self._buffers.get((width, dtype))
        if buffer is None or len(buffer) < rows:
            if self.is_cuda:
                buffer = torch.empty((rows, width), dtype=dtype, device=self.torch_device)
            else:
                buffer = memory.zeros(rows * width * dtype.itemsize).view(dtype).view(rows, width)
            self._buffers[width, dtype] = buffer
        return buffer[:rows]

    def pool(self, shape: tuple[int, ...]) -> Tensor:
        """Zeros of a size where it matters that, in main memory, a page is taken when it is first written."""
        if self.is_cuda:
            return self.zeros(shape)
        return memory.zeros(math.prod(shape) * self.dtype.itemsize).view(self.dtype).view(shape)

    def host_pool(self, num_bytes: int) -> Tensor:
        """uint8 in main memory, to copy from the device and back. A page is taken when it is first written; for a CUDA
        device all of it at once, since it must stay where it is, and torch rounds that up to a power of two."""
        if self.is_cuda:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        return memory.zeros(num_bytes)

    def copies(self) -> Callable[[Tensor, Tensor], None]:
        """A function (target, source) that copies bytes between host_pool and the device, from any thread, beside the
        steps: it returns when they are there, and holds no lock of Python's meanwhile."""
        if not self.is_cuda:  # torch's own copy would wake a team of threads
            return lambda target, source: np.copyto(target.numpy(), source.numpy())
        stream = torch.cuda.Stream(self.torch_device)

        def copy(target: Tensor, source: Tensor) -> None:
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
            stream.synchronize()

        return copy

    def keep(self, tensor: Tensor) -> Tensor:
        """A copy where reading it in each step is fast, for tensors in main memory that stay."""
        return self._arena.keep(tensor)

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """Device memory that `work` takes at its highest, beyond what is taken now; 0, without running it, on a CPU."""
        if not self.is_cuda:
            return 0
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        before = torch.cuda.memory_allocated(self.torch_device)
        work()
        return torch.cuda.max_memory_allocated(self.torch_device) - before

    def mark(self) -> Any:
        """A point in the device's work, for `elapsed_ns`."""
        if not self.is_cuda:
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed_ns(self, start: Any, end: Any) -> int:
        """Device time between two marks; waits for the second."""
        if not self.is_cuda:
            return end - start
        end.synchronize()
        return int(start.elapsed_time(end) * 1e6)


def choose(config: EngineConfig) -> Device:
    """Also sets torch's number of threads. Raises ValueError for a device that is not there."""
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"engine.device is {config.device!r}; allowed: auto, cpu, cuda, cuda:N")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ValueError(f"engine.device is {config.device!r}; this machine has {count} CUDA devices")
    dtype = _DTYPES[config.dtype] if config.dtype != "auto" else _best_dtype(device)
    if config.batch_invariant and device.type != "cpu":
        raise ValueError(f"engine.batch_invariant is true; it needs a CPU: the device is {device}")
    if config.quantization != "none" and (device.type != "cpu" or dtype == torch.float16):
        raise ValueError(
            f"engine.quantization is {config.quantization}; it needs a CPU, and bfloat16 or float32: "
            f"the device is {device}, engine.dtype {str(dtype).removeprefix('torch.')}"
        )
    threads = config.threads or num_cores()
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("highest")
    kernels = _kernels(threads) if device.type == "cpu" and config.kernels == "auto" else None
    log.info(
        "engine.device", {"device": str(device), "dtype": str(dtype), "threads": threads, "kernels": bool(kernels)}
    )
    return Device(
        device,
        dtype,
        attention="paged" if kernels else "fixed" if config.batch_invariant else "sdpa",
        kernels=kernels,
        quantization=config.quantization,
        batch_invariant=config.batch_invariant,
    )


def _kernels(threads: int) -> Kernels | None:
    try:
        return Kernels(threads)
    except Unavailable as reason:
        log.warning("kernels.unavailable", {"reason": str(reason), "instead": "torch"})
        return None


def kv_pool_bytes(config: EngineConfig, device: Device, activation_peak_bytes: int, num_ranks: int = 1) -> int:
    """Bytes for keys and values of one of so many ranks, with the weights loaded already. Raises ValueError where
    nothing is left."""
    if config.kv_cache_bytes:
        return config.kv_cache_bytes // num_ranks
    if not device.is_cuda:
        return min(CPU_KV_BYTES, int(CPU_KV_SHARE * memory_bytes())) // num_ranks
    _, total = torch.cuda.mem_get_info(device.torch_device)
    weights = torch.cuda.memory_allocated(device.torch_device)
    left = pool_bytes(total, config.gpu_memory_utilization, weights, activation_peak_bytes)
    if left <= 0:
        raise ValueError(
            f"engine.gpu_memory_utilization is {config.gpu_memory_utilization}; of {total >> 20} MiB, weights take "
            f"{weights >> 20} MiB and activations {activation_peak_bytes >> 20} MiB: nothing is left for the KV pool"
        )
    return left


def device_of_rank(asked: str, rank: int) -> str:
    """`engine.device` of one of several ranks: a GPU of its own, where there are any."""
    if asked == "cuda" or (asked == "auto" and torch.cuda.is_available()):
        return f"cuda:{rank}"
    return asked


def num_cores() -> int:
    """Cores that this process really has: its affinity, and its control group's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cpu_quota()
    return max(1, min(cores, math.ceil(quota))) if quota else cores


def memory_bytes() -> int:
    """Memory that this process may use: the machine's, or its control group's limit where that is lower."""
    limits = [psutil.virtual_memory().total]
    for folder in _cgroup_folders("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):  # version 2, version 1
            text = _read(folder / name)
            if text.isdigit():
                limits.append(int(text))
    return min(limits)


def _cpu_quota() -> float | None:
    """In cores; None: no quota."""
    quotas = []
    for folder in _cgroup_folders("cpu"):
        quota, _, period = _read(folder / "cpu.max").partition(" ")  # version 2
        if not quota:
            quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _cgroup_folders(controller: str) -> list[Path]:
    """This process' control group and the ones above it, under versions 1 and 2; inside a container often the root."""
    folders = []
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _CGROUP / controller if controllers else _CGROUP
        group = root / path.lstrip("/")
        folders += [group, *(parent for parent in group.parents if parent.is_relative_to(root))]
    return folders


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _best_dtype(device: torch.device) -> torch.dtype:
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    flags: set[str] = set()
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            flags.update(value.split())
            break
    return torch.bfloat16 if flags & _BF16_CPU_FLAGS else torch.float32
