"""`shoal pull`: a model onto this machine, with progress on stderr."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

STAGES = {"wait": "waiting for another pull", "download": "downloading", "convert": "converting"}


def pull(
    model: Annotated[
        str,
        typer.Argument(metavar="NAME", help="a known name (smollm2-135m), a model folder, or a Hugging Face hub id"),
    ],
) -> None:
    """Download a model, convert it if need be, and print its folder."""
    typer.echo(fetch(model))


def fetch(model: str) -> Path:
    """The model's folder, pulled if it is not here yet. A bar on a terminal, a line per stage elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    from shoal import models

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        tasks: dict[str, TaskID] = {}

        def show(progress: models.Progress) -> None:
            if progress.stage not in tasks:
                for task in bars.tasks:  # a new stage begins when the one before is done
                    bars.update(task.id, completed=task.total or 0)
                tasks[progress.stage] = bars.add_task(f"{STAGES[progress.stage]} {model}", total=None)
                if not console.is_terminal:
                    typer.echo(f"{STAGES[progress.stage]} {model}", err=True)
            task = bars.tasks[tasks[progress.stage]]
            done = max(task.completed, progress.done_bytes)  # pip moves files about
            bars.update(task.id, completed=done, total=progress.total_bytes or None)

        return models.pull(model, show)
