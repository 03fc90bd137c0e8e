"""Fetch or compute: when is the first token of a prompt there whose blocks another engine holds?

live       engine processes of the default model: one holds the beginning; of the two that do not, one reads it over TCP
           and one over shared memory. In turn, each round with other prompts, from the request's leaving a gateway to
           its first token there; nothing else is asked for meanwhile
simulated  told to do either, and by choice, over link rates and lengths. The engine learns the rate from the fetches
           before, starting from its configured belief, and gives a fetch up when computing would have been done
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from random import Random
from statistics import fmean, median
from typing import Literal, NamedTuple

from common import Report, arguments
from neighbour import Neighbour, processes
from shoal.core.kv.hashing import root_key
from shoal.core.limits import Limits
from shoal.core.plan import Event, Refused, Token
from shoal.core.request import Peer, RequestSpec
from shoal.core.scheduler import Scheduler
from shoal.core.stepcost import StepCost
from shoal.sim.agenda import Agenda
from shoal.sim.replica import Modelled, Replica

Mode = Literal["fetch", "compute", "choose"]
BELIEVED = {"fetch": 1e15, "compute": 0.0, "choose": 5e8}  # bytes/s, before anything was measured

# A model of 1.5 billion parameters on two cores, with 28 KB of KV a token, as in swapping.py.
MACHINE = (1.2e8, 2.1e6, 350.0, 5e5, 2e3)  # of core.stepcost
BLOCK_TOKENS, BLOCK_BYTES = 16, 16 * 28 * 1024
ROOT = root_key("simulated", "none", "none", BLOCK_TOKENS)
NUM_PRIMING, NUM_ASKED = 4, 40  # prompts before those that count, and those

HELD_TOKENS, OWN_TOKENS = 2000, 16
LIVE_TARGET = 0.15


class Cell(NamedTuple):
    mb_per_s: int
    num_tokens: int  # that the peer holds


GRID = [Cell(rate, length) for rate in (5, 7, 10, 20, 50, 200, 1000) for length in (64, 250, 1000, 2000, 4000)]
QUICK = [Cell(rate, length) for rate in (5, 20, 1000) for length in (64, 1000, 4000)]


class Stage:
    """One replica that is asked for one prompt after the other."""

    def __init__(self, cell: Cell, believed: float) -> None:
        limits = Limits(
            num_blocks=2 * (cell.num_tokens // BLOCK_TOKENS + 8),
            max_model_len=1 << 15,
            vocab_size=1 << 20,
            block_tokens=BLOCK_TOKENS,
            block_bytes=BLOCK_BYTES,
            fetch_bytes_per_s=believed,
        )
        scheduler = Scheduler(limits, hash_root=ROOT, cost=StepCost(MACHINE))
        machine = Modelled(StepCost(MACHINE), fetch_bytes_per_s=cell.mb_per_s * 1e6)
        self._agenda = Agenda()
        self._replica = Replica(scheduler, machine, self._agenda, tell=self._hear)
        self._cell = cell
        self._first_ns = 0

    def ask(self, number: int) -> float:
        """Seconds until the first token."""
        first, size = number * 5000, self._cell.num_tokens
        peer = Peer("tcp:127.0.0.1:1", "i", size // BLOCK_TOKENS)
        spec = RequestSpec(id=str(number), prompt=tuple(range(first, first + size + 1)), max_tokens=1, peer=peer)
        began_ns = self._agenda.now_ns
        self._replica.submit(spec)
        self._agenda.run()
        return (self._first_ns - began_ns) / 1e9

    def _hear(self, events: Iterable[Event | Refused]) -> None:
        for event in events:
            assert not isinstance(event, Refused), event
            if isinstance(event, Token):
                self._first_ns = self._agenda.now_ns


def seconds(cell: Cell, mode: Mode) -> float:
    """Mean; of the choice, also the tries from which it learns again what it had forgotten."""
    stage = Stage(cell, BELIEVED[mode])
    if mode != "choose":
        return stage.ask(0)
    asked = [stage.ask(number) for number in range(NUM_PRIMING + NUM_ASKED)]
    return fmean(asked[NUM_PRIMING:])


# -- live --------------------------------------------------------------------------------------------------------------


async def live(report: Report, num_rounds: int) -> None:
    """The first round shows engines what they have not done yet, and does not count."""
    started = [{"name": name, "transport": name} for name in ("both", "tcp", "shm")]
    async with processes(*started) as (owner, tcp, shm):
        chance = Random(1)
        found: dict[str, list[float]] = {"compute": [], "tcp": [], "shm": []}
        for number in range(num_rounds + 1):
            begin, other = ([*chance.choices(range(owner.info.vocab_size), k=HELD_TOKENS)] for _ in range(2))
            await owner.ask([*begin, 0])
            took = {"compute": await first_token(tcp, other)}
            for name, engine in (("tcp", tcp), ("shm", shm)):
                took[name] = await first_token(engine, begin, owner)
            for name, ttft_s in took.items():
                found[name] += [ttft_s] * (number > 0)
    rows = []
    for name, all in found.items():
        shares = [one / other for one, other in zip(all, found["compute"], strict=True)]
        rows.append((name, *(1e3 * value for value in (median(all), min(all), max(all))), median(shares), max(shares)))
    columns = ("how", "TTFT ms, P50", "least", "most", "by computing: P50", "worst")
    report.table(f"live: {HELD_TOKENS} tokens held by another engine; medians of {num_rounds} rounds", columns, rows)
    share = rows[1][4]
    name = f"live: TTFT over tcp, by computing {HELD_TOKENS} tokens"
    report.claim(name, round(share, 3), f"at most {LIVE_TARGET:g}", share <= LIVE_TARGET)


async def first_token(engine: Neighbour, begin: Sequence[int], owner: Neighbour | None = None) -> float:
    """Seconds, for a prompt that begins like this and goes on a little, to an engine that has nothing of it."""
    peer = None if owner is None else owner.peer(HELD_TOKENS)
    answer = await engine.ask([*begin, *range(1, OWN_TOKENS + 1)], peer=peer)
    assert answer.cached_tokens == HELD_TOKENS * (owner is not None), answer
    return answer.ttft_s


def main() -> None:
    report = Report("peer_fetch", arguments(__doc__.splitlines()[0]).parse_args())
    asyncio.run(live(report, 2 if report.quick else 20))
    choices(report)
    report.finish()


# -- simulated ---------------------------------------------------------------------------------------------------------


def choices(report: Report) -> None:
    rows, worst, num_fetch = [], 0.0, 0
    cells = QUICK if report.quick else GRID
    for cell in cells:
        fetched, computed, chosen = [seconds(cell, mode) for mode in ("fetch", "compute", "choose")]  # type: ignore[arg-type]
        loss = chosen / min(fetched, computed)
        worst = max(worst, loss)
        num_fetch += fetched < computed
        better = "fetch" if fetched < computed else "compute"
        rows.append((*cell, round(fetched, 3), round(computed, 3), better, round(chosen, 3), round(loss, 3)))
    report.table("simulated", ("MB/s", "tokens", "fetch s", "compute s", "better", "choice s", "choice/better"), rows)
    report.claim("choice, by the better way", round(worst, 3), "at most 1.1", worst <= 1.1)
    share = min(num_fetch, len(cells) - num_fetch) / len(cells)
    report.claim("cells in which the rarer answer is right", round(share, 3), "at least 0.25", share >= 0.25)


if __name__ == "__main__":
    main()
