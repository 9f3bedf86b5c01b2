"""A real vLLM engine that loads and saves layer by layer: the same tokens as without any cache, whatever happens to the
slots between the promise and the last layer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvservice.core.segment.geometry import plan_geometry
from kvservice.memory.segment import Segment, segment_path
from kvservice.testing.cluster import LocalCluster
from kvservice.units import MiB
from tests.vllm.replica import Replica
from tests.vllm.test_service_failures import ENGINE, PROMPTS, during, wait_attached

pytestmark = pytest.mark.vllm

POOL_BYTES = 384 * MiB
# With and without a common prefix, and longer than what was stored.
MIXED = [*PROMPTS[:3], *(PROMPTS[0] + more for more in (" that the tide", " nothing at all about the lamp", " so"))]


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=1, lookup_partitions=1, pool_bytes=POOL_BYTES, lease_seconds=4.0) as running:
        yield running


@pytest.fixture(scope="module")
def replicas(
    cluster: LocalCluster, without_cache: Replica, shallow_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Replica, Replica]]:
    """One that works layer by layer, one without a cache."""
    logs = tmp_path_factory.mktemp("replicas")
    extra = {"mode": "service", "socket": cluster.socket("n0"), "verify_load": "full", "layerwise": "both"}
    layerwise = Replica(shallow_model, extra, logs / "layerwise.log", async_scheduling=False, **ENGINE)
    try:
        yield layerwise.ready(), without_cache.ready()
    finally:
        layerwise.close()


@pytest.fixture(scope="module")
def wanted(replicas: tuple[Replica, Replica]) -> list[list[int]]:
    return replicas[1].tokens(MIXED, 8)


def test_tokens_are_equal_cold_warm_and_extended(replicas: tuple[Replica, Replica], wanted: list[list[int]]) -> None:
    replica = replicas[0]
    assert replica.tokens(MIXED[:3], 8) == wanted[:3]
    assert not replica.counters()["loaded_blocks"]
    replica.reset()
    assert replica.tokens(MIXED, 8) == wanted
    counters = replica.counters()
    assert counters["loaded_blocks_layerwise"] > 3 * 8 and not counters["loads_failed"]
    assert counters["load_verified_blocks"] >= counters["loaded_blocks_layerwise"]
    assert not counters["store_blocks_failed"] and not counters["load_layers_not_waited_for"]


def test_bytes_that_changed_in_a_slot_cost_time_and_no_token(
    cluster: LocalCluster, replicas: tuple[Replica, Replica], wanted: list[list[int]]
) -> None:
    """The check comes after the forward: what it sampled is dropped, also for those with the same prefix."""
    replica = replicas[0]
    before = replica.counters()
    replica.reset()
    segment = Segment.attach(segment_path(cluster.service, "n0"), plan_geometry(POOL_BYTES))
    for slot, payload_bytes, _ in segment.scan():
        middle = payload_bytes // 2
        segment.payload(slot, payload_bytes)[middle : middle + 4096] = bytes(range(256)) * 16
    segment.close()
    assert replica.tokens(MIXED, 8) == wanted
    after = replica.counters()
    assert after["load_corrupt"] > before["load_corrupt"] and after["loads_failed"] > before["loads_failed"]
    assert replica.tokens(MIXED, 8) == wanted, "from the engine's own cache, which must hold nothing of the failed load"
    replica.reset()
    assert replica.tokens(MIXED, 8) == wanted, "what was computed on wrong blocks went into the pool"


def test_shard_killed_while_requests_run(
    cluster: LocalCluster, replicas: tuple[Replica, Replica], wanted: list[list[int]]
) -> None:
    replica = replicas[0]
    assert replica.tokens(PROMPTS[3:], 8) == replicas[1].tokens(PROMPTS[3:], 8)
    attached = replica.counters()["attached"]
    replica.reset()
    assert len(during(replica, lambda: cluster.kill("n0"), 0.03)) == len(PROMPTS)
    replica.reset()
    assert replica.tokens(MIXED, 8) == wanted, "without any service"
    cluster.start_shard("n0")
    wait_attached(replica, attached + 1)
    replica.reset()
    assert replica.tokens(MIXED, 8) == wanted
