"""The engine process: builds the parts of one real engine and serves with them."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.core.classes import DEFAULT_CLASSES, ServiceClass
from shoal.core.limits import Limits
from shoal.core.plan import Held
from shoal.core.scheduler import Scheduler
from shoal.core.stepcost import StepCost, fit
from shoal.engine import process
from shoal.engine.config import EngineConfig
from shoal.engine.model.registry import read_config
from shoal.engine.parallel.layout import Layout, layout_of
from shoal.engine.process import Engine, Parts
from shoal.engine.transfer.copier import Copier
from shoal.engine.transfer.peers import Peers
from shoal.engine.transfer.storage import Storage
from shoal.fleet.view import ReplicaRole
from shoal.telemetry import logs
from shoal.telemetry.journal import JournalFile, Planner, Recorder
from shoal.wire import address as addresses
from shoal.wire import lifeline
from shoal.wire.messages import EngineInfo

if TYPE_CHECKING:
    from shoal.engine.parallel.group import Group
    from shoal.engine.runner import Runner

log = logging.getLogger("shoal.engine")


def run(
    config: EngineConfig,
    *,
    model_dir: Path,
    served_name: str,
    name: str,
    listen: str,
    controller: str = "",
    classes: Mapping[str, ServiceClass] = DEFAULT_CLASSES,
) -> None:
    """Serves until SIGTERM; raises SystemExit with the status. Listens only once requests can be computed. Raises
    ValueError for an address that is none, or that takes a better secret."""
    secret = os.environ.get("SHOAL_SECRET", "").encode()
    _check_addresses(listen, controller, config.peer_address, secret)
    if config.kv_disk_folder:
        config = replace(config, kv_disk_folder=str(Path(config.kv_disk_folder) / name))
    logs.setup(name)
    lifeline.watch()
    engine = Engine(
        lambda: build(model_dir, config, served_name, classes),
        name=name,
        listen=listen,
        controller=controller,
        secret=secret,
        role=ReplicaRole(config.role),
    )
    raise SystemExit(process.run(engine))


def build(
    model_dir: Path, config: EngineConfig, served_name: str, classes: Mapping[str, ServiceClass] = DEFAULT_CLASSES
) -> Parts:
    """Loads and warms up, on the thread that will run the steps. Raises ValueError for what cannot be served."""
    # Threads of one step wait for each other asleep: spinning, they hold the core that the late one needs.
    # Measured on two cores with other work on them: 10 tokens/s, and 0.7 without this.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read once, when torch loads
    _check_disk(config)
    log.info("engine.loading", {"model": served_name, "folder": model_dir})
    layout = layout_of(config)
    if layout.size == 1:
        return _build(model_dir, config, served_name, classes)
    from shoal.engine.parallel.group import Group

    _check_ranks(config, layout)
    layout.check(read_config(model_dir))
    config = replace(config, peer_address="")
    group = Group(layout, model_dir, config)
    log.info("engine.ranks", {"layout": str(layout), "pids": group.pids})
    try:
        return _build(model_dir, config, served_name, classes, group)
    except Exception as error:
        cause = group.cause_of(error)
        group.close()
        raise cause from None


def _build(
    model_dir: Path,
    config: EngineConfig,
    served_name: str,
    classes: Mapping[str, ServiceClass],
    group: Group | None = None,
) -> Parts:
    from shoal.engine.parallel import lead
    from shoal.engine.runner import load

    runner = load(model_dir, config) if group is None else lead.load(model_dir, config, group)
    core = "interpreted" if str(sys.modules[Scheduler.__module__].__file__).endswith(".py") else "compiled"
    log.info("engine.warming", {"blocks": runner.num_blocks, "max_model_len": runner.max_model_len, "core": core})
    cost = StepCost(fit(runner.warm_up()))
    limits = Limits(
        num_blocks=runner.num_blocks,
        block_tokens=runner.block_tokens,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_prefill_chunk=config.max_prefill_chunk,
        max_model_len=runner.max_model_len,
        vocab_size=runner.vocab_size,
        max_step_ns=config.max_step_ms * 1_000_000,
        prefix_caching=config.enable_prefix_caching,
        eviction=config.eviction,
        max_steps_in_flight=max(config.steps_in_flight, config.pipeline_parallel_size),
        num_stages=config.pipeline_parallel_size,
        composer=config.composer,
        classes=dict(classes),
        block_bytes=runner.block_bytes,
    )
    peers = None
    if config.peer_address:
        most = config.peer_max_bytes_per_s
        peers = Peers(runner.blocks, config.peer_address, max_bytes_per_s=most)
        believed = min(config.peer_bytes_per_s, most) if most else config.peer_bytes_per_s
        limits = replace(limits, fetch_bytes_per_s=float(believed))
    copier: Copier | lead.GroupCopier | None = None
    disk = None
    if runner.host is not None:
        disk = _disk(runner, config)
        copier = Copier(runner.host, max_bytes_per_s=config.host_copy_bytes_per_s, disk=disk)
        if group is not None:
            copier = lead.GroupCopier(copier, group)
        limits = replace(
            limits,
            num_host_blocks=runner.host.num_blocks,
            copy_bytes_per_s=copier.measure(),
            disk_bytes_per_s=disk.measure() if disk else 0.0,
        )
        log.info("engine.host_tier", {"blocks": limits.num_host_blocks, "bytes_per_s": int(limits.copy_bytes_per_s)})
    on_disk = disk.held() if disk else []
    scheduler = Scheduler(limits, hash_root=runner.hash_root, cost=cost, on_disk=on_disk)
    planner, close = _recorded(scheduler, config.journal, runner.hash_root, on_disk)

    def closing() -> None:
        if group is not None:
            group.close()
        close()

    return Parts(
        runner=runner,
        scheduler=planner,
        copier=copier,
        disk=disk,
        peers=peers,
        info=EngineInfo(
            model=served_name,
            model_digest=runner.model_digest,
            hash_root=runner.hash_root,
            hash_block_tokens=runner.block_tokens,
            max_model_len=runner.max_model_len,
            vocab_size=runner.vocab_size,
            capabilities=layout_of(config).capabilities,
            fetch_token_ns=_fetch_token_ns(limits),
        ),
        group=group,
        costs=lambda: cost.coefficients,
        closing=closing,
    )


def _check_addresses(listen: str, controller: str, peer_address: str, secret: bytes) -> None:
    """Before minutes of loading. ValueError: one of them cannot do."""
    where = addresses.configured("--listen", listen, secret)
    if controller:
        addresses.configured("--controller", controller, secret)
    if not peer_address:
        return
    peer = addresses.configured("engine.peer_address", peer_address, secret)
    if addresses.other_hosts_reach(where) and not addresses.other_hosts_reach(peer):
        own = addresses.TcpAddress(where.host, 0)
        raise ValueError(
            f"engine.peer_address is {peer}, where engines on other hosts cannot fetch, and --listen is {where}; "
            f"allowed: a host that they reach, as {own}, or empty: nothing is lent or fetched"
        )


def _fetch_token_ns(limits: Limits) -> float:
    if not limits.fetch_bytes_per_s:
        return 0.0
    return 1e9 * limits.block_bytes / limits.block_tokens / limits.fetch_bytes_per_s


def _check_disk(config: EngineConfig) -> None:
    """ValueError: the disk tier lacks something."""
    if not config.kv_disk_folder:
        return
    for field, value in (
        ("kv_disk_bytes", config.kv_disk_bytes),
        ("host_cache_bytes", config.host_cache_bytes),
        ("enable_prefix_caching", config.enable_prefix_caching),
    ):
        if not value:
            folder = config.kv_disk_folder
            raise ValueError(f"engine.kv_disk_folder is {folder!r}; it needs engine.{field}, which is {value}")


def _check_ranks(config: EngineConfig, layout: Layout) -> None:
    """ValueError: something that was asked for cannot be had with several ranks."""
    if config.peer_address not in ("", EngineConfig().peer_address):
        raise ValueError(
            f"engine.peer_address is {config.peer_address!r}; with {layout} nothing is lent or fetched: allowed: empty"
        )
    if config.kv_disk_folder:
        raise ValueError(f"engine.kv_disk_folder is {config.kv_disk_folder!r}; with {layout} there is no disk tier")
    if config.batch_invariant and layout.cp > 1:
        raise ValueError(
            f"engine.batch_invariant is true; with {layout} it is not kept: where ranks share contexts, parts of "
            "results are merged"
        )


def _disk(runner: Runner, config: EngineConfig) -> Storage | None:
    """The disk tier, with what an earlier run left, where one is asked for."""
    if not config.kv_disk_folder or runner.host is None:
        return None
    disk = Storage(
        runner.host,
        Path(config.kv_disk_folder),
        root=runner.hash_root,
        block_tokens=runner.block_tokens,
        capacity_bytes=config.kv_disk_bytes,
    )
    log.info("engine.disk_tier", {"folder": config.kv_disk_folder, "blocks": disk.num_blocks, "off": disk.off})
    return disk


def _recorded(
    scheduler: Scheduler, journal: str, hash_root: bytes, on_disk: Sequence[Held]
) -> tuple[Planner, Callable[[], None]]:
    """The scheduler, behind a journal where one is asked for, and what to call at the end."""
    if not journal:
        return scheduler, lambda: None
    recorder = Recorder(scheduler, JournalFile(Path(journal)), hash_root=hash_root, on_disk=on_disk)
    return recorder, recorder.close
