from __future__ import annotations

import errno
import logging
import os
import stat
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.core.limits import Limits
from shoal.core.plan import Copied, Logprobs, Refused, StepResult
from shoal.core.request import RequestSpec, Sampling
from shoal.core.scheduler import Scheduler
from shoal.telemetry import journal
from shoal.telemetry.journal import Aborted, Applied, CopiesDone, Header, JournalFile, Planned, Recorder, Submitted

LIMITS = Limits(num_blocks=8, max_model_len=64, vocab_size=100)
ROOT = b"\x00root\xff"
WAIT_S = 10.0


@pytest.fixture
def off() -> Iterator[threading.Event]:
    """Set when a journal says that it went off."""
    heard = threading.Event()

    def hear(record: logging.LogRecord) -> bool:
        heard.set()
        return True

    journal.log.addFilter(hear)
    yield heard
    journal.log.removeFilter(hear)


def scheduler() -> Scheduler:
    return Scheduler(LIMITS, hash_root=ROOT)


def spec(id: str, tokens: int = 3) -> RequestSpec:
    sampling = Sampling(seed=2**63 + 1, logit_bias=((7, 2.0),), logprobs=1)
    return RequestSpec(id=id, prompt=(1, 2, 3), max_tokens=tokens, sampling=sampling, prefix_keys=(b"k" * 16,))


def step(live: Recorder, now_ns: int, token: int, logprob: float = -0.5) -> None:
    plan = live.plan(now_ns)
    assert plan is not None
    ids = [part.id for part in plan.slices if part.sample]
    alternatives = {id: Logprobs(logprob, ((token, logprob),)) for id in ids}
    live.apply(StepResult(plan.step, [token] * len(ids), alternatives, busy_ns=10 * now_ns), now_ns + 1)


