"""Partial tails with the reference engine: the beginning of a block is stored, hit, and computed on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvservice.engine.loop import ReferenceEngine, RequestOutput
from kvservice.engine.model import PagedModel
from kvservice.engine.options import EngineOptions
from kvservice.engine.sampling import Sampling
from kvservice.errors import ConfigError
from kvservice.testing.eventually import eventually
from tests.unit.engine.tiny_models import generated, make, prompt

SETTINGS: dict[str, Any] = {
    "mode": "embedded",
    "memory": "16MiB",
    "weights_version": "random",
    "verify_load": "full",
    "device_blocks": 64,
    "tails": True,
}
COUNT = 6


def engine_of(model: Any, block_tokens: int, **options: Any) -> ReferenceEngine:
    settings = {**SETTINGS, "block_tokens": block_tokens, **options}
    return ReferenceEngine(PagedModel(model, block_tokens=block_tokens), EngineOptions(**settings))


def wait_stored(engine: ReferenceEngine) -> None:
    """Until all that the engine stored can be found. A digest may take longer than the next request."""

    def is_stored() -> bool:
        counted = engine.all_counters()
        sealed = sum(count for name, count in counted.items() if name.startswith("seal_"))
        return sealed >= counted["store_blocks_planned"]

    eventually(is_stored, "the stores")


def generate(engine: ReferenceEngine, prompts: list[list[int]], sampling: Sampling) -> list[RequestOutput]:
    outputs = engine.generate(prompts, sampling)
    wait_stored(engine)
    return outputs


def test_three_tokens_are_hit_and_four_computed() -> None:
    """A prompt of 3 tokens in a block of 16, and one of 7 that begins with it: 3 are loaded, and 4 are computed."""
    model = make("grouped heads")
    longer = prompt(7, seed=1)
    with engine_of(model, 16) as engine:
        generate(engine, [longer[:3]], Sampling(max_tokens=1))
        engine.forget()
        engine.counters.clear()
        (output,) = generate(engine, [longer], Sampling(max_tokens=1))
        assert (output.loaded_tokens, engine.counters["prefill_tokens"]) == (3, 4)
        assert output.token_ids[0] == generated(model, longer, 1)[0]
        counters = engine.all_counters()
        assert (counters["load_tails"], counters["store_tails_planned"]) == (1, 2), "7 tokens have another name than 3"


@pytest.mark.parametrize("kind", ["grouped heads", "latent v2"])
def test_behind_a_tail_is_nothing_that_others_left(kind: str) -> None:
    """The engine's memory is full of what others computed. The block of a tail comes back with zeros behind it."""
    longer = prompt(7, seed=1)
    with engine_of(make(kind), 16) as engine:
        for text in (longer[:3], longer):
            for layer in engine.model.kv.layers:
                layer.fill_(7.0)
            (output,) = generate(engine, [text], Sampling(max_tokens=1))
            engine.forget()
        assert output.loaded_tokens == 3
        behind = torch.stack([layer[:, :, 7:].flatten(1) for layer in engine.model.kv.layers])
        is_blank = (behind == 0).all(2).all(0)
        assert is_blank.sum() == 1, "the one block that was loaded"


@pytest.mark.parametrize("block_tokens", [16, 128])
@pytest.mark.parametrize("kind", ["grouped heads", "latent v2"])
def test_turns_of_a_chat_are_hit_to_the_last_token(kind: str, block_tokens: int) -> None:
    """Each turn begins with everything before it. The tail of a turn is hit, wherever in a block it ends; of blocks of
    128 tokens every second token has a name."""
    model = make(kind)
    text = prompt(3, seed=2)
    step = 2 if block_tokens == 128 else 1
    with engine_of(model, block_tokens) as engine:
        known = 0
        for turn in range(4):
            text = [*text, *prompt(9 + 7 * turn, seed=turn + 3)]
            (output,) = generate(engine, [text], Sampling(max_tokens=COUNT))
            assert output.token_ids[0] == generated(model, text, COUNT)[0], f"turn {turn}"
            assert output.loaded_tokens == known // step * step, f"turn {turn}"
            text = [*text, *output.token_ids[0]]
            known = len(text) - 1  # the last token of an answer is not computed
            engine.forget()
        assert not engine.all_counters()["loads_failed"]


