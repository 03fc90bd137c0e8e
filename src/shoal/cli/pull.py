"""`shoal pull`: a model onto this machine."""

from __future__ import annotations

from typing import Annotated

import typer


def pull(
    model: Annotated[
        str,
        typer.Argument(metavar="NAME", help="a known name (smollm2-135m), a model folder, or a Hugging Face hub id"),
    ],
) -> None:
    """Download a model, convert it if need be, and print its folder."""
    from shoal import models

    typer.echo(models.pull(model))
