"""Gateway, controller and two engines on hosts of their own: TCP between them, a long secret, and one that dies."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import psutil
import pytest

from shoal.wire.connection import ConnectionClosed
from shoal.wire.messages import Role
from tests.support.gateways import metric
from tests.support.namespaces import Host, hosts, why_none
from tests.support.processes import Process, running, wait_until
from tests.support.tiny_model import make_tiny_model
from tests.support.wires import connect

pytestmark = [pytest.mark.torch, pytest.mark.processes]

T = TypeVar("T")

SECRET, OTHER_SECRET = "s" * 32, "t" * 32
KEY = "a-key"
ENGINES = ("engine-0", "engine-1")
LIMIT_S = 90.0
NUM_STREAMS = 3
ANSWER_TOKENS = 800
# Where each prompt starts, and the least difference in its answer between the logprobs of the two likeliest tokens, as
# seen with `logprobs=2`: large enough that sums in another order, in float32, turn no choice.
MARGINS = {8: 0.0030, 9: 0.0063, 11: 0.0023, 14: 0.0061, 20: 0.0057}
OTHERS = (0, 1, 4, 5, 7, 13, 15, 16, 17, 19)  # no nearer than 0.001 in the first 400 tokens
SEATS, CROWD = 4, 16  # in a step of an engine, and those that want the same prompt at once: a line that two shorten


class Lines:
    """Who is started how. `home`: a cache folder of the gateway's own, for what it remembers of the others."""

    def __init__(self, home: Path, controller: str, model: Path) -> None:
        self.control = f"tcp:{controller}:8002"
        self.model = model
        self._home = home

    def line(self, name: str, at: str) -> list[str]:
        """`at`: its address, IPv6 in brackets."""
        command = [sys.executable, "-m", "shoal.cli", name.partition("-")[0], "--name", name]
        if name == "controller":
            return [*command, "--listen", self.control, "--controller-port", "0"]
        command += ["--model", str(self.model), "--controller", self.control]
        if name == "gateway-0":
            return [*command, "--host", at, "--port", "8000"]
        command += ["--listen", f"tcp:{at}:8010", "--peer-address", f"tcp:{at}:8011"]
        return [
            *command,
            "--dtype",
            "float32",
            "--kv-cache-bytes",
            str(64 << 20),
            "--threads",
            "1",
            "--max-num-seqs",
            str(SEATS),
        ]

    def environment(self, name: str, secret: str = SECRET) -> dict[str, str]:
        of_gateway = {"SHOAL_API_KEY": KEY, "SHOAL_HOME": str(self._home)}
        return {"SHOAL_SECRET": secret, **(of_gateway if name == "gateway-0" else {})}


