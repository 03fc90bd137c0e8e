"""The key file of a real gateway process: it must be good at the start, and may change afterwards."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.command import shoal_here
from tests.support.gateways import MODEL, Service, service
from tests.support.processes import running
from tests.support.scripted import Script

pytestmark = pytest.mark.processes


def new_key(path: Path, tenant: str, *options: str) -> str:
    """Appends the entry, as the documents say, and returns the key."""
    done = shoal_here("key", tenant, *options)
    assert done.returncode == 0, done.stderr
    path.touch(mode=0o600)
    with path.open("a") as file:
        file.write(done.stdout)
    key = done.stderr.strip().rpartition(" ")[2]
    assert key.startswith("sk-shoal-") and key not in done.stdout
    return key


def status(s: Service, key: str) -> int:
    return s.call("/v1/models", headers={"authorization": f"Bearer {key}"}).status


@pytest.mark.parametrize(
    ("command", "content", "message"),
    [
        ("gateway", None, "No such file or directory"),
        ("gateway", "- key: a-secret-key\n", "entry 1: unknown field 'key'"),
        ("serve", "", "expected a list of keys"),
    ],
)
def test_a_missing_or_bad_file_stops_the_start(
    model_dir: Path, tmp_path: Path, command: str, content: str | None, message: str
) -> None:
    path = tmp_path / "keys.yaml"
    if content is not None:
        path.write_text(content)
        path.chmod(0o600)
    model = [str(model_dir)] if command == "serve" else ["--model", str(model_dir)]
    line = [sys.executable, "-m", "shoal.cli", command, *model, "--port", "0", "--key-file", str(path)]
    with running(line) as process:
        assert process.wait(30) == 1
    assert f"shoal: gateway.key_file: {path}: {message}" in process.text
    assert "a-secret-key" not in process.text and "Traceback" not in process.text
    assert "serving" not in process.text


def test_keys_come_and_go_without_a_restart(model_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    first = new_key(path, "acme", "--class", "batch", "--max-in-flight", "3")
    options, env = ("--key-file", str(path)), {"SHOAL_API_KEY": "from-the-environment"}
    with service(model_dir, options=options, env=env) as s:
        assert [status(s, key) for key in (first, "from-the-environment", "wrong")] == [200, 200, 401]
        second = new_key(path, "globex")
        s.gateway.wait_line(r"keys\.reloaded keys=2")
        assert [status(s, key) for key in (first, second)] == [200, 200]
        alone = tmp_path / "alone.yaml"
        third = new_key(alone, "acme")
        os.replace(alone, path)
        os.kill(s.gateway.pid, signal.SIGHUP)
        s.gateway.wait_line(r"keys\.reloaded keys=1")
        assert [status(s, key) for key in (first, second, third, "from-the-environment")] == [401, 401, 200, 200]
        path.write_text("- {")
        s.gateway.wait_line(r"keys\.not_reloaded")
        assert status(s, third) == 200
        for key in (first, second, third, "from-the-environment"):
            assert key not in s.gateway.text


def test_tenants_share_a_replica_and_nothing_else(model_dir: Path, tmp_path: Path) -> None:
    """Real scheduler, real prefix cache: what one tenant has sent makes nothing faster for another."""
    path = tmp_path / "keys.yaml"
    acme = new_key(path, "acme", "--class", "interactive", "--class", "batch")
    globex = new_key(path, "globex", "--class", "batch")
    with service(model_dir, Script(), options=("--key-file", str(path)), env={"SHOAL_API_KEY": "own"}) as s:

        def cached(key: str, **headers: str) -> int:
            body = {"model": MODEL, "prompt": [100 + number % 7 for number in range(64)], "max_tokens": 2}
            reply = s.call("/v1/completions", body, headers={"authorization": f"Bearer {key}", **headers})
            assert reply.status == 200, reply.body
            assert float(reply.headers["x-shoal-queue-ms"]) >= 0
            count: int = reply.json["usage"]["prompt_tokens_details"]["cached_tokens"]
            return count

        assert [cached(key) for key in (acme, globex, "own")] == [0, 0, 0]
        assert [cached(key) > 0 for key in (acme, globex, "own")] == [True, True, True]
        assert cached(acme, **{"x-shoal-class": "batch"}) > 0, "a prefix belongs to a tenant, not to a class"
        waits = metric_by_class(s, "request_queue_time_seconds_count")
        assert waits == {"interactive": 2.0, "batch": 3.0, "standard": 2.0}


def metric_by_class(s: Service, name: str) -> dict[str, float]:
    page = s.call("/metrics", headers={"authorization": "Bearer own"}).body.decode()
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    return {sample.labels["class"]: sample.value for sample in samples if sample.name == f"shoal:{name}"}
