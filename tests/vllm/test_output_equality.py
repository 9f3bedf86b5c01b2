"""Greedy tokens with the cache equal those without it, whatever state the cache is in.

float32, because then a different batch shape cannot flip a token: a difference is a wrong block, not a rounding. The
model has its first layers only; the whole one is compared by test_prefill_decode and by the demo.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvservice.testing.eventually import eventually
from tests.vllm.replica import Replica, close_all

pytestmark = pytest.mark.vllm

STORY = (
    "In the year the lamp was changed, the keeper {} walked the cliff path every morning before the tide turned, "
    "counting the boats and writing down the weather. "
)
ENGINE = {"max_num_batched_tokens": 256, "max_model_len": 1024}  # prompts are prefilled in chunks


def prompt(name: str, sentences: int, tail: str = "That evening") -> str:
    return STORY.format(name) * sentences + tail


def settle(replica: Replica, blocks: int) -> None:
    """Wait until so many blocks are sealed: digests are computed after the answer."""
    eventually(
        lambda: replica.counters()["stored_blocks"] >= blocks, f"{blocks} stored blocks", detail=replica.counters
    )


@pytest.fixture(scope="module")
def replicas(
    without_cache: Replica, shallow_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Replica]]:
    logs = tmp_path_factory.mktemp("replicas")
    embedded = {"mode": "embedded", "memory": "512MiB", "verify_load": "full"}
    started = {
        "on": Replica(shallow_model, embedded, logs / "on.log", **ENGINE),
        # Three running requests do not fit its KV space, and two prompts do not fit its pool.
        "tight": Replica(
            shallow_model,
            {**embedded, "memory": "12MiB", "offload": "lazy"},
            logs / "tight.log",
            **ENGINE,
            num_gpu_blocks_override=40,
        ),
        "plain": Replica(shallow_model, embedded, logs / "plain.log", **ENGINE, enable_prefix_caching=False),
    }
    try:
        yield {name: replica.ready() for name, replica in {**started, "off": without_cache}.items()}
    finally:
        close_all(started.values())


def test_cold_and_warm(replicas: dict[str, Replica]) -> None:
    off, on = replicas["off"], replicas["on"]
    text = prompt("Ada", 20)
    wanted = off.tokens([text], 16)
    before = on.counters()["stored_blocks"]
    assert on.tokens([text], 16) == wanted, "cold"
    settle(on, before + 15)
    on.reset()
    assert on.ask_warm(text, 16, 15 * 32)["token_ids"] == wanted[0], "warm"


def test_partial_prefix(replicas: dict[str, Replica]) -> None:
    off, on = replicas["off"], replicas["on"]
    first, second = prompt("Bea", 12), prompt("Bea", 8, "A storm came, and")
    before = on.counters()["stored_blocks"]
    on.tokens([first])
    settle(on, before + 8)
    on.reset()
    answer = on.ask_warm(second, 16, 1)
    assert answer["token_ids"] == off.tokens([second], 16)[0]
    assert answer["cached_tokens"] < 8 * 40


def test_blocks_of_generated_tokens_hit_in_the_next_turn(replicas: dict[str, Replica]) -> None:
    off, on = replicas["off"], replicas["on"]
    text = prompt("Cyd", 6)
    before = on.counters()["stored_blocks"]
    first = on.ask(text, 64)
    follow_up = text + first["text"] + " After that"
    wanted = off.tokens([follow_up], 8)
    settle(on, before + 7)
    on.reset()
    # More than the prompt alone: the generated blocks were stored.
    assert on.ask_warm(follow_up, 8, 6 * 30 + 1)["token_ids"] == wanted[0]


def test_eight_at_once_sharing_blocks(replicas: dict[str, Replica]) -> None:
    off, on = replicas["off"], replicas["on"]
    prompts = [prompt("Dot", 10, tail) for tail in ("It was", "He saw", "The sea", "A boat")]
    prompts += [prompt(name, 7) for name in ("Eve", "Fay")] + [prompt("Dot", 5, "At noon")] * 2
    wanted = off.tokens(prompts, 12)
    before = on.counters()["stored_blocks"]
    assert on.tokens(prompts, 12) == wanted, "cold"
    settle(on, before + 23)
    on.reset()
    before = on.counters()["loaded_blocks"]
    assert on.tokens(prompts, 12) == wanted, "warm"
    assert on.counters()["loaded_blocks"] > before + 20


def test_without_the_engines_own_prefix_caching(replicas: dict[str, Replica]) -> None:
    """vLLM hashes blocks whenever it has a connector. Nothing of a prompt stays in the engine: every hit is loaded."""
    off, plain = replicas["off"], replicas["plain"]
    text = prompt("Ray", 12)
    wanted = off.tokens([text], 16)
    assert plain.tokens([text], 16) == wanted, "cold"
    settle(plain, 8)
    before = plain.counters()["loaded_blocks"]
    assert plain.ask_warm(text, 16, 8 * 32)["token_ids"] == wanted[0], "warm"
    assert plain.counters()["loaded_blocks"] >= before + 8


def test_a_session_of_streaming_input_is_stored_when_it_ends(replicas: dict[str, Replica]) -> None:
    off, tight = replicas["off"], replicas["tight"]
    before = tight.counters()["stored_blocks"]
    tight.send(session=[list(range(100, 200)), list(range(900, 961)), [7], list(range(500, 650))], max_tokens=20)
    tokens = {"prompt_token_ids": [*tight.answer()["token_ids"], 5, 6, 7]}
    wanted = off.ask(tokens, 16)["token_ids"]
    settle(tight, before + 12)
    tight.reset()
    assert tight.ask_warm(tokens, 16, 12 * 32)["token_ids"] == wanted


def test_after_eviction(replicas: dict[str, Replica]) -> None:
    off, tight = replicas["off"], replicas["tight"]
    texts = [prompt(name, 14) for name in ("Gil", "Hal", "Ian", "Jon")]
    wanted = off.tokens(texts)
    for text, tokens in zip([*texts, *texts], [*wanted, *wanted], strict=True):
        assert tight.tokens([text]) == [tokens]
        tight.reset()
        time.sleep(0.2)
    assert tight.counters()["stored_blocks"] > 25, "the pool was never full"


def test_under_preemption(replicas: dict[str, Replica]) -> None:
    off, tight = replicas["off"], replicas["tight"]
    prompts = [prompt(name, 6) for name in ("Kim", "Lou", "Max", "Ned", "Ola", "Pia", "Quy")]
    wanted = off.tokens(prompts, 40)
    before = tight.counters()["preemptions"]
    assert tight.tokens(prompts, 40) == wanted
    between = tight.counters()["preemptions"]
    assert between > before, "the KV space was large enough: nothing was tested"
    assert tight.tokens(prompts, 40) == wanted, "again, with blocks in the pool"
    assert tight.counters()["preemptions"] > between


def test_nothing_failed_on_the_way(replicas: dict[str, Replica]) -> None:
    for name in ("on", "tight", "plain"):
        counters = replicas[name].counters()
        failures = {
            key: count for key, count in counters.items() if "failed" in key or "corrupt" in key or "stale" in key
        }
        assert not any(failures.values()), failures
