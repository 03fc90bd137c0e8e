"""The store: leases, results that come once, and what is a tenant's."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.gateway.batches import lines
from shoal.gateway.batches.archive import ABANDONED_S, Archive
from shoal.gateway.batches.lines import Problem, look
from shoal.gateway.batches.objects import NEXT, Batch, File, Place, Status
from shoal.gateway.batches.pauses import LONGEST_S, pause_s
from shoal.gateway.batches.store import Store
from shoal.gateway.batches.window import Window

FILE = File(id="file-1", tenant="a", purpose="batch", filename="in", bytes=10, created_at=0, expires_at=1000)
BATCH = Batch(
    id="batch_1",
    tenant="a",
    model="m",
    endpoint="/v1/completions",
    input_file_id="file-1",
    metadata="null",
    created_at=0,
    expires_at=100,
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path / "db")
    assert made.add_file(FILE, 100)
    yield made
    made.close()


def at_work(store: Store, owner: str = "me", lines: int = 3) -> None:
    """BATCH is `owner`'s, and in progress."""
    assert store.add_batch(BATCH, 9) == "added"
    assert store.claim(owner, "m", 0.0, 10.0) == BATCH
    store.add_lines(owner, BATCH.id, [Place(number, 0, 1, f"c{number}") for number in range(1, lines + 1)])
    assert store.move(owner, BATCH.id, Status.IN_PROGRESS, 1.0, total=lines)


def test_a_result_counts_once_and_is_what_the_file_gets(store: Store) -> None:
    at_work(store)
    assert store.add_result("me", BATCH.id, 2, True, b"first")
    assert store.add_result("me", BATCH.id, 2, False, b"second")
    assert store.add_result("me", BATCH.id, 3, False, b"bad")
    held = store.held("me", BATCH.id)
    assert held is not None and (held.total, held.completed, held.failed) == (3, 1, 1)
    assert store.results(BATCH.id, 0, 9) == [(2, True, b"first"), (3, False, b"bad")]
    assert [place.number for place in store.pending(BATCH.id, 0, 9)] == [1]


def test_all_of_it_is_there_after_a_restart(store: Store, tmp_path: Path) -> None:
    at_work(store)
    store.add_result("me", BATCH.id, 1, True, b"x")
    other = Store(tmp_path / "db")  # the first one is not closed: its process was killed
    assert other.results(BATCH.id, 0, 9) == [(1, True, b"x")]
    assert other.batch("a", BATCH.id) == store.batch("a", BATCH.id)
    other.close()


def test_who_lost_the_lease_writes_nothing(store: Store) -> None:
    at_work(store)
    assert store.claim("other", "m", 9.9, 10.0) is None
    assert store.renew("me", 9.9, 10.0) != []
    assert store.claim("other", "m", 19.8, 10.0) is None, "it was renewed"
    assert store.claim("other", "m", 19.9, 10.0) is not None
    before = store.batch("a", BATCH.id)
    assert store.renew("me", 20.0, 10.0) == []
    assert not store.add_result("me", BATCH.id, 1, True, b"late")
    assert not store.move("me", BATCH.id, Status.FINALIZING, 20.0)
    assert not store.finish("me", BATCH.id, Status.EXPIRED, 20.0)
    store.add_lines("me", BATCH.id, [Place(9, 0, 1, "late")])
    store.forget_lines("me", BATCH.id)
    assert store.batch("a", BATCH.id) == before and len(store.pending(BATCH.id, 0, 9)) == 3
    assert store.add_result("other", BATCH.id, 1, True, b"good")


def test_released_batches_are_free_at_once(store: Store) -> None:
    at_work(store)
    store.release("me")
    assert store.claim("other", "m", 0.0, 10.0) is not None
    assert store.claim("third", "m", 0.0, 10.0) is None


def test_only_gateways_of_the_same_model_take_a_batch(store: Store) -> None:
    store.add_batch(BATCH, 9)
    assert store.claim("me", "another model", 0.0, 10.0) is None
    assert store.claim("me", "m", 0.0, 10.0) == BATCH


