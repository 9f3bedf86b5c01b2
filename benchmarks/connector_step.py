"""What the connector costs the engine's scheduler thread in a step, by running requests and by blocks that it fills.

    python -m benchmarks.connector_step [--before CHECKOUT] [--rounds 5] [--out PATH]

Every request decodes one token a step. Timed is what vLLM waits for in its scheduler: the report of a step before, the
walk over what vLLM hands over, and the plan of the step; by the production code with a real session, whose pool answers
from its own thread between the steps. Copies are reported two steps later. With `--before`, the same is measured in
another checkout of the project (a git worktree of an older commit), in alternating rounds, each in a process of its
own. A figure is the best round's median; the 99th percentile is that of the same round.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import subprocess
import sys
import time
import uuid
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

BLOCK = 16
RUNNING = (16, 64, 256, 1024)
CHANGES = 64  # requests that fill a block in the same step, at the most
STEPS = 96  # six blocks of every request
WARM_UP = 2 * BLOCK  # steps: prompts are stored, and the stock has its size
PAUSE_SECONDS = 0.004  # between steps, for the session's thread; an engine computes meanwhile
WAYS = ("nothing", "one in 16", "64 changes")


class Pins:
    """References on the engine's blocks, as vLLM's pool counts them."""

    def __init__(self, count: int) -> None:
        self.references = [0] * count

    def pin(self, block_ids: Any) -> None:
        for block_id in block_ids:
            self.references[block_id] += 1

    def unpin(self, block_ids: Any) -> None:
        for block_id in block_ids:
            self.references[block_id] -= 1

    def forget(self, block_ids: Any) -> None: ...

    def free_share(self) -> float:
        return 1.0


class Request:
    """What the connector reads of vLLM's request, and its block ids."""

    lora_request = None

    def __init__(self, number: int, begin: int, total_blocks: int) -> None:
        self.request_id = f"cmpl-{number:08d}"
        self.all_hashes = [f"{number:07d}-{i:08d}".encode().ljust(32) for i in range(total_blocks)]
        self.num_computed_tokens = begin
        self.block_hashes = self.all_hashes[: begin // BLOCK]
        self.block_ids = (list(range(number * total_blocks, (number + 1) * total_blocks)),)


def phase_of(number: int, count: int, way: str) -> int:
    """At which step, modulo a block, this request fills one."""
    if way == "one in 16":
        return number % BLOCK
    return BLOCK - 1 if way == "nothing" else number // CHANGES % BLOCK


def everybody(live: dict[str, Request], output: Any) -> Iterator[tuple[str, Any, int, Any]]:
    """The walk over all requests of a step, as it was before only those that are due were looked at."""
    state, cached = output.kv_connector_block_state, output.scheduled_cached_reqs
    computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    for request_id, tokens in output.num_scheduled_tokens.items():
        request = live.get(request_id)
        if request is not None:
            ids = functools.partial(lambda name: state.get_block_ids(name)[0], request_id)
            yield request_id, request.block_hashes, computed[request_id] + tokens, ids


class Engine:
    """An engine's scheduler thread around the connector's scheduler half."""

    def __init__(self, count: int, way: str) -> None:
        from kvservice.connector.plan import PoolInfo
        from kvservice.connector.scheduler.half import SchedulerHalf
        from kvservice.connector.scheduler.request_terms import RequestTerms
        from kvservice.core.block.fingerprint import Fingerprint
        from kvservice.core.block.keys import block_keys
        from kvservice.core.messages import EngineSpec
        from kvservice.core.segment.geometry import plan_geometry
        from kvservice.core.segment.layout import SlotLayout
        from kvservice.session.session import Session
        from kvservice.testing.fake_pool import FakePool

        layout = SlotLayout(layer_count=1, kv_head_count=1, cell_bytes=64, block_tokens=BLOCK)
        spec = EngineSpec(b"e" * 16, "m", Fingerprint.of({"model": "m"}), layout)
        self.path = Path(f"/dev/shm/kvservice-bench{uuid.uuid4().hex[:8]}-n")
        pool = FakePool(self.path, plan_geometry(128 << 20))

        async def open_pool() -> Any:
            return pool

        self.session = Session(open_pool, spec, lambda: True, 8 * CHANGES)
        self.half = SchedulerHalf(
            self.session,
            functools.partial(block_keys, spec.fingerprint.digest),
            lambda attachment: PoolInfo.of(attachment, layout, spec.engine_id),
            block_tokens=BLOCK,
            worker_count=1,
            fetch_timeout_seconds=2.0,
        )
        total = 4 + (WARM_UP + STEPS) // BLOCK
        self.half.pin_with(Pins(count * total))
        self.session.start(10.0)
        self.live = {}
        for number in range(count):
            request = Request(number, 2 * BLOCK - 1 - phase_of(number, count, way), total)
            self.live[request.request_id] = request
            self.half.on_new_request(request.request_id, request.block_hashes, 0.0, terms=RequestTerms(may_load=False))
            self.half.allocated(request.request_id, request.block_ids[0], 0)
        try:
            from kvservice.connector.cache_groups import OneGroup
            from kvservice.connector.vllm.walk import StepWalk
        except ImportError:
            self.walk = None
        else:
            self.walk = StepWalk(self.live, BLOCK, OneGroup())  # type: ignore[arg-type]
        self.reports: deque[Any] = deque()

    def step(self, number: int) -> tuple[float, float, int]:
        """(seconds, seconds of the thread's processor time, blocks that were planned) of one step."""
        from kvservice.connector.plan import StepPlan, StepReport

        cached = [] if number == 0 else list(self.live.values())
        output: Any = SimpleNamespace(  # vLLM makes these whether or not anybody looks
            num_scheduled_tokens=dict.fromkeys(self.live, 1),
            total_num_scheduled_tokens=len(self.live),
            scheduled_new_reqs=[] if cached else [_new(request) for request in self.live.values()],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[request.request_id for request in cached],
                num_computed_tokens=[request.num_computed_tokens for request in cached],
                resumed_req_ids=set(),
            ),
            kv_connector_block_state=SimpleNamespace(get_block_ids=lambda name: self.live[name].block_ids),
            preempted_req_ids=None,
        )
        for request in self.live.values():
            if (request.num_computed_tokens + 1) % BLOCK == 0:
                request.block_hashes.append(request.all_hashes[len(request.block_hashes)])
        began, busy = time.perf_counter(), time.thread_time()
        now = time.monotonic()
        if len(self.reports) > 1:
            self.half.reported(self.reports.popleft())
        plan = StepPlan()
        self.half.begin_step(plan, now)
        if self.walk is None:
            self.half.plan_stores(plan, everybody(self.live, output))
        else:
            self.walk.plan_stores(self.half, plan, output)
        self.half.has_pending_work(now)
        seconds, busy = time.perf_counter() - began, time.thread_time() - busy
        for request in self.live.values():
            request.num_computed_tokens += 1
        self.reports.append(StepReport(stored={store.store_id: 1 for store in plan.stores}))
        return seconds, busy, sum(len(store.entries) for store in plan.stores)

    def close(self) -> None:
        self.session.close()
        self.path.unlink(missing_ok=True)