def test_prompts_that_part_within_a_block_do_not_mix() -> None:
    model = make("grouped heads")
    base = prompt(20, seed=7)
    texts = [[*base, *prompt(8, seed=seed)] for seed in range(10, 14)]
    with engine_of(model, 16) as engine:
        generate(engine, [base], Sampling(max_tokens=1))
        for text in texts:
            engine.forget()
            (output,) = generate(engine, [text], Sampling(max_tokens=COUNT))
            assert output.token_ids[0] == generated(model, text, COUNT)[0]
            assert output.loaded_tokens == len(base), "what they share, and no token more"


@pytest.mark.parametrize(("block_tokens", "hit"), [(16, 36), (128, 36)])
def test_a_prompt_that_is_asked_again_is_hit_to_its_last_token(block_tokens: int, hit: int) -> None:
    """Whatever was answered to it: one token is left to compute, and of a block of 128 half of the tails."""
    model = make("latent v2")
    text = prompt(37, seed=6)
    with engine_of(model, block_tokens) as engine:
        for loaded in (0, hit):
            (output,) = generate(engine, [text], Sampling(max_tokens=COUNT))
            assert output.token_ids[0] == generated(model, text, COUNT)[0]
            assert output.loaded_tokens == loaded
            engine.forget()


def test_what_the_engine_holds_itself_is_not_loaded() -> None:
    model = make("grouped heads")
    text = prompt(40, seed=3)
    with engine_of(model, 16) as engine:
        generate(engine, [text], Sampling(max_tokens=1))
        (output,) = generate(engine, [[*text, 5, 6, 7]], Sampling(max_tokens=COUNT))
        assert (output.local_tokens, output.loaded_tokens) == (32, 8), (
            "whole blocks are its own, the tail is the pool's"
        )


@pytest.mark.parametrize(("options", "hits"), [({"tails": False}, False), ({"store": "prompts"}, False), ({}, True)])
def test_tails_are_stored_only_where_they_are_wanted(options: dict[str, Any], hits: bool) -> None:
    model = make("grouped heads")
    with engine_of(model, 16, **options) as engine:
        generate(engine, [prompt(5, seed=4)], Sampling(max_tokens=1))
        engine.forget()
        (output,) = generate(engine, [[*prompt(5, seed=4), 9, 9]], Sampling(max_tokens=1))
        assert (output.loaded_tokens > 0) is hits
        assert ("tails_asked" in engine.all_counters()) is options.get("tails", True)


def test_salts_and_beams_keep_their_tails_apart() -> None:
    model = make("grouped heads")
    text = prompt(21, seed=8)
    with engine_of(model, 16) as engine:
        engine.add(text, Sampling(max_tokens=3, n=3, temperature=1.0, seed=1), salt=b"mine")
        while engine.has_work:
            engine.step()
        wait_stored(engine)
        engine.forget()
        for salt, expected in ((b"", 0), (b"mine", 21)):
            engine.add([*text, 1, 2], Sampling(max_tokens=1), salt=salt)
            outputs: list[RequestOutput] = []
            while engine.has_work:
                outputs += engine.step()
            engine.forget()
            assert outputs[0].loaded_tokens == expected, "of several answers the prompt's own tail is kept"


@pytest.mark.parametrize(
    "other",
    [{"layerwise": "load"}, {"slot_tokens": 32}, {"offload": "evicting"}, {"share": "engines"}],
)
def test_options_that_exclude_tails_are_refused(other: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="tails"):
        EngineOptions(**{**SETTINGS, "block_tokens": 16, **other})
