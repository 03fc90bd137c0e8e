"""`shoal serve` before it serves: what it refuses, and the block of text that it ends its start with."""

from __future__ import annotations

import json
import shlex
import subprocess

import pytest

from shoal.cli.serve import invitation
from shoal.controller.launchers.local import Service
from tests.support.command import shoal_here


def test_the_curl_line_survives_the_shell_whatever_the_models_name():
    service = Service(url="http://127.0.0.1:1", status_url="http://127.0.0.1:2")
    for name in ("plain", "it's", 'a "b" $(c) `d` \\', "名"):
        line = next(line for line in invitation(name, service, keys="").splitlines() if line.startswith("curl "))
        words = shlex.split(line)
        assert words[:4] == ["curl", "http://127.0.0.1:1/v1/chat/completions", "-H", "Content-Type: application/json"]
        assert json.loads(words[words.index("-d") + 1])["model"] == name


@pytest.mark.parametrize("keys", ["one", "one,two"])
def test_the_curl_line_takes_the_first_key_from_the_environment(keys):
    service = Service(url="http://127.0.0.1:1", status_url="http://127.0.0.1:2")
    line = invitation("m", service, keys).split("\ncurl ")[1]
    assert "one" not in line
    done = subprocess.run(
        ["bash", "-c", f"printf '%s\n' {line}"], env={"SHOAL_API_KEY": keys}, capture_output=True, text=True
    )
    assert "Authorization: Bearer one" in done.stdout.splitlines()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--port", "70000"), "--port: '70000' is not allowed; allowed: whole number, 0 to 65535"),
        (("--replicas", "0"), "--replicas: '0' is not allowed; allowed: whole number, 1 to 64"),
        (("--replicas", "2", "--journal", "x"), "--journal records one engine; allowed with --replicas 1 only"),
        (("",), "model: '' is not allowed; allowed: text, not empty"),
    ],
)
def test_a_bad_value_is_refused_before_anything_is_fetched(tmp_path, arguments, message):
    done = shoal_here("serve", *arguments, SHOAL_HOME=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert message in " ".join(done.stderr.split())
    assert list(tmp_path.iterdir()) == []


def test_a_host_that_others_reach_needs_a_key_before_anything_is_fetched(tmp_path):
    done = shoal_here("serve", "--host", "0.0.0.0", SHOAL_HOME=str(tmp_path), SHOAL_API_KEY="")
    assert done.returncode == 1
    assert "set SHOAL_API_KEY" in done.stderr
    assert list(tmp_path.iterdir()) == []
