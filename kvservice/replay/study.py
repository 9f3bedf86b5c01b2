"""The questions of `kvservice replay` as a list of runs, and their answers as plain figures.

Runs in the calling thread, or in worker processes that share nothing.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from kvservice.errors import InvalidRequest
from kvservice.replay.choice import compare_choices, known_prefixes
from kvservice.replay.cluster import Below, Cluster, Machine, ReplayOutcome
from kvservice.replay.optimum import belady_hits
from kvservice.replay.policies import POLICIES
from kvservice.replay.trace import BLOCK_TOKENS, Trace
from kvservice.signals import mapped

OPTIMUM = "belady"
DEFAULT_POLICIES = ("default", "lru", OPTIMUM)
CAPACITY_SHARES = (128, 32, 16, 8, 4, 1)  # Parts of the blocks of a trace, from room for little to room for everything.
# Bytes a second, from a slow disk to 200 Gbit/s; closest around 1 GB/s, where the decision changes.
LINK_SPEEDS = (0.1e9, 0.25e9, 0.5e9, 0.75e9, 1e9, 1.25e9, 1.5e9, 2e9, 3e9, 6e9, 12e9, 25e9)

SECONDS_A_DAY = 86_400  # Of 24 hours: makers give the endurance of a disk in drive writes a day.
NOTHING_BELOW = Below()


@dataclass(frozen=True, slots=True)
class ReplayRun:
    """One pass over the trace. One node is the ideal case: it has all the room."""

    policy: str
    capacity: int  # blocks, of all nodes together
    nodes: int = 1
    pooled: bool = True
    routing: str = "round-robin"
    below: Below = NOTHING_BELOW

    @property
    def label(self) -> str:
        words = [self.policy]
        if self.nodes > 1:
            words = [f"{self.nodes} nodes", "pooled" if self.pooled else "local only", self.routing]
        if self.below.disk:
            words.append(f"disk of {self.below.disk}, {self.below.disk_write}")
        if self.below.objects:
            words.append(f"object store, {self.below.objects_write}")
        return ", ".join(words)


@dataclass(frozen=True, slots=True)
class Plan:
    capacities: Sequence[int]
    policies: Sequence[str] = DEFAULT_POLICIES
    nodes: int = 8
    cluster_policy: str = "default"
    count_from: int = 0  # requests that only warm the nodes up
    machine: Machine = field(default_factory=Machine)
    below: Sequence[Below] = ()  # tiers to try, each with every capacity

    def runs(self) -> list[ReplayRun]:
        """All runs of the plan. Raises InvalidRequest for an unknown policy."""
        for policy in (*self.policies, self.cluster_policy):
            if policy not in (*POLICIES, OPTIMUM):
                known = ", ".join((*POLICIES, OPTIMUM))
                raise InvalidRequest(f"there is no policy {policy!r}; choose from: {known}")
        found = [ReplayRun(policy, capacity) for capacity in self.capacities for policy in self.policies]
        for capacity in self.capacities if self.nodes > 1 else ():
            if capacity >= self.nodes:
                found += [
                    ReplayRun(self.cluster_policy, capacity, self.nodes, False),
                    ReplayRun(self.cluster_policy, capacity, self.nodes, True),
                    ReplayRun(self.cluster_policy, capacity, self.nodes, True, "kv-aware"),
                ]
        for below in self.below:
            for capacity in self.capacities:
                found.append(ReplayRun(self.cluster_policy, capacity, below=below))
                if self.nodes > 1 and capacity >= self.nodes:
                    found.append(ReplayRun(self.cluster_policy, capacity, self.nodes, below=below))
        return found


def default_capacities(trace: Trace) -> list[int]:
    return sorted({max(trace.unique_count // share, 1) for share in CAPACITY_SHARES})


def play(trace: Trace, run: ReplayRun, plan: Plan, show: Callable[[int], None] | None = None) -> dict[str, float]:
    """Play one run and return its figures. Takes a second to about a minute for 300,000 blocks."""
    if run.policy == OPTIMUM:
        asked = sum(len(request.keys) for request in trace.requests[plan.count_from :])
        return {"hit_rate": belady_hits(trace, run.capacity, plan.count_from) / asked}
    cluster = Cluster(
        run.nodes,
        run.capacity,
        POLICIES[run.policy],
        pooled=run.pooled and run.nodes > 1,
        routing=run.routing,
        machine=plan.machine,
        below=run.below,
    )
    found = cluster.play(trace, plan.count_from, show)
    figures = {"hit_rate": found.hit_rate, "evicted": float(found.evicted)}
    if run.nodes > 1:
        figures |= {
            "local_rate": found.local_hits / found.asked,
            "remote_rate": found.remote_hits / found.asked,
            "busiest_over_mean": found.busiest_share,
            "first_token_seconds": found.first_token_seconds,
        }
    if run.below != NOTHING_BELOW:
        figures |= _below(trace, run, plan, found)
    return figures


def _below(trace: Trace, run: ReplayRun, plan: Plan, found: ReplayOutcome) -> dict[str, float]:
    """What the tiers found, and what was written for it. Bytes a day are those of the requests that were counted, gone
    on for a day; drive writes are of a disk of exactly this size."""
    days = (trace.requests[-1].at - trace.requests[plan.count_from].at) / SECONDS_A_DAY
    block_bytes = plan.machine.speeds.block_bytes
    figures = {"local_rate": found.local_hits / found.asked, "remote_rate": found.remote_hits / found.asked}
    for name, size, hits, written in (
        ("disk", run.below.disk, found.disk_hits, found.disk_written),
        ("objects", run.below.objects, found.objects_hits, found.objects_written),
    ):
        if size:
            figures |= {
                f"{name}_rate": hits / found.asked,
                f"{name}_read_bytes": float(hits * block_bytes),
                f"{name}_written_bytes": float(written * block_bytes),
                f"{name}_written_bytes_a_day": written * block_bytes / days if days else 0.0,
            }
    if run.below.disk:
        figures["drive_writes_a_day"] = found.disk_written / run.below.disk / days if days else 0.0
    return figures


def play_all(
    trace: Trace,
    plan: Plan,
    processes: int = 1,
    show: Callable[[float], None] | None = None,
    runs: Sequence[ReplayRun] | None = None,
) -> list[tuple[ReplayRun, dict[str, float]]]:
    """Play all runs of the plan, or these, and return them in this order. `show` gets the number of runs done, with
    fractions."""
    runs = plan.runs() if runs is None else runs
    found: list[tuple[ReplayRun, dict[str, float]]] = []
    for done, (run, figures) in enumerate(_played(trace, plan, runs, processes, show)):
        found.append((run, figures))
        if show is not None:
            show(done + 1)
    return found


def _played(
    trace: Trace, plan: Plan, runs: Sequence[ReplayRun], processes: int, show: Callable[[float], None] | None
) -> Iterator[tuple[ReplayRun, dict[str, float]]]:
    if processes == 1:
        for done, run in enumerate(runs):
            yield run, play(trace, run, plan, None if show is None else partial(_show_part, show, trace, done))
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, initializer=_start_process, initargs=(trace, plan)) as pool:
        yield from zip(runs, mapped(pool, _play_here, runs), strict=True)


def _show_part(show: Callable[[float], None], trace: Trace, done: int, requests: int) -> None:
    show(done + requests / len(trace.requests))


_here: list[tuple[Trace, Plan]] = []  # what a worker process plays; the trace is sent to it once


def _start_process(trace: Trace, plan: Plan) -> None:
    os.nice(19)
    _here.append((trace, plan))


def _play_here(run: ReplayRun) -> dict[str, float]:
    trace, plan = _here[0]
    return play(trace, run, plan)


def choices(trace: Trace, machine: Machine) -> list[dict[str, float]]:
    """Compare fetch or recompute with the oracle, one row per link speed."""
    prefixes = known_prefixes(trace)
    rows: list[dict[str, float]] = []
    for speed in LINK_SPEEDS:
        found = compare_choices(
            prefixes,
            speed,
            machine.link.overhead_seconds,
            machine.token_bytes * BLOCK_TOKENS,
            machine.prefill_tokens_per_second,
        )
        rows.append(
            {
                "link_bytes_per_second": speed,
                "decisions": found.decisions,
                "differ_share": found.differ_share,
                "lost_share": found.lost_share,
                "always_lost_share": found.always_seconds / found.oracle_seconds - 1 if found.oracle_seconds else 0.0,
                "never_lost_share": found.never_seconds / found.oracle_seconds - 1 if found.oracle_seconds else 0.0,
            }
        )
    return rows


def report(trace: Trace, plan: Plan, found: list[tuple[ReplayRun, dict[str, float]]]) -> dict[str, object]:
    """All results under stable names, for JSON."""
    return {
        "trace": trace.name,
        "requests": len(trace.requests),
        "blocks": trace.block_count,
        "unique_blocks": trace.unique_count,
        "seconds": trace.seconds,
        "hit_rate_max": trace.hit_rate_max,
        "counted_from_request": plan.count_from,
        "runs": [
            {
                "label": run.label,
                "policy": run.policy,
                "capacity": run.capacity,
                "nodes": run.nodes,
                "pooled": run.pooled,
                "routing": run.routing,
                "disk": run.below.disk,
                "disk_write": run.below.disk_write,
                "objects": run.below.objects,
                "objects_write": run.below.objects_write,
                **{name: round(value, 6) for name, value in figures.items()},
            }
            for run, figures in found
        ],
        "block_bytes": plan.machine.speeds.block_bytes,
        "fetch_or_recompute": [
            {name: round(value, 6) for name, value in row.items()} for row in choices(trace, plan.machine)
        ],
    }
