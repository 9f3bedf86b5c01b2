"""No order of puts, gets, evictions, lost leases and closes lets a program read another block's bytes unnoticed.

Played against a pool in this process and against a real shard. The bytes of each block follow from its prompt, so every
read judges itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, rule, run_state_machine_as_test

import kvservice
from kvservice.testing.cluster import LocalCluster
from kvservice.testing.eventually import eventually
from kvservice.units import KiB, MiB

LAYOUT = kvservice.Layout(block_tokens=4, shape=(2, 128 * KiB // 8), dtype="float32")  # 128 KiB: a pool holds some 20
CHAINS, BLOCKS = 12, 4  # more than twice of what the pool holds
ENDED = np.frombuffer(b"\xff\xff\xff\xff", "uint32")[0]


def tokens(chain: int) -> list[int]:
    """Chains share their first block with their neighbour, as prompts do."""
    return [chain // 2] * 4 + [chain] * 4 * (BLOCKS - 1)


def content(chain: int, block: int) -> Any:
    seed = chain // 2 if block == 0 else 1000 + 10 * chain + block
    return np.random.default_rng(seed).random(LAYOUT.shape, "float32")


def contents(chain: int, count: int = BLOCKS) -> Any:
    return np.stack([content(chain, block) for block in range(count)]) if count else np.empty((0, *LAYOUT.shape), "f4")


@pytest.fixture(scope="module", params=["embedded", pytest.param("shard", marks=pytest.mark.processes)])
def pool(request: pytest.FixtureRequest) -> Iterator[kvservice.Pool]:
    with contextlib.ExitStack() as stack:
        if request.param == "embedded":
            made = kvservice.connect("embedded", memory=4 * MiB)
        else:
            cluster = LocalCluster(nodes=1, lookup_partitions=1, pool_bytes=4 * MiB, slab_bytes=MiB, transport="shm")
            stack.enter_context(cluster)
            made = kvservice.connect("service", socket=cluster.socket("n0"))
        yield stack.enter_context(made)


def lose_lease(cache: kvservice.Cache, hit: kvservice.Hit) -> None:
    """What a shard does that has not heard of a program for a while."""
    if hit._held is not None:
        hit._held.release()
    cache.warm([7] * 4)  # an answer says that the release before it was done


def evict(cache: kvservice.Cache, hit: kvservice.Hit) -> None:
    """Use other prompts more often than the hit's, so that any rule of eviction gives its slots to them."""
    held = np.array(hit.view)
    for chain in list(range(2, CHAINS)) * 20:
        cache.put(tokens(chain), contents(chain))
        cache.get(tokens(chain)).close()
        if not np.array_equal(hit.view, held):
            return
    raise AssertionError("the blocks of the hit were never evicted")


class Programs(RuleBasedStateMachine):
    """One program with two caches of one model, and the hits that it holds."""

    pool: kvservice.Pool

    hits = Bundle("hits")
    chains = st.integers(0, CHAINS - 1)

    def __init__(self) -> None:
        super().__init__()
        self.model = os.urandom(4).hex()
        self.caches = [self.pool.attach(self.model, LAYOUT, verify=verify) for verify in ("full", "off")]

    @rule(chain=chains, which=st.integers(0, 1), start=st.integers(0, BLOCKS - 1))
    def put(self, chain: int, which: int, start: int) -> None:
        result = self.caches[which].put(tokens(chain), contents(chain)[start:], start=start)
        assert result.stored + result.present + result.dropped == BLOCKS - start
        assert result.reason in ("", "full") and result.is_complete == (not result.reason)

    @rule(target=hits, chain=chains, which=st.integers(0, 1), start=st.integers(0, BLOCKS))
    def get(self, chain: int, which: int, start: int) -> Any:
        hit = self.caches[which].get(tokens(chain), start=start)
        assert len(hit) <= BLOCKS - start and bool(hit.miss) == (len(hit) < BLOCKS - start)
        return hit, chain, which

    @rule(held=hits)
    def read(self, held: Any) -> None:
        hit, chain, _ = held
        if hit and hit._held is None:
            with pytest.raises(kvservice.InvalidRequest, match="closed"):
                hit.copy()
            return
        try:
            copied = hit.copy()
        except kvservice.LeaseLost:
            return
        assert np.array_equal(copied, contents(chain)[hit.start : hit.start + len(hit)])

    @rule(held=hits)
    def lose(self, held: Any) -> None:
        hit, _, which = held
        lose_lease(self.caches[which], hit)

    @rule(held=consumes(hits))
    def close(self, held: Any) -> None:
        hit, chain, _ = held
        view = hit.view if hit._held is not None else None
        seen, sound = None, False
        with contextlib.suppress(kvservice.LeaseLost), hit:
            seen = None if view is None else np.array(view)
            sound = True
            hit.check() if view is not None else None
        if view is not None:
            assert (view.view("uint32") == ENDED).all()
            still_right = np.array_equal(seen, contents(chain)[hit.start : hit.start + len(hit)])
            assert still_right or sound

    @rule(which=st.integers(0, 1))
    def reopen(self, which: int) -> None:
        self.caches[which].close()
        self.caches[which] = self.pool.attach(self.model, LAYOUT, verify="full")

    def teardown(self) -> None:
        for cache in self.caches:
            cache.close()


