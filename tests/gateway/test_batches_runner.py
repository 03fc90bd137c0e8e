"""Working batches off: what a line's answers, the clock, the disk and other gateways can do to it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest

from shoal.core.request import Refusal
from shoal.gateway.batches import work
from shoal.gateway.batches.archive import NewFile
from shoal.gateway.batches.objects import WINDOW_S, Batch, Place, Status
from shoal.gateway.batches.store import Store
from shoal.gateway.errors import ApiError, Reason, invalid
from tests.gateway.batch_desk import NOW_S, Desk, fine, never, running
from tests.support.wires import eventually


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "batches"


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses take no time; each is noted with what the service asked for."""
    noted: list[float] = []

    def pause_s(tries: int, at_least_s: float = 0.0) -> float:
        noted.append(at_least_s)
        return 0.0

    monkeypatch.setattr(work, "pause_s", pause_s)
    return noted


async def test_every_line_is_asked_once_and_no_more_than_the_window_at_a_time(folder: Path) -> None:
    names = [f"n{number}" for number in range(300)]
    async with running(Desk(folder)) as desk:
        batch = await desk.ended(await desk.batch(*names))
        assert (batch.status, batch.total, batch.completed, batch.failed) == (Status.COMPLETED, 300, 300, 0)
        assert sorted(desk.asked) == sorted(names) and desk.most_at_once == 4
        output = desk.lines(batch.output_file_id)
        assert list(output) == names, "in the order of the lines"
        assert {name: line["response"]["body"]["answer"] for name, line in output.items()} == {n: n for n in names}
        assert batch.error_file_id is None and len(desk.on_disk()) == 2
        assert desk.counted == [True] * 300


async def test_a_refusal_of_the_request_is_its_result(folder: Path, pauses: list[float]) -> None:
    async def answer(name: str) -> bytes:
        if name == "bad":
            raise invalid("no", "field")
        if name == "broken":
            raise KeyError("a fault of ours")
        return await fine(name)

    async with running(Desk(folder, answer)) as desk:
        batch = await desk.ended(await desk.batch("good", "bad", "broken"))
        assert (batch.status, batch.completed, batch.failed) == (Status.COMPLETED, 1, 2)
        errors = desk.lines(batch.error_file_id)
        assert errors["bad"]["response"]["status_code"] == 400 and errors["bad"]["error"] is None
        assert errors["bad"]["response"]["body"] == json.loads(invalid("no", "field").body())
        assert errors["broken"]["response"]["status_code"] == 500
        assert sorted(desk.asked) == ["bad", "broken", "good"] and pauses == []


async def test_not_now_is_no_answer(folder: Path, pauses: list[float]) -> None:
    refusals = [
        ApiError(Refusal.QUEUE_FULL, "full", retry_after_s=17.2),
        ApiError(Reason.NO_REPLICA, "none"),
        ApiError(Reason.SHUT_DOWN, "going"),
    ] * 7

    async def answer(name: str) -> bytes:
        if refusals:
            raise refusals.pop(0)
        return await fine(name)

    async with running(Desk(folder, answer)) as desk:
        batch = await desk.ended(await desk.batch("a"))
        assert (batch.completed, batch.failed) == (1, 0)
        assert pauses == [18.0, 1.0, 1.0] * 7


async def test_a_line_that_is_lost_again_and_again_fails(folder: Path, pauses: list[float]) -> None:
    lost, busy = ApiError(Reason.REPLICA_LOST, "gone"), ApiError(Reason.NO_REPLICA, "none")
    told = {
        "poison": [lost] * 9,
        "unlucky": [busy, busy, busy, lost, busy, lost],
        "wrong": [lost, invalid("no"), lost],
    }

    async def answer(name: str) -> bytes:
        if told[name]:
            raise told[name].pop(0)
        return await fine(name)

    async with running(Desk(folder, answer)) as desk:
        batch = await desk.ended(await desk.batch(*told))
        assert set(desk.lines(batch.output_file_id)) == {"unlucky"}
        errors = desk.lines(batch.error_file_id)
        statuses = {name: line["response"]["status_code"] for name, line in errors.items()}
        assert statuses == {"poison": 502, "wrong": 400}
        assert [desk.asked.count(name) for name in told] == [work.MAX_LOST, 7, 2]


