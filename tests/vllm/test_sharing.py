"""One pool for two kinds of engine: what vLLM computed is hit by the reference engine, and the other way round. Blocks
of the exact kind are found by neither.

In float32, because then the two differ by less than what decides a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvservice.engine.loop import ReferenceEngine
from kvservice.engine.model import PagedModel
from kvservice.engine.options import EngineOptions
from kvservice.engine.sampling import Sampling
from kvservice.testing.cluster import LocalCluster
from kvservice.testing.eventually import eventually
from kvservice.units import MiB
from tests.vllm.replica import Replica
from tests.vllm.test_output_equality import ENGINE, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

COUNT = 16
ANSWER = Sampling(max_tokens=COUNT)


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=2, lookup_partitions=1, pool_bytes=128 * MiB) as running:
        yield running


@pytest.fixture(scope="module")
def model(shallow_model: Path) -> PagedModel:
    return PagedModel.open(shallow_model, dtype=torch.float32)


@pytest.fixture(scope="module")
def vllm(cluster: LocalCluster, shallow_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    """On node n0, after the prompt that opens its gate."""
    extra = {"mode": "service", "socket": cluster.socket("n0"), "share": "engines", "verify_load": "full"}
    log = tmp_path_factory.mktemp("sharing") / "log"
    replica = Replica(shallow_model, {**extra, "fetch_timeout_seconds": 60}, log, **ENGINE, block_size=32)
    try:
        replica.ready().ask(prompt("Ann", 3), 4)

        def is_open() -> bool:
            replica.ask("On", 1)  # a step, with which the workers' counters come
            return replica.counters()["share_probe_agrees"] == 1

        eventually(is_open, "vLLM's pages agree with the model's files", 60.0, detail=replica.counters)
        yield replica
    finally:
        replica.close()


def reference(cluster: LocalCluster, node: str, model: PagedModel, **more: Any) -> ReferenceEngine:
    given = {"mode": "service", "socket": cluster.socket(node), "share": "engines", "verify_load": "full"}
    fresh = PagedModel(model._model, block_tokens=16, tokenizer=model._tokenizer, name=model.name)
    return ReferenceEngine(fresh, EngineOptions(**{**given, "device_blocks": 128, "fetch_timeout_seconds": 60, **more}))


def test_reference_engine_hits_what_vllm_computed(cluster: LocalCluster, model: PagedModel, vllm: Replica) -> None:
    """On vLLM's own node, and from the other one. The exact kind finds nothing of it."""
    tokens = model.encode(prompt("Ida", 12))
    before = vllm.counters()["stored_blocks"]
    wanted = vllm.ask({"prompt_token_ids": tokens}, COUNT)["token_ids"]
    eventually(lambda: vllm.counters()["stored_blocks"] >= before + len(tokens) // 16, "stored", detail=vllm.counters)
    cluster.wait_until_announced("n0")
    for node, share, loaded in (("n0", "off", 0), ("n0", "engines", len(tokens) // 16 * 16), ("n1", "engines", None)):
        with reference(cluster, node, model, share=share, role="consumer") as engine:
            (output,) = engine.generate([tokens], ANSWER)
            assert output.token_ids == [wanted[:COUNT]], (node, share)
            assert loaded is None or output.loaded_tokens == loaded
            assert bool(engine.all_counters()["load_blocks_remote"]) == (node == "n1")


def test_vllm_hits_what_the_reference_engine_computed(cluster: LocalCluster, model: PagedModel, vllm: Replica) -> None:
    """A hit ends with a block of vLLM, which holds two pages."""
    tokens, other = (model.encode(prompt(name, 12)) for name in ("Eve", "Fay"))
    tokens = tokens[: len(tokens) // 32 * 32 - 10]
    with reference(cluster, "n0", model) as engine, reference(cluster, "n0", model, share="off") as exact:
        (output,) = engine.generate([tokens], ANSWER)
        exact.generate([other], ANSWER)
        stored = engine.all_counters()["stored_blocks"]
        assert stored >= len(tokens) // 16
    vllm.reset()
    warm = vllm.ask_warm({"prompt_token_ids": tokens}, COUNT, 1)
    assert warm["token_ids"] == output.token_ids[0]
    assert warm["cached_tokens"] == len(tokens) // 32 * 32
    assert vllm.ask({"prompt_token_ids": other}, COUNT)["cached_tokens"] == 0
    counters = vllm.counters()
    assert not counters["loads_failed"] and counters["load_verified_blocks"]