def test_a_program_never_reads_other_bytes_unnoticed(pool: kvservice.Pool) -> None:
    Programs.pool = pool
    run_state_machine_as_test(
        Programs,
        settings=settings(
            max_examples=25, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


def test_readers_beside_writers_see_right_bytes_or_a_loss(pool: kvservice.Pool) -> None:
    """Threads: some put what evicts, some read hits whose leases are taken away at random."""
    cache, over = pool.attach(os.urandom(4).hex(), LAYOUT, verify="off"), threading.Event()
    wrong: list[str] = []
    read, lost = [0], [0]

    def write(seed: int) -> None:
        chance = random.Random(seed)
        while not over.is_set():
            chain = chance.randrange(CHAINS)
            cache.put(tokens(chain), contents(chain))

    def look(seed: int) -> None:
        chance = random.Random(seed)
        while not over.is_set():
            chain = chance.randrange(CHAINS)
            try:
                with cache.get(tokens(chain)) as hit:
                    if chance.random() < 0.5 and hit._held is not None:
                        hit._held.release()
                        time.sleep(0.002)
                    seen = np.array(hit.view)
            except kvservice.LeaseLost:
                lost[0] += 1
                continue
            read[0] += len(seen)
            if not np.array_equal(seen, contents(chain)[: len(seen)]):
                wrong.append(f"chain {chain}")

    threads = [threading.Thread(target=run, args=(n,)) for n, run in enumerate([write, write, look, look])]
    for thread in threads:
        thread.start()
    time.sleep(1.5)
    over.set()
    for thread in threads:
        thread.join()
    cache.close()
    assert not wrong and read[0] > 0, (wrong, read, lost)


def test_a_lost_lease_is_noticed_by_every_way_of_reading(pool: kvservice.Pool) -> None:
    cache = pool.attach(os.urandom(4).hex(), LAYOUT)
    for read in (
        lambda hit: hit.copy(),
        lambda hit: hit.copy_to(np.empty(hit.view.shape, "f4")),
        lambda hit: hit.check(),
        lambda hit: hit.__exit__(None, None, None),
    ):
        cache.put(tokens(0), contents(0))
        hit = cache.get(tokens(0))
        lose_lease(cache, hit)
        evict(cache, hit)
        with pytest.raises(kvservice.LeaseLost) as found:
            read(hit)
        assert found.value.attributes["block"] in range(BLOCKS)
        hit.close()
    cache.close()


def open_files() -> Counter[str]:
    found: Counter[str] = Counter()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found[str(path.readlink())] += 1
    return found


@pytest.mark.parametrize("seed", range(4))
async def test_calls_cancelled_at_any_moment_leave_nothing(seed: int) -> None:
    """No lease, no attachment and no descriptor stays, and what is read is right."""
    noise, before = random.Random(seed), open_files()
    async with await kvservice.connect_async("embedded", memory=4 * MiB) as pool:
        caches = [await pool.attach("m", LAYOUT, verify=verify) for verify in ("full", "off")]

        async def call() -> None:
            cache, chain, start = noise.choice(caches), noise.randrange(CHAINS), noise.randrange(BLOCKS)
            match noise.choices(["put", "get", "warm", "reopen"], [4, 4, 1, 1])[0]:
                case "put":
                    await cache.put(tokens(chain), contents(chain)[start:], start=start)
                case "get":
                    with contextlib.suppress(kvservice.LeaseLost):
                        async with await cache.get(tokens(chain), start=start) as hit:
                            seen = np.array(hit.view)
                        assert np.array_equal(seen, contents(chain)[start : start + len(seen)])
                case "warm":
                    await cache.warm(tokens(chain), hold=0.05)
                case "reopen":
                    fresh = await pool.attach("m", LAYOUT, verify="full")
                    old, caches[0] = caches[0], fresh
                    await asyncio.shield(old.close())

        under_way: set[asyncio.Task[None]] = set()
        for _ in range(250):
            under_way.add(asyncio.create_task(call()))
            await asyncio.sleep(0.001 * noise.random())
            if noise.random() < 0.3:
                noise.choice(list(under_way)).cancel()
            for task in [task for task in under_way if task.done()]:
                under_way.discard(task)
                assert task.cancelled() or task.exception() is None, task.exception()
        await asyncio.gather(*under_way, return_exceptions=True)
        await asyncio.gather(*(cache.close() for cache in caches))
        assert pool._thread._runtime is not None
        state = pool._thread._runtime.state
        await asyncio.to_thread(
            eventually, lambda: not state.lease_count and not state.attachment_count, "no lease and no attachment"
        )
    gc.collect()  # what a cancelled task was given keeps the memory mapped
    assert open_files() <= before, open_files() - before
