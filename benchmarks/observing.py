"""What watching costs: histograms, request names and spans, per call and per acquire over the Unix socket.

    python -m benchmarks.observing [--out PATH]

A call is timed in loops, and the fastest loop counts: other programs of the machine only ever make one slower. The
acquires are local hits of 128 blocks at a shard in a process of its own. Rounds with traces off and on alternate.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
import timeit
from collections.abc import Callable
from pathlib import Path

from benchmarks.report import default_out, percentile, print_table, write_report
from kvservice.client.shard import ShardClient
from kvservice.core.messages import AcquireRequest, EngineSpec, SealItem
from kvservice.memory.segment import Segment
from kvservice.observe import logs, tracing
from kvservice.observe.timings import Timings
from kvservice.testing.builders import make_chain, make_spec
from kvservice.testing.cluster import LocalCluster
from kvservice.units import BlockKey, SpanRoute

LOOPS, CALLS = 15, 5_000
BLOCKS, ROUNDS, ACQUIRES = 128, 6, 200
REQUEST = "chatcmpl-0af7651916cd43dd8448eb211c80319c"


def per_call_us(call: Callable[[], object]) -> float:
    """Microseconds of one call, in the fastest of LOOPS loops."""
    return min(timeit.repeat(call, number=CALLS, repeat=LOOPS)) / CALLS * 1e6


def enter(make: Callable[[], object]) -> Callable[[], None]:
    def call() -> None:
        with make():  # type: ignore[attr-defined]
            pass

    return call


def calls() -> dict[str, float]:
    timings = Timings()
    found = {
        "histogram": per_call_us(lambda: timings.add("seal_seconds", 0.001)),
        "histogram with an exemplar": per_call_us(lambda: timings.add("acquire_seconds", 0.001, "local", REQUEST)),
        "name of the request for logs": per_call_us(enter(lambda: logs.about(REQUEST))),
        "traces off: a span": per_call_us(enter(lambda: tracing.span("resolve", blocks=1))),
        "traces off: metadata of a call": per_call_us(tracing.metadata),
        "traces off: a call that is served": per_call_us(enter(lambda: tracing.served_span("Acquire", tuple))),
    }
    tracing.start("file:/dev/null", "kvservice-benchmark")
    found["traces on: a span of a request"] = per_call_us(enter(lambda: tracing.request_span("acquire", asked=1)))
    tracing.stop()
    return found


async def acquires(socket: str) -> dict[str, list[float]]:
    """Microseconds of each acquire, by whether its engine traces it."""
    pool, spec = ShardClient(socket), make_spec()
    spec = EngineSpec(os.urandom(16), spec.model, spec.fingerprint, spec.layout)
    attachment = await pool.attach(spec, lambda reason: None)
    keys = make_chain(BLOCKS)
    await store(pool, attachment, keys, spec.layout.payload_bytes)
    took: dict[str, list[float]] = {"off": [], "on": []}
    for _ in range(ROUNDS):
        for way in ("off", "on"):
            if way == "on":
                tracing.start("file:/dev/null", "kvservice-benchmark")
            for number in range(ACQUIRES):
                wanted = AcquireRequest(keys, 0, 5.0, request_id=str(number))
                began = time.perf_counter()
                with tracing.request_span("acquire", request_id=REQUEST):
                    result = await pool.acquire(attachment.attachment_id, wanted)
                took[way].append((time.perf_counter() - began) * 1e6)
                assert len(result.blocks) == BLOCKS
                await pool.release(attachment.attachment_id, [result.lease_id])
            tracing.stop()
    await pool.close()
    return took


async def store(pool: ShardClient, attachment: object, keys: tuple[BlockKey, ...], payload_bytes: int) -> None:
    segment = Segment.attach(Path(attachment.segment_path), attachment.geometry)  # type: ignore[attr-defined]
    items = []
    for position, ref in enumerate(await pool.reserve(attachment.attachment_id, len(keys))):  # type: ignore[attr-defined]
        segment.payload(ref.slot, payload_bytes)[:] = bytes(payload_bytes)
        parent = keys[position - 1] if position else None
        items.append(SealItem(ref, keys[position], parent, position, SpanRoute(0)))
    await pool.seal(attachment.attachment_id, items)  # type: ignore[attr-defined]
    segment.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=default_out("observing"))
    arguments = parser.parse_args()
    each = calls()
    with tempfile.TemporaryDirectory() as folder:
        environment = {"KVSERVICE_TRACES": f"file:{folder}/spans"}
        with LocalCluster(1, 1, environment=environment) as cluster:
            took = asyncio.run(acquires(cluster.socket("n0")))
    whole = {way: {"p10_us": percentile(found, 0.1), "p50_us": percentile(found, 0.5)} for way, found in took.items()}
    print_table(["one call", "us"], list(each.items()))
    print_table(["an acquire, traces", "p10 us", "p50 us"], [[way, *found.values()] for way, found in whole.items()])
    print(write_report("observing", {"calls_us": each, "acquire_of_128_blocks": whole}, arguments.out))


if __name__ == "__main__":
    main()
