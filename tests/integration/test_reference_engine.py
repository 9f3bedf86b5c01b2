"""Reference engines over real shards: warm from another engine, handed over, through a copy worker, and without a
shard. The tokens are those of `generate` each time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from kvservice.engine.loop import ReferenceEngine, RequestOutput
from kvservice.engine.model import PagedModel
from kvservice.engine.options import EngineOptions
from kvservice.engine.sampling import Sampling
from kvservice.testing.cluster import LocalCluster
from kvservice.testing.eventually import eventually
from kvservice.units import MiB
from tests.unit.engine.tiny_models import generated, make, prompt

BLOCK, COUNT = 4, 10
SETTINGS: dict[str, Any] = {"mode": "service", "weights_version": "random", "verify_load": "full", "device_blocks": 64}
PROMPTS = [prompt(length, seed=length) for length in (31, 42, 37)]
ANSWERS = Sampling(max_tokens=COUNT)
Start = Callable[..., ReferenceEngine]


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=2, lookup_partitions=1, pool_bytes=16 * MiB, lease_seconds=4.0) as running:
        yield running


@pytest.fixture(scope="module")
def model() -> Any:
    return make("grouped heads")


@pytest.fixture(scope="module")
def wanted(model: Any) -> list[list[int]]:
    return [generated(model, tokens, COUNT)[0] for tokens in PROMPTS]


@pytest.fixture(scope="module")
def copy_worker(cluster: LocalCluster) -> None:
    cluster.start_copy_worker("n0")


@pytest.fixture
def start(cluster: LocalCluster, model: Any) -> Iterator[Start]:
    """Engines of one test share no block with those of another. None leaves anything behind."""
    with ExitStack() as stack:

        def make_engine(node: str, namespace: str, **options: Any) -> ReferenceEngine:
            given = {**SETTINGS, "socket": cluster.socket(node), "namespace": namespace, "block_tokens": BLOCK}
            given["weights_version"] = namespace  # which names the blocks
            engine = ReferenceEngine(PagedModel(model, block_tokens=BLOCK), EngineOptions(**{**given, **options}))
            stack.enter_context(engine)
            return engine

        yield make_engine
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("kvservice")]
    assert not left, f"threads that outlive their engine: {left}"
    eventually(cluster.nothing_is_held, "no lease, attachment or slot being written", 10.0)


def one(engine: ReferenceEngine, tokens: list[int], **given: Any) -> RequestOutput:
    request_id = engine.add(tokens, ANSWERS, **given)
    found: list[RequestOutput] = []
    while engine.has_work:
        found += engine.step()
    (output,) = found
    assert output.request_id == request_id and not output.reason
    return output


@pytest.mark.parametrize(
    "options",
    [{}, {"layerwise": "both"}, {"slot_tokens": 2 * BLOCK, "offload": "eager"}],
    ids=["whole", "layerwise", "slots"],
)
def test_an_engine_hits_what_another_stored(
    cluster: LocalCluster, start: Start, wanted: list[list[int]], options: dict[str, Any]
) -> None:
    """On the same node, and over the path between two nodes."""
    namespace = f"warm{len(options)}"
    first = start("n0", namespace, **options)
    assert [one(first, tokens).token_ids[0] for tokens in PROMPTS] == wanted
    assert first.counters["prefill_tokens"] >= sum(map(len, PROMPTS))
    cluster.wait_until_announced("n0")
    for node in ("n0", "n1"):
        second = start(node, namespace, **options)
        for tokens, answer in zip(PROMPTS, wanted, strict=True):
            output = one(second, tokens)
            assert output.token_ids == [answer]
            slot = options.get("slot_tokens", BLOCK)
            assert output.loaded_tokens == (len(tokens) - 1) // slot * slot
        counters = second.all_counters()
        assert bool(counters["load_blocks_remote"]) == (node == "n1")
        assert bool(counters["loaded_blocks_layerwise"]) == ("layerwise" in options)


def test_the_beginning_of_a_block_is_hit_on_another_node(
    cluster: LocalCluster, start: Start, wanted: list[list[int]]
) -> None:
    """A prompt is hit up to its last token, wherever in a block that is, from this node and over the path between."""
    first = start("n0", "tails", tails=True)
    assert [one(first, tokens).token_ids[0] for tokens in PROMPTS] == wanted
    cluster.wait_until_announced("n0")
    for node in ("n0", "n1"):
        second = start(node, "tails", tails=True)
        for tokens, answer in zip(PROMPTS, wanted, strict=True):
            output = one(second, tokens)
            assert (output.token_ids, output.loaded_tokens) == ([answer], len(tokens) - 1)
        assert second.all_counters()["load_tails"] == 2, "one of the prompts has all but its last token in whole blocks"
    assert cluster.stats("n1").counters["tails_found_remote"] == 3, "also the one that is not needed"


@pytest.mark.parametrize("slot", [BLOCK, 2 * BLOCK])
def test_a_prompt_is_handed_over_between_two_engines(start: Start, wanted: list[list[int]], slot: int) -> None:
    """One computes the prompt and its first token, the other on another node goes on, before any directory is asked."""
    prefill = start("n0", f"handed{slot}", role="both", slot_tokens=slot)
    decode = start("n1", f"handed{slot}", role="consumer", slot_tokens=slot)
    for tokens, answer in zip(PROMPTS, wanted, strict=True):
        request = prefill.add(tokens, Sampling(max_tokens=1), transfer_params={"do_remote_decode": True})
        params: dict[str, object] | None = None
        while prefill.has_work:
            for output in prefill.step():
                assert output.request_id == request and output.token_ids == [answer[:1]]
                params = output.transfer_params
        assert params is not None
        output = one(decode, tokens, transfer_params=params)
        assert output.token_ids == [answer]
        assert output.loaded_tokens == (len(tokens) - 1) // slot * slot
    assert decode.all_counters()["handoffs_read"] == len(PROMPTS)
    assert not decode.all_counters()["store_blocks_planned"], "a consumer stores nothing"


def test_swaps_go_to_the_shard_and_come_back(start: Start, wanted: list[list[int]]) -> None:
    engine = start("n0", "swapped", device_blocks=20, host_blocks=64, preempt_by="swap")
    for turn in range(20):  # one whose answer takes longer than to compute it is computed, as on a busy machine
        assert [output.token_ids[0] for output in engine.generate(PROMPTS, ANSWERS)] == wanted, turn
        engine.forget()
        if engine.counters["swapped_in"]:
            break
    assert engine.counters["swapped_out"] > 0 and engine.counters["swapped_in"] > 0


@pytest.mark.parametrize("slot", [BLOCK, 2 * BLOCK])
def test_a_copy_worker_copies_for_it(
    cluster: LocalCluster, start: Start, wanted: list[list[int]], copy_worker: None, slot: int
) -> None:
    options = {"copier": "worker", "device_blocks": 20, "host_blocks": 64, "preempt_by": "swap", "slot_tokens": slot}
    engine = start("n0", f"worker{slot}", **options)
    for turn in range(20):  # the engine copies itself until it has found the worker
        assert [output.token_ids[0] for output in engine.generate(PROMPTS, ANSWERS)] == wanted, turn
        engine.forget()
        if engine.all_counters()["copy_worker_blocks"] > 20:
            break
        time.sleep(0.2)
    counters = engine.all_counters()
    assert counters["copy_worker_blocks"] > 20 and not counters["loads_failed"]
    assert counters["swapped_out"] > 0


def test_a_killed_shard_costs_time_and_no_token(cluster: LocalCluster, start: Start, wanted: list[list[int]]) -> None:
    """While requests lie on the host, too: they are computed again. A shard that comes back is used again."""
    engine = start("n1", "killed", device_blocks=20, host_blocks=64, preempt_by="swap")
    ids = [engine.add(tokens, ANSWERS) for tokens in PROMPTS]
    found: dict[str, RequestOutput] = {}
    while not engine.counters["swapped_out"]:
        found.update({output.request_id: output for output in engine.step()})
    cluster.kill("n1")
    while engine.has_requests:
        found.update({output.request_id: output for output in engine.step()})
    assert [found[each].token_ids[0] for each in ids] == wanted
    assert engine.counters["recomputed"] > 0
    engine.forget()
    assert [output.token_ids[0] for output in engine.generate(PROMPTS, ANSWERS)] == wanted, "without any shard"
    cluster.start_shard("n1")

    def is_back() -> bool:
        engine.step()  # the session attaches once nothing writes to the old shard's memory any more
        return engine.all_counters()["attached"] >= 2

    eventually(is_back, "the engine attached again", 20.0)
    engine.forget()
    assert [output.token_ids[0] for output in engine.generate(PROMPTS, ANSWERS)] == wanted
    assert engine.all_counters()["stored_blocks"] > 0
