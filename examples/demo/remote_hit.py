"""`make demo`: a remote hit on one machine. Two Ray nodes, a shard on each, two vLLM replicas, one document.

Whatever happens (Ctrl-C, SIGTERM, a failing step), everything that was started is stopped and removed.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from examples.demo.network import Crossing, why_not
from examples.demo.remote_hit_report import CACHE_OFF, Row, save, shortfalls, show
from examples.demo.stage import (
    SERVICE,
    Steps,
    Stops,
    cache_service,
    conclude,
    performance,
    prepared_model,
    ray_cluster,
    running_replica,
    screen,
    shard_numbers,
    shipped_document,
    wait_ready,
)

ANSWER_TOKENS = 24
ANSWER_SECONDS = 300
SETTLE_SECONDS = 20


def run(model: str | None, out: Path, question_count: int) -> None:
    """Run the demo. Raises KVServiceError if a step fails or something was not shown; everything is cleaned up by
    then."""
    console = screen()
    started = time.perf_counter()
    with performance(console) as (stack, stops):
        rows, nodes, crossing = _measure(stack, stops, model, question_count, console)
    show(rows, nodes, crossing, console)
    conclude(console, started, save(rows, nodes, crossing, out), shortfalls(rows))


def _measure(
    stack: contextlib.ExitStack, stops: Stops, model: str | None, question_count: int, console: Console
) -> tuple[list[Row], list[tuple[str, dict[str, Any]]], Crossing]:
    document, questions = shipped_document(question_count)
    steps = stack.enter_context(Steps(console, total=5 + 4 * len(questions)))
    rows: list[Row] = []

    def ask(label: str, replica: Any, number: int, *, with_cache: bool = True) -> None:
        import ray

        steps.begin(f"question {number} to {label}")
        prompt = f"{document}\n\n{questions[number - 1]}"
        answer = ray.get(replica.ask.remote(prompt, ANSWER_TOKENS), timeout=ANSWER_SECONDS)
        rows.append(Row.of(number, label, answer, with_cache=with_cache))
        steps.say(rows[-1].sentence)

    steps.begin("preparing the model")
    folder = prepared_model(model)
    steps.begin("starting a Ray cluster of two nodes")
    with ray_cluster(stops, why_not(folder)) as cluster, cache_service(steps.begin, cluster) as sockets:
        steps.begin("loading the model into two replicas, one on each node")
        with running_replica(folder, cluster.ids[0], sockets[0]) as a:
            with running_replica(folder, cluster.ids[1], sockets[1]) as b:
                wait_ready(a, b)
                for number in range(1, len(questions) + 1):
                    ask("A", a, number)
                _wait_for_announcements()
                for number in range(1, len(questions) + 1):
                    ask("B", b, number)
                _forget(b)
                ask("B, engine emptied", b, 1)
            nodes = list(zip(("A's node", "B's node"), shard_numbers(cluster.ids), strict=True))
            crossing = cluster.crossing()
        steps.begin("loading a replica without the cache on B's node")
        with running_replica(folder, cluster.ids[1], None) as plain:
            wait_ready(plain)
            for number in range(1, len(questions) + 1):
                _forget(plain)
                ask(CACHE_OFF, plain, number, with_cache=False)
        steps.begin("stopping")
    return rows, nodes, crossing


def _forget(replica: Any) -> None:
    import ray

    ray.get(replica.forget.remote(), timeout=60)


def _wait_for_announcements() -> None:
    """Wait until the directory has every block that A's shard sealed. Usually milliseconds, at most seconds."""
    from kvservice.cli.status import collect

    deadline = time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < deadline:
        seen = collect(SERVICE)
        slots = {usage.state: usage.slots for usage in seen.pool.states}
        sealed = slots["sealed"] + slots["leased"]
        known = sum(lookup.keys for lookup in seen.lookups)
        if known >= sealed > 0 and not slots["writing"]:
            return
        time.sleep(0.2)
