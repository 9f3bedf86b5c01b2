"""`helm upgrade` with engines at work: every pod is replaced in Kubernetes' order, its hook first, while programs put
and get through both nodes. The parts are of one version; that another one is refused is tested apart.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import numpy as np
import pytest

import kvservice
from kvservice.testing.eventually import eventually
from tests.helm.test_standalone_runs import NODES, Cluster, wait_until_ready

pytestmark = pytest.mark.slow
LAYOUT = kvservice.Layout(block_tokens=16, shape=(2, 2, 4, 16, 64), dtype="float16")  # 64 KiB
BLOCKS = 16  # of a prompt
PROMPTS = 8  # that all programs share: what one put, the others get
CALL_SECONDS = 10.0  # an engine that asks waits no longer, whatever is being replaced


def prompt(number: int) -> tuple[list[int], np.ndarray]:
    """Tokens, and blocks that are a function of them."""
    tokens = np.random.default_rng(number).integers(0, 50_000, BLOCKS * LAYOUT.block_tokens).tolist()
    return tokens, np.random.default_rng(number).random((BLOCKS, *LAYOUT.shape), "float32").astype("float16")


@dataclass(slots=True)
class Load:
    """A program at one node, until it is told to end."""

    socket: str
    hits: int = 0
    misses: int = 0
    longest: float = 0.0
    faults: list[str] = field(default_factory=list)
    ending: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        with kvservice.connect("service", socket=self.socket) as pool:
            cache = pool.attach("upgraded", LAYOUT)
            number = 0
            while not self.ending.is_set():
                number += 1
                began = time.monotonic()
                try:
                    self._turn(cache, number % PROMPTS)
                except (kvservice.Unavailable, kvservice.LeaseLost):  # the engine computes then
                    self.misses += 1
                except Exception as error:  # noqa: BLE001  the test reports it
                    self.faults.append(repr(error))
                self.longest = max(self.longest, time.monotonic() - began)
                self.ending.wait(0.02)

    def _turn(self, cache: kvservice.Cache, number: int) -> None:
        tokens, blocks = prompt(number)
        with cache.get(tokens) as hit:
            count = len(hit)
            if count and not np.array_equal(hit.copy(), blocks[:count]):
                self.faults.append(f"prompt {number} has other bytes")
        self.hits += count
        self.misses += BLOCKS - count
        if count < BLOCKS:
            cache.put(tokens, blocks)


def replace_lookups(cluster: Cluster) -> None:
    """A StatefulSet's way: from the last one down, each when the one before is ready."""
    for index in reversed(range(len(cluster.lookups))):
        old = cluster.lookups[index]
        assert old.end(30) == 0
        cluster.lookups[index] = cluster.start_lookup(index, old.place.ip)
        wait_until_ready(cluster.lookups[index])


def replace_shard(cluster: Cluster, node: str) -> None:
    """A DaemonSet's way: hook, SIGTERM, and the next pod when this one has ended."""
    old = cluster.shards[node]
    drained = old.run(old.container["lifecycle"]["preStop"]["exec"]["command"])
    assert drained.returncode == 0, drained.stdout + drained.stderr
    assert old.process is not None
    code = old.process.poll()
    assert (old.end(30) if code is None else code) == 0, old.log.read_text()[-2000:]
    cluster.start_shard(node)
    wait_until_ready(cluster.shards[node])


def test_a_rolling_upgrade_costs_hits_and_nothing_else() -> None:
    cluster = Cluster("cache.pool=128Mi")
    loads: list[Load] = []
    threads: list[threading.Thread] = []
    try:
        cluster.start()
        loads = [Load(cluster.socket(node)) for node in NODES]
        threads = [threading.Thread(target=load.run, daemon=True) for load in loads]
        for thread in threads:
            thread.start()
        eventually(lambda: all(load.hits > 100 for load in loads), "hits on both nodes", 60)
        cluster.change("cache.leaseSeconds=12")
        replace_lookups(cluster)
        for node in NODES:
            replace_shard(cluster, node)
            settings = cluster.shards[node].place.paths["/etc/kvservice"] / "kvservice.toml"
            assert "lease_seconds = 12" in settings.read_text()
        upgraded = [load.hits for load in loads]
        eventually(
            lambda: all(load.hits > count + 100 for load, count in zip(loads, upgraded, strict=True)),
            "hits on both nodes after the upgrade",
            60,
            detail=lambda: str(loads),
        )
    finally:
        for load in loads:
            load.ending.set()
        for thread in threads:
            thread.join(30)
        cluster.close()
    assert [load.faults for load in loads] == [[], []]
    assert max(load.longest for load in loads) < CALL_SECONDS
