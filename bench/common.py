"""What every bench shares: `--quick` and `--json FILE`, a table on the terminal, claims with their targets.

Tables are kept in the JSON file too, which holds {bench, quick, machine, claims: [{name, value, target, ok}], tables}.
A missed claim is printed and recorded; it does not change the exit status, since a busy machine may miss a target.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from shoal.core import scheduler


def arguments(description: str) -> argparse.ArgumentParser:
    """A parser with the two options that every bench takes; a bench may add its own."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="for CI: fewer repetitions")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write claims and tables to FILE")
    return parser


class Report:
    """Collects claims and tables while a bench runs; `finish()` prints the claims and writes the JSON file."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name = name
        self.quick: bool = options.quick
        self._file: Path | None = options.json
        self._claims: list[dict[str, Any]] = []
        self._tables: dict[str, list[dict[str, Any]]] = {}
        self._console = Console()

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Prints at once; put units into the column names."""
        self.keep(title, columns, rows)
        self._print(title, columns, rows)

    def keep(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """A table, or more of it than before, for the JSON file alone."""
        self._tables[title] = [dict(zip(columns, row, strict=True)) for row in rows]

    def claim(self, name: str, value: Any, target: str, ok: bool) -> None:
        """One measurable statement, e.g. claim("decode p50 ms", 0.8, "<= 1", True)."""
        self._claims.append({"name": name, "value": value, "target": target, "ok": bool(ok)})

    def finish(self) -> None:
        rows = [(c["name"], c["value"], c["target"], "yes" if c["ok"] else "NO") for c in self._claims]
        self._print("claims", ("claim", "value", "target", "ok"), rows)
        self.save()

    def save(self) -> None:
        """What there is so far: a long bench calls it as it goes, so that one cut short leaves what it measured."""
        if self._file is None:
            return
        machine = {"python": platform.python_version(), "platform": platform.platform(), "cores": os.cpu_count()}
        machine["core"] = "compiled" if scheduler.__file__.endswith(".so") else "interpreted"
        document = {"bench": self.name, "quick": self.quick, "machine": machine}
        document |= {"claims": self._claims, "tables": self._tables}
        self._file.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")

    def _print(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        table = Table(title=title, title_justify="left")
        for column in columns:
            table.add_column(column, justify="left" if column == columns[0] else "right")
        for row in rows:
            table.add_row(*(_text(cell) for cell in row))
        self._console.print(table)


def _text(cell: Any) -> str:
    """Four digits, and no exponent for what is large."""
    if not isinstance(cell, float):
        return str(cell)
    return f"{cell:.0f}" if abs(cell) >= 1000 else f"{cell:.4g}"
