"""A real SGLang engine of two tensor-parallel ranks and one of a single rank: each hits what the other one stored."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from examples.demo.sglang_engine import PAGE_TOKENS, SITE
from examples.demo.sglang_process import SGLangProcess
from kvservice.testing.cluster import LocalCluster
from kvservice.testing.eventually import eventually
from kvservice.units import MiB
from tests.sglang.test_engines import ANSWER_TOKENS, pages_of, prompt
from tests.vllm.tiny_model import make_llama

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.timeout(900),  # as in test_engines
    pytest.mark.skipif(not (SITE / "sglang").is_dir(), reason="no SGLang: make .venv-sglang/.installed"),
]

KV_HEADS = 4
RANKS = {"n0": 2, "n1": 1}  # by node


def cores_of(ranks: int) -> dict[str, str]:
    """SGLang gives each rank a NUMA node of its own, or the cores that this says."""
    cores = sorted(os.sched_getaffinity(0))
    shares = [cores[rank % len(cores)] for rank in range(ranks)]
    return {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, shares))} if ranks > 1 else {}


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=2, pool_bytes=256 * MiB, transport="shm") as made:
        yield made


@pytest.fixture(scope="module")
def engines(
    cluster: LocalCluster, model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, SGLangProcess]]:
    model = make_llama(tmp_path_factory.mktemp("ranks"), model_path, attention_heads=KV_HEADS, kv_heads=KV_HEADS)
    with ExitStack() as stack:
        made = {}
        for node, ranks in RANKS.items():
            storage = {"mode": "service", "socket": cluster.socket(node), "verify_load": "full", "head_group": 1}
            settings = {"model_path": str(model), "tp_size": ranks, "storage": storage, "log_level": "warning"}
            settings["context_length"] = 4096
            made[node] = stack.enter_context(SGLangProcess(settings, variables=cores_of(ranks)))
            made[node].ready()
        yield made


@pytest.mark.parametrize(("writer", "reader"), [("n0", "n1"), ("n1", "n0")])
def test_engines_of_other_sizes_hit_each_others_pages(
    cluster: LocalCluster, engines: dict[str, SGLangProcess], writer: str, reader: str
) -> None:
    text = prompt(f"of {writer}")
    before = cluster.stats(writer).counters.get("blocks_sealed", 0)
    first = engines[writer].ask(text, ANSWER_TOKENS)
    blocks = pages_of(first) * KV_HEADS  # a page is a block for each head
    assert blocks and first["cached_tokens"] == 0

    def stored() -> bool:
        return cluster.stats(writer).counters.get("blocks_sealed", 0) - before >= blocks

    eventually(stored, "the pages in the pool", detail=lambda: engines[writer].said[-2000:])
    fetched = cluster.stats(reader).counters.get("fetched_blocks", 0)
    second = engines[reader].ask(text, ANSWER_TOKENS)
    assert second["storage_tokens"] == pages_of(first) * PAGE_TOKENS, engines[reader].said[-2000:]
    assert cluster.stats(reader).counters["fetched_blocks"] - fetched == blocks
    assert second["token_ids"] == first["token_ids"]


def test_ranks_of_an_engine_hit_what_they_stored(cluster: LocalCluster, engines: dict[str, SGLangProcess]) -> None:
    engine, text = engines["n0"], prompt("of both ranks")
    first = engine.ask(text, ANSWER_TOKENS)

    def from_the_pool() -> int:
        engine.forget()
        return int(engine.ask(text, 1)["storage_tokens"])

    eventually(lambda: from_the_pool() == pages_of(first) * PAGE_TOKENS, "all pages from the pool")
    engine.forget()
    assert engine.ask(text, ANSWER_TOKENS)["token_ids"] == first["token_ids"]
