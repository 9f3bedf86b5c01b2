"""`kvservice sim`: plays schedules of faults against the production core, and shows what happened in one that fails."""

from __future__ import annotations

import resource
import time
from typing import TYPE_CHECKING

from rich.console import Console

from kvservice.cli.progress import Progress
from kvservice.units import counted

if TYPE_CHECKING:
    from kvservice.testing.sim.schedule import Schedule

NUMBERS = (
    ("blocks stored", "blocks_stored"),
    ("blocks loaded", "blocks_loaded"),
    ("blocks pulled from other nodes", "blocks_pulled"),
    ("loads refused by a check", "loads_failed"),
    ("reads that did not end", "pulls_stuck"),
    ("messages lost", "messages_lost"),
)


def tell(seed: int, *, whole: bool) -> bool:
    """Play one schedule and print its events. Returns whether nothing went wrong. A failing schedule is first reduced,
    unless `whole`."""
    from kvservice.testing.sim.run import minimise, run_schedule
    from kvservice.testing.sim.schedule import make_schedule

    console = Console(highlight=False, soft_wrap=True)
    schedule = make_schedule(seed)
    if not whole and run_schedule(schedule).violation:
        with Console(stderr=True).status("looking for the smallest schedule that still fails"):
            schedule = minimise(schedule)
    outcome = run_schedule(schedule, tell=True)
    console.print(_described(schedule, f", {schedule.engines} engines"))
    for fault in schedule.faults:
        console.print(f"  {fault}", markup=False)
    for line in outcome.story:
        console.print(line, markup=False)
    return _judged(console, outcome.violation, f"nothing went wrong in {outcome.virtual_seconds:.1f} s of virtual time")


def wide(seed: int, nodes: int, *, whole: bool) -> bool:
    """Play one schedule with many nodes, and say what it took. Its events are printed only if `whole`: there are
    hundreds of thousands. Returns whether nothing went wrong."""
    from kvservice.testing.sim.run import run_schedule
    from kvservice.testing.sim.schedule import make_wide_schedule

    console = Console(highlight=False, soft_wrap=True)
    schedule = make_wide_schedule(seed, nodes)
    console.print(_described(schedule, " with an engine each"))
    begun = time.process_time()
    with Console(stderr=True).status(f"playing {nodes} nodes"):
        outcome = run_schedule(schedule, tell=whole)
    for line in outcome.story:
        console.print(line, markup=False)
    for label, name in NUMBERS:
        console.print(f"  {outcome.counters[name]:>10,}  {label}")
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    console.print(
        f"{outcome.virtual_seconds:.1f} s of virtual time took {time.process_time() - begun:.0f} s of a core and "
        f"{memory:.0f} MiB"
    )
    return _judged(console, outcome.violation, "nothing went wrong")


def _described(schedule: Schedule, engines: str) -> str:
    return (
        f"seed {schedule.seed}: {schedule.nodes} nodes of {schedule.slabs * 4} blocks{engines}, "
        f"{counted(schedule.lookups, 'lookup partition')}, {len(schedule.asks)} requests, {len(schedule.faults)} faults"
    )


def _judged(console: Console, violation: str, good: str) -> bool:
    """Print how a schedule ended. Returns whether it ended well."""
    if violation:
        console.print(f"VIOLATION: {violation}", style="bold red", markup=False)
    else:
        console.print(good)
    return not violation


def campaign(seed: int, count: int, processes: int, *, tiers: bool) -> bool:
    """Play `count` schedules from `seed` on; with `tiers`, of those that have disks or an object store. Returns whether
    nothing went wrong."""
    from kvservice.testing.sim.campaign import CampaignTally, run_campaign
    from kvservice.testing.sim.schedule import TIERS_AT, TIERS_EVERY

    console = Console(highlight=False, soft_wrap=True)
    every = TIERS_EVERY if tiers else 1
    first = seed + (TIERS_AT - seed) % every
    with Progress("playing") as progress:

        def show(tally: CampaignTally) -> None:
            progress.update(f"{tally.schedules} of {count} schedules", tally.schedules, count)

        tally = run_campaign(range(first, first + count * every, every), processes, show)
    console.print(f"{tally.schedules} schedules, {tally.virtual_seconds / 3600:.1f} h of virtual time")
    for label, name in NUMBERS:
        console.print(f"  {tally.counters[name]:>10,}  {label}")
    faults = {name: n for name, n in sorted(tally.counters.items()) if name.startswith("fault_")}
    console.print(f"  {sum(faults.values()):>10,}  faults: " + ", ".join(f"{n} {k[6:]}" for k, n in faults.items()))
    if not tally.violations:
        console.print("0 violations")
        return True
    failed, what = min(tally.violations)
    console.print(f"VIOLATION at seed {failed}: {what}", style="bold red", markup=False)
    console.print(f"to see what happened: kvservice sim --seed {failed}")
    return False
