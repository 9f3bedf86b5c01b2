"""A real vLLM engine whose KV cache lies in shared memory and whose copies run in a copy worker, which is then killed
and stopped: the same tokens as without any cache, always, and copies that really ran where they should."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvservice.testing.cluster import LocalCluster
from kvservice.testing.eventually import eventually
from kvservice.units import MiB
from tests.failpoints import Failpoints
from tests.vllm.replica import Replica
from tests.vllm.test_service_failures import ENGINE, PROMPTS, during

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def failpoints(tmp_path_factory: pytest.TempPathFactory) -> Failpoints:
    return Failpoints(tmp_path_factory.mktemp("failpoints"))


@pytest.fixture(scope="module")
def cluster(failpoints: Failpoints) -> Iterator[LocalCluster]:
    environment = failpoints.environment
    with LocalCluster(
        nodes=1, lookup_partitions=1, pool_bytes=384 * MiB, lease_seconds=4.0, environment=environment
    ) as running:
        running.start_copy_worker("n0")
        yield running


@pytest.fixture(scope="module")
def replica(
    cluster: LocalCluster, without_cache: Replica, shallow_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Replica]:
    """With its copies in the worker."""
    extra = {"mode": "service", "socket": cluster.socket("n0"), "verify_load": "full", "copier": "worker"}
    started = Replica(shallow_model, extra, tmp_path_factory.mktemp("replica") / "worker.log", **ENGINE)
    try:
        yield started.ready()
    finally:
        started.close()


@pytest.fixture(scope="module")
def wanted(without_cache: Replica) -> list[list[int]]:
    return without_cache.ready().tokens(PROMPTS, 12)


def wait_connected(replica: Replica, times: int) -> Counter[str]:
    """Counters reach the engine's scheduler with its steps, so there have to be some."""

    def connected() -> Counter[str] | None:
        counters = replica.counters()
        if counters["copy_worker_connected"] >= times:
            return counters
        replica.ask("Once", 2)
        return None

    return eventually(connected, "the engine's link to the worker", detail=replica.counters)


def test_tokens_are_equal_with_every_copy_in_the_worker(replica: Replica, wanted: list[list[int]]) -> None:
    """They are equal cold and warm."""
    before = wait_connected(replica, 1)
    assert replica.tokens(PROMPTS, 12) == wanted
    replica.reset()
    answer = replica.ask_all(PROMPTS, 12)
    assert [output["token_ids"] for output in answer["outputs"]] == wanted
    assert all(output["cached_tokens"] > 250 for output in answer["outputs"])
    after = replica.counters()
    assert after["copy_worker_blocks"] - before["copy_worker_blocks"] > 6 * 8 * 2
    assert after["copy_in_process_blocks"] == before["copy_in_process_blocks"]
    assert after["load_verified_blocks"] >= 6 * 8 and not after["loads_failed"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_worker_lost_in_the_middle_of_a_copy(
    cluster: LocalCluster, replica: Replica, failpoints: Failpoints, wanted: list[list[int]], number: signal.Signals
) -> None:
    before = wait_connected(replica, 1)
    replica.reset()
    failpoints.arm("copy_worker.copy")

    def lose() -> None:
        assert failpoints.hit("copy_worker.copy") == cluster.pid("copy-worker-n0")
        cluster.kill("copy-worker-n0", number)

    assert during(replica, lose, 0.0) == wanted
    replica.reset()
    assert replica.tokens(PROMPTS, 12) == wanted
    between = replica.counters()
    assert (
        between["copy_worker_lost"] + between["copy_worker_wedged"]
        > before["copy_worker_lost"] + before["copy_worker_wedged"]
    )
    assert between["copy_in_process_blocks"] > before["copy_in_process_blocks"], "the engine did not serve on"
    cluster.start_copy_worker("n0")
    connected = wait_connected(replica, between["copy_worker_connected"] + 1)
    replica.reset()
    assert replica.tokens(PROMPTS, 12) == wanted
    after = replica.counters()
    assert after["copy_worker_blocks"] > connected["copy_worker_blocks"]
    assert cluster.accounting("n0").balanced
