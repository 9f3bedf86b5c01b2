"""LMCache itself on our L2 adapter: its contract tool, and two servers on two nodes driven by its bench client."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvservice.testing.cluster import LocalCluster
from kvservice.testing.eventually import eventually
from kvservice.units import MiB
from tests.integration.lmcache_server import CHUNK_TOKENS, LMCacheServer, adapter, needs_lmcache, program, tool

pytestmark = [pytest.mark.slow, needs_lmcache]
PROMPTS, CHUNKS = 2, 8


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=2, pool_bytes=256 * MiB) as running:
        yield running


def bench_client(server: LMCacheServer, first: int = 0) -> str:
    """Look up, retrieve or store, and read back some prompts from number `first` on, with KV of the client's own."""
    place = ("--rpc-url", f"tcp://127.0.0.1:{server.port}", "--url", server.url, "--mode", "cpu")
    numbers = ("--start", str(first), "--end", str(first + PROMPTS))
    moves = ("--transfer-mode", "lmcache_driven", "--interval", "0.1", *numbers)
    kv = ("--kvcache-shape-spec", "(2,64,16,3,64):bfloat16:30", "--num-blocks", "64", "--block-size", "16")
    return tool("bench", "server", *place, *moves, *kv, "--num-tokens", str(CHUNKS * CHUNK_TOKENS))


def checksums(said: str) -> set[tuple[str, str]]:
    """(number of the prompt, checksum of its chunks) of everything that the client read back."""
    return set(re.findall(r"\[seq (\d+)/\w+\] CHECKSUM: ([0-9a-f]+) \(8 chunks\)", said))


def test_its_contract_tool_gets_back_what_it_stored(cluster: LocalCluster) -> None:
    """The tool takes back none of the locks of its lookups: closing the adapter must end them."""
    node = adapter(socket=cluster.socket("n0"))
    sizes = ("--num-keys", "16", "--in-flight", "2", "--rounds", "2", "--data-size-kb", "720")
    said = tool("bench", "l2", "--l2-adapter", node, *sizes, "--no-skip-verify", "--lookup-max-hit-rate", "0.5")
    assert "All 32 keys data verified OK." in said
    assert len(re.findall(r"found=16/32", said)) == 3 and len(re.findall(r"loaded=32/32", said)) == 3
    eventually(cluster.nothing_is_held, "no lease is left")


def test_a_float16_engine_misses_what_a_bfloat16_engine_stored(cluster: LocalCluster, tmp_path: Path) -> None:
    """LMCache's own adapter finds and loads it: its key says nothing of dtypes, and the size is the same. The program
    fails when closing our adapter leaves a thread or a descriptor."""
    said = program("tests.integration.lmcache_adapter", cluster.socket("n0"), str(tmp_path))
    found = json.loads(said.splitlines()[-1])
    assert found["ours"] == {
        "stored": True,
        "torch.bfloat16": [4, 4, [1, 2, 3, 4]],
        "torch.float16": [0, 0, [200, 201, 202, 203]],
    }
    assert found["theirs"] == {**found["ours"], "torch.float16": [4, 4, [1, 2, 3, 4]]}
    assert found["status"]["is_healthy"] and found["status"]["is_attached"]
    assert found["late"] is None and "Exception" not in said
    eventually(cluster.nothing_is_held, "no lease is left, those of lookups without an unlock either")


def test_memory_taken_back_amid_a_store_is_no_object() -> None:
    """An operator clears level 1 by force while the shard hangs, and the objects' memory is that of others at once."""
    found = json.loads(program("tests.integration.lmcache_level_1").splitlines()[-1])
    assert (found["found"], found["loaded"], found["there"]) == (0, 0, [200, 201, 202, 203])
    assert found["status"]["dropped_taken_back"] == 4


def test_what_one_server_stores_another_node_hits(cluster: LocalCluster, tmp_path: Path) -> None:
    with (
        LMCacheServer(cluster, "n0", tmp_path / "a.log") as first,
        LMCacheServer(cluster, "n1", tmp_path / "b.log") as second,
    ):
        stored = bench_client(first)
        assert len(re.findall(r"cold\] LOOKUP: 0/8 chunks hit", stored)) == PROMPTS
        eventually(lambda: first.level_2().get("objects_sealed") == PROMPTS * CHUNKS, "everything is stored", 30)
        cluster.wait_until_announced("n0")
        found = bench_client(second)
        assert len(re.findall(r"cold\] LOOKUP: 8/8 chunks hit", found)) == PROMPTS
        assert checksums(stored) and checksums(found) == checksums(stored)
        assert cluster.stats("n1").counters["fetched_blocks"] == PROMPTS * CHUNKS
        for server in (first, second):
            eventually(lambda server=server: server.level_2()["locked_objects"] == 0, "every lock was taken back", 30)
        first.close()
        second.close()
    eventually(cluster.nothing_is_held, "no lease is left")


def test_a_server_whose_shard_dies_computes_on(tmp_path: Path) -> None:
    with (
        LocalCluster(nodes=1, pool_bytes=64 * MiB) as cluster,
        LMCacheServer(cluster, "n0", tmp_path / "a.log") as server,
    ):
        stored = bench_client(server)
        cluster.kill("n0")
        said = bench_client(server, first=PROMPTS)  # what is new goes to the adapter; level 1 has the prompts of before
        assert len(re.findall(r"cold\] LOOKUP: 0/8 chunks hit", said)) == PROMPTS
        assert len(checksums(stored)) == len(checksums(said)) == PROMPTS
        eventually(lambda: server.level_2()["is_attached"] is False, "the adapter noticed", 30)
