"""A real vLLM engine on a GPU gives the same tokens with and without the cache: cold, warm, partly warm, after a load
that failed and was rolled back, and over several rounds of a conversation; with copies in either place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvservice.discovery import find_copy_workers, node_directory
from kvservice.testing.cluster import LocalCluster
from kvservice.testing.eventually import eventually
from kvservice.units import MiB, NodeId
from tests.vllm.replica import Replica
from tests.vllm.test_service_failures import PROMPTS

pytestmark = [pytest.mark.gpu, pytest.mark.vllm]

# bfloat16 and batch-invariant kernels: else a prompt computed in other pieces may give other last bits.
ENGINE = {"dtype": "bfloat16", "max_model_len": 2048, "gpu_memory_utilization": 0.25, "block_size": 16}
MORE = "He said that the lamp had burned all night, and that nobody had seen it from the sea. Then"


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=1, lookup_partitions=1, pool_bytes=1024 * MiB) as running:
        yield running


@pytest.fixture(scope="module")
def copy_worker(cluster: LocalCluster) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "kvservice", "copy-worker", "--service", cluster.service]
    environment = {**os.environ, "KVSERVICE_RUNTIME_DIR": str(cluster.root)}
    process = subprocess.Popen([*command, "--node", "n0", "--device", "0"], env=environment)
    eventually(lambda: find_copy_workers(node_directory(cluster.service, NodeId("n0"), cluster.root)), "the worker")
    yield process
    process.terminate()
    process.wait(30)


@pytest.fixture(scope="module")
def wanted(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[int]]]:
    """Tokens of an engine without a cache, with its own prefix cache forgotten before each call."""
    os.environ["VLLM_BATCH_INVARIANT"] = "1"
    replica = Replica(model_path, None, tmp_path_factory.mktemp("off") / "off.log", **ENGINE).ready()
    try:
        found = {"first": replica.tokens(PROMPTS, 16)}
        replica.reset()
        found["longer"] = replica.tokens([prompt + MORE for prompt in PROMPTS], 16)
        return found
    finally:
        replica.close()


@pytest.mark.parametrize("place", ["in_process", "worker"])
def test_tokens_are_those_of_an_engine_without_a_cache(
    cluster: LocalCluster,
    copy_worker: subprocess.Popen[bytes],
    model_path: Path,
    tmp_path: Path,
    wanted: dict[str, list[list[int]]],
    place: str,
) -> None:
    extra = {
        "mode": "service",
        "socket": cluster.socket("n0"),
        "verify_load": "full",
        "copier": place,
        "namespace": place,
    }
    replica = Replica(model_path, extra, tmp_path / "replica.log", **ENGINE).ready()
    try:
        assert replica.tokens(PROMPTS, 16) == wanted["first"], "cold"
        replica.reset()
        assert replica.tokens(PROMPTS, 16) == wanted["first"], "warm"
        assert replica.counters()["loaded_blocks"] > 6 * 16
        replica.reset()
        longer = [prompt + MORE for prompt in PROMPTS]
        assert replica.tokens(longer, 16) == wanted["longer"], "partly warm"
        for _ in range(3):
            assert replica.tokens(longer, 16) == wanted["longer"], "several rounds"
            replica.reset()
        if place == "worker":
            assert replica.counters()["copy_worker_blocks"] > 0
            copy_worker.send_signal(signal.SIGSTOP)  # loads under way fail, and are rolled back and recomputed
            assert replica.tokens(PROMPTS, 16) == wanted["first"], "rolled back"
            replica.reset()
            assert replica.tokens(PROMPTS, 16) == wanted["first"], "without the worker"
            assert replica.counters()["copy_worker_lost_copies"] > 0
    finally:
        replica.close()