def test_the_file_says_everything_that_went_in_and_came_out(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    live = Recorder(scheduler(), JournalFile(path), hash_root=ROOT)
    first = live.submit(spec("a.0"), 10)
    second = live.submit(spec("a.0"), 11)  # a duplicate
    step(live, 20, 5)
    assert live.view().num_running == 1
    events = live.abort("a.0", 30)
    assert live.plan(31) is None
    live.close()

    assert not isinstance(first, Refused) and isinstance(second, Refused)
    records = [record for _, record in journal.read(path)]
    header, submitted, refused, planned, applied, aborted, idle = records
    assert isinstance(header, Header) and header == Header(journal.VERSION, LIMITS, ROOT, scheduler().cost.coefficients)
    assert submitted == Submitted(10, spec("a.0"), None)
    assert refused == Submitted(11, spec("a.0"), second)
    assert isinstance(planned, Planned) and planned.plan is not None and planned.plan.admits[0].tokens == (1, 2, 3)
    assert isinstance(applied, Applied)
    assert (applied.now_ns, applied.result.busy_ns) == (21, 200)
    assert applied.events == [["started", "a.0", 0], ["token", "a.0", 0, 5, [-0.5, [[5, -0.5]]]]]
    assert isinstance(aborted, Aborted) and aborted.events == [["ended", *events[0]]]
    assert idle == Planned(31, None)


def test_copies_are_in_the_file_with_what_they_were_and_what_they_brought(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    limits = replace(LIMITS, max_num_seqs=1, num_host_blocks=4, block_bytes=10, preemption="swap")
    live = Recorder(Scheduler(limits, hash_root=ROOT), JournalFile(path), hash_root=ROOT)
    live.submit(replace(spec("a.0"), priority=1), 1)
    step(live, 10, 5)
    live.submit(spec("b.0"), 11)
    step(live, 20, 6)  # "a.0" has to go for "b.0"
    assert live.copied([Copied(1, 500)], 30) == []
    with pytest.raises(ValueError, match="copy 2 is done"):
        live.copied([Copied(2, 500)], 31)
    records = [record for _, record in journal.read(path)]
    planned, applied, copied, failed = records[-4:]
    assert isinstance(planned, Planned) and planned.plan is not None
    (op,) = planned.plan.ops
    assert (op.number, op.id, op.out, len(op.device_blocks)) == (1, "a.0", True, 1)
    assert isinstance(applied, Applied) and ["parked", "a.0"] in applied.events
    assert copied == CopiesDone(30, [Copied(1, 500)], [])
    assert isinstance(failed, CopiesDone) and failed.error.startswith("ValueError: copy 2 is done")


def test_only_the_owner_may_read_it_also_where_it_was_there_before(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.touch(0o644)
    path.chmod(0o644)
    JournalFile(path).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(OSError) as refused:
        JournalFile(link)
    assert refused.value.errno == errno.ELOOP


def test_minus_infinity_survives_the_file(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    live = Recorder(scheduler(), JournalFile(path), hash_root=ROOT)
    live.submit(spec("a.0"), 1)
    step(live, 2, 5, logprob=float("-inf"))
    live.close()
    (applied,) = [record for _, record in journal.read(path) if isinstance(record, Applied)]
    assert applied.result.logprobs == {"a.0": Logprobs(float("-inf"), ((5, float("-inf")),))}


def test_a_new_run_is_appended_and_the_line_that_a_crash_cut_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    for now_ns in (1, 2):
        live = Recorder(scheduler(), JournalFile(path), hash_root=ROOT)
        live.submit(spec("a.0"), now_ns)
        live.close()
        with path.open("ab") as file:
            file.write(b'{"op":"submit","now_')
    kinds = [type(record) for _, record in journal.read(path)]
    assert kinds == [Header, Submitted, Header, Submitted]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"op":"plan","now_ns":1,"plan":null}\n' * 2, "journal:1"),
        (b'{"op":"header","version":99,"limits":null}\n{"op":"plan","now_ns":1,"plan":null}\n', "journal:1"),
        (b"\xff\n\xff\n", "journal:1"),
    ],
)
def test_what_is_no_journal_is_refused_with_the_line(tmp_path: Path, line: bytes, says: str) -> None:
    path = tmp_path / "journal"
    path.write_bytes(line)
    with pytest.raises(ValueError, match=says):
        list(journal.read(path))


def test_the_call_in_which_a_scheduler_fails_is_in_the_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    live = Recorder(scheduler(), JournalFile(path), hash_root=ROOT)
    with pytest.raises(ValueError, match="step 9"):
        live.apply(StepResult(9, []), 5)
    *_, (_, last) = journal.read(path)  # not closed: the engine may not get that far
    assert isinstance(last, Applied) and last.result.step == 9
    assert last.error.startswith("ValueError: result of step 9")


def test_a_full_disk_switches_the_journal_off_and_serving_goes_on(
    caplog: pytest.LogCaptureFixture, off: threading.Event
) -> None:
    file = JournalFile(Path("/dev/full"))
    live = Recorder(scheduler(), file, hash_root=ROOT)
    live.submit(spec("a.0", tokens=20), 1)
    assert off.wait(WAIT_S)
    for now_ns in range(2, 12):
        step(live, now_ns, 5)
    live.close()
    assert live.view().generation_tokens == 10
    assert file.lost >= 1 and not file.on
    (line,) = caplog.records
    assert line.msg == "journal.off" and "No space left" in str(line.args)
    assert stat.S_IMODE(os.stat("/dev/full").st_mode) != 0o600  # what is not a file keeps its mode


def test_a_disk_that_is_too_slow_switches_it_off_and_never_holds_the_step_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stuck, released, write = threading.Event(), threading.Event(), os.write

    def slow(descriptor: int, data: bytes) -> int:
        stuck.set()
        assert released.wait(WAIT_S)
        return write(descriptor, data)

    monkeypatch.setattr(journal.os, "write", slow)
    path = tmp_path / "journal"
    file = JournalFile(path, max_buffer_bytes=4000)
    file.write(b"first\n")
    assert stuck.wait(WAIT_S)
    for _ in range(30):
        file.write(b"x" * 199 + b"\n")
    assert not file.on and file.lost == 30  # 20 that waited and 10 that came after
    released.set()
    file.close()
    assert path.read_bytes() == b"first\n"
    assert [record.msg for record in caplog.records] == ["journal.off"]


def test_an_old_scheduler_is_not_recorded(tmp_path: Path) -> None:
    old = scheduler()
    old.submit(spec("a.0"), 1)
    with pytest.raises(AssertionError, match="whole life"):
        Recorder(old, JournalFile(tmp_path / "journal"), hash_root=ROOT)
