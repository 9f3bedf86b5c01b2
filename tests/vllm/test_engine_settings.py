"""Greedy tokens with the cache equal those without it, whatever vLLM's own settings are and whenever blocks are stored.

As in test_output_equality, in float32 and with the first layers of the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvservice.memory.segment import segment_path
from kvservice.testing.cluster import LocalCluster
from kvservice.testing.eventually import eventually
from kvservice.units import KiB, MiB, NodeId
from tests.vllm.replica import Replica, close_all
from tests.vllm.test_output_equality import ENGINE, prompt, settle

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

EMBEDDED: dict[str, object] = {"mode": "embedded", "memory": "256MiB", "verify_load": "full"}
OURS = {
    "kv_connector": "KVServiceConnector",
    "kv_connector_module_path": "kvservice.connector.vllm",
    "kv_role": "kv_both",
    "kv_connector_extra_config": EMBEDDED,
}


@pytest.fixture
def off(without_cache: Replica) -> Replica:
    return without_cache.ready()


@pytest.fixture
def replica(request: pytest.FixtureRequest, shallow_model: Path, tmp_path: Path) -> Iterator[Replica]:
    """One engine with the settings that the test names."""
    extra, engine = request.param
    started = Replica(shallow_model, {**EMBEDDED, **extra}, tmp_path / "log", **{**ENGINE, **engine})
    try:
        yield started.ready()
    finally:
        close_all([started])


def failures(replica: Replica) -> dict[str, int]:
    return {name: count for name, count in replica.counters().items() if "failed" in name and count}


@pytest.mark.parametrize("replica", [({}, {"enable_prefix_caching": False})], indirect=True)
def test_engine_without_prefix_caching_hits_in_the_pool(off: Replica, replica: Replica) -> None:
    """vLLM names blocks whenever there is a connector, so the pool is the only cache."""
    text = prompt("Ada", 12)
    wanted = off.tokens([text], 12)[0]
    assert replica.tokens([text], 12) == [wanted], "cold"
    settle(replica, 9)
    assert replica.ask_warm(text, 12, 9 * 32)["token_ids"] == wanted, "warm"
    assert not failures(replica)


@pytest.mark.parametrize("replica", [({"offload": "evicting"}, {"num_gpu_blocks_override": 40})], indirect=True)
def test_blocks_near_eviction_come_back_from_the_pool(off: Replica, replica: Replica) -> None:
    """Nothing is stored while vLLM has room for it, and what it evicts is in the pool."""
    texts = [prompt(name, 12) for name in ("Bea", "Cyd", "Dot", "Eve", "Fay")]
    wanted = off.tokens(texts, 12)
    assert replica.tokens(texts[:1], 12) == wanted[:1]
    assert replica.counters().get("store_blocks_planned", 0) == 0
    assert [replica.tokens([text], 12)[0] for text in texts[1:]] == wanted[1:]
    eventually(lambda: replica.counters()["stored_blocks"] >= 9, "stored blocks", detail=replica.counters)
    before = replica.counters().get("loaded_blocks", 0)
    assert replica.ask_warm(texts[0], 12, 9 * 32)["token_ids"] == wanted[0]
    assert replica.counters()["loaded_blocks"] >= before + 9, "it had been evicted, and came back"
    assert not failures(replica)


@pytest.mark.parametrize("replica", [({"offload": "lazy"}, {"num_gpu_blocks_override": 40})], indirect=True)
def test_lazy_engine_stores_what_it_preempts(off: Replica, replica: Replica) -> None:
    prompts = [prompt(name, 6) for name in ("Kim", "Lou", "Max", "Ned", "Ola", "Pia", "Quy")]
    wanted = off.tokens(prompts, 40)
    assert replica.tokens(prompts, 40) == wanted
    counters = replica.counters()
    assert counters["preemptions"] > 0, "the KV space was large enough: nothing was tested"
    assert counters["store_blocks_preempted"] > 0
    assert not failures(replica)


DRAFTS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@pytest.mark.parametrize("replica", [({}, {"speculative_config": DRAFTS})], indirect=True)
def test_session_with_drafts_is_not_stored(off: Replica, replica: Replica) -> None:
    """vLLM takes drafts behind the end of a part for computed tokens of the next part."""
    part = [100, 200, 300, 400] * 24
    replica.send(session=[part, part, part[:50]], max_tokens=20)
    tokens = replica.answer()["token_ids"]
    assert len(tokens) > 7 * 32
    assert not replica.counters()["store_blocks_planned"]
    replica.reset()
    again = {"prompt_token_ids": tokens}
    assert replica.tokens([again], 8) == off.tokens([again], 8)  # type: ignore[list-item]
    assert replica.counters()["store_blocks_planned"] >= 7, "what is no session is stored"


def test_connector_beside_another_one_in_multi_connector(off: Replica, shallow_model: Path, tmp_path: Path) -> None:
    """vLLM asks ours first; the other one writes files of its own."""
    folder = tmp_path / "example"
    other = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }
    connector = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [OURS, other]},
    }
    both = Replica(shallow_model, None, tmp_path / "log", connector=connector, **ENGINE)
    try:
        both.ready()
        text = prompt("Gil", 7)
        wanted = off.tokens([text], 12)[0]
        assert both.tokens([text], 12) == [wanted], "cold"
        settle(both, 5)
        assert list(folder.rglob("*.safetensors")), "the other connector stored as well"
        both.reset()
        assert both.ask_warm(text, 12, 5 * 32)["token_ids"] == wanted, "warm"
        assert both.counters()["loaded_blocks"] >= 5, "from ours, which stands first"
        assert not failures(both)
    finally:
        close_all([both])


def test_failed_load_under_a_multi_connector_is_computed(off: Replica, shallow_model: Path, tmp_path: Path) -> None:
    """By vLLM's default the request would fail."""
    text = prompt("Hal", 7)
    with LocalCluster(nodes=1, lookup_partitions=1, pool_bytes=64 * MiB) as cluster:
        extra = {"mode": "service", "socket": cluster.socket("n0"), "verify_load": "full"}
        children = [{**OURS, "kv_connector_extra_config": extra}]
        connector = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": children},
        }
        replica = Replica(shallow_model, None, tmp_path / "log", connector=connector, **ENGINE)
        try:
            replica.ready()
            wanted = off.tokens([text], 12)
            assert replica.tokens([text], 12) == wanted, "cold"
            settle(replica, 5)
            replica.reset()
            damage(segment_path(cluster.service, NodeId("n0")))
            assert replica.tokens([text], 12) == wanted
            assert replica.counters()["loads_failed"] == 1, "nothing was damaged"
        finally:
            close_all([replica])


def damage(segment: Path) -> None:
    """Some bytes of every slot."""
    with segment.open("r+b") as file:
        for offset in range(MiB, segment.stat().st_size, 16 * KiB):
            file.seek(offset)
            file.write(b"\x5a" * 16)
