"""A load through the engine in this process, by the clock or in a closed loop; the report is that of the simulator.

    with one thread that sends:  due ──► StepLoop's inbox ─► turn: plan, compute, apply ─► what a gateway would hear

Latencies count from the moment a row was due. The thread that sends sleeps between two rows, and takes nothing from
the step thread but a wake-up for each.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from engine import GREEDY, SESSION, Engine
from shoal.core.limits import Limits
from shoal.core.plan import StepPlan, StepResult
from shoal.core.request import Refusal, RequestSpec
from shoal.engine.loop import StepLoop, Turn
from shoal.engine.transfer.copier import Copier
from shoal.engine.transfer.storage import Storage
from shoal.sim.load import spec
from shoal.sim.outcomes import Ledger, Report
from shoal.workload.trace import Trace

TELL_S = 10.0  # so often a long run says how far it is
LIMIT_S = 600.0  # what has not ended by then is a miss


def note(text: str) -> None:
    """Progress, for whoever waits."""
    print(text, file=sys.stderr, flush=True)


def copier(engine: Engine, max_bytes_per_s: int = 0, disk: Storage | None = None) -> Copier | None:
    """A new one, since a step loop ends its own, and the disk tier with it; None: the engine has no host tier."""
    host = engine.runner.host
    return None if host is None else Copier(host, max_bytes_per_s=max_bytes_per_s, disk=disk)


def serve(
    engine: Engine,
    load: Trace,
    *,
    seed: int,
    name: str,
    stop: Callable[[Ledger], bool] = lambda ledger: False,
    prompts: Sequence[tuple[int, ...]] | None = None,
    disk: Storage | None = None,
    **limits: Any,
) -> Report:
    """The whole load, or until `stop`, asked after each step, says that it is enough.

    `limits` differ from the engine's own; `name` is for progress; `prompts`: of the rows, random ones where None.
    """
    run = _Run(engine, load, replace(engine.limits, **limits), seed, name, stop, disk)
    if prompts is not None:
        run.ask(prompts)
    return run.run()


class _Run:
    def __init__(
        self,
        engine: Engine,
        load: Trace,
        limits: Limits,
        seed: int,
        name: str,
        stop: Callable[[Ledger], bool],
        disk: Storage | None,
    ) -> None:
        self._name = name
        self._load = load
        chance = Random(f"{seed}/tokens")
        self._specs = [_spec(number, load, limits.vocab_size, chance) for number in range(len(load.rows))]
        self._num_sent = 0
        self._stop = stop
        self._ledger = Ledger()
        self._scheduler = engine.scheduler(limits)
        self._loop = StepLoop(
            self._scheduler,
            _Watched(engine.runner, self._on_step),
            publish=self._on_turn,
            announce=lambda predicted_ns: None,
            failed=self._on_failure,
            copier=copier(engine, disk=disk),
        )
        self._error: BaseException | None = None
        self._lock = threading.Lock()  # the ledger and what is sent: two threads send, the clock's and the steps'
        self._over = threading.Event()
        self._start_ns = self._told_ns = 0

    def ask(self, prompts: Sequence[tuple[int, ...]]) -> None:
        self._specs = [replace(spec, prompt=prompt) for spec, prompt in zip(self._specs, prompts, strict=True)]

    def run(self) -> Report:
        thread = threading.Thread(target=self._send_by_the_clock, name="clients", daemon=True)
        self._start_ns = time.monotonic_ns()
        if self._load.concurrency is None:
            thread.start()
        else:
            for _ in range(self._load.concurrency):
                self._send_next()
        self._loop.run()
        self._over.set()
        if self._load.concurrency is None:
            thread.join()
        if self._error is not None:
            raise self._error
        return self._ledger.report(self._scheduler.view(), self._now_ns())

    def _now_ns(self) -> int:
        return time.monotonic_ns() - self._start_ns

    def _send_by_the_clock(self) -> None:
        for row in self._load.rows:
            late_ns = self._now_ns() - row.due_ns
            if late_ns < 0 and self._over.wait(-late_ns / 1e9):
                return
            self._send_next(row.due_ns)

    def _send_next(self, due_ns: int | None = None) -> None:
        with self._lock:
            if self._num_sent == len(self._specs):
                return
            spec, row = self._specs[self._num_sent], self._load.rows[self._num_sent]
            self._num_sent += 1
            self._ledger.sent(spec.id, row, self._now_ns() if due_ns is None else due_ns)
        self._loop.submit(SESSION, [spec])

    def _on_step(self, plan: StepPlan, launched_ns: int) -> None:
        with self._lock:
            self._ledger.step(plan, launched_ns - self._start_ns, self._now_ns())

    def _on_turn(self, turn: Turn) -> None:
        now_ns, num_ended = self._now_ns(), 0
        with self._lock:
            for refusing in turn.refused.get(SESSION, ()):
                self._ledger.refused(refusing.id, Refusal(refusing.reason))
                num_ended += 1
            for update in turn.updates.get(SESSION, ()):
                if update.tokens:
                    self._ledger.tokens(update.id, update.tokens, now_ns)
                if update.ending is not None:
                    self._ledger.ended(update.id, update.ending.reason)
                    num_ended += 1
        if self._load.concurrency is not None:
            for _ in range(num_ended):
                self._send_next()
        self._tell(now_ns)
        with self._lock:
            done = self._num_sent == len(self._specs) and not self._ledger.num_open
            if done or self._stop(self._ledger) or now_ns > LIMIT_S * 1e9:
                self._loop.stop(0)

    def _tell(self, now_ns: int) -> None:
        if now_ns - self._told_ns > TELL_S * 1e9:
            self._told_ns = now_ns
            num_ended = self._num_sent - self._ledger.num_open
            note(f"  {self._name}: {num_ended} of {len(self._specs)} ended after {now_ns / 1e9:.0f} s")

    def _on_failure(self, error: BaseException) -> None:
        self._error = error


def _spec(number: int, load: Trace, vocab_size: int, chance: Random) -> RequestSpec:
    return replace(spec(f"{number:06d}.0", load.rows[number], vocab_size, chance), sampling=GREEDY)


class _Watched:
    """A runner that tells of each step that returned, and when it was launched."""

    def __init__(self, runner: Any, tell: Callable[[StepPlan, int], None]) -> None:
        self._runner = runner
        self._tell = tell
        self._plans: deque[tuple[StepPlan, int]] = deque()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, plan: StepPlan) -> None:
        self._plans.append((plan, time.monotonic_ns()))
        self._runner.launch(plan)

    def collect(self) -> StepResult:
        result = self._runner.collect()
        self._tell(*self._plans.popleft())
        return result
