"""`shoal generate` from file to file, over pipes, and with lines that cannot be answered."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import flat, shoal, shoal_here
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.torch

SMALL = ("--dtype", "float32", "--kv-cache-bytes", "1048576", "--max-num-seqs", "4")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


def rows(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_from_a_file_to_a_file_in_the_order_of_the_lines(model, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"line {number}\n" for number in range(1, 31)) + "\nlast\n")
    answers = tmp_path / "answers.jsonl"
    done = shoal(
        *("generate", "--model", model, *SMALL, "--max-tokens", "4", "--temperature", "0", "--ignore-eos"),
        *("--input", str(prompts), "--output", str(answers)),
    )
    assert (done.returncode, done.stdout) == (0, "")
    found = rows(answers.read_text())
    assert [row["line"] for row in found] == [*range(1, 31), 32]
    assert all(row["finish_reason"] == "length" and row["completion_tokens"] == 4 for row in found)
    assert [row["prompt_tokens"] for row in found][:2] == [5, 5]
    assert "31 prompts, 0 failed; 124 tokens in" in done.stderr


def test_a_bad_line_costs_that_line_only_and_the_exit_code_says_that_there_was_one(model):
    lines = [
        '{"prompt": "a", "max_tokens": 3, "ignore_eos": true}',
        '{"prompt": "a", "temperature": 9}',
        "{",
        '{"prompt": ""}',
        '{"messages": [{"role": "user", "content": "hi"}]}',
        '{"messages": []}',
        '{"prompt": "' + "x" * 600 + '"}',
        '{"prompt": "z"}',
        '{"prompt": "z"}',
    ]
    done = shoal("generate", "--model", model, *SMALL, "--max-tokens", "5", "--seed", "3", stdin="\n".join(lines))
    assert done.returncode == 1
    found = rows(done.stdout)
    assert [row["line"] for row in found] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert found[0]["completion_tokens"] == 3
    errors = {row["line"]: row["error"] for row in found if "error" in row}
    assert set(errors) == {2, 3, 4, 6, 7}
    assert errors[2] == "line 2: temperature: Expected `float` <= 2.0, got 9"
    assert errors[3].startswith("line 3: ")
    assert "prompt has 0 tokens" in errors[4]
    assert "the context window is 512 tokens" in errors[7]
    assert found[7]["text"] == found[8]["text"], "the same seed gives the same answer"
    assert "9 prompts, 5 failed" in done.stderr


def test_an_answer_is_written_while_the_next_prompt_has_not_come_and_ctrl_c_ends_it(model):
    command = [sys.executable, "-m", "shoal.cli", "generate", "--model", model, *SMALL, "--max-tokens", "3"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            for number in (1, 2):
                process.stdin.write(b"tell me\n")
                process.stdin.flush()
                assert json.loads(process.stdout.readline())["line"] == number
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 130
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--temperature", "3"), "--temperature: Expected `float` <= 2.0, got 3.0"),
        (("--temperature", "warm"), "'--temperature': 'warm' is not a number"),
        (("--max-tokens", "0"), "--max-tokens: Expected `int` >= 1, got 0"),
        (("--max-tokens", "1.5"), "'--max-tokens': '1.5' is not a whole number"),
        (("--stop", ""), "--stop"),
        (("--format", "xml"), "'xml' is not one of 'auto', 'text', 'jsonl'"),
        (("--input", "/nowhere/prompts.txt"), "--input: /nowhere/prompts.txt: No such file or directory"),
        (("--output", "/nowhere/answers.txt"), "--output: /nowhere/answers.txt: No such file or directory"),
        (("--max-num-seqs", "0"), "--max-num-seqs: '0' is not allowed"),
    ],
)
def test_a_bad_option_is_named_with_its_value(arguments, message):
    done = shoal_here("generate", *arguments)
    assert done.returncode == 2
    assert message in flat(done.stderr)
    assert "Traceback" not in done.stderr


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path):
    done = shoal_here("generate", "--model", str(tmp_path / "nowhere"), stdin="a\n")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and "nowhere" in done.stderr
