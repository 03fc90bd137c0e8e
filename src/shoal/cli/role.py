"""`shoal role`: what a running replica is meant for from now on."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from typing import Annotated

import typer

from shoal.cli import status
from shoal.fleet.view import ReplicaRole

_ALLOWED = ", ".join(ReplicaRole)


def role(
    name: Annotated[str, typer.Argument(metavar="REPLICA", help="as `shoal status` names it")],
    role: Annotated[str, typer.Argument(metavar="ROLE", help=_ALLOWED)],
    url: status.StatusUrl = status.STATUS_URL,
) -> None:
    """Set a replica's role, without a restart: prefill (computes prompts), decode (goes on with them), or both.

    Only for the user who runs the service. Until it is set again, also after restarts of the replica.
    """
    if role not in set(ReplicaRole):
        raise typer.BadParameter(f"role is {role!r}; allowed: {_ALLOWED}")
    with status.reaching(url):
        done = post(url, name, role)
    typer.echo(f"{done['replica']}: {done['role']}")


def post(url: str, name: str, role: str) -> dict[str, str]:
    """`url` is the status page's. Raises ValueError for what it refuses, OSError where nobody answers."""
    query = urllib.parse.urlencode({"replica": name, "role": role})
    request = urllib.request.Request(status.page(url, f"/role?{query}"), method="POST")
    try:
        with urllib.request.urlopen(request, timeout=status.FETCH_LIMIT_S) as answer:
            done: dict[str, str] = json.load(answer)
            return done
    except urllib.error.HTTPError as error:
        if not error.headers.get("content-type", "").startswith("text/plain"):
            raise
        raise ValueError(error.read(1000).decode(errors="replace").strip()) from None