def test_tenants_take_turns(store: Store) -> None:
    store.add_file(replace(FILE, id="file-2", tenant="b"), 100)
    for number in range(3):
        store.add_batch(replace(BATCH, id=f"a{number}"), 9)
    store.add_batch(replace(BATCH, id="b0", tenant="b", input_file_id="file-2"), 9)
    order = []
    while (batch := store.claim("me", "m", 0.0, 10.0)) is not None:
        order.append(batch.id)
    assert order == ["a0", "b0", "a1", "a2"]


@pytest.mark.parametrize("status", Status)
@pytest.mark.parametrize("to", [status for status in Status if status is not Status.VALIDATING])
def test_a_batch_moves_only_as_the_table_says(store: Store, status: Status, to: Status) -> None:
    store.add_batch(replace(BATCH, status=status), 9)
    store._db.execute("UPDATE batches SET owner = 'me'")
    assert store.move("me", BATCH.id, to, 7.9) == (to in NEXT[status])
    now = store.batch("a", BATCH.id)
    assert now is not None and now.status == (to if to in NEXT[status] else status)
    assert getattr(now, f"{to}_at") == (7 if to in NEXT[status] else None)


def test_the_end_takes_lines_and_results_along(store: Store) -> None:
    at_work(store)
    store.add_result("me", BATCH.id, 1, True, b"x")
    output = replace(FILE, id="file-out", purpose="batch_output")
    assert store.move("me", BATCH.id, Status.FINALIZING, 2.0)
    assert store.finish("me", BATCH.id, Status.COMPLETED, 3.0, output=output)
    assert store.results(BATCH.id, 0, 9) == [] and store.pending(BATCH.id, 0, 9) == []
    ended = store.batch("a", BATCH.id)
    assert ended is not None and (ended.output_file_id, ended.error_file_id) == ("file-out", None)
    assert store.file("a", "file-out") == output
    assert not store.finish("me", BATCH.id, Status.COMPLETED, 4.0), "once only"


def test_a_tenant_sees_its_own(store: Store) -> None:
    store.add_batch(BATCH, 9)
    assert store.file("b", FILE.id) is None and store.batch("b", BATCH.id) is None
    assert store.files("b", limit=9, after=None, ascending=False, purpose=None) == []
    assert store.files("b", limit=9, after=FILE.id, ascending=False, purpose=None) is None
    assert store.batches("b", limit=9, after=None) == []
    assert store.delete_file("b", FILE.id) == "missing"
    assert store.add_batch(replace(BATCH, id="b", tenant="b"), 9) == "no file"


def test_limits_of_a_tenant(store: Store) -> None:
    assert not store.add_file(replace(FILE, id="file-2", bytes=91), 100)
    assert store.add_file(replace(FILE, id="file-2", bytes=90), 100)
    assert store.add_file(replace(FILE, id="file-3", tenant="b", bytes=100), 100)
    assert store.add_batch(BATCH, 1) == "added"
    assert store.add_batch(replace(BATCH, id="2"), 1) == "too many"
    assert store.cancel(BATCH.id, 0.0) and not store.cancel(BATCH.id, 0.0)


def test_lists_go_page_by_page(store: Store) -> None:
    for number in range(2, 6):
        store.add_file(replace(FILE, id=f"file-{number}", purpose="batch_output" if number == 4 else "batch"), 100)

    def ids(limit: int, after: str | None, ascending: bool = False, purpose: str | None = None) -> list[str]:
        return [
            file.id for file in store.files("a", limit=limit, after=after, ascending=ascending, purpose=purpose) or []
        ]

    assert ids(2, None) == ["file-5", "file-4"]
    assert ids(2, "file-4") == ["file-3", "file-2"]
    assert ids(9, "file-2", ascending=True) == ["file-3", "file-4", "file-5"]
    assert ids(9, None, purpose="batch") == ["file-5", "file-3", "file-2", "file-1"]


def test_a_file_is_not_deleted_under_a_batch_that_reads_it(store: Store) -> None:
    at_work(store)
    assert store.delete_file("a", FILE.id) == "in use"
    store.purge(2000.0, 0.0)
    assert store.file("a", FILE.id) is not None
    store.cancel(BATCH.id, 0.0)
    assert store.finish("me", BATCH.id, Status.CANCELLED, 1.0)
    assert store.delete_file("a", FILE.id) == "deleted"


