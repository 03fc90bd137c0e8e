"""What `shoal status` and the status page show: one plain document made from the registry, fetched and drawn here."""

from __future__ import annotations

import dataclasses
import json
import urllib.request
from typing import Any

from rich.console import Group
from rich.padding import Padding
from rich.table import Table

from shoal.controller.registry import Entry
from shoal.wire.messages import Role

FETCH_LIMIT_S = 5.0
Document = dict[str, Any]


def document(entries: list[Entry], now_ns: int) -> Document:
    """JSON-ready. Numbers of engines are their last report's; ages in seconds."""
    by_role = {role: [e for e in entries if e.role is role] for role in Role}
    return {
        "replicas": [_replica(e, now_ns) for e in by_role[Role.ENGINE]],
        "gateways": [_gateway(e, now_ns) for e in by_role[Role.GATEWAY]],
        "processes": [
            {"name": p.name, "state": p.state, "pid": p.pid, "restarts": p.restarts, "cause": p.cause}
            for e in by_role[Role.SUPERVISOR]
            for p in e.registered.processes
        ],
    }


def _common(entry: Entry, now_ns: int) -> Document:
    return {
        "name": entry.name,
        "incarnation": entry.incarnation,
        "pid": entry.registered.pid,
        "metrics": entry.registered.metrics,
        "connected": entry.connected,
        "uptime_s": round((now_ns - entry.since_ns) / 1e9, 1),
        "heard_s_ago": round((now_ns - entry.heard_ns) / 1e9, 1),
    }


def _replica(entry: Entry, now_ns: int) -> Document:
    replica = entry.registered.replica
    assert replica is not None
    info = replica.info
    return _common(entry, now_ns) | {
        "state": replica.state,
        "address": replica.address,
        "model": info.model if info is not None else None,
        "max_model_len": info.max_model_len if info is not None else None,
        "view": dataclasses.asdict(entry.view) if entry.view is not None else None,
    }


def _gateway(entry: Entry, now_ns: int) -> Document:
    return _common(entry, now_ns) | {"url": entry.registered.url, "report": entry.gateway}


def fetch(url: str) -> Document:
    """`url` is the status page's. Raises OSError where nobody answers, ValueError where the answer is no status."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{url!r} is no http URL")
    with urllib.request.urlopen(url.rstrip("/") + "/status", timeout=FETCH_LIMIT_S) as answer:
        value = json.load(answer)
    if not isinstance(value, dict) or "replicas" not in value:
        raise ValueError(f"{url} answers, but not as a shoal controller")
    return value


def tables(status: Document) -> Group:
    """The same as text for a terminal."""
    parts = [_replica_table(status["replicas"]), _gateway_table(status["gateways"]), *_process_table(status)]
    return Group(*(Padding(table, (0, 0, 1, 0)) for table in parts))


def _replica_table(replicas: list[Document]) -> Table:
    table = _table("replica", "state", "model", "running", "waiting", "KV used", "steps", "up", "pid")
    for r in replicas:
        view = r["view"]
        numbers = ["-"] * 4
        if view is not None:
            numbers = [
                str(view["num_running"]),
                str(view["num_waiting"]),
                f"{kv_used(view):.0%}",
                str(view["step"]),
            ]
        state = r["state"] if r["connected"] else "lost"
        table.add_row(r["name"], state, r["model"] or "-", *numbers, span(r["uptime_s"]), str(r["pid"]))
    return table


def _gateway_table(gateways: list[Document]) -> Table:
    table = _table("gateway", "URL", "up", "pid")
    for g in gateways:
        table.add_row(g["name"], g["url"], span(g["uptime_s"]), str(g["pid"]))
    return table


def _process_table(status: Document) -> list[Table]:
    if not status["processes"]:
        return []
    table = _table("process", "state", "restarts", "ended last by")
    for p in status["processes"]:
        table.add_row(p["name"], p["state"], str(p["restarts"]), p["cause"] or "-")
    return [table]


def _table(*columns: str) -> Table:
    """Without lines, so that a replica's row fits 80 columns."""
    return Table(*columns, box=None, padding=(0, 2, 0, 0))


def kv_used(view: Document) -> float:
    """Share of the KV blocks that live requests hold, 0 to 1."""
    total = view["total_blocks"]
    return (total - view["free_blocks"] - view["cached_blocks"]) / total if total else 0.0


def span(seconds: float) -> str:
    """ "42 s", "3 min", "5.2 h" """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
