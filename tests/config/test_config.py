"""The configuration file: what it may say, and what the answer is where it says something else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shoal import config
from shoal.config import Config, ConfigError, ModelConfig


def problems(tmp_path: Path, text: str | bytes, overrides: dict | None = None) -> list[tuple[str, str]]:
    path = tmp_path / "shoal.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        config.load(path, overrides)
    return [tuple(problem) for problem in caught.value.problems]


def test_without_a_file_everything_is_default():
    assert config.load() == Config()


def test_an_empty_file_and_an_empty_section_are_defaults(tmp_path):
    path = tmp_path / "shoal.yaml"
    path.write_text("")
    assert config.load(path) == Config()
    path.write_text("engine:\n")
    assert config.load(path) == Config()


def test_overrides_win_over_the_file_and_the_file_over_defaults(tmp_path):
    path = tmp_path / "shoal.yaml"
    path.write_text("gateway: {port: 9000, max_connections: 10}\n")
    loaded = config.load(path, {"gateway.port": 9001})
    assert (loaded.gateway.port, loaded.gateway.max_connections) == (9001, 10)


def test_an_override_may_be_text_as_a_command_line_gives_it():
    loaded = config.load(
        None,
        {
            "engine.max_num_seqs": "8",
            "engine.block_size": "32",
            "engine.gpu_memory_utilization": "0.5",
            "model.name": "8",
        },
    )
    assert (loaded.engine.max_num_seqs, loaded.engine.block_size) == (8, 32)
    assert loaded.engine.gpu_memory_utilization == 0.5
    assert loaded.model.name == "8"


def test_what_is_dumped_is_read_back_equal(tmp_path):
    changed = config.load(
        None, {"gateway.port": 1, "engine.enable_prefix_caching": False, "model.served_name": "näme: #1"}
    )
    path = tmp_path / "shoal.yaml"
    path.write_text(config.dump(changed))
    assert config.load(path) == changed


@pytest.mark.parametrize(
    ("text", "field", "message"),
    [
        ("engine: {max_num_seq: 3}", "engine.max_num_seq", "did you mean engine.max_num_seqs?"),
        ("engine: {max-num-seqs: 3}", "engine.max-num-seqs", "did you mean engine.max_num_seqs?"),
        ("engine: {replicas: 3}", "engine.replicas", "unknown key in section engine; it is cluster.replicas"),
        ("engine: {zzz: 3}", "engine.zzz", "unknown key in section engine; known: dtype, device,"),
        ("gatway: {port: 1}", "gatway", "unknown section; did you mean gateway?"),
        ("port: 8000", "port", "it is gateway.port or controller.port"),
        ("5: {}", "5", "known: model, engine, gateway, controller, cluster, classes"),
        ("engine: 3", "engine", "expected keys and values, got 3"),
        ("engine: {max_num_seqs: 0}", "engine.max_num_seqs", "0 is not allowed; allowed: whole number, 1 to 4096"),
        ("engine: {max_num_seqs: 4097}", "engine.max_num_seqs", "4097 is not allowed"),
        ("engine: {max_num_seqs: '8'}", "engine.max_num_seqs", "'8' is not allowed"),
        ("engine: {max_num_seqs: 8.5}", "engine.max_num_seqs", "8.5 is not allowed"),
        ("engine: {max_num_seqs: true}", "engine.max_num_seqs", "True is not allowed"),
        ("engine: {max_num_seqs: null}", "engine.max_num_seqs", "None is not allowed"),
        ("engine: {max_num_seqs: [1]}", "engine.max_num_seqs", "[1] is not allowed"),
        (
            "gateway: {max_connections: 0}",
            "gateway.max_connections",
            "0 is not allowed; allowed: whole number, at least 1",
        ),
        ("engine: {block_size: 7}", "engine.block_size", "7 is not allowed; allowed: 8, 16, 32, 64, 128"),
        ("engine: {dtype: int8}", "engine.dtype", "allowed: auto, bfloat16, float16, float32"),
        (
            "engine: {enable_prefix_caching: 1}",
            "engine.enable_prefix_caching",
            "1 is not allowed; allowed: true, false",
        ),
        ("engine: {gpu_memory_utilization: 1.0}", "engine.gpu_memory_utilization", "more than 0 and less than 1"),
        ("gateway: {request_timeout_s: 0}", "gateway.request_timeout_s", "allowed: number, more than 0"),
        ("gateway: {request_timeout_s: .inf}", "gateway.request_timeout_s", "inf is not allowed"),
        ("gateway: {request_timeout_s: .nan}", "gateway.request_timeout_s", "nan is not allowed"),
        ("gateway: {port: 65536}", "gateway.port", "65536 is not allowed; allowed: whole number, 0 to 65535"),
        ("model: {name: ''}", "model.name", "'' is not allowed; allowed: text, not empty"),
        ("model: {name: 7}", "model.name", "7 is not allowed; allowed: text, not empty"),
    ],
)
def test_a_wrong_file_is_answered_with_field_value_and_what_is_allowed(tmp_path, text, field, message):
    [(where, what)] = problems(tmp_path, text)
    assert where == field
    assert message in what


@pytest.mark.parametrize("key", ["api_key", "api-key", "API_KEY", "secret", "hf_token"])
def test_a_secret_in_the_file_is_refused_and_not_repeated(tmp_path, key):
    [(where, what)] = problems(tmp_path, f"gateway: {{{key}: hunter2}}")
    assert where == f"gateway.{key}"
    assert "SHOAL_API_KEY" in what
    assert "hunter2" not in what


def test_a_secret_outside_the_sections_is_refused_too(tmp_path):
    [(where, what)] = problems(tmp_path, "api_key: hunter2")
    assert (where, "SHOAL_API_KEY" in what, "hunter2" in what) == ("api_key", True, False)


def test_all_problems_are_reported_at_once(tmp_path):
    found = problems(tmp_path, "engine: {block_size: 7, dtyp: x}\ngateway: {port: -1}", {"model.name": ""})
    assert [where for where, _ in found] == ["model.name", "engine.block_size", "engine.dtyp", "gateway.port"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n- b", "expected sections"),
        ("just words", "expected sections"),
        ("engine: {", "not YAML"),
        ("a: *nowhere", "not YAML"),
        (b"\xff\xfe\xff", "not YAML"),
        (b"a: \x00", "not YAML"),
        ("[" * 5000, "not YAML"),
        ("a: !!python/object/apply:os.getcwd []", "not YAML"),
        ("a: 2026-99-99", "not YAML"),
        ("#" * (config.MAX_FILE_BYTES + 1), "larger than 1048576 bytes"),
    ],
)
def test_what_is_no_configuration_file_is_refused_in_one_line(tmp_path, text, message):
    [(_, what)] = problems(tmp_path, text)
    assert message in what
    assert "\n" not in what
    assert len(what) < 500


def test_a_huge_nested_value_is_shown_short(tmp_path):
    bomb = "model:\n  name: &a0 [x]\n" + "".join(
        f"  k{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 30)
    )
    assert all(len(what) < 500 for _, what in problems(tmp_path, bomb))


def test_a_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        config.load(tmp_path / "nowhere.yaml")


def test_every_field_is_explained():
    rows = config.rows(config.load(None, {"gateway.port": 1}))
    assert len({row.name for row in rows}) == len(rows) > 20
    for row in rows:
        assert row.description, row.name
        assert row.bounds, row.name
    port = next(row for row in rows if row.name == "gateway.port")
    assert (port.value, port.default, port.bounds) == (1, 8000, "whole number, 0 to 65535")
    timeout = next(row for row in rows if row.name == "gateway.request_timeout_s")
    assert timeout.unit == "s"


def test_the_public_name_is_the_given_one_else_the_name_else_the_folders(tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    assert ModelConfig(name=str(folder), served_name="x").public_name == "x"
    assert ModelConfig(name=str(folder)).public_name == "my-model"
    assert ModelConfig(name=f"{folder}/.").public_name == "my-model"
    assert ModelConfig(name="org/model").public_name == "org/model"


def test_importing_the_configuration_is_light():
    heavy = "torch numpy starlette uvicorn aiohttp tokenizers transformers"
    code = f"import sys, shoal.config; print([name for name in {heavy.split()} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
