"""What a long command shows on stderr: that it loads, how far it is, how fast it was."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

import typer

if TYPE_CHECKING:
    from shoal.llm import Output


@contextmanager
def loading(what: str) -> Iterator[None]:
    """A moving line on a terminal, a plain one elsewhere."""
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(f"loading {what}"):
            yield
    else:
        typer.echo(f"loading {what}", err=True)
        yield


class Meter:
    """Counts answers: a bar on a terminal, and one line at the end."""

    def __init__(self, num_prompts: int | None) -> None:
        """`num_prompts`: None where nobody knows it."""
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        console = Console(stderr=True)
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[speed]}"), TimeElapsedColumn())
        self.num_failed = 0
        self._num_done = self._num_tokens = 0
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
        self._task = self._progress.add_task("", total=num_prompts, speed="")

    def __enter__(self) -> Self:
        self._start_s = time.monotonic()
        self._progress.start()
        return self

    def count(self, answer: Output) -> None:
        self._num_done += 1
        self.num_failed += bool(answer.error)
        self._num_tokens += sum(len(choice.token_ids) for choice in answer.choices)
        self._progress.update(self._task, completed=self._num_done, speed=f"{self._speed():.0f} tokens/s")

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        typer.echo(
            f"{self._num_done} prompts, {self.num_failed} failed; {self._num_tokens} tokens in "
            f"{time.monotonic() - self._start_s:.1f} s ({self._speed():.0f} tokens/s)",
            err=True,
        )

    def _speed(self) -> float:
        return self._num_tokens / max(time.monotonic() - self._start_s, 1e-3)
