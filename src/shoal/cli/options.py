"""The configuration's fields as command-line options: one option per field, explained and bounded in one place.

Names follow vLLM's where the meaning is the same.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal import config as configuration
from shoal.config import Config, ConfigError, Row

RENAMED = {
    "model.served_name": "served-model-name",
    "controller.host": "controller-host",
    "controller.port": "controller-port",
}

SHORT = {
    "engine.tensor_parallel_size": "--tp",
    "engine.context_parallel_size": "--cp",
    "engine.pipeline_parallel_size": "--pp",
    "cluster.replicas": "--dp",
}

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="YAML configuration; options win over it; fields: `shoal config`"),
]
Model = Annotated[
    str | None, typer.Option("--model", metavar="MODEL", help="a known name, a model folder, or a Hugging Face hub id")
]


def flag(field: str) -> str:
    """ "engine.max_num_seqs" -> "--max-num-seqs" """
    return "--" + RENAMED.get(field, field.partition(".")[2].replace("_", "-"))


def with_settings(*sections: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for each field of these sections; it receives those that were set as `settings`."""
    rows = [row for row in configuration.rows() if row.section in sections and row.name != "model.name"]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [
            parameter
            for name, parameter in inspect.signature(command, eval_str=True).parameters.items()
            if name != "settings"
        ]

        @functools.wraps(command)
        def wrapped(**values: Any) -> None:
            settings = {row.name: values.pop(_variable(row)) for row in rows}
            command(**values, settings={name: value for name, value in settings.items() if value is not None})

        wrapped.__signature__ = inspect.Signature([*own, *map(_parameter, rows)])  # type: ignore[attr-defined]
        return wrapped

    return decorate


def resolve(config: Path | None, settings: Mapping[str, Any], model: str | None = None) -> Config:
    """The file, and over it what the command line set."""
    overrides = dict(settings) | ({"model.name": model} if model is not None else {})
    try:
        return configuration.load(config, overrides)
    except ConfigError as error:
        lines = [f"{_where(problem.field, overrides, config)}: {problem.message}" for problem in error.problems]
        raise typer.BadParameter("\n".join(lines)) from None
    except OSError as error:
        raise typer.BadParameter(f"--config: {config}: {error.strerror}") from None


def _where(field: str, overrides: Mapping[str, Any], config: Path | None) -> str:
    if field == "model.name" and field in overrides:
        return "model"
    return flag(field) if field in overrides else f"{config}: {field}".removesuffix(": ")


def _variable(row: Row) -> str:
    return flag(row.name)[2:].replace("-", "_")


def _parameter(row: Row) -> inspect.Parameter:
    """Values arrive as text: the configuration converts and bounds them, with one message for files and options."""
    annotation: Any = Annotated[bool | None if row.kind is bool else str | None, _option(row)]
    return inspect.Parameter(_variable(row), inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _option(row: Row) -> Any:
    name, boolean = flag(row.name), row.kind is bool
    limits = "" if row.kind is bool or row.bounds == "text" else f"{row.bounds}; "
    short = (SHORT[row.name],) if row.name in SHORT else ()
    return typer.Option(
        f"{name}/--no-{name[2:]}" if boolean else name,
        *short,
        help=f"{row.description}  [{limits}default: {plain(row.default)}]",
        metavar=None if boolean else row.unit.upper() or {int: "N", float: "X"}.get(row.kind, "TEXT"),
        show_default=False,
    )


def plain(value: object) -> str:
    """A configuration value as YAML spells it."""
    return str(value).lower() if isinstance(value, bool) else str(value) or '""'
