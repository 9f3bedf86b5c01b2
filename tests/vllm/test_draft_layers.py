"""Draft layers (EAGLE, EAGLE-3, MTP) of a real vLLM: tokens and drafts after a hit are those of vLLM's own hit.

The weights are random, so no draft is accepted and each of them depends on the KV of the draft layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.vllm.draft_models import make_eagle, make_mimo
from tests.vllm.replica import Replica, close_all
from tests.vllm.test_output_equality import settle
from tests.vllm.tiny_model import make_llama

pytestmark = pytest.mark.vllm

EMBEDDED: dict[str, object] = {"mode": "embedded", "memory": "64MiB", "verify_load": "full"}
BLOCK = 32
LONGEST = 1024
SLOW = pytest.mark.slow


class Engines(NamedTuple):
    off: Replica
    on: Replica
    drafted: int  # tokens in a step


def speculation(method: str, folder: Path, model: Path) -> tuple[Path, dict[str, object]]:
    """The folder of a target model, and vLLM's settings of its drafts."""
    for name in ("target", "draft"):
        (folder / name).mkdir()
    if method == "mtp":
        return make_mimo(folder / "target", model), {"method": "mtp", "num_speculative_tokens": 1}
    target = make_llama(folder / "target", model, attention_heads=4, kv_heads=2)
    draft = make_eagle(folder / "draft", target, version=3 if method == "eagle3" else 1)
    return target, {"method": method, "model": str(draft), "num_speculative_tokens": 3}


@pytest.fixture(scope="module", params=["eagle", pytest.param("eagle3", marks=SLOW), pytest.param("mtp", marks=SLOW)])
def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model_path: Path
) -> Iterator[Engines]:
    folder = tmp_path_factory.mktemp(request.param)
    target, settings = speculation(request.param, folder, model_path)
    engine: dict[str, object] = {
        "max_num_batched_tokens": 128,
        "max_model_len": LONGEST,
        "speculative_config": settings,
    }
    started = [
        Replica(target, extra, folder / f"{name}.log", **engine) for name, extra in (("off", None), ("on", EMBEDDED))
    ]
    try:
        off, on = (replica.ready() for replica in started)
        yield Engines(off, on, int(str(settings["num_speculative_tokens"])))
    finally:
        close_all(started)


def prompt(*parts: int) -> dict[str, list[int]]:
    """Whole blocks of tokens, one for each number, and a few tokens more."""
    return {"prompt_token_ids": [100 + 977 * part + 31 * n for part in parts for n in range(BLOCK)] + [7, 8, 9]}


def decoded(answer: dict[str, Any]) -> tuple[list[int], list[list[int]]]:
    """Tokens, and what was drafted beside the last of them: a prefill in steps drafts, too."""
    return answer["token_ids"], answer["drafts"][-10:]


def assert_hits_as_vllm_does(engines: Engines, text: dict[str, list[int]], blocks: int) -> None:
    """As many blocks as vLLM finds in a cache of its own that has the same, and then the same tokens and drafts: both
    compute the rest in steps of the same shape, so that rounding is the same."""
    own = engines.off.ask(text, 16)
    engines.on.reset(overwrite=True)
    warm = engines.on.ask_warm(text, 16, blocks * BLOCK)
    assert own["cached_tokens"] == warm["cached_tokens"] == blocks * BLOCK
    assert any(any(draft) for draft in own["drafts"]), "nothing was drafted"
    assert decoded(warm) == decoded(own)


def test_drafts_after_a_hit_are_those_of_vllms_own_hit(engines: Engines) -> None:
    """The last of eight blocks is left out by both: none behind it says what its last cell was drafted with."""
    off, on, _ = engines
    text = prompt(*range(8))
    before = on.counters()["stored_blocks"]
    assert decoded(on.ask(text, 16)) == decoded(off.ask(text, 16)), "cold"
    settle(on, before + 7)
    assert_hits_as_vllm_does(engines, text, 7)


def test_block_before_another_continuation_is_not_served(engines: Engines) -> None:
    """Its last cell was drafted with the first token of the other block."""
    off, on, _ = engines
    first, second = prompt(20, 21, 22, 23, 24, 25), prompt(20, 21, 22, 23, 34, 35)
    before = on.counters()["stored_blocks"]
    assert on.tokens([first], 4) == off.tokens([first], 4)
    settle(on, before + 5)
    assert_hits_as_vllm_does(engines, second, 3)


def test_blocks_of_generated_tokens_hit_in_the_next_turn(engines: Engines) -> None:
    off, on, _ = engines
    first = prompt(40, 41, 42)
    before = on.counters()["stored_blocks"]
    answer = on.ask(first, 3 * BLOCK)
    assert off.ask(first, 3 * BLOCK)["token_ids"] == answer["token_ids"]
    settle(on, before + 5)
    second = {"prompt_token_ids": first["prompt_token_ids"] + answer["token_ids"][:-2] + [5] * BLOCK}
    assert_hits_as_vllm_does(engines, second, 5)


@pytest.mark.parametrize("end", [LONGEST, LONGEST + 1])
def test_step_that_vllm_does_not_draft_in_is_not_stored(engines: Engines, end: int) -> None:
    """With a request near the longest length it drafts for none of the step. Its own cache has that prompt already.
    With one draft a prompt always leaves room for it."""
    on = engines.on
    length = min(end - engines.drafted, LONGEST - 1)
    is_drafted = length + engines.drafted <= LONGEST
    long = {"prompt_token_ids": [100 + end + 13 * n for n in range(length)]}
    other = prompt(20 + end - LONGEST, 12, 13)
    on.ask(long, 1)
    before = on.counters()
    on.send(prompts=[long, other], params=[{"kvservice": {"version": 1, "load": False}}] * 2, max_tokens=1)
    assert any(on.answer()["drafts"][0]) == is_drafted
    assert on.counters()["steps_without_drafts"] == before["steps_without_drafts"] + (not is_drafted)
    if is_drafted:
        settle(on, before["stored_blocks"] + 2)
    on.reset(overwrite=True)
    assert on.ask(other, 1)["cached_tokens"] == (2 * BLOCK if is_drafted else 0)


def test_block_of_vllms_own_hit_is_not_stored(engines: Engines) -> None:
    """Of two blocks with equal tokens it takes the one that was drafted with what followed in another prompt."""
    on = engines.on
    before = on.counters()["stored_blocks"]
    on.ask(prompt(15, 16, 17), 1)
    settle(on, before + 2)
    unstored = {"kvservice": {"version": 1, "store": False, "load": False}}
    for text, params in ((prompt(15, 16, 18), unstored), (prompt(15, 16, 18, 19), None)):
        on.send(prompts=[text], params=[params], max_tokens=1)
        on.answer()
    settle(on, before + 3)
    on.reset(overwrite=True)
    assert on.ask(prompt(15, 16, 18, 19), 1)["cached_tokens"] == BLOCK, "the block behind is reached through that one"
