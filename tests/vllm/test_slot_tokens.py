"""A real vLLM engine whose slots hold four of its blocks: the same tokens as without any cache, also where its own hit
ends inside a slot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.replica import Replica
from tests.vllm.test_output_equality import ENGINE, prompt, settle

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

BLOCK, PARTS = 32, 4  # vLLM's block size on CPUs
SLOT = PARTS * BLOCK


@pytest.fixture(scope="module", params=["off", "both"])
def replica(
    request: pytest.FixtureRequest, shallow_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Replica]:
    """Copies whole blocks, or layer by layer."""
    extra = {"mode": "embedded", "memory": "512MiB", "verify_load": "full", "slot_tokens": SLOT}
    log = tmp_path_factory.mktemp("replica") / "log"
    started = Replica(
        shallow_model, {**extra, "layerwise": request.param}, log, **ENGINE, async_scheduling=request.param == "off"
    )
    try:
        yield started.ready()
    finally:
        started.close()


def test_tokens_are_equal_cold_warm_and_behind_its_own_hit(without_cache: Replica, replica: Replica) -> None:
    text, other = prompt("Ida", 20), prompt("Ida", 9, "A storm came, and")
    wanted, wanted_other = without_cache.ready().tokens([text, other], 16)
    assert replica.tokens([text], 16) == [wanted], "cold"
    settle(replica, 3)
    replica.reset()
    warm = replica.ask_warm(text, 16, 3 * SLOT)
    assert warm["token_ids"] == wanted and warm["cached_tokens"] % SLOT == 0
    replica.reset()
    # It shares more than a slot and less than a prompt: the engine then has blocks up to the middle of a slot.
    found = replica.ask_warm(other, 16, SLOT)
    assert found["token_ids"] == wanted_other
    before = replica.counters()
    behind = replica.ask(text, 16)
    assert behind["token_ids"] == wanted
    counters = replica.counters()
    loaded = counters["loaded_blocks"] - before["loaded_blocks"]
    assert loaded and loaded % PARTS, "a slot was loaded in part"
    assert not counters["loads_failed"] and counters["load_verified_blocks"]


def test_a_prompt_shorter_than_a_slot_is_no_hit(without_cache: Replica, replica: Replica) -> None:
    text = prompt("Eve", 3)
    (wanted,) = without_cache.ready().tokens([text], 8)
    for _ in range(2):
        answer = replica.ask(text, 8)
        assert answer["token_ids"] == wanted and answer["cached_tokens"] == 0
        replica.reset()
