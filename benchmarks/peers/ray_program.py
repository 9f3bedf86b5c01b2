"""Ray's object store as a cache of blocks: put by one process of a node, got by another one, and copied to where an
engine would want it (a get alone moves nothing: it maps). One JSON line at the end."""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np
import ray

HEADROOM = 512 << 20


@ray.remote(num_cpus=1)  # type: ignore[untyped-decorator]
def read(references: list[list[ray.ObjectRef]], size: int, rounds: int) -> float:
    """Median seconds for all blocks."""
    (blocks,) = references
    target = np.zeros((len(blocks), size), dtype=np.uint8)
    seconds = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        for row, block in zip(target, ray.get(blocks), strict=True):
            np.copyto(row, block)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("sizes", type=int, nargs="+")
    parser.add_argument("--total", type=int, required=True)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=options.total + HEADROOM,
        logging_level="ERROR",
        _node_ip_address="127.0.0.1",
    )
    put: dict[int, float] = {}
    got: dict[int, float] = {}
    for size in options.sizes:
        count = options.total // size
        source = np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8)
        started = time.perf_counter()
        references = [ray.put(source) for _ in range(count)]
        put[size] = count * size / (time.perf_counter() - started) / 1e9
        got[size] = count * size / ray.get(read.remote([references], size, options.rounds)) / 1e9
        del references
    print(json.dumps({"put_gb_per_second": put, "own_gb_per_second": got}), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
