"""Which order of eviction finds most of what is asked for again? Hit rates in tokens, beside the best that is possible.

The real prefix index and block pool are driven through the lives of requests: a prompt is looked up and gets blocks,
each block of its answer gets one when its turn comes, and the table is released from its end. Arrivals, lengths and
pauses are the trace's own, so all orders see the same prompts at the same times. One token of the index stands for a
whole block of 16. The optimum gives up what is asked for again last (Belady), from a prefix's end, which no order that
cannot see what comes can reach.

chat    conversations of people. 41 % go on after the first answer, and 3.7 % have more than ten turns (WildChat: Zhao
        et al., ICLR 2024; here each later turn is followed by another with 75 %), messages and answers as there: means
        of 296 and 441 tokens, with long tails. A pause is the time to read some of the answer (238 words a minute,
        Brysbaert 2019) and to type the next message (about 50 words a minute, Dhakal et al., CHI 2018); in three of ten
        someone leaves, half of them for more than 15 minutes, so that about 80 % of pauses are under ten minutes, as in
        a large service (Wang et al., USENIX ATC 2025)
pauses  the same conversations with pauses that have no usual length: log-normal, 80 % under ten minutes. The longer
        nobody came back, the less likely it is that anyone will, which is what lru assumes
agents  tasks of some twelve steps behind one of four system prompts of 3,000 to 8,000 tokens: a tool's answer of some
        400 tokens, a call of some 80. Tools mostly take a second or two, one call in seven some minutes
scan    questions about 400 documents of 1,500 to 6,000 tokens, some asked about far more than others (Zipf, 0.8), and
        among them prompts of 4,000 to 12,000 tokens that nobody asks again: one of three requests

A working set are the blocks that were used and will be used again, on average over time; the pool has a share of it
beside what running requests hold.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from random import Random
from typing import NamedTuple

from common import Report, arguments
from shoal.core.kv.blocks import BlockPool
from shoal.core.kv.evict import ORDERS, Order
from shoal.core.kv.prefix import Chain, Entry, PrefixIndex

BLOCK_TOKENS = 16
TPOT_S, TTFT_S = 0.03, 0.5
WARM_UP = 0.2  # of the requests; not counted
SHARES = (0.25, 0.5, 1.0)  # of the working set
GAIN = 1.10
TITLE = "prompt tokens found in the pool"
MOST_BLOCKS = 1500  # of a conversation

Blocks = tuple[int, ...]  # their contents


class Visit(NamedTuple):
    start_s: float
    end_s: float
    prompt: Blocks
    answer: Blocks


# -- traces ------------------------------------------------------------------------------------------------------------


class Author:
    """Writes requests, whose every new block is like no other."""

    def __init__(self, seed: int) -> None:
        self.chance = Random(seed)
        self.visits: list[Visit] = []
        self._next = count()

    def text(self, num_tokens: float) -> Blocks:
        return tuple(next(self._next) for _ in range(max(1, round(num_tokens / BLOCK_TOKENS))))

    def around(self, median: float, sigma: float, most: float = 1e9) -> float:
        return min(most, self.chance.lognormvariate(math.log(median), sigma))

    def visit(self, start_s: float, prompt: Blocks, answer_tokens: float) -> Visit:
        answer = self.text(answer_tokens)
        visit = Visit(start_s, start_s + TTFT_S + len(answer) * BLOCK_TOKENS * TPOT_S, prompt, answer)
        self.visits.append(visit)
        return visit

    def arrivals(self, num: int, rate_per_s: float) -> Iterator[float]:
        now_s = 0.0
        for _ in range(num):
            now_s += self.chance.expovariate(rate_per_s)
            yield now_s

    def until(self, end_s: float) -> list[Visit]:
        return sorted(visit for visit in self.visits if visit.start_s < end_s)


def conversations(author: Author, num: int, rate_per_s: float, pause_s: Callable[[float, float], float]) -> list[Visit]:
    """`pause_s(tokens of the answer, of the next message)`."""
    system = author.text(320)
    start_s = 0.0
    for start_s in author.arrivals(num, rate_per_s):
        now_s, history, goes_on = start_s, system, 0.41
        ask_tokens = author.around(100, 1.4, 8000)
        while True:
            history += author.text(ask_tokens)
            answer_tokens = author.around(300, 0.9, 2000)
            visit = author.visit(now_s, history, answer_tokens)
            history += visit.answer
            if author.chance.random() >= goes_on or len(history) > MOST_BLOCKS:
                break
            goes_on, ask_tokens = 0.75, author.around(100, 1.4, 8000)
            now_s = visit.end_s + pause_s(answer_tokens, ask_tokens)
    return author.until(start_s)


def chat(scale: float, seed: int) -> list[Visit]:
    author = Author(seed)

    def pause_s(answer_tokens: float, ask_tokens: float) -> float:
        if author.chance.random() < 0.3:
            return author.around(900, 1.0)
        reading_s = answer_tokens / 5.3 * author.chance.uniform(0.2, 1.0)
        typing_s = min(ask_tokens, 100) / 1.1  # the rest was pasted
        return 3 + (reading_s + typing_s) * author.around(1, 0.4)

    return conversations(author, round(4000 * scale), 2.0, pause_s)


def pauses(scale: float, seed: int) -> list[Visit]:
    author = Author(seed)
    return conversations(author, round(4000 * scale), 1.0, lambda *_: author.around(170, 1.5))


def agents(scale: float, seed: int) -> list[Visit]:
    author = Author(seed)
    systems = [author.text(num_tokens) for num_tokens in (4000, 6000, 8000, 3000)]
    start_s = 0.0
    for start_s in author.arrivals(round(700 * scale), 0.3):
        now_s, (history,) = start_s, author.chance.choices(systems, (8, 4, 2, 1))
        new_tokens = author.around(300, 0.8, 3000)
        while True:
            history += author.text(new_tokens)
            visit = author.visit(now_s, history, author.around(80, 0.8, 1000))
            history += visit.answer
            if author.chance.random() < 1 / 12 or len(history) > MOST_BLOCKS:
                break
            new_tokens = author.around(400, 1.0, 6000)
            now_s = visit.end_s + (author.around(1.3, 1.3) if author.chance.random() < 0.85 else author.around(50, 1.4))
    return author.until(start_s)


def scan(scale: float, seed: int) -> list[Visit]:
    author = Author(seed)
    documents = [author.text(author.chance.uniform(1500, 6000)) for _ in range(400)]
    weights = [(place + 1) ** -0.8 for place in range(len(documents))]
    for start_s in author.arrivals(round(5000 * scale), 2.0):
        if author.chance.random() < 1 / 3:
            prompt = author.text(author.chance.uniform(4000, 12_000))
        else:
            (document,) = author.chance.choices(documents, weights)
            prompt = document + author.text(author.around(60, 0.8, 500))
        author.visit(start_s, prompt, author.around(100, 0.8, 1000))
    return author.until(math.inf)


TRACES = {"chat": chat, "pauses": pauses, "agents": agents, "scan": scan}


def needs(visits: list[Visit]) -> tuple[float, int]:
    """Blocks of the working set, and most that running requests hold."""
    left_s: dict[int, float] = {}
    block_s = 0.0
    for visit in visits:
        for block in visit.prompt:
            if block in left_s:
                block_s += max(0.0, visit.start_s - left_s[block])
        left_s.update(dict.fromkeys(visit.prompt + visit.answer, visit.end_s))
    num_held = most = 0
    steps = [(visit.start_s, len(visit.prompt) + len(visit.answer)) for visit in visits]
    steps += [(visit.end_s, -len(visit.prompt) - len(visit.answer)) for visit in visits]
    for _, num in sorted(steps):
        num_held += num
        most = max(most, num_held)
    return block_s / visits[-1].start_s, most


# -- the pool ----------------------------------------------------------------------------------------------------------


class Optimum:
    """Belady: what is asked for again last goes first. Of one prefix, its end was added first."""

    def __init__(self, visits: list[Visit]) -> None:
        self.now = -1  # number of the newest visit
        self._asked: dict[int, list[int]] = {}  # by content, the visits that ask for it
        for number, visit in enumerate(visits):
            for block in visit.prompt:
                self._asked.setdefault(block, []).append(number)
        self._heap: list[tuple[int, int, Entry]] = []
        self._added: dict[Entry, int] = {}
        self._number = count()

    def __len__(self) -> int:
        return len(self._added)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._added)

    def add(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            asked = self._asked.get(entry.tokens[0], [])
            place = bisect_right(asked, self.now)
            number = self._added[entry] = next(self._number)
            heapq.heappush(self._heap, (-asked[place] if place < len(asked) else -(1 << 60), number, entry))

    def found(self, entries: Sequence[Entry], cached: Sequence[Entry], beyond: Sequence[bytes]) -> None:
        self.remove(cached)

    def remove(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            del self._added[entry]

    def pop(self) -> Entry:
        while True:
            _, number, entry = heapq.heappop(self._heap)
            if self._added.get(entry) == number:
                del self._added[entry]
                return entry


class Life(NamedTuple):
    links: Chain
    tokens: list[int]
    table: list[int]


def hit_rate(visits: list[Visit], num_blocks: int, order: Order) -> float:
    """Of the prompts' tokens."""
    index = PrefixIndex(1)
    pool = BlockPool(num_blocks, index, order)
    lives: dict[int, Life] = {}
    num_asked = num_hit = 0
    for _, number, step in events(visits):
        visit = visits[number]
        if step == 0:
            if isinstance(order, Optimum):
                order.now = number
            life = lives[number] = Life(Chain(b""), list(visit.prompt), [])
            most = len(visit.prompt) - 1
            hits = index.match(life.links, life.tokens, most)
            life.table.extend(pool.acquire(hits, life.links.beyond_hits(life.tokens, 1, most)))
            life.table.extend(pool.allocate(len(visit.prompt) - len(hits)))
            if number >= WARM_UP * len(visits):
                num_asked += len(visit.prompt)
                num_hit += len(hits)
            life.links.adopt(hits)
            index.extend(life.links, life.tokens, life.table, len(life.tokens))
        elif step <= len(visit.answer):
            life = lives[number]
            life.tokens.append(visit.answer[step - 1])
            life.table.extend(pool.allocate(1))
            index.extend(life.links, life.tokens, life.table, len(life.tokens))
        else:
            pool.release(lives.pop(number).table)
    return num_hit / num_asked


