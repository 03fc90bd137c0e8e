"""`shoal config`: every field of the configuration, with its unit, default, bounds and value."""

from __future__ import annotations

from typing import Annotated

import typer

from shoal import config as configuration
from shoal.cli.options import ConfigFile, plain, resolve


def config(
    config: ConfigFile = None,
    check: Annotated[bool, typer.Option("--check", help="only check; exit with 2 if something is wrong")] = False,
    as_yaml: Annotated[bool, typer.Option("--yaml", help="print a configuration file with all values")] = False,
) -> None:
    """Show every configuration field: value, default, unit, bounds."""
    values = resolve(config, {})
    if check:
        typer.echo("configuration ok")
    elif as_yaml:
        typer.echo(configuration.dump(values), nl=False)
    else:
        _print_table(values)


def _print_table(values: configuration.Config) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), expand=False)
    for column in ("field", "value", "default", "unit", "allowed", "description"):
        table.add_column(column, overflow="fold", no_wrap=column == "field")
    section = ""
    for row in configuration.rows(values):
        if section and row.section != section:
            table.add_row()
        section = row.section
        changed = row.value != row.default
        cells = (row.name, plain(row.value), plain(row.default), row.unit, row.bounds, row.description)
        table.add_row(*(Text(cell, style="bold" if changed and index < 2 else "") for index, cell in enumerate(cells)))
    Console().print(table)
