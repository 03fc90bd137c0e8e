"""One configuration for the whole of shoal: a YAML file with a section per component.

The components' dataclasses live beside the components; their annotations carry bounds, unit and description. This file
puts them together, reads and writes them, and explains them (`shoal config`). Secrets have no place in it: they come
from the environment.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import reprlib
import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import msgspec
import yaml
from msgspec import Meta, inspect

from shoal.controller.config import ClusterConfig, ControllerConfig
from shoal.core.classes import DEFAULT_CLASSES, ServiceClass
from shoal.engine.config import EngineConfig
from shoal.gateway.config import GatewayConfig

MAX_FILE_BYTES = 1 << 20
SECRETS = frozenset({"api_key", "api_keys", "apikey", "secret", "password", "token", "hf_token"})
CLASSES = "classes"  # the section whose keys are names of service classes
MAX_CLASSES = 32  # each is a value of metric labels

_CLASS_NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    name: Annotated[str, Meta(min_length=1, description="a known name, a model folder, or a Hugging Face hub id")] = (
        "smollm2-135m"
    )
    served_name: Annotated[str, Meta(description="what clients call it; empty: its name, or its folder's name")] = ""

    @property
    def public_name(self) -> str:
        """The name that clients use."""
        if self.served_name:
            return self.served_name
        folder = os.path.abspath(os.path.expanduser(self.name))
        return os.path.basename(folder) if os.path.isdir(folder) else self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassConfig:
    """A ServiceClass as a file may give it: core, where that lives with its defaults, has no bounds and no prose."""

    rank: Annotated[int, Meta(ge=0, le=99, description="lower is more urgent: it may preempt what is higher")]
    weight: Annotated[float, Meta(gt=0, le=1_000_000, description="worth of a token beside one of another class")]
    ttft_ms: Annotated[
        float,
        Meta(
            ge=0,
            le=86_400_000,
            extra_json_schema={"unit": "ms"},
            description="target: from arrival to the first token; 0: none",
        ),
    ]
    tpot_ms: Annotated[
        float,
        Meta(
            ge=0,
            le=86_400_000,
            extra_json_schema={"unit": "ms"},
            description="target: mean time between tokens; 0: none",
        ),
    ]
    max_wait_s: Annotated[
        float,
        Meta(
            gt=0,
            le=604_800,
            extra_json_schema={"unit": "s"},
            description="an admitted request never waits longer for its next slice",
        ),
    ]
    max_queue: Annotated[int, Meta(ge=1, description="most requests of the class that wait in a replica")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    controller: ControllerConfig = field(default_factory=ControllerConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    classes: dict[str, ServiceClass] = field(default_factory=lambda: dict(DEFAULT_CLASSES))


SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "engine": EngineConfig,
    "gateway": GatewayConfig,
    "controller": ControllerConfig,
    "cluster": ClusterConfig,
}


class Problem(typing.NamedTuple):
    field: str  # "section.key", a section, or "" for the file as a whole
    message: str  # names the value and what is allowed


class ConfigError(ValueError):
    """What is wrong, all of it at once. One line per problem."""

    def __init__(self, problems: list[Problem]):
        self.problems = problems
        super().__init__("\n".join(f"{where}: {message}" if where else message for where, message in problems))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One field of the configuration, explained."""

    section: str
    key: str
    value: Any
    default: Any
    annotation: Any  # type and bounds, as msgspec.convert takes them
    kind: type  # bool, int, float or str; that of the choices, where only some values are allowed
    choices: tuple[Any, ...]
    unit: str
    bounds: str  # what is allowed, as text
    description: str

    @property
    def name(self) -> str:
        return f"{self.section}.{self.key}"


# -- reading -----------------------------------------------------------------------------------------------------------


