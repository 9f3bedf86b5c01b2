"""vLLM's engines with LMCache's own connector, on two LMCache servers whose level 2 is our pool on two nodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvservice.testing.cluster import LocalCluster
from kvservice.testing.eventually import eventually
from kvservice.units import MiB
from tests.integration.lmcache_server import CHUNK_TOKENS, LMCacheServer, needs_lmcache
from tests.vllm.lmcache_engine import ask

pytestmark = [pytest.mark.vllm, pytest.mark.slow, needs_lmcache]
CHUNKS = 5


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=2, pool_bytes=256 * MiB) as running:
        yield running


@pytest.mark.timeout(900)
def test_an_engine_hits_only_what_one_of_its_own_kind_stored(
    cluster: LocalCluster, shallow_model: Path, tmp_path: Path
) -> None:
    """A float32 engine on the second node says the same from the first one's blocks. A float16 engine misses those of a
    bfloat16 engine, which are as large: LMCache by itself serves them, and the engine writes garbage."""
    with (
        LMCacheServer(cluster, "n0", tmp_path / "a.log") as first,
        LMCacheServer(cluster, "n1", tmp_path / "b.log") as second,
    ):
        log, tokens = tmp_path / "engines.log", CHUNKS * CHUNK_TOKENS
        computed = ask(shallow_model, first.port, "float32", tokens, 1, log)
        eventually(lambda: first.level_2().get("objects_sealed", 0) >= CHUNKS, "everything is stored", 30)
        cluster.wait_until_announced("n0")
        found = ask(shallow_model, second.port, "float32", tokens, 1, log)
        assert computed["cached"] == 0 and found["cached"] == tokens - 1
        assert found["token_ids"] == computed["token_ids"]
        assert cluster.stats("n1").counters["fetched_blocks"] == CHUNKS

        # Another prompt: the servers' level 1 still has that of the float32 engines, and would serve it.
        stored = first.level_2()["objects_sealed"]
        ask(shallow_model, first.port, "bfloat16", tokens, 2, log)
        eventually(lambda: first.level_2()["objects_sealed"] >= stored + CHUNKS, "everything is stored", 30)
        cluster.wait_until_announced("n0")
        other = ask(shallow_model, second.port, "float16", tokens, 2, log)
        assert other["cached"] == 0 and cluster.stats("n1").counters["fetched_blocks"] == CHUNKS
        first.close()
        second.close()
    eventually(cluster.nothing_is_held, "no lease is left")
