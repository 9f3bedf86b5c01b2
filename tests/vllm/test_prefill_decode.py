"""Prefill on one engine, decode on another: the tokens of one engine alone, whoever stops or dies in between.

Three real engines on two nodes: `prefill` (producer) and `local` (consumer) on n0, `decode` (consumer) on n1. A
producer reads nothing, so what it says to a whole request is what one engine alone says.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvservice.testing.cluster import LocalCluster
from kvservice.testing.eventually import eventually
from kvservice.units import MiB
from tests.vllm.replica import Replica, close_all

pytestmark = pytest.mark.vllm

TEXT = "The pilot of the supply boat {} knew every rock by its name and told the keeper which ones had moved. "
ENGINE = {"max_model_len": 3072, "max_num_batched_tokens": 256, "dtype": "float32", "block_size": 32}
LEASE_SECONDS = 4.0
TOKENS = 8


class Setup:
    def __init__(self, cluster: LocalCluster, model: Path, logs: Path) -> None:
        self.cluster = cluster
        self._model = model
        self._logs = logs
        self._prompts = 0
        self.replicas: dict[str, Replica] = {}
        for name, node, role in (
            ("prefill", "n0", "kv_producer"),
            ("local", "n0", "kv_consumer"),
            ("decode", "n1", "kv_consumer"),
        ):
            self.start(name, node, role)
        for replica in self.replicas.values():
            replica.ready()

    def start(self, name: str, node: str, role: str) -> Replica:
        extra: dict[str, object] = {
            "mode": "service",
            "socket": self.cluster.socket(node),
            "verify_load": "full",
            "handoff_timeout_seconds": 40,
        }
        self.replicas[name] = Replica(self._model, extra, self._logs / f"{name}.log", role=role, threads=1, **ENGINE)
        return self.replicas[name]

    def prompt(self, sentences: int = 40) -> str:
        """About 25 tokens a sentence; no two share a block."""
        self._prompts += 1
        return f"Log number {self._prompts}. " + TEXT.format(f"Nr {self._prompts}") * sentences + "He said"

    def wanted(self, prompt: str) -> list[int]:
        return list(self.replicas["prefill"].ask(prompt, TOKENS)["token_ids"])

    def settle(self) -> None:
        """Every slot is accounted for and nothing stays leased, within a lease."""

        def is_settled() -> bool:
            found = [self.cluster.accounting(node) for node in self.cluster.nodes]
            assert all(one.balanced for one in found), found
            return all(one.leases == 0 and one.slots["leased"] == 0 for one in found)

        eventually(is_settled, "the leases to end", LEASE_SECONDS + 3)

    def close(self) -> None:
        close_all(self.replicas.values())


@pytest.fixture(scope="module")
def setup(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    with LocalCluster(nodes=2, pool_bytes=512 * MiB, lease_seconds=LEASE_SECONDS) as cluster:
        made = Setup(cluster, model_path, tmp_path_factory.mktemp("engines"))
        try:
            yield made
        finally:
            made.close()


@pytest.fixture(autouse=True)
def nothing_stays_leased(setup: Setup) -> Iterator[None]:
    yield
    setup.settle()


def handoff() -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameters for the prefill on n0 and for the decode that follows it."""
    ours = {"version": 1, "handoff": uuid.uuid4().hex}
    return {"kvservice": {**ours, "role": "prefill"}}, {"kvservice": {**ours, "role": "decode", "node": "n0"}}


def fetched(setup: Setup) -> int:
    return setup.cluster.stats("n1").counters.get("fetched_blocks", 0)


def test_decode_continues_what_the_prefill_answered(setup: Setup) -> None:
    prompt = setup.prompt()
    prefill, decode = setup.replicas["prefill"], setup.replicas["decode"]
    prefill.send_prompt(prompt, {"do_remote_decode": True}, 1)
    first = prefill.first_answer()
    assert first["params"]["kvservice"]["node"] == "n0"
    before, loaded = fetched(setup), decode.counters()["load_blocks"]
    decode.send_prompt(prompt, first["params"], TOKENS)
    answer = decode.first_answer()
    assert answer["token_ids"] == setup.wanted(prompt)
    assert answer["token_ids"][:1] == first["token_ids"]
    assert answer["cached_tokens"] == 0, "vLLM tells the client what the prefill had cached"
    assert fetched(setup) - before == decode.counters()["load_blocks"] - loaded >= 28


def test_decode_pulls_while_the_prefill_computes(setup: Setup) -> None:
    prompt = setup.prompt(60)
    prefill, decode = setup.replicas["prefill"], setup.replicas["decode"]
    produce, consume = handoff()
    before = fetched(setup)
    decode.send_prompt(prompt, consume, TOKENS)
    prefill.send_prompt(prompt, produce, 1)
    eventually(lambda: fetched(setup) > before, "a fetched block")
    arrived_early = fetched(setup) - before
    prefill.first_answer()
    answer = decode.first_answer()
    assert answer["token_ids"] == setup.wanted(prompt)
    assert answer["cached_tokens"] >= 1400, "decode computed what the prefill had computed"
    assert arrived_early < answer["cached_tokens"] // 32, "nothing crossed before the prefill was done"