def load(path: Path | str | None = None, overrides: Mapping[str, Any] | None = None) -> Config:
    """The file's values over the defaults, and over both `overrides`.

    An override's key is "section.key"; its value may be text, as a command line gives it.
    Raises ConfigError for what the file or an override gets wrong, OSError for a file that cannot be read.
    """
    problems: list[Problem] = []
    values = _read(Path(path), problems) if path is not None else {}
    overrides = overrides or {}
    for name, value in overrides.items():
        section, _, key = name.partition(".")
        values.setdefault(section, {})[key] = value
    sections = {name: _converted(name, values.pop(name, {}), _fields(name), overrides, problems) for name in SECTIONS}
    classes = _classes(values.pop(CLASSES, {}), problems)
    problems += [Problem(str(name), _unknown(str(name), "", (*SECTIONS, CLASSES))) for name in values]
    if problems:
        raise ConfigError(problems)
    return Config(**{name: SECTIONS[name](**fields) for name, fields in sections.items()}, classes=classes)


def _read(path: Path, problems: list[Problem]) -> dict[str, dict[str, Any]]:
    """The file as a mapping of sections. What is not one is reported and left out."""
    with path.open("rb") as file:
        text = file.read(MAX_FILE_BYTES + 1)
    if len(text) > MAX_FILE_BYTES:
        raise ConfigError([Problem("", f"{path}: larger than {MAX_FILE_BYTES} bytes")])
    try:
        document = yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeError, ValueError, RecursionError) as error:
        raise ConfigError([Problem("", f"{path}: not YAML: {' '.join(str(error).split())}")]) from None
    if document is None:
        return {}
    known = (*SECTIONS, CLASSES)
    if not isinstance(document, dict):
        raise ConfigError([Problem("", f"{path}: expected sections ({', '.join(known)}), got {_show(document)}")])
    sections = {}
    for name, content in document.items():
        if content is None or isinstance(content, dict):
            sections[name] = dict(content or {})
        elif name in known:
            problems.append(Problem(name, f"expected keys and values, got {_show(content)}"))
        else:
            sections[name] = {}  # reported as unknown
    return sections


def _converted(
    section: str,
    values: dict[Any, Any],
    fields: Mapping[str, Row],
    overrides: Mapping[str, Any],
    problems: list[Problem],
) -> dict[str, Any]:
    good = {}
    for key, value in values.items():
        name = f"{section}.{key}"
        if key not in fields:
            problems.append(Problem(name, _unknown(str(key), section, fields)))
            continue
        try:
            good[key] = msgspec.convert(value, fields[key].annotation, strict=name not in overrides)
            if isinstance(good[key], float) and not math.isfinite(good[key]):
                raise msgspec.ValidationError  # a limit that is never reached is none
        except msgspec.ValidationError:
            problems.append(Problem(name, f"{_show(value)} is not allowed; allowed: {fields[key].bounds}"))
    return good


def _classes(values: dict[Any, Any], problems: list[Problem]) -> dict[str, ServiceClass]:
    """The file's classes over the built-in ones, so that none of these is ever missing."""
    classes = dict(DEFAULT_CLASSES)
    for name, given in values.items():
        if not isinstance(name, str) or not _CLASS_NAME.fullmatch(name):
            allowed = "a lower-case letter, then at most 31 of a-z, 0-9, _ and -"
            problems.append(Problem(CLASSES, f"a class cannot be called {_show(name)}; allowed: {allowed}"))
            continue
        where = f"{CLASSES}.{name}"
        if given is not None and not isinstance(given, dict):
            problems.append(Problem(where, f"expected keys and values, got {_show(given)}"))
            continue
        good = _converted(where, given or {}, _class_fields(), {}, problems)
        if name not in classes and "rank" not in (given or {}):
            problems.append(Problem(f"{where}.rank", _no_rank(name)))
        classes[name] = replace(classes.get(name, ServiceClass(rank=0)), **good)
    if len(classes) > MAX_CLASSES:
        problems.append(Problem(CLASSES, f"{len(classes)} classes, built-in ones included; allowed: {MAX_CLASSES}"))
    return classes


def _no_rank(name: str) -> str:
    near = difflib.get_close_matches(name, DEFAULT_CLASSES, n=1, cutoff=0.5)
    hint = f"; did you mean {CLASSES}.{near[0]}?" if near else ""
    return f"a class that is not built in must have it; allowed: {_class_fields()['rank'].bounds}{hint}"


