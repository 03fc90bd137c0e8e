"""The documents speak of things that exist: names of functions, files, make targets, links."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("bench/**/*.md")])
NAME = re.compile(r"`((?:src/shoal/)?[\w/]+\.py):([\w.]+)`")
LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)(?:#[^)]*)?\)")


def defined(path: Path) -> set[str]:
    names: set[str] = set()

    def walk(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(prefix + node.name)
                if isinstance(node, ast.ClassDef):
                    walk(node.body, prefix + node.name + ".")

    walk(ast.parse(path.read_text()).body, "")
    return names


def source(name: str) -> Path:
    return ROOT / name if name.startswith("src/") else ROOT / "src/shoal" / name


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_named_function_exists(document: Path) -> None:
    missing = [
        f"{file}:{name}"
        for file, name in NAME.findall(document.read_text())
        if not source(file).is_file() or name not in defined(source(file))
    ]
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_link_leads_somewhere(document: Path) -> None:
    broken = [link for link in LINK.findall(document.read_text()) if not (document.parent / link).exists()]
    assert not broken


def test_a_request_passes_ten_steps_and_each_names_its_function() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    steps = re.findall(r"^(\d+)\. (.*(?:\n   .*)*)", text, re.M)
    assert [int(number) for number, _ in steps] == list(range(1, 11))
    assert all(NAME.search(body) for _, body in steps)


def test_every_make_target_that_the_documents_name_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    named = {word for document in DOCUMENTS for word in re.findall(r"`make ([a-z]+)", document.read_text())}
    assert named <= targets
