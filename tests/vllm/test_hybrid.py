"""A model of several cache groups: greedy tokens with the cache equal those without it, whichever group lacks what.

Two layers see every token, five a window of 100, which is less than most prompts here: vLLM makes four groups of them.
Two engines share node n0, a third is on n1. float32, so that a difference is a wrong block and not a rounding.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvservice.testing.cluster import LocalCluster
from kvservice.units import MiB
from tests.vllm.replica import Replica
from tests.vllm.tiny_model import make_gemma3

pytestmark = pytest.mark.vllm

BLOCK = 32
WINDOW = 100
ENGINE = {"max_model_len": 2048, "max_num_batched_tokens": 256, "num_gpu_blocks_override": 400, "threads": 1}
STORY = "The keeper {} of the {} lamp walked the cliff path, counting {} boats, and wrote down the weather. "


class Setup:
    def __init__(self, model: Path, cluster: LocalCluster, logs: Path) -> None:
        self.cluster = cluster
        self.replicas = {"off": Replica(model, None, logs / "off.log", **ENGINE)}
        for name, node in (("one", "n0"), ("two", "n0"), ("far", "n1")):
            extra: dict[str, object] = {"mode": "service", "socket": cluster.socket(node), "verify_load": "full"}
            self.replicas[name] = Replica(model, extra, logs / f"{name}.log", **ENGINE)
        for replica in self.replicas.values():
            replica.ready()

    def __getitem__(self, name: str) -> Replica:
        return self.replicas[name]

    def wanted(self, text: str, tokens: int = 16) -> list[int]:
        found = self["off"].ask(text, tokens)["token_ids"]
        assert len(set(found)) > 3, "any cache content would give these tokens"
        return list(found)

    def stored(self, name: str, text: str, tokens: int = 16) -> list[int]:
        """Ask one engine, and wait until what it stored is sealed and announced."""
        found = self[name].ask(text, tokens)["token_ids"]
        deadline = time.monotonic() + 10
        while True:
            counters = self[name].counters()
            done = sum(counters[f"seal_{status}"] for status in ("sealed", "duplicate", "stale", "failed"))
            if done >= counters["store_blocks_planned"]:
                break
            assert time.monotonic() < deadline, f"never stored: {counters}"
            time.sleep(0.05)
        time.sleep(0.5)
        return list(found)

    def hit(self, name: str, text: str, tokens: int = 16) -> tuple[list[int], int, Counter[str]]:
        """(tokens, prompt tokens that were not computed, what was counted), without the cache of the engine itself."""
        replica = self[name]
        replica.reset()
        before = replica.counters()
        answer = replica.ask(text, tokens)
        return list(answer["token_ids"]), answer["cached_tokens"], replica.counters() - before


def prompt(name: str, sentences: int, tail: str = "That evening") -> str:
    return "".join(STORY.format(name, name.upper(), f"{i} {name}") for i in range(sentences)) + tail


@pytest.fixture(scope="module")
def setup(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    root = tmp_path_factory.mktemp("hybrid")
    model = make_gemma3(root / "model", model_path, window=WINDOW)
    with LocalCluster(nodes=2, pool_bytes=64 * MiB, lease_seconds=4.0) as cluster:
        made = Setup(model, cluster, root)
        try:
            yield made
        finally:
            for replica in made.replicas.values():
                replica.close()


@pytest.fixture(autouse=True)
def accounts_are_balanced(setup: Setup) -> Iterator[None]:
    yield
    found = [setup.cluster.accounting(node) for node in setup.cluster.nodes]
    assert all(one.balanced for one in found), found


def test_cold_then_warm_then_another_engine_of_the_node(setup: Setup) -> None:
    text = prompt("ada", 16)
    wanted = setup.wanted(text)
    assert setup.stored("one", text) == wanted, "cold"
    for name in ("one", "two"):
        tokens, cached, counted = setup.hit(name, text)
        assert tokens == wanted, name
        assert cached >= 10 * BLOCK, f"{name}: nothing came from the pool"
        # All blocks of two full groups' layers are one group here; of the three windowed groups the last four blocks.
        assert counted["loaded_blocks"] == cached // BLOCK + 3 * 4, f"{name}: more than the windows was loaded"


def test_engine_on_another_node(setup: Setup) -> None:
    text = prompt("bea", 14)
    wanted = setup.wanted(text)
    assert setup.stored("one", text) == wanted
    tokens, cached, counted = setup.hit("far", text)
    assert tokens == wanted
    assert cached >= 9 * BLOCK
    assert counted["load_blocks_remote"] == cached // BLOCK


def test_extended_and_branching_prompts(setup: Setup) -> None:
    first = prompt("cyd", 12, "")
    setup.stored("one", first)
    for name, text in (("one", first + prompt("dot", 6)), ("two", prompt("cyd", 8, "") + prompt("eve", 5))):
        wanted = setup.wanted(text)
        tokens, cached, _ = setup.hit(name, text)
        assert tokens == wanted
        assert cached >= 5 * BLOCK, "the common part was computed again"


def test_engines_own_hit_is_extended(setup: Setup) -> None:
    """Its own cache has a shorter prefix than the pool: blocks of the window that it has are not loaded again."""
    short, text = prompt("fay", 6, ""), prompt("fay", 16)
    wanted = setup.wanted(text)
    setup.stored("one", text)
    two = setup["two"]
    two.reset()
    two.ask(short, 1)
    before = two.counters()
    answer = two.ask(text, 16)
    assert answer["token_ids"] == wanted
    assert answer["cached_tokens"] >= 10 * BLOCK
    assert (two.counters() - before)["loaded_blocks"] > 0


def test_prompts_around_the_window_and_the_block(setup: Setup) -> None:
    for sentences in (2, 3, 4, 5, 6):
        text = prompt("gil", sentences, "")
        wanted = setup.wanted(text)
        assert setup.stored("one", text) == wanted
        tokens, cached, _ = setup.hit("two", text)
        assert tokens == wanted
        assert cached >= BLOCK


def test_generated_blocks_hit_in_the_next_turn(setup: Setup) -> None:
    text = prompt("hal", 5)
    setup["one"].reset()
    first = setup["one"].ask(text, 96)
    follow_up = text + first["text"] + " After that"
    wanted = setup.wanted(follow_up)
    time.sleep(1)
    tokens, cached, _ = setup.hit("one", follow_up)
    assert tokens == wanted
    assert cached >= 5 * BLOCK


def test_several_at_once(setup: Setup) -> None:
    prompts = [prompt("ida", 10, tail) for tail in ("It was", "He saw", "The sea")] + [prompt("jon", 7)]
    wanted = setup["off"].tokens(prompts, 12)
    assert setup["one"].tokens(prompts, 12) == wanted, "cold"
    time.sleep(1)
    setup["two"].reset()
    before = setup["two"].counters()
    assert setup["two"].tokens(prompts, 12) == wanted, "warm"
    assert (setup["two"].counters() - before)["loaded_blocks"] > 20


def test_handoff_between_nodes_and_on_one(setup: Setup) -> None:
    for name, node_writer in (("far", "one"), ("two", "one")):
        text = prompt("kim" + name, 30)
        wanted = setup.wanted(text, 8)
        ours = {"version": 1, "handoff": uuid.uuid4().hex}
        writer: dict[str, Any] = {"kvservice": {**ours, "role": "prefill"}}
        reader: dict[str, Any] = {"kvservice": {**ours, "role": "decode", "node": "n0"}}
        setup[name].reset()
        before = setup[name].counters()
        setup[node_writer].send_prompt(text, writer, 1)
        setup[name].send_prompt(text, reader, 8)
        setup[node_writer].first_answer()
        answer = setup[name].first_answer()
        assert answer["token_ids"] == wanted
        counted = setup[name].counters() - before
        assert counted["handoffs_read"] == 1
        assert counted["load_blocks"] >= 18, "the reader computed the prompt itself"


def test_blocks_that_were_evicted_shorten_the_hit(setup: Setup) -> None:
    """More prompts than the pool holds: what is left of each gives its tokens, and some windows are gone."""
    texts = [prompt(f"lou{i}", 40) for i in range(12)]
    wanted = [setup.wanted(text, 4) for text in texts[:3]]
    for text in texts:
        setup.stored("one", text, 4)
    for text, tokens in zip(texts[:3], wanted, strict=True):
        assert setup.hit("one", text, 4)[0] == tokens
        assert setup.hit("far", text, 4)[0] == tokens


def test_nothing_failed_on_the_way(setup: Setup) -> None:
    for name in ("one", "two", "far"):
        counters = setup[name].counters()
        bad = {
            key: count for key, count in counters.items()
            if count and any(word in key for word in ("failed", "corrupt", "stale", "dropped"))
        }  # fmt: skip
        assert not bad, bad