async def test_a_file_that_is_none_of_requests_fails_with_the_numbers_of_its_lines(folder: Path) -> None:
    good = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}\n'
    async with running(Desk(folder)) as desk:
        batch = await desk.ended(await desk.batch(content=good + b"{\n" + good))
        assert batch.status is Status.FAILED and batch.failed_at is not None and batch.errors is not None
        told = [(problem["line"], problem["code"]) for problem in json.loads(batch.errors)]
        assert told == [(2, "invalid_json_line"), (3, "duplicate_custom_id")]
        assert desk.asked == [] and batch.total == 0
        many = await desk.ended(await desk.batch(content=b"{\n" * 1000))
        assert many.errors is not None and len(json.loads(many.errors)) == 100
        empty = await desk.ended(await desk.batch(content=b""))
        assert empty.errors is not None and json.loads(empty.errors)[0]["code"] == "empty_file"


async def test_a_look_at_the_file_that_was_interrupted_begins_anew(folder: Path) -> None:
    desk = Desk(folder)
    id = await desk.batch("a", "b")
    assert await desk.archive.do(Store.claim, "who died", "m", NOW_S - 20, 10.0) is not None
    await desk.archive.do(Store.add_lines, "who died", id, [Place(1, 0, 5, "stale")])
    async with running(desk):
        batch = await desk.ended(id)
        assert batch.completed == 2 and list(desk.lines(batch.output_file_id)) == ["a", "b"]


async def test_at_the_end_of_the_window_what_is_not_done_is_an_error(folder: Path) -> None:
    async def answer(name: str) -> bytes:
        return await (fine if name < "c" else never)(name)

    async with running(Desk(folder, answer, num_places=3)) as desk:
        id = await desk.batch("a", "b", "c", "d", "e", "f")
        await desk.until(id, lambda batch: batch.completed == 2)
        desk.now_s += WINDOW_S
        desk.runner.wake()
        batch = await desk.ended(id)
        assert (batch.status, batch.expired_at) == (Status.EXPIRED, int(NOW_S) + WINDOW_S)
        assert set(desk.lines(batch.output_file_id)) == {"a", "b"} and desk.at_once == 0
        errors = desk.lines(batch.error_file_id)
        assert [(name, line["response"], line["error"]["code"]) for name, line in errors.items()] == [
            (name, None, "batch_expired") for name in "cdef"
        ]


async def test_a_batch_that_nobody_worked_on_expires_too(folder: Path) -> None:
    desk = Desk(folder)
    id = await desk.batch("a")
    desk.now_s += WINDOW_S
    async with running(desk):
        assert (await desk.ended(id)).status is Status.EXPIRED and desk.asked == []


async def test_cancelling_withdraws_what_is_at_work(folder: Path) -> None:
    async def answer(name: str) -> bytes:
        return await (fine if name == "a" else never)(name)

    async with running(Desk(folder, answer, num_places=2)) as desk:
        id = await desk.batch("a", "b", "c")
        await desk.until(id, lambda batch: batch.completed == 1 and desk.at_once == 2)
        assert await desk.archive.do(Store.cancel, id, desk.now_s)
        desk.runner.wake()
        batch = await desk.ended(id)
        assert batch.status is Status.CANCELLED and desk.at_once == 0
        assert set(desk.lines(batch.output_file_id)) == {"a"}
        assert {line["error"]["code"] for line in desk.lines(batch.error_file_id).values()} == {"batch_cancelled"}
        again = await desk.ended(await desk.batch("a"))  # the places in the window are free
        assert again.status is Status.COMPLETED


async def test_it_stops_at_once_and_another_goes_on_with_the_rest(folder: Path) -> None:
    async def answer(name: str) -> bytes:
        return await (fine if int(name) < 7 else never)(name)

    names = [str(number) for number in range(20)]
    async with running(Desk(folder, answer)) as first:
        id = await first.batch(*names)
        await first.until(id, lambda batch: batch.completed == 7 and first.at_once == 4)
        began_s = time.perf_counter()
    assert time.perf_counter() - began_s < 1.0 and first.at_once == 0
    async with running(Desk(folder, owner="two")) as second:
        batch = await second.ended(id)
        assert (batch.status, batch.completed, batch.failed) == (Status.COMPLETED, 20, 0)
        assert sorted(second.asked, key=int) == names[7:]
        assert list(second.lines(batch.output_file_id)) == names


