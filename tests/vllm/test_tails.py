"""A real vLLM engine that keeps the beginnings of blocks: a hit ends within a block, and the tokens are the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvservice.testing.eventually import eventually
from tests.vllm.replica import Replica
from tests.vllm.test_output_equality import ENGINE, prompt, settle

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module", params=[32, 128])
def replica(
    request: pytest.FixtureRequest, shallow_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Replica]:
    extra = {"mode": "embedded", "memory": "512MiB", "verify_load": "full", "tails": True}
    log = tmp_path_factory.mktemp("replica") / "log"
    started = Replica(shallow_model, extra, log, **{**ENGINE, "block_size": request.param})
    try:
        yield started.ready()
    finally:
        started.close()


def test_tokens_are_equal_behind_a_tail_of_any_length(without_cache: Replica, replica: Replica) -> None:
    """Prompts that begin alike and part within a block. Each is hit up to where the longest one before it ends."""
    texts = [prompt("Noa", count) for count in (4, 5, 7, 8)]
    wanted = without_cache.ready().tokens(texts, 8)
    for text, expected in zip(texts, wanted, strict=True):
        for turn in range(2):
            replica.reset()
            before = replica.counters()["store_tails_planned"]
            answer = replica.ask(text, 8)
            assert answer["token_ids"] == expected, turn
            if not turn:
                eventually(lambda old=before: replica.counters()["store_tails_planned"] > old, "its tails are stored")
                settle(replica, 1)
    counters = replica.counters()
    assert counters["load_tails"] >= len(texts) - 1, counters
    assert not counters["loads_failed"] and counters["load_verified_blocks"]


def test_a_prompt_shorter_than_a_block_is_hit(without_cache: Replica, replica: Replica) -> None:
    text = "Ben went down to"
    (wanted,) = without_cache.ready().tokens([text], 4)
    replica.reset()
    assert replica.ask(text, 4)["token_ids"] == wanted
    longer = text + " the sea"
    (wanted_longer,) = without_cache.tokens([longer], 4)
    replica.reset()
    found = replica.ask(longer, 4)
    assert found["token_ids"] == wanted_longer
    assert 0 < found["cached_tokens"] < 32