def _unknown(key: str, section: str, known: Collection[str]) -> str:
    if key.lower().replace("-", "_") in SECRETS:
        return "secrets do not belong in a file; set the environment variable SHOAL_API_KEY (the API's key) instead"
    what = f"unknown key in section {section}" if section else "unknown section"
    near = difflib.get_close_matches(key.lower().replace("-", "_"), known, n=1, cutoff=0.5)
    elsewhere = [f"{other}.{key}" for other in SECTIONS if key in _fields(other)]
    if elsewhere:
        return f"{what}; it is {' or '.join(elsewhere)}"
    if near:
        return f"{what}; did you mean {section + '.' if section else ''}{near[0]}?"
    return f"{what}; known: {', '.join(known)}"


def _show(value: object) -> str:
    return reprlib.repr(value)  # short, however large the value


# -- writing and explaining --------------------------------------------------------------------------------------------


def dump(config: Config) -> str:
    """The whole configuration as YAML; `load` reads it back to an equal one."""
    return yaml.safe_dump(msgspec.to_builtins(config), sort_keys=False, allow_unicode=True)


def rows(config: Config | None = None) -> list[Row]:
    """Every field, in order, with the values of `config`; without one, the defaults."""
    config = config or Config()
    in_sections = [
        replace(row, value=getattr(getattr(config, section), row.key))
        for section in SECTIONS
        for row in _fields(section).values()
    ]
    return in_sections + [row for name, service in config.classes.items() for row in _class_rows(name, service)]


def _class_rows(name: str, service: ServiceClass) -> list[Row]:
    default = DEFAULT_CLASSES.get(name, ServiceClass(rank=service.rank))
    return [
        replace(row, key=f"{name}.{key}", value=getattr(service, key), default=getattr(default, key))
        for key, row in _class_fields().items()
    ]


@cache
def _fields(section: str) -> dict[str, Row]:
    return _explained(section, SECTIONS[section], SECTIONS[section]())


@cache
def _class_fields() -> dict[str, Row]:
    return _explained(CLASSES, ClassConfig, ServiceClass(rank=0))


def _explained(section: str, cls: type, defaults: object) -> dict[str, Row]:
    """A row for each annotated field of a dataclass."""
    annotations = typing.get_type_hints(cls, include_extras=True)
    info = inspect.type_info(cls)
    assert isinstance(info, inspect.DataclassType)
    fields = {}
    for entry in info.fields:
        schema: Any = entry.type
        extra: dict[str, Any] = {}
        if isinstance(schema, inspect.Metadata):
            schema, extra = schema.type, schema.extra_json_schema or {}
        default = getattr(defaults, entry.name)
        fields[entry.name] = Row(
            section=section,
            key=entry.name,
            value=default,
            default=default,
            annotation=annotations[entry.name],
            kind=type(default),
            choices=schema.values if isinstance(schema, inspect.LiteralType) else (),
            unit=extra.get("unit", ""),
            bounds=_bounds(schema),
            description=extra.get("description", ""),
        )
    return fields


def _bounds(schema: Any) -> str:
    if isinstance(schema, inspect.LiteralType):
        return ", ".join(str(value) for value in schema.values)
    if isinstance(schema, inspect.BoolType):
        return "true, false"
    if isinstance(schema, inspect.StrType):
        return "text, not empty" if schema.min_length else "text"
    assert isinstance(schema, inspect.IntType | inspect.FloatType), f"configuration fields are scalars, not {schema}"
    name = "whole number" if isinstance(schema, inspect.IntType) else "number"
    if schema.ge is not None and schema.le is not None:
        return f"{name}, {schema.ge} to {schema.le}"
    low = (
        f"at least {schema.ge}" if schema.ge is not None else f"more than {schema.gt}" if schema.gt is not None else ""
    )
    high = (
        f"at most {schema.le}" if schema.le is not None else f"less than {schema.lt}" if schema.lt is not None else ""
    )
    limits = " and ".join(filter(None, (low, high)))
    return f"{name}, {limits}" if limits else name