async def test_two_gateways_share_the_work_and_none_is_done_twice(folder: Path) -> None:
    async with running(Desk(folder)) as one, running(Desk(folder, owner="two")) as two:
        ids = [await one.batch(*(f"{batch}-{number}" for number in range(10))) for batch in range(12)]
        two.runner.wake()
        for id in ids:
            assert (await one.ended(id)).completed == 10
        asked = one.asked + two.asked
        assert len(asked) == len(set(asked)) == 120


async def test_who_loses_the_lease_lets_go(folder: Path) -> None:
    async with running(Desk(folder, never)) as slow:
        id = await slow.batch("a", "b")
        await slow.until(id, lambda _: slow.at_once == 2)
        with contextlib.closing(sqlite3.connect(folder / "batches.sqlite3")) as database, database:
            database.execute("UPDATE batches SET owner = 'who died since', lease_until = 0")  # it hung for so long
        async with running(Desk(folder, owner="two")) as quick:
            assert (await quick.ended(id)).completed == 2
            async with asyncio.timeout(5):
                while slow.at_once:
                    slow.runner.wake()
                    await asyncio.sleep(0.01)
    assert slow.counted == []


async def test_a_full_disk_costs_time_and_no_answer(
    folder: Path, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = {"result": 3, "file": 2}
    add_result, write = Store.add_result, NewFile._write

    def add_result_sometimes(self: Store, *args: Any) -> bool:
        if failures["result"]:
            failures["result"] -= 1
            raise sqlite3.OperationalError("database or disk is full")
        return add_result(self, *args)

    def write_sometimes(self: NewFile, data: bytes) -> None:
        if data.startswith(b'{"id":"batch_req_') and failures["file"]:
            failures["file"] -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, data)

    monkeypatch.setattr(Store, "add_result", add_result_sometimes)
    monkeypatch.setattr(NewFile, "_write", write_sometimes)
    async with running(Desk(folder)) as desk:
        batch = await desk.ended(await desk.batch("a", "b"))
        assert (batch.status, batch.completed) == (Status.COMPLETED, 2)
        assert sorted(desk.asked) == ["a", "b"] and failures == {"result": 0, "file": 0}
        assert set(desk.lines(batch.output_file_id)) == {"a", "b"}
        assert desk.on_disk() == {batch.input_file_id, batch.output_file_id}


async def test_a_database_that_cannot_be_read_does_not_end_the_runner(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [3]
    renew = Store.renew

    def renew_sometimes(self: Store, *args: Any) -> list[Batch]:
        if failures[0]:
            failures[0] -= 1
            desk.runner.wake()
            raise sqlite3.OperationalError("disk I/O error")
        return renew(self, *args)

    monkeypatch.setattr(Store, "renew", renew_sometimes)
    async with running(Desk(folder)) as desk:
        assert (await desk.ended(await desk.batch("a"))).status is Status.COMPLETED


async def test_old_files_and_batches_go(folder: Path) -> None:
    async with running(Desk(folder)) as desk:
        id = await desk.batch("a")
        batch = await desk.ended(id)
        desk.now_s += 31 * 86400
        desk.runner.wake()

        async def gone() -> bool:
            return await desk.archive.do(Store.batch, "", id) is None

        await eventually(gone)
        assert batch.output_file_id is not None
        assert await desk.archive.do(Store.file, "", batch.output_file_id) is None


async def test_tenants_have_equal_shares_of_the_window(folder: Path) -> None:
    first: list[str] = []

    async def answer(name: str) -> bytes:
        first.append(name[0])
        await asyncio.sleep(0.002)
        return await fine(name)

    desk = Desk(folder, answer)
    await desk.batch(*(f"a{number}" for number in range(200)), tenant="a")
    small = await desk.batch(*(f"b{number}" for number in range(50)), tenant="b")
    async with running(desk):
        await desk.ended(small, "b")
    both = first[first.index("b") :]
    assert 24 <= both[:60].count("b") <= 36, "in turn, from the moment when both have begun"
