"""Works off batches beside the gateway's other requests: takes what nobody works on, keeps it, gives it up at the end.

A batch belongs to one gateway at a time: it takes a lease in the store and renews it. One that dies or hangs leaves its
batches to the others when the lease has run out, and writes nothing into them any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
from itertools import count

from shoal.gateway.batches.objects import Status
from shoal.gateway.batches.pauses import pause_s
from shoal.gateway.batches.store import Store
from shoal.gateway.batches.work import Means, Work

TURN_S = 1.0  # at least so often leases are renewed, and others' cancellations and the clock are heard
LEASE_S = 10.0
PURGE_S = 3600.0
MOST_AT_WORK = 32  # batches; a tenant with many leaves room for others

log = logging.getLogger("shoal.gateway")


class Runner:
    def __init__(self, means: Means, model: str) -> None:
        """`model`: the served name. Batches that another model's gateway took are not ours to run."""
        self._means = means
        self._archive = means.archive
        self._model = model
        self._works: dict[str, Work] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._news = asyncio.Event()
        self._stopped = False
        self._purge_at_s = 0.0

    def wake(self) -> None:
        """A batch was made or cancelled."""
        self._news.set()

    def stop(self) -> None:
        """`run` ends: what is at work is withdrawn, what is done is kept, the batches are anybody's."""
        self._stopped = True
        self._news.set()

    async def run(self) -> None:
        failures = 0
        try:
            while not self._stopped:
                try:
                    if self._archive.exists:
                        await self._turn()
                    failures = 0
                except Exception:  # a full disk, or a fault of ours: neither may take the gateway along
                    log.exception("batches.turn_failed")
                    failures += 1
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_s(failures, TURN_S) if failures else TURN_S):
                        await self._news.wait()
                self._news.clear()
        finally:
            await self._give_up()

    async def _turn(self) -> None:
        owner, now_s = self._means.owner, self._means.now_s()
        held = {batch.id: batch for batch in await self._archive.do(Store.renew, owner, now_s, LEASE_S)}
        for id, work in self._works.items():
            batch = held.get(id)
            if batch is None:
                self._tasks[id].cancel()  # it has just ended, or our lease ran out and another gateway has it
            elif batch.status is Status.CANCELLING or now_s >= batch.expires_at:
                work.stop_lines()
        for id in held.keys() - self._works.keys():
            self._begin(id)
        while len(self._works) < MOST_AT_WORK:
            batch = await self._archive.do(Store.claim, owner, self._model, now_s, LEASE_S)
            if batch is None:
                break
            self._begin(batch.id)
        if now_s >= self._purge_at_s:
            self._purge_at_s = now_s + PURGE_S
            await self._archive.do(Store.purge, now_s, self._means.retention_s)
            await self._archive.sweep()

    def _begin(self, id: str) -> None:
        self._works[id] = Work(id, self._means)
        self._tasks[id] = task = asyncio.create_task(self._work(id))
        task.add_done_callback(lambda _: self._ended(id))

    def _ended(self, id: str) -> None:
        del self._works[id], self._tasks[id]
        self.wake()

    async def _work(self, id: str) -> None:
        for tries in count():
            try:
                await self._works[id].run()
                return
            except Exception:
                log.exception("batches.work_failed", {"batch": id})
            await asyncio.sleep(pause_s(tries))

    async def _give_up(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._archive.exists:
            with contextlib.suppress(OSError, sqlite3.Error):  # then the leases run out
                await self._archive.do(Store.release, self._means.owner)
