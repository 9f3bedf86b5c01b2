"""A model of several KV cache groups: greedy tokens with the cache equal those without it, whichever group lacks what.

Two layers see every token, five a window of 100, which is less than most prompts here: vLLM makes four groups of them.
Two engines share node n0, a third one is on n1. float32, so that a difference is a wrong block and not a rounding.
"""

from __future__ import annotations

import random
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from kvservice.testing.cluster import LocalCluster
from kvservice.testing.eventually import eventually
from kvservice.units import MiB
from tests.vllm.replica import Replica
from tests.vllm.tiny_model import make_gemma3

pytestmark = pytest.mark.vllm

Prompt: TypeAlias = str | dict[str, list[int]]

BLOCK = 32
POOL = 24 * MiB  # some 200 positions: one of the full layers is 32 KiB, one of the others 80 KiB
SEAL_ENDS = ("sealed", "duplicate", "stale", "failed")
WINDOW = 100
ENGINE: dict[str, Any] = {
    "max_model_len": 2048,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 400,
    "threads": 1,
}
# Steps too short to measure the engine's speed: it then waits for the pool, however fast so small a model computes.
READER = {**ENGINE, "max_num_batched_tokens": 63}
STORY = "The keeper {} of the {} lamp walked the cliff path, counting {} boats, and wrote down the weather. "


class Setup:
    """`plain` reads nothing from the pool, so what it says is what an engine without it says. `two` is on its node."""

    def __init__(self, model: Path, cluster: LocalCluster, logs: Path) -> None:
        self.cluster = cluster
        self.replicas: dict[str, Replica] = {}
        for name, node, role in (("plain", "n0", "kv_producer"), ("two", "n0", "kv_both"), ("far", "n1", "kv_both")):
            extra: dict[str, object] = {"mode": "service", "socket": cluster.socket(node), "verify_load": "full"}
            engine = ENGINE if name == "plain" else READER
            self.replicas[name] = Replica(model, extra, logs / f"{name}.log", role=role, **engine)

    def __getitem__(self, name: str) -> Replica:
        return self.replicas[name]

    def wanted(self, text: Prompt, tokens: int = 16) -> list[int]:
        """Computed without the pool. Stores the prompt in the pool of n0, and waits until that is announced."""
        self["plain"].reset()
        found = list(self["plain"].ask(text, tokens)["token_ids"])
        assert len(set(found)) > 3, "any cache content would give these tokens"
        self.settle("plain")
        return found

    def settle(self, name: str) -> None:
        """Everything that the engine stored so far is sealed, and announced."""

        def is_stored() -> bool:
            counters = self[name].counters()
            return sum(counters[f"seal_{end}"] for end in SEAL_ENDS) >= counters["store_blocks_planned"]

        eventually(is_stored, f"the blocks of {name} sealed", detail=self[name].counters)
        self.cluster.wait_until_announced("n1" if name == "far" else "n0")

    def hit(self, name: str, text: Prompt, tokens: int = 16) -> tuple[list[int], int, Counter[str]]:
        """(tokens, prompt tokens that were not computed, what was counted), without the cache of the engine itself."""
        replica = self[name]
        replica.reset()
        before = replica.counters()
        answer = replica.ask(text, tokens)
        return list(answer["token_ids"]), answer["cached_tokens"], replica.counters() - before


def ids(count: int, seed: int) -> dict[str, list[int]]:
    """A prompt of so many tokens; of one seed each is the beginning of the longer ones."""
    numbers = random.Random(seed)
    return {"prompt_token_ids": [numbers.randrange(100, 40000) for _ in range(count)]}


def prompt(name: str, sentences: int, tail: str = "That evening") -> str:
    return "".join(STORY.format(name, name.upper(), f"{i} {name}") for i in range(sentences)) + tail


