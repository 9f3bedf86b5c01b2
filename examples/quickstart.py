"""Put the keys and values of a prompt into a pool, and get back what another prompt has in common with it.

    python quickstart.py

Uses the service that runs on this machine, or a pool in this process when none runs. Needs NumPy only.
"""

from __future__ import annotations

import time

import numpy as np

import kvservice

BLOCK_TOKENS = 16
# What one block is, is yours to say. Here: 24 layers, K and V, 4 heads, 16 tokens, 64 numbers a head; 768 KiB.
LAYOUT = kvservice.Layout(BLOCK_TOKENS, shape=(24, 2, 4, BLOCK_TOKENS, 64), dtype="float32")


def main() -> None:
    chance = np.random.default_rng(1)
    document = chance.integers(0, 50_000, 32 * BLOCK_TOKENS)  # 512 tokens
    computed = chance.random((32, *LAYOUT.shape), "float32")  # a model would compute this

    with kvservice.connect(memory="256MiB") as pool, pool.attach("quickstart", LAYOUT) as cache:
        print(f"mode:  {pool.mode}")
        print(f"put:   {cache.put(document, computed)}")

        question = np.concatenate([document, [7, 8, 9]])  # the same document, and something new
        begun = time.perf_counter()
        with cache.get(question) as hit:
            print(f"get:   {hit}")
            print(f"took:  {1000 * (time.perf_counter() - begun):.1f} ms, no byte copied")
            print(f"equal: {np.array_equal(hit.view, computed)}")
        print(f"else:  {cache.get([1, 2, 3] * BLOCK_TOKENS)}")


if __name__ == "__main__":
    main()
