"""core and fleet decide: standard library only, and no clock, chance, I/O or environment."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"
PURE = sorted(path for package in ("core", "fleet") for path in (SRC / "shoal" / package).rglob("*.py"))

# What a decision may use. Anything else that turns out to be needed is added here after a thought.
ALLOWED = {
    "__future__", "abc", "array", "bisect", "collections", "copy", "dataclasses",
    "enum", "functools", "hashlib", "heapq", "itertools",
    "math", "operator", "re", "struct", "typing", "shoal.core", "shoal.fleet",
}  # fmt: skip

WALK = """
import importlib, pkgutil, sys
import shoal.core, shoal.fleet
names = [m.name for p in (shoal.core, shoal.fleet) for m in pkgutil.walk_packages(p.__path__, p.__name__ + ".")]
for name in names:
    importlib.import_module(name)
assert "shoal.core.scheduler" in names and "shoal.core.kv.blocks" in names, names
foreign = sorted(m for m in sys.modules if m.partition(".")[0] in ("torch", "numpy", "msgspec", "yaml"))
assert not foreign, foreign
"""


def test_core_and_fleet_import_without_site_packages() -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-c", WALK], env={"PYTHONPATH": str(SRC)}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", PURE, ids=lambda path: str(path.relative_to(SRC)))
def test_imports_are_on_the_list(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        for name in names:
            assert any(name == good or name.startswith(good + ".") for good in ALLOWED), f"imports {name}"


@pytest.mark.parametrize("path", [path for path in PURE if "core" in path.parts], ids=lambda p: str(p.relative_to(SRC)))
def test_no_set_is_iterated(path: Path) -> None:
    """A set's order differs between runs; membership and building one for a check are fine."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.For, ast.comprehension)):
            text = ast.unparse(node.iter)
            assert not text.startswith(("set(", "frozenset(", "{")) or ":" in text, f"iterates {text}"
