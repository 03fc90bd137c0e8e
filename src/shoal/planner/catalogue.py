"""Well-known models, GPUs and links: data/*.json, each row with its source. A file of one's own has the same fields."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from shoal.planner.model import Model, read

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Between two ranks. Bandwidth per GPU and direction as specified; `efficiency` of it is reached."""

    name: str
    title: str
    bytes_per_s: float
    efficiency: float
    latency_s: float  # of one hop
    per_node: bool = False  # all GPUs of a node share it
    source: str = ""
    url: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    name: str
    title: str
    memory_bytes: int
    bytes_per_s: float  # as specified
    flops_per_s: Mapping[str, float]  # dense, as specified, by format
    link: str  # within a node
    host: str
    per_node: int
    bytes_share: float  # what of the specified rates serving reaches
    flops_share: float
    step_s: float  # of a step beside its arithmetic
    source: str = ""
    url: str = ""


@cache
def _data(name: str) -> Any:
    return json.loads((resources.files("shoal.planner") / "data" / name).read_text(encoding="utf-8"))


def models() -> dict[str, dict[str, Any]]:
    """By name: source, parameters, config."""
    return dict(_data("models.json")["models"])


def gpus() -> dict[str, Gpu]:
    data = _data("gpus.json")
    return {name: _gpu(name, {**data["efficiency"], **row}) for name, row in data["gpus"].items()}


@cache
def links() -> dict[str, Link]:
    return {name: _link(name, row) for name, row in _data("links.json")["links"].items()}


def model(name: str) -> Model:
    """A name of the catalogue, a folder with config.json, or a config.json. Raises ValueError."""
    known = models()
    if name.lower() in known:
        return read(known[name.lower()]["config"], name.lower())
    path = Path(name).expanduser()
    if path.is_dir():
        path /= "config.json"
    if not path.is_file():
        raise ValueError(f"model {name!r} is {_unknown(name, known)}; or a folder with config.json")
    raw = _object(path)
    return read(raw, path.parent.name or "model")


def gpu(name: str) -> Gpu:
    """A name of the catalogue, or a JSON file with the fields of one row there. Raises ValueError."""
    found = gpus()
    if name.lower() in found:
        return found[name.lower()]
    path = Path(name).expanduser()
    if not path.is_file():
        raise ValueError(f"--gpu {name!r} is {_unknown(name, found)}; or a JSON file")
    raw = {**_data("gpus.json")["efficiency"], "title": path.stem, "per_node": 8, **_object(path)}
    try:
        return _gpu(path.stem, raw)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: {_missing(error)}") from None


def link(name: str) -> Link:
    found = links()
    if name.lower() not in found:
        raise ValueError(f"link {name!r} is {_unknown(name, found)}")
    return found[name.lower()]


def _gpu(name: str, row: Mapping[str, Any]) -> Gpu:
    links_known = links()
    for field in ("link", "host"):
        if row[field] not in links_known:
            raise ValueError(f"{field} is {row[field]!r}; allowed: {', '.join(links_known)}")
    shares = {"bytes": row["bytes"], "flops": row["flops"]}
    for field, value in shares.items():
        if not 0 < value <= 1:
            raise ValueError(f"{field} is {value!r}; must be above 0 and at most 1")
    return Gpu(
        name=name,
        title=row["title"],
        memory_bytes=_positive(row, "memory_mib") * MIB,
        bytes_per_s=float(_positive(row, "bytes_per_s")),
        flops_per_s={kind: float(rate) for kind, rate in row["flops_per_s"].items()},
        link=row["link"],
        host=row["host"],
        per_node=_positive(row, "per_node"),
        bytes_share=shares["bytes"],
        flops_share=shares["flops"],
        step_s=row["step_us"] / 1e6,
        source=row.get("source", ""),
        url=row.get("url", ""),
    )


def _link(name: str, row: Mapping[str, Any]) -> Link:
    return Link(
        name=name,
        title=row["title"],
        bytes_per_s=row["bytes_per_s"],
        efficiency=row["efficiency"],
        latency_s=row["latency_us"] / 1e6,
        per_node=row.get("per_node", False),
        source=row["source"],
        url=row["url"],
    )


def _positive(row: Mapping[str, Any], field: str) -> Any:
    value = row[field]
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise ValueError(f"{field} is {value!r}; must be a number above 0")
    return value


def _object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a readable JSON file: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: not a JSON object")
    return value


def _unknown(name: str, known: Mapping[str, object]) -> str:
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}? Known" if near else "known"
    return f"not in the catalogue; {hint}: {', '.join(known)}"


def _missing(error: Exception) -> str:
    return f"lacks the field {error}" if isinstance(error, KeyError) else str(error)
