"""What `shoal status` and the status page show: one plain document made from the registry."""

from __future__ import annotations

import dataclasses
from typing import Any

from shoal.controller.registry import Entry
from shoal.wire.messages import Role

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
        "role": str(replica.role),
        "address": replica.address,
        "model": info.model if info is not None else None,
        "max_model_len": info.max_model_len if info is not None else None,
        "view": dataclasses.asdict(entry.view) if entry.view is not None else None,
    }


def _gateway(entry: Entry, now_ns: int) -> Document:
    return _common(entry, now_ns) | {"url": entry.registered.url, "report": entry.gateway}


def kv_used(view: Document) -> float:
    """Share of the KV blocks that live requests hold, 0 to 1."""
    total = view["total_blocks"]
    return (total - view["free_blocks"] - view["cached_blocks"]) / total if total else 0.0


def span(seconds: float) -> str:
    """ "42 s", "3 min", "5.2 h" """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