def test_decode_on_the_same_node_shares_the_slots(setup: Setup) -> None:
    prompt = setup.prompt()
    prefill, local = setup.replicas["prefill"], setup.replicas["local"]
    produce, consume = handoff()
    before = setup.cluster.stats("n0").counters.get("fetched_blocks", 0)
    local.send_prompt(prompt, consume, TOKENS)
    prefill.send_prompt(prompt, produce, 1)
    prefill.first_answer()
    answer = local.first_answer()
    assert answer["token_ids"] == setup.wanted(prompt)
    assert answer["cached_tokens"] >= 900
    assert setup.cluster.stats("n0").counters.get("fetched_blocks", 0) == before


def test_several_prompts_are_handed_off_at_once(setup: Setup) -> None:
    prompts = [setup.prompt(16) for _ in range(5)]
    pairs = [handoff() for _ in prompts]
    prefill, decode = setup.replicas["prefill"], setup.replicas["decode"]
    decode.send(prompts=prompts, params=[consume for _, consume in pairs], max_tokens=TOKENS)
    prefill.send(prompts=prompts, params=[produce for produce, _ in pairs], max_tokens=1)
    prefill.answer()
    outputs = decode.answer()["outputs"]
    assert [one["token_ids"] for one in outputs] == [setup.wanted(prompt) for prompt in prompts]
    assert all(one["cached_tokens"] >= 350 for one in outputs)


def test_decode_that_is_aborted_while_it_waits_leaves_nothing(setup: Setup) -> None:
    prompt = setup.prompt(60)
    prefill, decode = setup.replicas["prefill"], setup.replicas["decode"]
    produce, consume = handoff()
    decode.send_prompt(prompt, consume, TOKENS, abort_after=0.8)
    prefill.send_prompt(prompt, produce, 1)
    assert decode.answer()["outputs"] == []
    prefill.first_answer()
    eventually(lambda: setup.cluster.stats("n1").counters.get("acquires_cancelled", 0) >= 1, "the cancelled acquire")


def test_prefill_that_is_aborted_is_finished_by_the_decode(setup: Setup) -> None:
    prompt = setup.prompt(60)
    prefill, decode = setup.replicas["prefill"], setup.replicas["decode"]
    produce, consume = handoff()
    decode.send_prompt(prompt, consume, TOKENS)
    prefill.send_prompt(prompt, produce, 1, abort_after=1.0)
    assert prefill.answer()["outputs"] == []
    answer = decode.first_answer()
    assert answer["token_ids"] == setup.wanted(prompt)
    assert answer["seconds"] < 30, "decode waited for a prefill that was gone"


def test_decode_of_an_unknown_handoff_recomputes_soon(setup: Setup) -> None:
    prompt = setup.prompt(10)
    decode = setup.replicas["decode"]
    for node in ("n0", "nowhere"):
        _, consume = handoff()
        consume["kvservice"]["node"] = node
        decode.send_prompt(prompt, consume, TOKENS)
        answer = decode.first_answer()
        assert answer["token_ids"] == setup.wanted(prompt)
        assert answer["seconds"] < 15
        decode.reset()


def test_consumer_that_never_comes_leaves_nothing_behind(setup: Setup) -> None:
    prefill = setup.replicas["prefill"]
    prefill.send_prompt(setup.prompt(), handoff()[0], 1)
    assert prefill.first_answer()["params"]["kvservice"]["role"] == "decode"


def test_prefill_shard_killed_midway_is_finished_by_the_decode(setup: Setup) -> None:
    prompt = setup.prompt(60)
    prefill, decode = setup.replicas["prefill"], setup.replicas["decode"]
    produce, consume = handoff()
    before, attached = fetched(setup), prefill.counters()["attached"]
    decode.send_prompt(prompt, consume, TOKENS)
    prefill.send_prompt(prompt, produce, 1)
    eventually(lambda: fetched(setup) > before, "a fetched block")
    setup.cluster.kill("n0")
    first = prefill.first_answer()
    answer = decode.first_answer()
    setup.cluster.start_shard("n0")
    eventually(
        lambda: prefill.counters()["attached"] > attached, "the next attachment"
    )  # the next test hands off again
    assert answer["token_ids"] == setup.wanted(prompt)
    assert answer["token_ids"][:1] == first["token_ids"]


def test_prefill_engine_killed_midway_is_finished_by_the_decode(setup: Setup) -> None:
    prompt = setup.prompt(60)
    prefill, decode = setup.replicas["prefill"], setup.replicas["decode"]
    produce, consume = handoff()
    before = fetched(setup)
    decode.send_prompt(prompt, consume, TOKENS)
    prefill.send_prompt(prompt, produce, 1)
    eventually(lambda: fetched(setup) > before, "a fetched block")
    prefill.kill()
    answer = decode.first_answer()
    setup.start("prefill", "n0", "kv_producer").ready()
    assert answer["token_ids"] == setup.wanted(prompt)