class Service:
    """Processes by name, each on its host; what is asked of them is asked from a host beside them."""

    def __init__(self, machines: Sequence[Host], model: Path, home: Path) -> None:
        gateway, controller, first, second, self._client = machines
        self.hosts = {"controller": controller, "engine-0": first, "engine-1": second, "gateway-0": gateway}
        self.processes: dict[str, Process] = {}
        self.model = model
        self._lines = Lines(home, controller.ipv4, model)
        self.control = self._lines.control
        self._stack = ExitStack()

    def at(self, name: str) -> str:
        """One engine speaks IPv6 where there is that, everybody else IPv4."""
        host = self.hosts[name]
        return f"[{host.ipv6}]" if host.ipv6 and name == "engine-1" else host.ipv4

    @contextmanager
    def started(self) -> Iterator[None]:
        with self._stack:
            for name in self.hosts:
                self.start(name)
            yield

    def start(self, name: str) -> None:
        command = self.hosts[name].command(*self._lines.line(name, self.at(name)))
        process = running(command, self._lines.environment(name))
        self.processes[name] = self._stack.enter_context(process)

    def pid(self, name: str) -> int:
        """As the test sees it, from outside."""
        child: int = psutil.Process(self.processes[name].pid).children()[0].pid
        return child

    def counts(self, name: str, of: str) -> dict[str, float]:
        """One of a process's metrics by its last label."""
        url = self.processes[name].wait_line(r"\.serving .*metrics=(\S+)", LIMIT_S)[1]
        return self.hosts[name].inside(lambda: metric(url, of))

    def count(self, name: str, of: str) -> float:
        return sum(self.counts(name, of).values())

    def busiest(self) -> str:
        """The engine that has most to do."""
        running = {name: self.count(name, "num_requests_running") for name in ENGINES}
        busiest = max(ENGINES, key=lambda name: running[name])
        assert running[busiest]
        return busiest

    def ready(self, count: int) -> None:
        """So many engines take work, as the gateway says."""
        gateway = self.processes["gateway-0"]
        wait_until(lambda: self.count("gateway-0", "num_replicas_ready") == count, LIMIT_S, lambda: gateway.text)

    def beside(self, call: Callable[[], T]) -> T:
        return self._client.inside(call)

    def at_once(self, call: Callable[[str], T], arguments: Sequence[str]) -> list[T]:
        def crowd() -> list[T]:
            with ThreadPoolExecutor(len(arguments)) as pool:
                return list(pool.map(call, arguments))

        return self.beside(crowd)

    def open(self, prompt: str, **fields: Any) -> Any:
        """The answer's bytes as they come; to be called `beside`."""
        body = {"model": self.model.name, "prompt": prompt, "temperature": 0, "ignore_eos": True, **fields}
        headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
        url = f"http://{self.at('gateway-0')}:8000/v1/completions"
        return urlopen(Request(url, json.dumps(body).encode(), headers), timeout=LIMIT_S)

    def text(self, prompt: str, num_tokens: int) -> str:
        """A whole answer; to be called `beside`."""
        try:
            with self.open(prompt, max_tokens=num_tokens) as answer:
                text: str = json.load(answer)["choices"][0]["text"]
        except HTTPError as e:
            raise AssertionError(e.read().decode()) from None
        return text

    @contextmanager
    def streams(self, prompts: Iterable[str]) -> Iterator[dict[str, str]]:
        """Entered when each has begun, left when each has come to its end; their texts by prompt then."""
        found: dict[str, str] = {}
        begun: set[str] = set()
        wanted = list(prompts)

        def read(prompt: str) -> str:
            pieces: list[str] = []
            ends: list[str] = []
            with self.open(prompt, max_tokens=ANSWER_TOKENS, stream=True) as answer:
                for event in (json.loads(line[6:]) for line in answer if line.startswith(b"data: {")):
                    assert "error" not in event, event
                    pieces.append(event["choices"][0]["text"])
                    ends += filter(None, [event["choices"][0]["finish_reason"]])
                    begun.add(prompt)
            assert ends == ["length"]
            return "".join(pieces)

        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(self.at_once, read, wanted)
            wait_until(lambda: len(begun) == len(wanted) or reading.done(), LIMIT_S)
            yield found
            found.update(zip(wanted, reading.result(), strict=True))


@pytest.fixture(scope="module")
def machines() -> Iterator[list[Host]]:
    if why := why_none():
        pytest.skip(why)
    with hosts(4) as made:
        yield made


