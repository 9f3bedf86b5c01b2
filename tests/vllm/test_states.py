"""Models with states (Mamba-2, gated delta nets), beside attention or alone: what comes from the pool is what was
computed.

Between storing and loading every cache tensor of the engine is overwritten. Tokens must be equal, and the
log-probability of every token: with a state missing or of another position an engine says something else, without any
error. Random weights; float32 where the model runs in it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvservice.core.block.window_groups import WINDOW_BIT
from kvservice.core.segment.geometry import plan_geometry
from kvservice.memory.segment import Segment, segment_path
from kvservice.testing.cluster import LocalCluster
from kvservice.testing.eventually import eventually
from kvservice.units import MiB
from tests.vllm.replica import Replica, close_all
from tests.vllm.tiny_model import make_with_states

pytestmark = pytest.mark.vllm

POOL = 128 * MiB
ENGINE: dict[str, Any] = {
    "block_size": None,  # vLLM makes a block as long as attention needs to be as large as a state
    "max_model_len": 2048,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 4,
    "num_gpu_blocks_override": 120,
    "threads": 1,
}
FLOAT = {**ENGINE, "whole_chunks": True}
# vLLM's gated delta net computes in nothing else on CPUs. Its blocks are longer, and a step shall have two.
BFLOAT = {**ENGINE, "dtype": "bfloat16", "max_num_batched_tokens": 1024, "max_model_len": 2560}
MODELS: dict[str, dict[str, Any]] = {
    "granite4": FLOAT,
    "qwen3_next": BFLOAT,
    "qwen3_5": {**BFLOAT, "without_pictures": True},
    "falcon_h1": FLOAT,
    "nemotron_h": FLOAT,
    "zamba2": FLOAT,
    "mamba2": {**FLOAT, "enable_prefix_caching": True},  # vLLM has it off for states alone
}
STATES_ALONE = ("mamba2",)  # no layer has attention, and a block is short
BETWEEN_NODES = ("granite4", "qwen3_next", "mamba2")
# Of log-probabilities, if a state was computed in other steps. Another prompt's state gives other tokens.
ROUNDING = {"float32": 1e-4, "bfloat16": 0.25}
SEAL_ENDS = ("sealed", "duplicate", "stale", "failed")
NOT_FROM_THE_POOL = {"kvservice": {"version": 1, "load": False, "store": False}}


def ids(count: int, seed: int) -> list[int]:
    """A prompt of so many tokens; of one seed each is the beginning of the longer ones."""
    numbers = random.Random(seed)
    return [numbers.randrange(100, 40000) for _ in range(count)]


@dataclass
class Engine:
    cluster: LocalCluster
    replica: Replica
    node: str
    block: int
    step: int  # tokens that it computes at once, in whole blocks
    dtype: str
    has_attention: bool

    def reset(self) -> None:
        self.replica.reset(overwrite=True)

    def run(self, *prompts: list[int], tokens: int = 24, alone: bool = False) -> list[dict[str, Any]]:
        """The outputs; `alone` is without the pool."""
        params = [NOT_FROM_THE_POOL if alone else None] * len(prompts)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        self.replica.send(prompts=asked, params=params, max_tokens=tokens, logprobs=True)
        return list(self.replica.answer()["outputs"])

    def wanted(self, *prompts: list[int], tokens: int = 24) -> list[dict[str, Any]]:
        """One by one, computed anew each time."""
        found = []
        for prompt in prompts:
            self.reset()
            found += self.run(prompt, tokens=tokens, alone=True)
            assert found[-1]["cached_tokens"] == 0
            assert len(set(found[-1]["token_ids"])) > 3, "any cache content would give these tokens"
        self.reset()
        return found

    def settle(self) -> None:
        """Everything that the engine stored so far is sealed, and announced."""

        def is_stored() -> bool:
            counters = self.replica.counters()
            return sum(counters[f"seal_{end}"] for end in SEAL_ENDS) >= counters["store_blocks_planned"]

        eventually(is_stored, "the blocks sealed", detail=self.replica.counters)
        self.cluster.wait_until_announced(self.node)

    def store(self, *prompts: list[int], tokens: int = 24) -> list[dict[str, Any]]:
        """Into the pool, one by one."""
        found = [output for prompt in prompts for output in self.run(prompt, tokens=tokens)]
        self.settle()
        self.reset()
        return found


def slow_beside(gate: str, names: Iterable[str]) -> list[Any]:
    """The models as parameters; the gate plays one of them, because each starts an engine."""
    return [pytest.param(name, marks=() if name == gate else pytest.mark.slow) for name in names]


@pytest.fixture(scope="module", params=slow_beside("qwen3_next", MODELS))
def model(
    request: pytest.FixtureRequest, model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    name = str(request.param)
    return name, make_with_states(tmp_path_factory.mktemp(name), model_path, name=name)


@pytest.fixture(scope="module")
def start(model: tuple[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Engine]]:
    """Starts one engine on each node that is asked for."""
    name, folder = model
    root = tmp_path_factory.mktemp("states")
    settings = MODELS[name]
    started: dict[str, Engine] = {}
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(nodes=2, pool_bytes=POOL, lease_seconds=4.0))
        stack.callback(lambda: close_all(engine.replica for engine in started.values()))

        def start(node: str) -> Engine:
            if node not in started:
                extra: dict[str, object] = {"mode": "service", "socket": cluster.socket(node), "verify_load": "full"}
                replica = Replica(folder, extra, root / f"{node}.log", **settings).ready()
                block = replica.block_tokens  # how long vLLM makes it depends on the processor
                step = settings["max_num_batched_tokens"] // block * block
                dtype, has_attention = settings.get("dtype", "float32"), name not in STATES_ALONE
                started[node] = Engine(cluster, replica, node, block, step, dtype, has_attention)
            return started[node]

        yield start
        for node in cluster.nodes:
            books = cluster.accounting(node)
            assert books.balanced, books.violation


def same(found: list[dict[str, Any]], wanted: list[dict[str, Any]], what: str, off: float = 0.0) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one["token_ids"] == other["token_ids"], what
        assert one["logprobs"] == pytest.approx(other["logprobs"], rel=0, abs=off), what


def test_hit_is_bit_for_bit_what_was_computed(start: Callable[[str], Engine]) -> None:
    """Prompts that end within a block, on a boundary and one token behind it; and one that shares a beginning."""
    engine = start("n0")
    block = engine.block
    lengths = [3 * block - 24, 3 * block, 2 * block + 1]
    prompts = [ids(length, seed) for seed, length in enumerate(lengths)]
    wanted = engine.wanted(*prompts)
    same(engine.store(*prompts), wanted, "cold")
    for prompt, length, one in zip(prompts, lengths, wanted, strict=True):
        before = engine.replica.counters()
        found = engine.run(prompt)
        same(found, [one], f"{length} tokens from the pool")
        assert found[0]["cached_tokens"] == (length - 1) // block * block
        counted = engine.replica.counters() - before
        blocks = found[0]["cached_tokens"] // block if engine.has_attention else 0
        assert counted["load_verified_blocks"] >= blocks + 1, counted
        engine.reset()
    found = engine.run(*prompts)
    assert [output["token_ids"] for output in found] == [one["token_ids"] for one in wanted], "all at once"
    assert all(output["cached_tokens"] >= block for output in found)


def test_hit_ends_where_a_state_is_and_not_where_attention_does(start: Callable[[str], Engine]) -> None:
    """Two prompts share more whole blocks than the first of them has states for."""
    engine = start("n0")
    block = engine.block
    shared = ids(engine.step + block, 7)
    first, second = [*shared, *ids(block + 9, 8)], [*shared, *ids(block + 5, 9)]
    wanted = engine.wanted(second)
    engine.store(first)
    found = engine.run(second)
    same(found, wanted, "a shared beginning")
    assert found[0]["cached_tokens"] == engine.step, "attention without its state, or nothing of it"


def test_next_turn_hits_the_state_within_the_answer(start: Callable[[str], Engine]) -> None:
    engine = start("n0")
    block = engine.block
    turn = ids(2 * block - 20, 11)
    answer = engine.store(turn, tokens=40)[0]["token_ids"]
    follow_up = [*turn, *answer, *ids(30, 12)]
    wanted = engine.wanted(follow_up)
    found = engine.run(follow_up)
    same(found, wanted, "the next turn", ROUNDING[engine.dtype])  # computed token by token there, and in one step here
    assert found[0]["cached_tokens"] == (len(turn) + len(answer) - 1) // block * block


def test_engines_own_hit_is_extended_by_states(start: Callable[[str], Engine]) -> None:
    engine = start("n0")
    block = engine.block
    prompt = ids(3 * block + 10, 13)
    wanted = engine.wanted(prompt)
    engine.store(prompt)
    engine.run(prompt[: block + 7], tokens=1, alone=True)
    found = engine.run(prompt)
    same(found, wanted, "partly its own")
    assert found[0]["cached_tokens"] == 3 * block


@pytest.mark.parametrize("model", slow_beside("qwen3_next", BETWEEN_NODES), indirect=True, scope="module")
def test_states_are_read_from_another_node(start: Callable[[str], Engine]) -> None:
    near, far = start("n0"), start("n1")
    prompt = ids(2 * near.block + 50, 17)
    wanted = near.wanted(prompt)
    near.store(prompt)
    before = far.replica.counters()
    found = far.run(prompt)
    same(found, wanted, "from the other node")
    blocks = (len(prompt) - 1) // near.block
    assert found[0]["cached_tokens"] == blocks * near.block
    assert (far.replica.counters() - before)["load_blocks_remote"] == blocks


def test_state_with_wrong_bytes_is_computed_again(start: Callable[[str], Engine]) -> None:
    """The load fails, once; the engine lives, and nothing goes round in circles."""
    engine = start("n0")
    prompt = ids(2 * engine.block + 9, 19)
    wanted = engine.wanted(prompt)
    engine.store(prompt)
    segment = Segment.attach(segment_path(engine.cluster.service, "n0"), plan_geometry(POOL))
    for slot, payload_bytes, header in segment.scan():
        if header.position & WINDOW_BIT:
            segment.payload(slot, payload_bytes)[:512] = bytes(range(256)) * 2
    segment.close()
    before = engine.replica.counters()
    same(engine.run(prompt), wanted, "after a failed load")
    counted: Counter[str] = engine.replica.counters() - before
    assert counted["loads_failed"] == 1
    assert counted["loads_planned"] == 1, "promised again"
    engine.reset()
    same(engine.run(prompt), wanted, "the request after it")