def test_what_is_old_goes(store: Store) -> None:
    at_work(store)
    store.cancel(BATCH.id, 0.0)
    store.finish("me", BATCH.id, Status.CANCELLED, 1.0)
    store.purge(999.0, 900.0)
    assert store.file_ids() == {FILE.id} and store.batch("a", BATCH.id) is not None
    store.purge(1000.0, 900.0)
    assert store.file_ids() == set() and store.batch("a", BATCH.id) is None


def test_a_full_disk_leaves_the_last_whole_state(store: Store) -> None:
    at_work(store)
    (pages,) = store._db.execute("PRAGMA page_count").fetchone()
    store._db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(sqlite3.OperationalError, match="full"):
        store.add_result("me", BATCH.id, 1, True, b"x" * 100_000)
    store._db.execute("PRAGMA max_page_count = 100000")
    held = store.held("me", BATCH.id)
    assert held is not None and held.completed == 0 and len(store.pending(BATCH.id, 0, 9)) == 3
    assert store.add_result("me", BATCH.id, 1, True, b"x" * 100_000)


# -- the folder --------------------------------------------------------------------------------------------------------


async def test_everything_on_the_disk_is_private(tmp_path: Path) -> None:
    archive = Archive(tmp_path / "some" / "batches")
    assert not archive.exists and not (tmp_path / "some").exists()
    content = await archive.new_file()
    await content.write(b"abc")
    await content.keep()
    await archive.do(Store.add_file, FILE, 100)
    assert archive.exists and archive.path(content.id).read_bytes() == b"abc"
    for path in [tmp_path / "some" / "batches", *(tmp_path / "some" / "batches").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    await archive.close()


def test_a_folder_that_others_look_into_is_not_used(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(ValueError, match="chmod 700"):
        Archive(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


async def test_a_folder_that_cannot_be_is_trouble_only_for_who_needs_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    archive = Archive(tmp_path / "file" / "batches")
    assert not archive.exists
    with pytest.raises(OSError):
        await archive.new_file()
    with pytest.raises(OSError):
        await archive.do(Store.file_ids)
    await archive.close()


async def test_bytes_that_no_row_names_are_swept_when_their_writer_is_long_gone(tmp_path: Path) -> None:
    archive = Archive(tmp_path / "batches")
    kept, dead, live = [await archive.new_file() for _ in range(3)]
    await kept.keep()
    await archive.do(Store.add_file, replace(FILE, id=kept.id), 100)
    for path in (tmp_path / "batches" / "files").iterdir():
        if live.id not in path.name:
            os.utime(path, (0, path.stat().st_mtime - ABANDONED_S - 1))
    await archive.sweep()
    left = {path.name for path in (tmp_path / "batches" / "files").iterdir()}
    assert left == {kept.id, f"{live.id}.part"}
    for file in (dead, live):
        await file.drop()
    await archive.close()


async def test_what_was_asked_for_is_done_though_nobody_waits_any_more(tmp_path: Path) -> None:
    archive = Archive(tmp_path / "batches")
    asked = asyncio.create_task(archive.do(Store.add_file, FILE, 100))
    await asyncio.sleep(0)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert await archive.do(Store.file_ids) == {FILE.id}
    await archive.close()


# -- lines, window, pauses ---------------------------------------------------------------------------------------------

GOOD = b'{"custom_id": "%s", "method": "POST", "url": "/v1/completions", "body": {"model": "m"}}'


def looked(tmp_path: Path, content: bytes, limit: int = 1000) -> list[Place | Problem]:
    path = tmp_path / "in.jsonl"
    path.write_bytes(content)
    with path.open("rb") as file:
        return list(look(file, "/v1/completions", limit))


def test_places_are_where_the_lines_are(tmp_path: Path) -> None:
    content = b"\n" + GOOD % b"a" + b"\r\n  \n" + GOOD % b"b" + b"\n\n" + GOOD % b"c"
    places = [place for place in looked(tmp_path, content) if isinstance(place, Place)]
    assert [(place.number, place.custom_id) for place in places] == [(2, "a"), (4, "b"), (6, "c")]
    for place in places:
        assert content[place.start : place.start + place.length] == GOOD % place.custom_id.encode()


@pytest.mark.parametrize(
    ("line", "code", "param"),
    [
        (b"{", "invalid_json_line", None),
        (b"\xff", "invalid_json_line", None),
        (b"[" * 5000, "invalid_json_line", None),
        (b"[1]", "invalid_request", None),
        (b"null", "invalid_request", None),
        (b"{}", "invalid_request", "custom_id"),
        (b'{"custom_id": 1, "method": "POST", "url": "u", "body": {}}', "invalid_request", "custom_id"),
        (GOOD % b"", "invalid_request", "custom_id"),
        (GOOD % (b"x" * 513), "invalid_request", "custom_id"),
        (GOOD.replace(b'"method"', b'"methd"') % b"z", "invalid_request", "methd"),
        (GOOD.replace(b"POST", b"GET") % b"z", "invalid_method", "method"),
        (GOOD.replace(b"/v1/completions", b"/v1/../admin") % b"z", "url_mismatch", "url"),
        (GOOD % b"first", "duplicate_custom_id", "custom_id"),
    ],
)
def test_a_line_that_cannot_be_run_is_named(tmp_path: Path, line: bytes, code: str, param: str | None) -> None:
    first, problem, last = looked(tmp_path, GOOD % b"first" + b"\n" + line + b"\n" + GOOD % b"last" + b"\n", 9000)
    assert isinstance(problem, Problem) and isinstance(first, Place) and isinstance(last, Place)
    assert (problem.code, problem.line, problem.param) == (code, 2, param)
    assert "the body" not in problem.message


def test_a_line_that_is_too_long_is_not_read_as_a_whole(tmp_path: Path) -> None:
    long, last = looked(tmp_path, b"x" * 50_000 + b"\n" + GOOD % b"last")
    assert isinstance(long, Problem) and (long.code, long.line) == ("line_too_long", 1)
    assert isinstance(last, Place) and last.start == 50_001


@pytest.mark.parametrize("content", [b"", b"\n\n  \n"])
def test_a_file_without_requests_is_a_problem(tmp_path: Path, content: bytes) -> None:
    assert [one.code for one in looked(tmp_path, content) if isinstance(one, Problem)] == ["empty_file"]


def test_a_batch_has_so_many_lines_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINES", 7)
    content = b"".join(GOOD % b"%d" % number + b"\n" for number in range(9))
    *places, problem = looked(tmp_path, content)
    assert len(places) == 7 and isinstance(problem, Problem) and problem.code == "too_many_tasks"


async def test_places_in_the_window_go_round_the_tenants() -> None:
    window, order = Window(1), []

    async def one(tenant: str, name: str) -> None:
        await window.enter(tenant)
        order.append(name)
        window.leave()

    await window.enter("a")
    waiting = [asyncio.create_task(one(name[0], name)) for name in ("a1", "a2", "a3", "b1", "c1", "c2")]
    gone = asyncio.create_task(one("b", "b2"))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    window.leave()
    await asyncio.wait_for(asyncio.gather(*waiting), 5)
    assert order == ["a1", "b1", "c1", "a2", "c2", "a3"]
    await asyncio.wait_for(window.enter("z"), 5)


async def test_a_place_given_to_who_is_cancelled_in_that_moment_is_not_lost() -> None:
    window = Window(1)
    await window.enter("a")
    unlucky = asyncio.create_task(window.enter("b"))
    await asyncio.sleep(0)
    window.leave()
    unlucky.cancel()
    await asyncio.gather(unlucky, return_exceptions=True)
    await asyncio.wait_for(window.enter("c"), 5)


def test_pauses_grow_to_a_bound_and_honour_what_was_asked() -> None:
    assert 0.25 <= pause_s(0) <= 0.3125
    assert LONGEST_S <= pause_s(1000) <= 1.25 * LONGEST_S
    assert 60 <= pause_s(0, 60.0) <= 75
