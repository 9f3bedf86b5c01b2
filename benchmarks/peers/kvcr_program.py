"""NVIDIA's KV Cache Runner (KVCR) on one node without a GPU. Runs beside .venv, without kvservice. One JSON line at the
end.

`deposit` copies blocks from an engine's memory into its local DRAM, `deliver` copies them back, both by NIXL in one
process; `query` says where keys are. It asserts that what comes back is what was stored.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np
from kvcr.api import KVCR, KVCRBindings
from kvcr.config import KVCRBackendConfigs, KVCRConfig, LocalDramOptions
from kvcr.types import BlockKey, MemoryRef, OpEntryStatus, RegionDescriptor

LOOKUP_KEYS = (1, 64, 512, 2048, 8192)
LOOKED_UP_BYTES = 64  # of a block that is only asked for
AGENT = "bench"
Refs = dict[BlockKey, list[MemoryRef]]


class Runner:
    """An engine's memory of so many blocks, and a KVCR with room for them all."""

    def __init__(self, size: int, count: int, port: int) -> None:
        self.engine = np.random.default_rng(1).integers(0, 256, (count, size), np.uint8)
        self._pool = np.zeros((count + 8) * size, np.uint8)
        self.keys = [BlockKey(number.to_bytes(32, "little")) for number in range(count)]
        self.blocks: Refs = {
            key: [MemoryRef(end_point_name=AGENT, label="kv", element_index=number)]
            for number, key in enumerate(self.keys)
        }
        region = RegionDescriptor(addr=self.engine.ctypes.data, count=count, size=size, label="kv")
        pools = LocalDramOptions([("kv", self._pool.ctypes.data, self._pool.nbytes)])
        self.kvcr = KVCR(
            KVCRConfig(
                AGENT, [("kv", size)], operation_timeout_ms=60_000, abandon_timeout_ms=120_000, nixl_listen_port=port
            ),
            KVCRBindings(request_pin=lambda keys: 0, poll_pin_results=list, release_pin=lambda handle: True),
            KVCRBackendConfigs(framework_regions=[region], local_dram=pools),
        )

    def timed(self, begin: Callable[[Refs], int], blocks: Refs) -> float:
        """Seconds until every block of the operation has succeeded."""
        started = time.perf_counter()
        operation = begin(blocks)
        while True:
            for handle, entries in self.kvcr.poll_completed():
                taken = time.perf_counter() - started
                assert handle == operation
                assert all(entry.status is OpEntryStatus.SUCCESS for entry in entries.values())
                return taken


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("sizes", type=int, nargs="+")
    parser.add_argument("--total", type=int, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--keys", type=int, default=100_000)
    parser.add_argument("--calls", type=int, default=100)
    options = parser.parse_args()
    put, get = {}, {}
    for size in options.sizes:
        runner = Runner(size, options.total // size, options.port)
        stored = runner.engine.copy()
        put[size] = stored.nbytes / runner.timed(runner.kvcr.deposit, runner.blocks) / 1e9
        runner.engine[:] = 0
        times = [runner.timed(runner.kvcr.deliver, runner.blocks) for _ in range(options.rounds)]
        assert (runner.engine == stored).all()
        get[size] = stored.nbytes / statistics.median(times) / 1e9
        runner.kvcr.close()
    looked_up = lookups(options.keys, options.calls, options.port)
    print(json.dumps({"put_gb_per_second": put, "get_gb_per_second": get, "lookup": looked_up}), flush=True)


def lookups(known: int, calls: int, port: int) -> dict[int, dict[str, float]]:
    """Milliseconds of `query`, in the process that holds the blocks."""
    runner = Runner(LOOKED_UP_BYTES, known, port)
    for begin in range(0, known, 10_000):
        runner.timed(runner.kvcr.deposit, {key: runner.blocks[key] for key in runner.keys[begin : begin + 10_000]})
    found = {}
    for count in LOOKUP_KEYS:
        seconds = []
        for call in range(calls):
            begin = call * 7919 % (known - count + 1)
            asked = runner.keys[begin : begin + count]
            started = time.perf_counter()
            states = runner.kvcr.query(asked)
            seconds.append(time.perf_counter() - started)
            assert all(status.name == "HIT" for status, _ in states)
        seconds.sort()
        found[count] = {"p50_ms": 1e3 * statistics.median(seconds), "p99_ms": 1e3 * seconds[int(0.99 * len(seconds))]}
    runner.kvcr.close()
    return found


if __name__ == "__main__":
    main()
