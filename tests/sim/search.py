"""`python -m tests.sim.search [WORD] [SCHEDULES]`: the first schedule that finds each planted bug, for its `seed`.

WORD picks the bugs whose name has it; all of them by default. Write the seeds into mutants.py after a change of the
code or the simulator: then a test plays one schedule a bug instead of searching.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor

from kvservice.testing.sim.run import run_schedule
from kvservice.testing.sim.schedule import make_schedule
from tests.sim.mutants import MUTANTS
from tests.sim.mutation import planted

SCHEDULES = 2_000


def search(index: int, schedules: int) -> tuple[str, int, str, float]:
    """(name, seed, violation, seconds of computing); the violation is empty when none was found."""
    mutant, started = MUTANTS[index], time.process_time()
    try:
        with planted(mutant):
            for seed in (mutant.seed, *range(schedules)):
                violation = run_schedule(make_schedule(seed)).violation
                if violation:
                    return mutant.name, seed, violation, time.process_time() - started
    except LookupError as error:
        return str(error), -1, "", 0.0
    return mutant.name, -1, "", time.process_time() - started


def main(arguments: list[str]) -> int:
    word = arguments[0] if arguments else ""
    schedules = int(arguments[1]) if len(arguments) > 1 else SCHEDULES
    chosen = [index for index, mutant in enumerate(MUTANTS) if word in mutant.name]
    survived = 0
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), context) as pool:
        for name, seed, violation, seconds in pool.map(search, chosen, [schedules] * len(chosen)):
            survived += not violation
            print(f"{seed:6}  {seconds:6.1f} s  {name}: {violation[:100] or 'NOT FOUND'}", flush=True)
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
