"""`shoal status`: which processes there are, which of them take work, and how busy they are."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def status(
    url: Annotated[
        str, typer.Option("--url", metavar="URL", help="address of the status page")
    ] = "http://127.0.0.1:8001",
    as_json: Annotated[bool, typer.Option("--json", help="as JSON, for programs")] = False,
) -> None:
    """Show the replicas, gateways and processes of a running service."""
    from rich.console import Console

    from shoal.controller import status as page

    try:
        found = page.fetch(url)
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise OSError(
            f"cannot reach {url} ({getattr(reason, 'strerror', None) or reason}); is shoal running?"
        ) from None
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        Console().print(page.tables(found))
