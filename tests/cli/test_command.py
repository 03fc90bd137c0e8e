"""What the command says, and the code that it exits with."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from shoal import config as configuration
from shoal.cli.options import SHORT, flag, plain
from tests.support.command import flat, shoal, shoal_here

COMMANDS = ("serve", "pull", "chat", "generate", "batch", "status", "role", "config", "plan", "key")
COMMANDS += ("gateway", "engine", "controller")


def test_help_imports_nothing_heavy():
    heavy = ["torch", "transformers", "tokenizers", "starlette", "uvicorn", "aiohttp", "numpy", "huggingface_hub"]
    code = (
        "import sys\nsys.argv = ['shoal', '--help']\nfrom shoal.cli.app import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        f"print('heavy:', [name for name in {heavy!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "heavy: []"


def test_help_names_every_command():
    done = shoal_here("--help")
    assert done.returncode == 0
    assert set(COMMANDS) == set(re.findall(r"^  (\w+)  ", done.stdout.split("Commands:")[1], re.MULTILINE))


@pytest.mark.parametrize(
    ("command", "sections"),
    [
        ("serve", ("model", "engine", "gateway", "controller", "cluster")),
        ("engine", ("model", "engine")),
        ("gateway", ("model", "gateway")),
        ("controller", ("controller",)),
        ("generate", ("engine",)),
    ],
)
def test_every_field_of_the_configuration_is_an_option_with_bounds_and_default(command, sections):
    done = shoal_here(command, "--help")
    assert done.returncode == 0
    for row in configuration.rows():
        if row.section in sections and row.name != "model.name":
            names = ", ".join(filter(None, (flag(row.name), SHORT.get(row.name))))
            shown = flat(done.stdout.split(f"  {names} ")[1].split("\n  --")[0])
            assert row.description in shown
            assert f"default: {plain(row.default)}]" in shown
            assert row.kind not in (int, float) or row.bounds in shown


def test_flags_are_spelled_as_users_of_vllm_know_them():
    flags = {flag(row.name) for row in configuration.rows()}
    assert flags >= {
        *("--served-model-name", "--dtype", "--max-model-len", "--max-num-seqs", "--max-num-batched-tokens"),
        *(
            "--gpu-memory-utilization",
            "--kv-cache-bytes",
            "--block-size",
            "--enable-prefix-caching",
            "--host",
            "--port",
        ),
    }
    assert len(flags) == len(configuration.rows())


def test_no_command_shows_the_help():
    done = shoal_here()
    assert "Commands:" in done.stdout + done.stderr
    assert done.returncode != 1


def test_version():
    done = shoal("--version")
    assert done.returncode == 0
    assert re.fullmatch(r"shoal \d+\.\d+\.\d+\n", done.stdout)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gateway", "--port", "99999"), "--port: '99999' is not allowed; allowed: whole number, 0 to 65535"),
        (
            ("serve", "--max-num-seqs", "many"),
            "--max-num-seqs: 'many' is not allowed; allowed: whole number, 1 to 4096",
        ),
        (("engine", "--block-size", "7"), "--block-size: '7' is not allowed; allowed: 8, 16, 32, 64, 128"),
        (("engine", "--dtype", "int8"), "--dtype: 'int8' is not allowed; allowed: auto, bfloat16, float16, float32"),
        (("engine", "--model", ""), "model: '' is not allowed; allowed: text, not empty"),
        (("gateway", "--config", "/nowhere.yaml"), "--config: /nowhere.yaml: No such file or directory"),
        (("serve", "--prot", "1"), "No such option: --prot"),
        (("serv",), "No such command 'serv'"),
    ],
)
def test_a_bad_value_exits_with_2_and_says_what_is_allowed(arguments, message):
    done = shoal_here(*arguments)
    assert done.returncode == 2
    assert message in flat(done.stderr)
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_an_option_wins_over_the_file_and_a_problem_is_blamed_on_its_source(tmp_path):
    path = tmp_path / "shoal.yaml"
    path.write_text("engine: {block_size: 7, max_num_seqs: 0}\n")
    done = shoal_here("engine", "--config", str(path), "--max-num-seqs", "-1")
    assert done.returncode == 2
    assert f"{path}: engine.block_size: 7 is not allowed" in done.stderr
    assert "--max-num-seqs: '-1' is not allowed" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("pull", "no-such-model"), "unknown model 'no-such-model'"),
        (("engine", "--model", "./nowhere"), "no such folder: "),
        (("gateway", "--model", "smollm2-135m"), "run `shoal pull smollm2-135m`"),
        (("chat", "--url", "http://127.0.0.1:9"), "cannot reach http://127.0.0.1:9 (Connection refused)"),
        (("chat", "--url", "nonsense"), "--url: 'nonsense' is not allowed; allowed: http://host:port"),
        (("chat", "--url", "127.0.0.1:9"), "--url: '127.0.0.1:9' is not allowed; allowed: http://host:port"),
        (("status", "--url", "http://127.0.0.1:9"), "cannot reach http://127.0.0.1:9 (Connection refused)"),
    ],
)
def test_a_failure_is_one_line_and_exits_with_1(tmp_path, arguments, message):
    done = shoal_here(*arguments, SHOAL_HOME=str(tmp_path))
    assert done.returncode == 1
    assert message in done.stderr
    assert done.stderr.startswith("shoal: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [("--debug", "pull", "nix"), ("pull", "nix")])
def test_the_traceback_is_shown_on_request(arguments):
    done = shoal(*arguments, **({} if "--debug" in arguments else {"SHOAL_DEBUG": "1"}))
    assert done.returncode == 1
    assert "Traceback" in done.stderr and "unknown model 'nix'" in done.stderr


def test_config_shows_every_field_and_its_value(tmp_path):
    path = tmp_path / "shoal.yaml"
    path.write_text("gateway: {port: 1234}\n")
    done = shoal_here("config", "--config", str(path))
    assert done.returncode == 0
    for row in configuration.rows():
        assert row.name in done.stdout
    line = next(line for line in done.stdout.splitlines() if line.startswith("gateway.port"))
    assert line.split(maxsplit=2) == ["gateway.port", "1234", "[whole number, 0 to 65535; default: 8000]"]


def test_config_as_yaml_is_a_configuration_file(tmp_path):
    done = shoal_here("config", "--yaml")
    assert configuration.load(None, {}) == configuration.Config()
    assert set(yaml.safe_load(done.stdout)) == {*configuration.SECTIONS, configuration.CLASSES}
    (tmp_path / "all.yaml").write_text(done.stdout)
    assert configuration.load(tmp_path / "all.yaml") == configuration.Config()


def test_config_check_answers_by_exit_code(tmp_path):
    path = tmp_path / "shoal.yaml"
    path.write_text("gateway: {prot: 1234}\n")
    done = shoal_here("config", "--config", str(path), "--check")
    assert (done.returncode, "did you mean gateway.port?" in done.stderr) == (2, True)
    path.write_text("gateway: {port: 1234}\n")
    done = shoal_here("config", "--config", str(path), "--check")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_reader_that_goes_away_is_no_traceback():
    code = f"{sys.executable} -m shoal.cli config | head -1"
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr


def test_the_example_configuration_is_valid():
    example = Path(__file__).parents[2] / "examples" / "serve.yaml"
    assert shoal_here("config", "--config", str(example), "--check").returncode == 0
