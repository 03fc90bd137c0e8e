"""Which rank a process is, as `runner.load` wants to know it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from shoal.engine.config import EngineConfig
from shoal.engine.device import Device, device_of_rank, num_cores
from shoal.engine.model.config import ModelConfig
from shoal.engine.parallel.comm import LIMIT_S, Alone, Comms
from shoal.engine.parallel.layout import Layout, Share, Split, stage_of
from shoal.engine.parallel.shared import SPIN_NS, Memory


def _alone(device: Device) -> Comms:
    return Comms(Alone(), Alone(), Alone())


class Room(NamedTuple):
    num_blocks: int  # of the KV pool
    num_host_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    layout: Layout = field(default_factory=Layout)
    number: int = 0
    join: Callable[[Device], Comms] = _alone  # its groups
    agree: Callable[[Room], Room] = lambda room: room  # what there is room for here → everywhere
    make_runner: Callable[..., Any] | None = None  # a Runner that also takes `comms`; None: one that is alone
    leads: Mapping[str, Any] = field(default_factory=dict)  # what the one that serves takes too, on rank 0

    def share(self, model: ModelConfig) -> Share:
        place, layout = self.layout.place(self.number), self.layout
        stage = stage_of(model, place.pp, layout.pp)
        return Share(Split(place.tp, layout.tp), Split(place.cp, layout.cp), stage)


ALONE = Rank()


def rank_config(config: EngineConfig, layout: Layout, rank: int) -> EngineConfig:
    """What one of a replica's ranks is told: its share of the cores, a GPU of its own."""
    device = device_of_rank(config.device, rank)
    return replace(config, device=device, threads=max(1, (config.threads or num_cores()) // layout.size))


def join(memory: Memory, rank: int, config: EngineConfig, device: Device) -> Comms:
    """The groups of a rank, once it knows what it computes on. Its waits may last ten times as long as a step."""
    limit_s = max(LIMIT_S, config.max_step_ms / 100)
    if device.kernels is not None:
        spin_ns = SPIN_NS if num_cores() >= memory.layout.size else 0
        return memory.comms(rank, device.kernels, spin_ns=spin_ns, limit_s=limit_s)
    from shoal.engine.parallel import network  # torch.distributed takes a while to import

    return network.join(memory.layout, rank, device, memory.fds[1], limit_s=limit_s)
