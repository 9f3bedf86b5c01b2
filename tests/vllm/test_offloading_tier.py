"""KVServiceTier at real shards: what one engine offloaded another loads, and a dead shard costs hits and nothing else.

vLLM refuses the OffloadingConnector without a GPU, so its scheduler side is driven here, without an engine.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from vllm.v1.kv_offload.base import LookupResult

from kvservice.testing.cluster import LocalCluster
from kvservice.testing.eventually import eventually
from tests.unit.connector.offloading.engine_line import OffloadingEngine, keys_of, some_chunks

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.processes]

HIT, MISS = LookupResult.HIT, LookupResult.MISS


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=2, lookup_partitions=1, transport="shm") as made:
        yield made


def engine_at(cluster: LocalCluster, node: str) -> OffloadingEngine:
    return OffloadingEngine({"mode": "service", "socket": cluster.socket(node), "verify_load": "full"}, chunks=64)


def test_an_engine_loads_what_one_on_another_node_offloaded(cluster: LocalCluster) -> None:
    keys, chunks = keys_of("a", 40), some_chunks(1, 40)
    writer, reader = engine_at(cluster, "n0"), engine_at(cluster, "n1")
    writer.store(keys, chunks)

    def all_found() -> bool:
        """A lookup that came before the directory knew the chunks is a miss, so each try is a request of its own."""
        context = reader.request()
        found = reader.found(context, keys)
        if found == [HIT] * len(keys):
            assert np.array_equal(reader.load(context, keys), chunks)
        reader.manager.on_request_finished(context)
        return found == [HIT] * len(keys)

    eventually(all_found, "all chunks at the other node")
    reader.close()
    writer.close()
    for node in cluster.nodes:
        eventually(lambda node=node: cluster.accounting(node).slots["leased"] == 0, "no lease is left")  # type: ignore[misc]
        slots = cluster.accounting(node).slots
        assert slots["writing"] == slots["quarantined"] == 0


def test_a_dead_shard_is_a_miss_and_a_new_one_is_used(cluster: LocalCluster) -> None:
    engine = engine_at(cluster, "n0")
    keys, chunks = keys_of("a", 4), some_chunks(1, 4)
    engine.store(keys, chunks)
    engine.forget()
    cluster.kill("n0")
    context = engine.request()
    assert engine.found(context, keys) == [MISS] * 4
    engine.manager.on_request_finished(context)
    cluster.start_shard("n0")
    eventually(lambda: engine.tier._blocks.is_attached, "attached to the new shard", 60.0)
    engine.store(keys_of("b", 4), chunks)
    engine.forget()
    assert engine.found(engine.request(), keys_of("b", 4)) == [HIT] * 4
    engine.close()
