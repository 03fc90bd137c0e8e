"""Sessions, leases and frames: a real server and step loop, spoken to over a real socket."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from shoal.core.request import Finish, Refusal, RequestSpec
from shoal.core.stepcost import StepCost
from shoal.engine import server as serving
from shoal.engine import sessions
from shoal.engine.loop import StepLoop
from shoal.engine.server import Server
from shoal.wire import connection as wire
from shoal.wire.connection import Cause, Connection, ConnectionClosed
from shoal.wire.messages import Abort, Announce, Ending, Frame, KeepAlive, Report, Role, Submit, Update
from tests.support.scripted import Rule, Script
from tests.support.scripted_engine import parts
from tests.support.wires import SECRET, connect, end_of, next_of, until

ENDLESS = Script(rules=(Rule(tokens=(5,), then=5),), step_ms=1)


@asynccontextmanager
async def engine(script: Script = ENDLESS, cost: StepCost | None = None) -> AsyncIterator[Server]:
    loop = asyncio.get_running_loop()
    made = parts(script, cost=cost)
    steps = StepLoop(
        made.scheduler,
        made.runner,
        publish=lambda turn: post(server.on_turn, turn),
        announce=lambda predicted_ns: post(server.on_announce, predicted_ns),
        failed=lambda error: None,
    )

    def post(callback: object, argument: object) -> None:
        loop.call_soon_threadsafe(callback, argument)  # type: ignore[arg-type]

    server = Server(steps, made.scheduler.view(), info=made.info, costs=made.costs)
    thread = threading.Thread(target=steps.run, daemon=True)
    thread.start()
    await server.listen("tcp:127.0.0.1:0", secret=SECRET, incarnation="e")
    try:
        yield server
    finally:
        await server.close()
        assert await asyncio.to_thread(steps.stop, 5)
        thread.join(5)
        made.scheduler.check()  # type: ignore[attr-defined]


def address(server: Server) -> str:
    return server.listener.address


def submit(id: str, max_tokens: int = 4, prompt: tuple[int, ...] = (1, 2, 3)) -> Submit:
    return Submit(specs=(RequestSpec(id=id, prompt=prompt, max_tokens=max_tokens),))


async def until_ended(connection: Connection, id: str) -> list[Update]:
    updates: list[Update] = []
    while not any(u.id == id and u.ending for u in updates):
        frame = await next_of(connection, Frame)
        assert isinstance(frame, Frame)
        updates += frame.updates
    return updates


async def test_a_gateway_gets_a_frame_at_once_and_one_per_step_with_its_streams() -> None:
    async with engine(Script(step_ms=2)) as server:
        gateway = await connect(address(server))
        first = await next_of(gateway, Frame)
        assert isinstance(first, Frame) and first.ready and first.costs is not None
        gateway.send(submit("a", 6, (7, 8)))
        gateway.send(submit("b", 6, (9,)))
        frames: list[Frame] = []
        while sum(u.ending is not None for f in frames for u in f.updates) < 2:
            frame = await next_of(gateway, Frame)
            assert isinstance(frame, Frame)
            frames.append(frame)
        steps = [f.view.step for f in frames if f.updates]
        assert steps == sorted(set(steps)), "two frames for one step"
        for id, expected in (("a", [7, 8, 7, 8, 7, 8]), ("b", [9] * 6)):
            updates = [u for f in frames for u in f.updates if u.id == id]
            assert [t for u in updates for t in u.tokens] == expected
            assert [u.index for u in updates] == list(range(6))


async def test_frames_hold_only_the_streams_of_their_gateway() -> None:
    async with engine(Script(step_ms=1)) as server:
        one, two = await connect(address(server), name="one"), await connect(address(server), name="two")
        one.send(submit("a", 20))
        two.send(submit("b", 20))
        assert {u.id for u in await until_ended(one, "a")} == {"a"}
        assert {u.id for u in await until_ended(two, "b")} == {"b"}


async def test_idle_engines_beat_every_half_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "BEAT_S", 0.05)
    async with engine() as server:
        gateway = await connect(address(server))
        frames = 0
        end_s = asyncio.get_running_loop().time() + 0.5
        while asyncio.get_running_loop().time() < end_s:
            await next_of(gateway, Frame)
            frames += 1
        assert 2 <= frames <= 12


async def test_a_newer_session_ends_the_streams_of_the_older_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "LEASE_S", 60.0)  # it is not the lease that ends them
    async with engine() as server:
        old = await connect(address(server), name="one", session=1)
        other = await connect(address(server), name="two", session=1)
        old.send(submit("a", 3000))
        other.send(submit("b", 50))
        await next_of(old, Frame)
        await until(lambda: server.view.num_running >= 1)
        new = await connect(address(server), name="one", session=2)
        assert (await end_of(old)).cause is Cause.EOF
        updates = await until_ended(other, "b")
        assert sum(len(u.tokens) for u in updates) == 50
        await until(lambda: server.view.num_running == 0)
        new.send(submit("c", 2))
        assert {u.id for u in await until_ended(new, "c")} == {"c"}


async def test_an_old_session_cannot_come_back() -> None:
    async with engine() as server:
        new = await connect(address(server), session=5)
        for number in (5, 4):
            with pytest.raises(ConnectionClosed, match="is not newer than 5"):
                await connect(address(server), session=number)
        new.close()
        with pytest.raises(ConnectionClosed, match="is not newer than 5"):
            await connect(address(server), session=5)
        (await connect(address(server), session=1, incarnation="a restarted gateway")).close()


async def test_only_gateways_are_served() -> None:
    async with engine() as server:
        with pytest.raises(ConnectionClosed, match="serves gateways, not a engine"):
            await connect(address(server), role=Role.ENGINE)


async def test_a_silent_session_loses_its_lease_and_its_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "LEASE_S", 0.2)
    async with engine() as server:
        gateway = await connect(address(server), name="silent")
        alive = await connect(address(server), name="alive")
        gateway.send(submit("a", 4000))
        alive.send(submit("b", 4000))
        await until(lambda: server.view.num_running == 2)
        for _ in range(100):
            alive.send(KeepAlive())
            if server.num_sessions == 1:
                break
            await asyncio.sleep(0.02)
        assert server.num_sessions == 1
        await until(lambda: server.view.num_running == 1)
        assert (await end_of(gateway)).cause is Cause.EOF
        alive.close()


async def test_a_closed_socket_frees_its_blocks_within_two_steps() -> None:
    async with engine(Script(rules=ENDLESS.rules, step_ms=50)) as server:
        gateway = await connect(address(server))
        gateway.send(submit("a", 4000))
        await until(lambda: server.view.num_running == 1)
        gateway.close()
        await until(lambda: server.num_sessions == 0)
        step = server.view.step
        await until(lambda: server.view.num_running == 0)
        assert server.view.step <= step + 3  # two, and one whose news had not come yet
        assert server.view.free_blocks + server.view.cached_blocks == server.view.total_blocks


async def test_refusals_come_back_with_their_reason() -> None:
    async with engine() as server:
        gateway = await connect(address(server))
        gateway.send(submit("a", 1_000_000))
        frame = await next_of(gateway, Frame)
        while isinstance(frame, Frame) and not frame.refused:
            frame = await next_of(gateway, Frame)
        assert isinstance(frame, Frame)
        assert (frame.refused[0].id, frame.refused[0].reason) == ("a", Refusal.CONTEXT_LENGTH)


async def test_an_aborted_stream_ends_once() -> None:
    async with engine() as server:
        gateway = await connect(address(server))
        gateway.send(submit("a", 4000))
        await until(lambda: server.view.num_running == 1)
        gateway.send(Abort(ids=("a", "a", "unknown"), reason="client_disconnect"))
        updates = await until_ended(gateway, "a")
        assert updates[-1].ending is not None and updates[-1].ending.reason is Finish.ABORT
        gateway.send(submit("b", 3))
        assert all(u.id == "b" for u in await until_ended(gateway, "b"))


async def test_a_draining_engine_refuses_and_says_that_it_is_not_ready() -> None:
    async with engine() as server:
        gateway = await connect(address(server))
        await next_of(gateway, Frame)
        server.drain()
        frame = await next_of(gateway, Frame)
        assert isinstance(frame, Frame) and not frame.ready
        gateway.send(submit("a"))
        frame = await next_of(gateway, Frame)
        assert isinstance(frame, Frame) and frame.refused[0].reason is Refusal.DRAINING


@pytest.mark.parametrize("message", [Report(), Submit(specs=()), Submit(specs=submit("a").specs * 17)])
async def test_messages_that_make_no_sense_end_their_session_only(message: msgspec.Struct) -> None:
    async with engine() as server:
        healthy = await connect(address(server), name="healthy")
        odd = await connect(address(server), name="odd")
        odd.send(message)  # type: ignore[arg-type]
        await until(lambda: server.ended.get(Cause.MALFORMED) == 1)
        healthy.send(submit("b"))
        await until_ended(healthy, "b")


async def test_a_slow_gateway_gets_merged_updates_and_the_step_never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "OUTBOX_S", 30.0)
    num = 3000
    async with engine(Script(rules=ENDLESS.rules, step_ms=0)) as server:
        slow = await connect(address(server), name="slow")
        fast = await connect(address(server), name="fast")
        slow._transport.pause_reading()
        filler = next(iter(server._sessions.values())).connection
        while filler.writable:  # fill the sockets' buffers, so that the engine has to wait for the gateway
            filler.send(Announce(what="x" * 50_000, predicted_ns=0))
        for n in range(4):
            slow.send(submit(f"s{n}", num))
        fast.send(submit("f", num))
        await until_ended(fast, "f")
        await until(lambda: server.view.num_running == 0, 20)
        slow._transport.resume_reading()
        tokens: dict[str, int] = {f"s{n}": 0 for n in range(4)}
        ended: list[Ending] = []
        frames = 0
        while len(ended) < 4:
            frame = await next_of(slow, Frame, 10)
            assert isinstance(frame, Frame)
            frames += 1
            for update in frame.updates:
                assert update.index == tokens[update.id]
                tokens[update.id] += len(update.tokens)
                ended += [update.ending] if update.ending else []
        assert set(tokens.values()) == {num}
        assert frames < num / 10


async def test_a_gateway_that_never_reads_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "OUTBOX_S", 0.1)
    async with engine(Script(rules=ENDLESS.rules, step_ms=0)) as server:
        deaf = await connect(address(server), name="deaf")
        await until(lambda: server.num_sessions == 1)
        deaf._transport.pause_reading()
        deaf.send(submit("a", 4000))
        filler = next(iter(server._sessions.values())).connection
        while filler.writable:
            filler.send(Announce(what="x" * 50_000, predicted_ns=0))
        await until(lambda: server.ended.get(Cause.OUTBOX) == 1)
        await until(lambda: server.view.num_running == 0)
        deaf.close()


async def test_long_steps_are_announced_and_changed_costs_are_sent() -> None:
    async with engine(cost=StepCost((0.3e9, 0, 0, 0, 0))) as server:
        gateway = await connect(address(server))
        gateway.send(submit("a", 1))
        announced = await next_of(gateway, Announce)
        assert announced == Announce(what="step", predicted_ns=300_000_000)
        await until_ended(gateway, "a")


async def test_both_sides_agree_on_what_was_sent_under_load() -> None:
    """Every token of every stream arrives once, at its index, whatever else the sessions do."""
    async with engine(Script(step_ms=0, num_blocks=4096)) as server:
        gateways = [await connect(address(server), name=f"g{n}") for n in range(3)]

        async def serve(number: int) -> None:
            gateway = gateways[number]
            wanted = {f"{number}-{n}": (1 + n % 5, 30 + number) for n in range(20)}
            for n, (id, prompt) in enumerate(wanted.items()):
                gateway.send(submit(id, 5 + n, prompt))
            got: dict[str, list[int]] = {id: [] for id in wanted}
            left = set(wanted)
            while left:
                frame = await next_of(gateway, Frame, 20)
                assert isinstance(frame, Frame)
                for update in frame.updates:
                    assert update.id in left and update.index == len(got[update.id])
                    got[update.id] += update.tokens
                    if update.ending:
                        left.discard(update.id)
            for n, (id, prompt) in enumerate(wanted.items()):
                assert got[id] == [prompt[i % 2] for i in range(5 + n)]

        await asyncio.gather(*(serve(number) for number in range(3)))
        await until(lambda: server.view.num_running == server.view.num_waiting == 0)
