"""Four ranks, a process each, write their heads of a block into one slot; one rank reads them, and back.

The model has 2 kv heads, so each of them is held by two of the four ranks, which take turns in writing it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvservice.testing.cluster import LocalCluster
from kvservice.testing.eventually import eventually
from kvservice.units import MiB
from tests.vllm.replica import Replica, close_all
from tests.vllm.shared_memory import vllm_segments_removed
from tests.vllm.tiny_model import make_llama

pytestmark = pytest.mark.vllm

TEXT = "The chart room smelled of oil and paper, and {} kept the log there, in a hand that nobody else could read. "
ENGINE = {"max_model_len": 1024, "max_num_batched_tokens": 256}
BLOCK_TOKENS = 32
BLOCKS = 8  # of a prompt, at least
KV_HEADS = 2


@pytest.fixture(scope="module")
def replicas(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Replica]]:
    logs = tmp_path_factory.mktemp("replicas")
    model = make_llama(tmp_path_factory.mktemp("model"), model_path, attention_heads=8, kv_heads=KV_HEADS)
    with vllm_segments_removed(), LocalCluster(nodes=1, lookup_partitions=1, pool_bytes=256 * MiB) as cluster:
        service = {"mode": "service", "socket": cluster.socket("n0"), "verify_load": "full"}
        started = {
            "one rank": Replica(model, service, logs / "one.log", threads=1, **ENGINE),
            "four ranks": Replica(model, service, logs / "four.log", threads=1, **ENGINE, tensor_parallel_size=4),
        }
        try:
            yield {name: replica.ready() for name, replica in started.items()}
        finally:
            close_all(started.values())


@pytest.mark.parametrize(("writer", "reader"), [("four ranks", "one rank"), ("one rank", "four ranks")])
def test_blocks_written_by_one_number_of_ranks_serve_another(
    replicas: dict[str, Replica], writer: str, reader: str
) -> None:
    text = TEXT.format(writer) * 12 + "One day"
    before = replicas[writer].counters()["stored_blocks"]
    cold = replicas[writer].ask(text, 4)
    assert cold["cached_tokens"] == 0
    counters = replicas[writer].counters
    eventually(lambda: counters()["stored_blocks"] >= before + BLOCKS, "the stored blocks", detail=counters)
    found = counters()
    heads_copied = found["copied_blocks"] / found["store_blocks_planned"]
    assert heads_copied == (1 if writer == "one rank" else KV_HEADS), "every part of a block is written by one rank"
    warm = replicas[reader].ask_warm(text, 4, BLOCKS * BLOCK_TOKENS)
    assert warm["token_ids"] == cold["token_ids"]
    assert replicas[reader].counters()["loads_failed"] == 0
