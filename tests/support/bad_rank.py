"""A rank that fails in its n-th step, as it is told: `python -m tests.support.bad_rank HOW N ARGUMENTS`."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from typing import Any

from shoal.core.plan import StepPlan
from shoal.engine.parallel import rank, runner

HOW, STEP = sys.argv[1], int(sys.argv[2])


class BadRunner(runner.RankRunner):
    num_steps = 0

    def launch(self, plan: StepPlan) -> None:
        self.num_steps += 1
        if self.num_steps == STEP:
            if HOW == "raises":
                raise RuntimeError("out of luck")
            if HOW == "hangs":
                time.sleep(3600)
            if HOW == "drops a request":
                plan = replace(plan, slices=plan.slices[1:])
            if HOW == "skips a sum":
                self._skip_next()
        super().launch(plan)

    def _skip_next(self) -> None:
        comm: Any = self._comms.layer
        real = comm.all_reduce

        def skip(x: Any) -> Any:
            comm.all_reduce = real
            return x

        comm.all_reduce = skip


if __name__ == "__main__":
    runner.RankRunner = BadRunner  # type: ignore[misc]
    rank.main()
