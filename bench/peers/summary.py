"""What a comparison prints and keeps: in what setting, the figures, their ratios, memory, claims."""

from __future__ import annotations

from dataclasses import asdict, fields
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from common import Report
from peers import vllm_cpu
from peers.cells import SHOAL, SHOAL_INT8, Measured, Record, Unusable
from peers.claims import QUANTITIES, by_round, claims, ratios

HEADINGS = ("output tok/s", "TTFT p50", "TTFT p99", "TPOT p50")


def setting(report: Report, model: Path, peer_folder: Path, kv_gib: int) -> None:
    """What somebody who repeats the run has to make alike."""
    peer = ", ".join(f"{package} {number}" for package, number in vllm_cpu.versions(peer_folder).items())
    preloaded = ", ".join(path.name for path in vllm_cpu.preloads(peer_folder)) or "nothing"
    rows = [
        ("processor", f"{_processor()}, {psutil.cpu_count()} cores, {psutil.virtual_memory().total / 1e9:.0f} GB"),
        ("model", f"{model}, bfloat16"),
        ("shoal", f"{version('shoal')}, torch {version('torch')}; defaults, KV pool {kv_gib} GiB"),
        ("vLLM", f"{peer}; default binding of threads to cores, KV pool {kv_gib} GiB, preloaded: {preloaded}"),
    ]
    report.table("setting", ("what", "is"), rows)


def keep(report: Report, record: Record) -> None:
    """Every cell measured so far, into the JSON file."""
    columns = [field.name for field in fields(Measured)]
    report.keep("cells", columns, [tuple(asdict(row).values()) for row in record.cells])
    report.keep("cells not used", Unusable._fields, record.unusable)
    report.save()


def write(report: Report, record: Record) -> None:
    """The tables and claims, and the end of the report."""
    if record.start_s:
        starts = [(server, start, seconds) for (server, start), seconds in record.start_s.items()]
        report.table("from the command to the first token", ("server", "start", "s"), starts)
    _figures(report, record)
    for peer in record.peers:
        _ratios(report, record, peer)
    if record.memory:
        _memory(report, record)
    if record.unusable:
        report.table("cells not used", Unusable._fields, record.unusable)
    for claim in claims(record):
        report.claim(claim.name, claim.value, claim.target, claim.ok)
    report.finish()


def _figures(report: Report, record: Record) -> None:
    rows = []
    for mix, concurrency in _places(record):
        for server in (SHOAL, SHOAL_INT8, *record.peers):
            found = [by_round(record, quantity, mix, concurrency, server) for quantity in QUANTITIES]
            if found[0]:
                rows.append((mix, concurrency, server, *(median(rounds.values()) for rounds in found), len(found[0])))
    units = [heading if heading.endswith("/s") else f"{heading} ms" for heading in HEADINGS]
    report.table("medians over rounds", ("mix", "concurrent", "server", *units, "rounds"), rows)
    if record.cells:
        lag = max(row.driver_lag_p99_ms for row in record.cells)
        report.table("the load driver", ("what", "ms"), [("its timers were late by, p99, in the worst cell", lag)])


def _ratios(report: Report, record: Record, peer: str) -> None:
    """The median, and behind it each round's."""
    rows: list[list[Any]] = []
    for mix, concurrency in _places(record):
        row: list[Any] = [mix, concurrency]
        for quantity in QUANTITIES:
            ours, theirs = (by_round(record, quantity, mix, concurrency, server) for server in (SHOAL, peer))
            found = ratios(ours, theirs)
            row.append(f"{median(found):.2f} ({' '.join(f'{ratio:.2f}' for ratio in found)})" if found else "")
        if any(row[2:]):
            rows.append(row)
    report.table(f"shoal / {peer}: median (each round)", ("mix", "concurrent", *HEADINGS), rows)


def _memory(report: Report, record: Record) -> None:
    """In the claim the greater figure for shoal and the lesser for the peer count."""
    rows = []
    for server, memory in record.memory.items():
        bounds = (memory.least_apart_bytes, memory.most_apart_bytes, memory.pss_bytes - memory.most_apart_bytes)
        rows.append((server, memory.processes, memory.pss_bytes / 1e6, *(size / 1e6 for size in bounds)))
    columns = ("server", "processes", "PSS MB", "without KV pool, least MB", "at most MB", "KV pool, resident MB")
    report.table("memory of all processes after the last round", columns, rows)


def _places(record: Record) -> list[tuple[str, int]]:
    """Mix and concurrency, in the order of measuring."""
    return list(dict.fromkeys((row.mix, row.concurrency) for row in record.cells))


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return "unknown"
