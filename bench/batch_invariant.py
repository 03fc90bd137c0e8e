"""What does `batch_invariant` cost: the same load with it and without, in turn, A B A B, the ratio round by round.

64 requests of about 128 tokens, answers of about 64, 16 at once, on the real engine in this process. Shoal's own
kernels keep the promise by construction: with them the option only forbids what would break it, and costs nothing.
Where torch computes, every product is padded to one shape and attention goes in tiles of 16 positions; that is shown in
the full form, without a claim.
"""

from __future__ import annotations

from statistics import median
from typing import Any

from common import Report, arguments
from engine import Engine
from shoal.workload import trace
from shoal.workload.arrivals import ClosedLoop
from shoal.workload.lengths import Mix, Uniform

SEQS, MIX = 16, Mix(Uniform(128, 0.5), Uniform(64, 0.5))
MAX_COST = 1.3
CLAIMED = "bfloat16"
FORMS: dict[str, tuple[dict[str, Any], int, int]] = {  # options of both, requests, rounds
    CLAIMED: ({}, 64, 5),
    "int8": ({"quantization": "int8"}, 64, 3),
    "float32": ({"dtype": "float32"}, 32, 3),
    "bfloat16, torch": ({"kernels": "off"}, 32, 3),
}


def main() -> None:
    report = Report("batch_invariant", arguments(__doc__.splitlines()[0]).parse_args())
    forms = {CLAIMED: ({}, 32, 3)} if report.quick else FORMS
    rows, costs = [], {}
    for name, (options, num_requests, num_rounds) in forms.items():
        plain, invariant = rates(options, num_requests, num_rounds)
        ratios = [p / i for p, i in zip(plain, invariant, strict=True)]
        costs[name] = median(ratios)
        rows.append((name, median(plain), median(invariant), median(ratios), min(ratios), max(ratios)))
    columns = ("format", "tokens/s without", "with", "cost", "lowest", "highest")
    report.table(f"{SEQS} at once, 128/64 tokens ± 50 %; medians; cost: without / with", columns, rows)
    report.claim("cost of batch_invariant", round(costs[CLAIMED], 3), f"<= {MAX_COST:g}", costs[CLAIMED] <= MAX_COST)
    report.finish()


def rates(options: dict[str, Any], num_requests: int, num_rounds: int) -> tuple[list[float], list[float]]:
    """Output tokens/s of each round, without the option and with it."""
    load = trace.make(ClosedLoop(SEQS), MIX, num_requests, seed=1)
    engines = [Engine(**options, batch_invariant=wanted, max_num_seqs=SEQS) for wanted in (False, True)]
    for engine in engines:
        engine.serve(trace.make(ClosedLoop(SEQS), MIX, SEQS, seed=2), seed=2)  # what is set up at first use
    rounds = [[engine.serve(load, seed=1).tokens_per_s for engine in engines] for _ in range(num_rounds)]
    return [plain for plain, _ in rounds], [invariant for _, invariant in rounds]


if __name__ == "__main__":
    main()
