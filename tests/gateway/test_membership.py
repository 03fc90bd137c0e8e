"""Gateway, controller and engines as processes: who is there is learnt, and remembered without the controller."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.gateways import Service, gateway_process
from tests.support.processes import running, scripted_engine, socket_folder, wait_until
from tests.support.scripted import Script

pytestmark = pytest.mark.processes


def test_a_gateway_finds_its_engines_and_outlives_the_controller(model_dir: Path) -> None:
    with socket_folder() as folder:
        address = f"unix:{folder}/c.sock"
        command = [sys.executable, "-m", "shoal.cli", "controller", "--listen", address, "--controller-port", "0"]
        options = ("--controller", address)
        with (
            running(command) as controller,
            scripted_engine(Script(), listen=f"unix:{folder}/e0.sock", controller=address) as first,
            scripted_engine(Script(), listen=f"unix:{folder}/e1.sock", name="engine-1", controller=address) as second,
        ):
            controller.wait_line(r"controller\.serving")
            with gateway_process(model_dir, (), *options) as (url, gateway):
                s = Service(url, gateway, [first, second])
                wait_until(lambda: s.counts("num_replicas_ready")[""] == 2, 15, lambda: gateway.text)
                controller.kill()
                controller.wait()
                assert s.complete("hello", max_tokens=3).status == 200
                first.kill()
                assert s.complete("hello", max_tokens=3).status == 200, "the other engine serves on"
                assert gateway.stop() == 0
            with gateway_process(model_dir, (), *options) as (url, gateway):
                s = Service(url, gateway, [first, second])
                wait_until(lambda: s.call("/ready").status == 200, 15, lambda: gateway.text)
                assert s.complete("hello", max_tokens=3).status == 200
