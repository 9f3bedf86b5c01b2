"""Put a prompt at one node and get it at another: the blocks cross from shard to shard.

    python two_nodes.py

Starts a service of two nodes on this machine, and removes it at the end. With a service of your own leave that out:
each program connects to the shard of its own machine, and the rest is the same.
"""

from __future__ import annotations

import time

import numpy as np

import kvservice
from kvservice.testing.cluster import LocalCluster

LAYOUT = kvservice.Layout(block_tokens=16, shape=(24, 2, 4, 16, 64), dtype="float16")  # 384 KiB
TOKENS = list(range(64 * LAYOUT.block_tokens))


def main() -> None:
    blocks = np.random.default_rng(2).random((64, *LAYOUT.shape), "float32").astype("float16")
    with (
        LocalCluster(nodes=2, pool_bytes=128 << 20) as cluster,
        kvservice.connect("service", socket=cluster.socket("n0")) as here,
        kvservice.connect("service", socket=cluster.socket("n1")) as there,
    ):
        writer, reader = here.attach("two-nodes", LAYOUT), there.attach("two-nodes", LAYOUT)
        print(f"n0 put: {writer.put(TOKENS, blocks)}")
        for turn in ("first", "again"):
            hit = get_when_known(reader) if turn == "first" else reader.get(TOKENS)
            begun = time.perf_counter()
            with hit:
                assert np.array_equal(hit.view, blocks), "never other bytes"
            print(f"n1 {turn}: {hit}, compared in {1000 * (time.perf_counter() - begun):.0f} ms")


def get_when_known(cache: kvservice.Cache) -> kvservice.Hit:
    """The nodes hear of each other's new blocks after some milliseconds; until then a get hits nothing or a part."""
    until = time.monotonic() + 10
    while True:
        hit = cache.get(TOKENS)
        if not hit.miss or time.monotonic() > until:
            return hit
        hit.close()
        time.sleep(0.01)


if __name__ == "__main__":
    main()
