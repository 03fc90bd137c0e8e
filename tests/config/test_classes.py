"""The section `classes`: laid over the built-in classes, bounded, explained, handed on unchanged."""

from __future__ import annotations

import dataclasses
import typing

import pytest

from shoal import config
from shoal.config import ClassConfig, Config, ConfigError
from shoal.core.classes import DEFAULT_CLASSES, STANDARD, ServiceClass
from tests.support.command import shoal_here


def load(tmp_path, text: str) -> dict[str, ServiceClass]:
    path = tmp_path / "shoal.yaml"
    path.write_text(text)
    return config.load(path).classes


def problems(tmp_path, text: str) -> list[tuple[str, str]]:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    return [tuple(problem) for problem in caught.value.problems]


def test_the_annotated_fields_are_those_of_the_core_with_the_same_types():
    bare = typing.get_type_hints(ClassConfig)
    assert bare == typing.get_type_hints(ServiceClass)
    assert [field.name for field in dataclasses.fields(ClassConfig)] == [
        field.name for field in dataclasses.fields(ServiceClass)
    ]


def test_without_the_section_there_are_the_built_in_classes(tmp_path):
    assert Config().classes == DEFAULT_CLASSES
    assert load(tmp_path, "classes:") == DEFAULT_CLASSES
    assert load(tmp_path, "classes: {batch: }") == DEFAULT_CLASSES
    assert STANDARD in DEFAULT_CLASSES


def test_an_entry_changes_what_it_names_and_leaves_the_rest(tmp_path):
    classes = load(tmp_path, "classes: {interactive: {ttft_ms: 300, max_wait_s: 8.5}}")
    assert classes["interactive"] == dataclasses.replace(DEFAULT_CLASSES["interactive"], ttft_ms=300.0, max_wait_s=8.5)
    assert {name: classes[name] for name in ("standard", "batch")} == {
        name: DEFAULT_CLASSES[name] for name in ("standard", "batch")
    }
    assert DEFAULT_CLASSES["interactive"].ttft_ms != 300


def test_a_class_of_ones_own_needs_its_rank_and_no_more(tmp_path):
    classes = load(tmp_path, "classes: {gold: {rank: 0}}")
    assert classes["gold"] == ServiceClass(rank=0)
    assert list(classes) == [*DEFAULT_CLASSES, "gold"]


@pytest.mark.parametrize(
    ("text", "field", "message"),
    [
        ("classes: 3", "classes", "expected keys and values, got 3"),
        ("classes: [batch]", "classes", "expected keys and values, got ['batch']"),
        ("classes: {batch: 3}", "classes.batch", "expected keys and values, got 3"),
        ("classes: {gold: {weight: 2}}", "classes.gold.rank", "must have it; allowed: whole number, 0 to 99"),
        ("classes: {gold: }", "classes.gold.rank", "must have it"),
        ("classes: {interactiv: {weight: 2}}", "classes.interactiv.rank", "did you mean classes.interactive?"),
        (
            "classes: {batch: {wait: 2}}",
            "classes.batch.wait",
            "did you mean classes.batch.weight?",
        ),
        ("classes: {batch: {max_wait_ms: 2}}", "classes.batch.max_wait_ms", "did you mean classes.batch.max_wait_s?"),
        ("classes: {batch: {port: 2}}", "classes.batch.port", "it is gateway.port or controller.port"),
        ("classes: {batch: {rank: 100}}", "classes.batch.rank", "100 is not allowed; allowed: whole number, 0 to 99"),
        ("classes: {batch: {rank: -1}}", "classes.batch.rank", "-1 is not allowed"),
        ("classes: {batch: {rank: 1.5}}", "classes.batch.rank", "1.5 is not allowed"),
        ("classes: {batch: {rank: null}}", "classes.batch.rank", "None is not allowed"),
        ("classes: {gold: {rank: x}}", "classes.gold.rank", "'x' is not allowed"),
        ("classes: {batch: {weight: 0}}", "classes.batch.weight", "more than 0 and at most 1000000"),
        ("classes: {batch: {weight: .inf}}", "classes.batch.weight", "inf is not allowed"),
        ("classes: {batch: {weight: .nan}}", "classes.batch.weight", "nan is not allowed"),
        ("classes: {batch: {ttft_ms: -1}}", "classes.batch.ttft_ms", "-1 is not allowed"),
        ("classes: {batch: {tpot_ms: true}}", "classes.batch.tpot_ms", "True is not allowed"),
        ("classes: {batch: {max_wait_s: 0}}", "classes.batch.max_wait_s", "more than 0 and at most 604800"),
        ("classes: {batch: {max_queue: 0}}", "classes.batch.max_queue", "whole number, at least 1"),
        ("classes: {batch: {max_queue: '9'}}", "classes.batch.max_queue", "'9' is not allowed"),
        ("classes: {Gold: {rank: 1}}", "classes", "a class cannot be called 'Gold'"),
        ("classes: {'a b': {rank: 1}}", "classes", "a class cannot be called 'a b'"),
        ('classes: {"a\\n": {rank: 1}}', "classes", "a class cannot be called"),
        ('classes: {"": {rank: 1}}', "classes", "a class cannot be called ''"),
        ("classes: {7: {rank: 1}}", "classes", "a class cannot be called 7"),
        (f"classes: {{{'a' * 33}: {{rank: 1}}}}", "classes", "a class cannot be called"),
        ("class: {batch: {rank: 1}}", "class", "unknown section; did you mean classes?"),
    ],
)
def test_a_wrong_entry_is_answered_with_field_value_and_what_is_allowed(tmp_path, text, field, message):
    [(where, what)] = problems(tmp_path, text)
    assert (where, message in what) == (field, True), what


def test_there_are_only_so_many(tmp_path):
    entries = ", ".join(f"c{number}: {{rank: 1}}" for number in range(config.MAX_CLASSES - len(DEFAULT_CLASSES)))
    assert len(load(tmp_path, f"classes: {{{entries}}}")) == config.MAX_CLASSES
    [(where, what)] = problems(tmp_path, f"classes: {{{entries}, more: {{rank: 1}}}}")
    assert where == "classes" and f"allowed: {config.MAX_CLASSES}" in what


def test_what_is_dumped_is_read_back_equal(tmp_path):
    path = tmp_path / "shoal.yaml"
    path.write_text("classes: {gold: {rank: 0, weight: 2.5}, standard: {max_queue: 7}}")
    loaded = config.load(path)
    path.write_text(config.dump(loaded))
    assert config.load(path) == loaded
    assert loaded.classes["standard"].max_queue == 7


def test_config_shows_every_class_with_its_own_defaults(tmp_path):
    path = tmp_path / "shoal.yaml"
    path.write_text("classes: {a-class-with-quite-a-long-name: {rank: 5}, batch: {weight: 2}}")
    done = shoal_here("config", "--config", str(path))
    assert done.returncode == 0
    lines = {line.split()[0]: " ".join(line.split()[1:]) for line in done.stdout.splitlines() if line.strip()}
    assert lines["classes.batch.weight"] == "2.0 [number, more than 0 and at most 1000000; default: 1.0]"
    wait_s = DEFAULT_CLASSES["interactive"].max_wait_s
    shown = f"{wait_s} s [number, more than 0 and at most 604800; default: {wait_s}]"
    assert lines["classes.interactive.max_wait_s"] == shown
    assert lines["classes.a-class-with-quite-a-long-name.rank"] == "5 [whole number, 0 to 99; default: 5]"
