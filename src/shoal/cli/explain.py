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
        _print(values)


def _print(values: configuration.Config) -> None:
    """Two lines a field, so that a narrow terminal shows them whole; what is not the default is bold."""
    section = ""
    for row in configuration.rows(values):
        if section and row.section != section:
            typer.echo()
        section = row.section
        value = f"{row.name:<30} {plain(row.value)} {row.unit}".rstrip()
        allowed = f"[{row.bounds}; default: {plain(row.default)}]"
        typer.echo(typer.style(f"{value:<46}", bold=row.value != row.default) + f"  {allowed}")
        typer.echo(f"    {row.description}")