@pytest.fixture(scope="module")
def service(machines: list[Host], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    model = make_tiny_model(tmp_path_factory.mktemp("model"), max_position=4096, num_layers=4, hidden_size=128)
    made = Service(machines, model, tmp_path_factory.mktemp("home"))
    with made.started():
        made.ready(2)
        yield made


def prompt_from(start: int) -> str:
    return " ".join(f"{number * 7919 % 9973:x}" for number in range(start, start + 250))


@pytest.fixture(scope="module")
def texts(service: Service) -> dict[str, str]:
    """Greedy answers by prompt, of some 1,130 tokens each, computed undisturbed."""
    prompts = [prompt_from(start) for start in MARGINS]
    return dict(zip(prompts, service.at_once(lambda prompt: service.text(prompt, ANSWER_TOKENS), prompts), strict=True))


def test_who_holds_another_secret_is_nobody(service: Service) -> None:
    doors = {("controller", Role.GATEWAY): service.control}
    for name in ENGINES:
        doors[name, Role.GATEWAY] = f"tcp:{service.at(name)}:8010"
        doors[name, Role.ENGINE] = f"tcp:{service.at(name)}:8011"

    async def knock() -> None:
        for (_, role), door in doors.items():
            with pytest.raises(ConnectionClosed, match="the shared secret does not match"):
                await connect(door, role=role, secret=OTHER_SECRET.encode())
            (await connect(door, role=role, secret=SECRET.encode(), name="another")).close()

    service.beside(lambda: asyncio.run(knock()))


def test_a_prompt_that_many_want_is_fetched_over_tcp_and_every_text_is_the_same(
    service: Service,
) -> None:
    for prompt in map(prompt_from, OTHERS):  # on a loaded machine a fetch may take longer than it is given
        (text,) = service.at_once(lambda each: service.text(each, 100), [prompt])
        received = {name: service.hosts[name].received_bytes() for name in ENGINES}
        answers = service.at_once(lambda each: service.text(each, 100), [prompt] * CROWD)
        assert all(text.startswith(answer) for answer in answers)
        fetched = {name: service.count(name, "kv_fetched_bytes_total") for name in ENGINES}
        if any(fetched.values()):
            break
    borrower = max(ENGINES, key=lambda name: fetched[name])
    owner = next(name for name in ENGINES if name != borrower)
    names = ("generation_tokens_total", "prefix_cache_hits_total", "kv_fetched_bytes_total", "kv_failed_fetches_total")
    told = {name: {of: service.counts(name, of) for of in names} for name in ENGINES}
    assert service.count(owner, "kv_lent_bytes_total") >= fetched[borrower] > 0, told
    # Through the network, where prompts are little beside it, and not through memory.
    assert service.hosts[borrower].received_bytes() - received[borrower] > fetched[borrower]
    assert service.count(borrower, "prefix_cache_peer_hits_total") > 0


def test_they_listen_for_each_other_at_their_own_address_only(service: Service) -> None:
    for name, host in service.hosts.items():
        assert host.listening() == {service.at(name), "127.0.0.1"}, name


def test_streams_migrate_to_the_other_engine_when_theirs_is_told_to_end(
    service: Service, texts: dict[str, str]
) -> None:
    some = dict(list(texts.items())[:NUM_STREAMS])
    with service.streams(some) as streams:
        ending = service.busiest()
        os.kill(service.pid(ending), signal.SIGTERM)
    assert streams == some
    migrations = service.counts("gateway-0", "request_migrations_total")
    assert migrations.get("migrated", 0) >= 1, (migrations, service.processes["gateway-0"].text)
    assert not service.count("gateway-0", "request_replays_total")
    assert service.processes[ending].wait(LIMIT_S) == 0
    service.start(ending)  # it comes back at its address, with nothing that it knew
    service.ready(2)


def test_streams_go_on_at_the_other_engine_when_theirs_is_killed(service: Service, texts: dict[str, str]) -> None:
    some = dict(list(texts.items())[:NUM_STREAMS])
    with service.streams(some) as streams:
        os.kill(service.pid(service.busiest()), signal.SIGKILL)
    assert streams == some
    assert service.count("gateway-0", "request_replays_total") >= 1
    service.ready(1)
    prompt, text = next(iter(texts.items()))
    assert service.beside(lambda: service.text(prompt, ANSWER_TOKENS)) == text


@pytest.mark.parametrize("name", ["controller", "engine-0", "gateway-0"])
def test_without_a_good_secret_nobody_starts_where_other_hosts_are(name: str, tmp_path: Path) -> None:
    """Also where there are no namespaces: it is refused before anything is bound or loaded."""
    lines = Lines(tmp_path, "192.0.2.1", make_tiny_model(tmp_path / "model"))
    with running(lines.line(name, "192.0.2.2"), lines.environment(name, "s" * 31)) as process:
        assert process.wait(LIMIT_S) == 1
    field = "--controller" if name == "gateway-0" else "--listen"
    assert re.search(
        rf"{field} is tcp:192\.0\.2\.\d:80\d\d, .*SHOAL_SECRET has 31 bytes; allowed: at least 32", process.text
    )
