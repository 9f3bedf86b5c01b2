"""Programs at real shards: blocks cross nodes, a dead shard is a miss and is found again, a killed program lets go."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import kvservice
from kvservice.testing.cluster import LocalCluster
from kvservice.testing.eventually import eventually

pytestmark = pytest.mark.processes

LAYOUT = kvservice.Layout(block_tokens=4, shape=(2, 1024))
TOKENS, BLOCKS = range(32), np.random.default_rng(3).random((8, *LAYOUT.shape), "float32")
HOLDER = """
import sys, kvservice
pool = kvservice.connect("service", socket=sys.argv[1])
hit = pool.attach("m", kvservice.Layout(block_tokens=4, shape=(2, 1024))).get(range(32))
print(len(hit), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=2, lookup_partitions=1, transport="shm") as made:
        yield made


def attached(cluster: LocalCluster, node: str) -> tuple[kvservice.Pool, kvservice.Cache]:
    pool = kvservice.connect("service", socket=cluster.socket(node))
    return pool, pool.attach("m", LAYOUT)


def test_blocks_cross_nodes_and_stay(cluster: LocalCluster) -> None:
    (here, writer), (there, reader) = attached(cluster, "n0"), attached(cluster, "n1")
    assert writer.put(TOKENS, BLOCKS).stored == 8
    eventually(lambda: reader.warm(TOKENS, hold=0.1) == 32, "all blocks at the other node")
    with reader.get(TOKENS) as hit:
        assert (len(hit), hit.fetched, hit.miss) == (8, 0, "") and np.array_equal(hit.view, BLOCKS)
    here.close()
    there.close()
    eventually(lambda: cluster.accounting("n1").slots["leased"] == 0, "the end of what was held")
    for node in cluster.nodes:
        slots = cluster.accounting(node).slots
        assert slots["leased"] == slots["writing"] == slots["quarantined"] == 0


def test_a_request_is_explained_by_the_word_of_all_nodes(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSERVICE_RUNTIME_DIR", str(cluster.root))
    (here, writer), (there, reader) = attached(cluster, "n0"), attached(cluster, "n1")
    writer.put(TOKENS, BLOCKS)
    eventually(lambda: cluster.stats("n0").counters["blocks_sealed"] == 8, "all blocks sealed")
    eventually(lambda: len(reader.get(range(32), request_id="warm")) == 8, "all blocks at the other node")
    reader.get(range(40), request_id="r1").close()
    found = there.explain("r1")
    rows = [(one.start, one.count, one.outcome, one.cause, one.asked_at) for one in found]
    assert rows == [(0, 8, "local", "", "n1"), (8, 2, "missed", "never_stored", "n1")]
    assert found.hosts == dict.fromkeys(cluster.nodes, socket.gethostname()) and not found.silent
    assert "fetched" in {one.outcome for one in here.explain("warm")}, "any node's program is told"
    here.close()
    there.close()


def test_a_shard_that_dies_is_a_miss_and_is_found_again(cluster: LocalCluster) -> None:
    pool, cache = attached(cluster, "n0")
    cache.put(TOKENS, BLOCKS)
    hit = cache.get(TOKENS)
    cluster.kill("n0", signal.SIGKILL)
    eventually(lambda: not cache.is_attached, "the loss")
    assert cache.get(TOKENS).miss == "unavailable" and cache.warm(TOKENS) == 0
    assert cache.put(TOKENS, BLOCKS) == kvservice.PutResult(0, 0, 8, "unavailable")
    assert np.array_equal(hit.copy(), BLOCKS)  # nobody has written there yet, and the check would say so
    cluster.start_shard("n0")
    eventually(lambda: cache.is_attached, "the new shard")
    cache.put(TOKENS, BLOCKS)
    with cache.get(TOKENS) as again:
        assert np.array_equal(again.view, BLOCKS)
    hit.close()
    pool.close()


def test_a_killed_program_holds_nothing(cluster: LocalCluster) -> None:
    pool, cache = attached(cluster, "n0")
    cache.put(TOKENS, BLOCKS)
    environment = {**os.environ, "PYTHONPATH": str(Path(kvservice.__file__).parents[1])}
    program = subprocess.Popen(
        [sys.executable, "-c", HOLDER, cluster.socket("n0")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    )
    with program:
        assert program.stdout is not None and program.stdout.readline() == b"8\n"
        assert cluster.accounting("n0").slots["leased"] == 8
        program.kill()
    eventually(lambda: cluster.accounting("n0").slots["leased"] == 0, "no lease")
    pool.close()