def events(visits: list[Visit]) -> list[tuple[float, int, int]]:
    """Time, number of the visit and step: 0 at its start, each block of its answer, and its end."""
    found = []
    for number, visit in enumerate(visits):
        last = len(visit.answer) + 1
        takes_s = visit.end_s - visit.start_s
        found += [(visit.start_s + takes_s * step / last, number, step) for step in range(last + 1)]
    return sorted(found)


# -- the bench ---------------------------------------------------------------------------------------------------------


def main() -> None:
    report = Report("eviction", arguments(__doc__.splitlines()[0]).parse_args())
    scale, shares = (0.25, SHARES[1:2]) if report.quick else (0.5, SHARES)
    columns = ("trace", "requests", "pool / set", "blocks", *(f"{name} %" for name in (*ORDERS, "optimum")),
               "lookahead / lru")  # fmt: skip
    rows = []
    for name, trace in TRACES.items():
        visits = trace(scale, 1)
        working, most = needs(visits)
        gains = []
        for share in shares:
            num_blocks = most + round(share * working)
            rates = {order: hit_rate(visits, num_blocks, make(num_blocks)) for order, make in ORDERS.items()}
            rates["optimum"] = hit_rate(visits, num_blocks, Optimum(visits))
            gains.append(rates["lookahead"] / rates["lru"])
            rows.append((name, len(visits), share, num_blocks, *(100 * rate for rate in rates.values()), gains[-1]))
            report.keep(TITLE, columns, rows)
            report.save()
        # A short trace ends before the lead of a few conversations can be told from chance.
        least, worst = GAIN if name == "chat" and not report.quick else 1.0, round(min(gains), 3)
        report.claim(f"{name}: hits, lookahead / lru, worst size", worst, f">= {least}", worst >= least)
    report.table(TITLE, columns, rows)
    report.finish()


if __name__ == "__main__":
    main()