def _new(request: Request) -> Any:
    return SimpleNamespace(req_id=request.request_id, num_computed_tokens=request.num_computed_tokens)


def one_round(count: int, way: str) -> dict[str, float]:
    """Median and 99th percentile, in microseconds, of the steps that change what `way` says."""
    engine, wanted = Engine(count, way), {"nothing": 0, "one in 16": count // BLOCK, "64 changes": min(count, CHANGES)}
    samples, busy = [], []
    gc.collect()
    gc.disable()  # vLLM freezes its objects; what a collection costs is another benchmark's question
    for number in range(WARM_UP + STEPS):
        seconds, cpu_seconds, planned = engine.step(number)
        if number >= WARM_UP and planned == wanted[way]:
            samples.append(1e6 * seconds)
            busy.append(1e6 * cpu_seconds)
        time.sleep(PAUSE_SECONDS)
    engine.close()
    samples.sort()
    assert len(samples) >= STEPS // BLOCK // 2, f"{len(samples)} steps with {wanted[way]} changes"
    return {
        "p50_us": samples[len(samples) // 2],
        "p99_us": samples[int(len(samples) * 0.99)],
        "cpu_us": sorted(busy)[len(busy) // 2],
        "steps": len(samples),
    }


def child(tree: Path, count: int, way: str) -> dict[str, float]:
    """One round in a process of its own, with the code of this checkout."""
    command = [sys.executable, str(Path(__file__).resolve()), "--one", str(count), way]
    done = subprocess.run(
        command, cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="another checkout, to measure in the same run")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--running", type=int, nargs="+", default=list(RUNNING))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", nargs=2, metavar=("RUNNING", "WAY"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one_round(int(options.one[0]), options.one[1])))
        return
    from benchmarks.report import ROOT, print_table, write_report

    trees = {"now": ROOT} | ({} if options.before is None else {"before": options.before.resolve()})
    figures: dict[str, Any] = {}
    rows = []
    for count in options.running:
        for way in WAYS:
            if way == "64 changes" and count < CHANGES:
                continue
            rounds: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
            for _ in range(options.rounds):
                for name, tree in trees.items():
                    rounds[name].append(child(tree, count, way))
            best = {name: min(found, key=lambda one: one["p50_us"]) for name, found in rounds.items()}
            figures[f"{count} running, {way}"] = {**best["now"], "rounds": rounds}
            now, before = best["now"], best.get("before")
            ratio = f"{before['p50_us'] / now['p50_us']:.1f}" if before else "-"
            rows.append(
                [f"{count}, {way}", *(f"{now[k]:.0f}" for k in ("p50_us", "p99_us")), ratio]
                + ([f"{before[k]:.0f}" for k in ("p50_us", "p99_us")] if before else [])
            )
            if before:
                figures[f"{count} running, {way}"]["before_over_now"] = before["p50_us"] / now["p50_us"]
    headings = ["running, step", "p50 µs", "p99 µs", "before ÷ now"]
    print_table(headings + (["before p50", "before p99"] if options.before else []), rows)
    print("written", write_report("connector_step", figures, options.out))


if __name__ == "__main__":
    main()
