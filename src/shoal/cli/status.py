"""`shoal status`: which processes there are, which of them take work, and how busy they are."""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.controller.status import Document, kv_used, span

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

FETCH_LIMIT_S = 5.0
STATUS_URL = "http://127.0.0.1:8001"
StatusUrl = Annotated[str, typer.Option("--url", metavar="URL", help="address of the status page")]
PIPE_COLUMNS = 200  # a name that grep looks for stays in one piece


def status(
    url: StatusUrl = STATUS_URL,
    as_json: Annotated[bool, typer.Option("--json", help="as JSON, for programs")] = False,
) -> None:
    """Show the replicas, gateways and processes of a running service."""
    from rich.console import Console

    with reaching(url):
        found = fetch(url)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS).print(tables(found))


@contextmanager
def reaching(url: str) -> Iterator[None]:
    """Failures of the status page at `url`, in words: ValueError where it is none, OSError where nobody answers."""
    try:
        yield
    except urllib.error.HTTPError as error:
        raise ValueError(
            f"{url} answers {error.code}: it is no status page; `shoal serve` prints its address"
        ) from None
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise OSError(
            f"cannot reach {url} ({getattr(reason, 'strerror', None) or reason}); is shoal running?"
        ) from None


def fetch(url: str) -> Document:
    """`url` is the status page's. Raises OSError where nobody answers, ValueError where the answer is no status."""
    with urllib.request.urlopen(page(url, "/status"), timeout=FETCH_LIMIT_S) as answer:
        value = json.load(answer)
    if not isinstance(value, dict) or "replicas" not in value:
        raise ValueError(f"{url} answers, but not as a shoal controller")
    return value


def page(url: str, path: str) -> str:
    """Of the status page's URL. Raises ValueError where that is none."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{url!r} is no http URL")
    return url.rstrip("/") + path


def tables(status: Document) -> Group:
    """The same as text for a terminal."""
    from rich.console import Group
    from rich.padding import Padding

    parts = [_replica_table(status["replicas"]), _gateway_table(status["gateways"]), *_process_table(status)]
    return Group(*(Padding(table, (0, 0, 1, 0), expand=False) for table in parts))


def _replica_table(replicas: list[Document]) -> Table:
    with_roles = any(r["role"] != "both" for r in replicas)
    roles = ("role",) if with_roles else ()
    table = _table("replica", "state", *roles, "model", "running", "waiting", "KV", "steps", "up", "pid")
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
        roles = (r["role"],) if with_roles else ()
        table.add_row(r["name"], state, *roles, r["model"] or "-", *numbers, span(r["uptime_s"]), str(r["pid"]))
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
    """Without lines, so that a replica's row fits 80 columns; where it does not, cells go on in the next line."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
