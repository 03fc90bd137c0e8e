"""`shoal serve` as a person uses it: one command, one block of text, the curl line in it, chat, status, Ctrl-C."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.command import shoal_here
from tests.support.processes import Process, running
from tests.support.tiny_model import make_tiny_model

pytestmark = [pytest.mark.torch, pytest.mark.processes]

EXAMPLES = Path(__file__).parents[2] / "examples"
KEY = "key-of-the-test"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "it's tiny")


@pytest.fixture(scope="module")
def service(model: Path) -> Iterator[Process]:
    command = [sys.executable, "-m", "shoal.cli", "serve", str(model), "--port", "0", "--controller-port", "0"]
    command += ["--dtype", "float32", "--kv-cache-bytes", "1048576"]
    with running(command, {"SHOAL_API_KEY": KEY}) as process:
        process.wait_line(r"curl http://\S+ .*\n", 90)
        yield process


def test_the_printed_curl_line_works_as_it_is(service: Process):
    line = service.wait_line(r"(?m)^curl .*$").group()
    done = subprocess.run(
        ["bash", "-c", f"{line} --silent --show-error --max-time 60"],
        env={"SHOAL_API_KEY": KEY, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=90,
    )
    answer = json.loads(done.stdout)
    assert answer["object"] == "chat.completion", done
    assert answer["model"] == "it's tiny"
    assert answer["usage"]["completion_tokens"] >= 1


def test_the_key_is_shown_nowhere(service: Process):
    assert "$SHOAL_API_KEY" in service.text
    assert KEY not in service.text


def test_status_shows_every_process(service: Process):
    page = service.wait_line(r"status page +(http://\S+)").group(1)
    done = shoal_here("status", "--url", page)
    assert done.returncode == 0
    for name in ("controller", "engine-0", "gateway-0", "serving", "it's tiny"):
        assert name in done.stdout
    found = json.loads(shoal_here("status", "--url", page, "--json").stdout)
    assert [replica["state"] for replica in found["replicas"]] == ["serving"]


def test_chat_talks_to_it_and_needs_the_key(service: Process):
    url = service.wait_line(r"--url (http://\S+)").group(1)
    command = ("chat", "--url", url, "--max-tokens", "8")
    assert shoal_here(*command, stdin="hi\n", SHOAL_API_KEY=KEY).returncode == 0
    refused = shoal_here(*command, stdin="hi\n", SHOAL_API_KEY="another")
    assert refused.returncode == 1
    assert "401" in refused.stderr and "set SHOAL_API_KEY" in refused.stderr


def test_the_openai_example_runs_against_it(service: Process):
    url = service.wait_line(r"--url (http://\S+)").group(1)
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "openai_client.py"), url],
        env={"SHOAL_API_KEY": KEY, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("model: it's tiny\nanswer: ")
    assert " tokens\ncompletion: " in done.stdout


def test_ctrl_c_ends_it_with_0_and_leaves_nothing(service: Process):
    service.kill(signal.SIGINT)
    assert service.wait(60) == 0
    assert "Traceback" not in service.text