@pytest.fixture(scope="module")
def setup(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    root = tmp_path_factory.mktemp("hybrid")
    model = make_gemma3(root / "model", model_path, window=WINDOW)
    with LocalCluster(nodes=2, pool_bytes=POOL, lease_seconds=4.0) as cluster:
        made = Setup(model, cluster, root)
        only_windows = make_gemma3(root / "only-windows", model_path, window=WINDOW, layers=1)
        made.replicas["refused"] = Replica(
            only_windows, {"mode": "service", "socket": cluster.socket("n0")}, root / "refused.log", **ENGINE
        )
        try:
            for replica in made.replicas.values():
                replica.ready()
            yield made
        finally:
            with ThreadPoolExecutor() as threads:
                list(threads.map(Replica.close, made.replicas.values()))


@pytest.fixture(autouse=True)
def accounts_are_balanced(setup: Setup) -> Iterator[None]:
    yield
    found = [setup.cluster.accounting(node) for node in setup.cluster.nodes]
    assert all(one.balanced for one in found), found


def test_cold_then_warm_then_another_engine_of_the_node(setup: Setup) -> None:
    text = prompt("ada", 16)
    two = setup["two"]
    cold = two.ask(text, 16)
    setup.settle("two")
    tokens, cached, counted = setup.hit("two", text)
    # All blocks of the full layers' group; of the three groups with windows the last four.
    assert counted["loaded_blocks"] == cached // BLOCK + 3 * 4, "more than the windows was loaded, or less"
    assert cached >= 10 * BLOCK
    wanted = setup.wanted(text)
    assert cold["token_ids"] == wanted, "cold"
    assert tokens == wanted, "warm"
    other = prompt("abe", 16)
    wanted = setup.wanted(other)
    tokens, cached, counted = setup.hit("two", other)
    assert tokens == wanted, "what another engine stored"
    assert counted["loaded_blocks"] == cached // BLOCK + 3 * 4
    assert cached >= 10 * BLOCK


def test_engine_on_another_node(setup: Setup) -> None:
    text = prompt("bea", 14)
    wanted = setup.wanted(text)
    before = setup.cluster.stats("n1").counters
    tokens, cached, counted = setup.hit("far", text)
    assert tokens == wanted
    assert cached >= 9 * BLOCK
    assert counted["load_blocks_remote"] == cached // BLOCK
    after = setup.cluster.stats("n1").counters
    assert after["fetched_blocks"] - before.get("fetched_blocks", 0) == cached // BLOCK + 4, "or other windows, too"


def test_extended_and_branching_prompts(setup: Setup) -> None:
    first = prompt("cyd", 12, "")
    setup.wanted(first)
    for name, text in (("two", first + prompt("dot", 6)), ("far", prompt("cyd", 8, "") + prompt("eve", 5))):
        tokens, cached, _ = setup.hit(name, text)
        assert tokens == setup.wanted(text)
        assert cached >= 5 * BLOCK, "the common part was computed again"


def test_engines_own_hit_is_extended(setup: Setup) -> None:
    """Its own cache has a shorter prefix than the pool: blocks of the window that it has are not loaded again."""
    short, text = prompt("fay", 6, ""), prompt("fay", 16)
    wanted = setup.wanted(text)
    two = setup["two"]
    two.reset()
    own = two.ask(short, 1)
    before = two.counters()
    answer = two.ask(text, 16)
    assert answer["token_ids"] == wanted
    assert answer["cached_tokens"] >= 10 * BLOCK
    assert 0 < (two.counters() - before)["load_blocks"] < answer["cached_tokens"] // BLOCK, own


def test_prompts_around_the_window_and_the_block(setup: Setup) -> None:
    for length in (BLOCK + 1, 2 * BLOCK, 3 * BLOCK, 3 * BLOCK + 4, 3 * BLOCK + 5, 4 * BLOCK, 4 * BLOCK + 1, 8 * BLOCK):
        text = ids(length, seed=length)
        wanted = setup.wanted(text)
        tokens, cached, _ = setup.hit("two", text)
        assert tokens == wanted, f"{length} tokens"
        assert cached == (length - 1) // BLOCK * BLOCK, f"{length} tokens"


def test_generated_blocks_hit_in_the_next_turn(setup: Setup) -> None:
    text = ids(150, seed=1)
    two = setup["two"]
    first = two.ask(text, 96)
    setup.settle("two")
    follow_up = {"prompt_token_ids": [*text["prompt_token_ids"], *first["token_ids"], 5, 6, 7]}
    tokens, cached, _ = setup.hit("two", follow_up)
    assert cached >= 7 * BLOCK, "the generated blocks were not stored, or not their windows"
    assert tokens == setup.wanted(follow_up)


def test_several_at_once(setup: Setup) -> None:
    prompts = [prompt("ida", 10, tail) for tail in ("It was", "He saw", "The sea")] + [prompt("jon", 7)]
    plain, two = setup["plain"], setup["two"]
    cold = two.tokens(prompts, 12)
    setup.settle("two")
    two.reset()
    before = two.counters()
    warm = two.tokens(prompts, 12)
    assert (two.counters() - before)["loaded_blocks"] > 20
    wanted = plain.tokens(prompts, 12)
    assert cold == wanted
    assert warm == wanted


@pytest.mark.parametrize("reader", ["far", "two"])
def test_handoff(setup: Setup, reader: str) -> None:
    """The prompt is computed in steps by one engine, for another one that waits for it."""
    text = prompt("kim" + reader, 30)
    ours = {"version": 1, "handoff": uuid.uuid4().hex}
    setup[reader].reset()
    before = setup[reader].counters()
    setup["plain"].send_prompt(text, {"kvservice": {**ours, "role": "prefill"}}, 1)
    setup[reader].send_prompt(text, {"kvservice": {**ours, "role": "decode", "node": "n0"}}, 8)
    setup["plain"].first_answer()
    answer = setup[reader].first_answer()
    counted = setup[reader].counters() - before
    assert counted["handoffs_read"] == 1
    assert counted["load_blocks"] >= 18, "the reader computed the prompt itself"
    assert answer["token_ids"] == setup.wanted(text, 8)


def test_window_that_was_evicted_shortens_the_hit(setup: Setup) -> None:
    """Of a prompt that is hit again and again its chain stays and its last window; the windows inside go."""
    whole, half = ids(700, seed=2), ids(350, seed=2)
    wanted = setup.wanted(whole)
    for number in range(8):
        setup["plain"].ask(ids(1000, seed=10 + number), 1)
        tokens, cached, _ = setup.hit("two", whole, 4)
        assert tokens == wanted[:4]
        assert cached == 21 * BLOCK, "the prompt itself went"
    before = setup.cluster.stats("n0").counters
    tokens, cached, _ = setup.hit("two", half)
    after = setup.cluster.stats("n0").counters
    assert after["evicted_primary"] > 100, "the pool was never full"
    assert after["acquires_cut_window"] > before.get("acquires_cut_window", 0), "nothing was missing"
    assert cached < 10 * BLOCK
    assert tokens == setup.wanted(half)


def test_model_of_windows_only_is_refused_by_name_and_served(setup: Setup) -> None:
    refused = setup["refused"]
    text = prompt("lea", 8)
    first = refused.ask(text, 4)
    refused.reset()
    again = refused.ask(text, 4)
    assert again["token_ids"] == first["token_ids"]
    assert again["cached_tokens"] == 0
    said = refused.log.read_text(errors="replace")
    assert f"KV cache group 0 (sliding_window of {WINDOW} tokens, 1 layers: model.layers.0" in said


def test_nothing_failed_on_the_way(setup: Setup) -> None:
    for name in ("plain", "two", "far"):
        counters = setup[name].counters()
        bad = {
            key: count
            for key, count in counters.items()
            if count and any(word in key for word in ("failed", "corrupt", "stale", "dropped"))
        }
        assert not bad, bad
