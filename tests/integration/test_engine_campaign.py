"""Random requests on engines that are far too small for them: each output is the one that transformers gives alone.

Prompts share beginnings, outputs fork, beams drop, requests are swapped to the pool or computed again, and afterwards
all prompts come back from the pool, as whole blocks or layer by layer.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from kvservice.connector.options import Layerwise
from kvservice.engine.loop import ReferenceEngine
from kvservice.engine.model import PagedModel
from kvservice.engine.options import EngineOptions, PreemptBy
from kvservice.engine.sampling import Sampling
from tests.unit.engine.tiny_models import KINDS, Driver, generated, make, prompt

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SEEDS = range(24)
STEPS_MAX = 3000  # of one engine: ten times what any of them needs
Asked = dict[str, tuple[list[int], Sampling]]


def some_sampling(chance: random.Random, number: int) -> Sampling:
    length = chance.randint(1, 25)
    return chance.choice(
        [
            Sampling(max_tokens=length),
            Sampling(max_tokens=length, beams=3, n=chance.choice([1, 3])),
            Sampling(max_tokens=length, temperature=0.9, top_p=0.9, seed=number, n=3),
        ]
    )


def some_requests(chance: random.Random, seed: int) -> Asked:
    base = prompt(40, seed)
    return {
        f"request-{number}": (
            base[: chance.randint(0, 30)] + prompt(chance.randint(1, 20), 100 * seed + number),
            some_sampling(chance, number),
        )
        for number in range(chance.randint(3, 8))
    }


def run(engine: ReferenceEngine, asked: Asked) -> dict[str, list[list[int]]]:
    """The outputs of those that did not outgrow the engine."""
    for request_id, (tokens, sampling) in asked.items():
        engine.add(tokens, sampling, request_id=request_id)
    found: dict[str, list[list[int]]] = {}
    for _ in range(STEPS_MAX):
        if not engine.has_work:
            return found
        found.update({output.request_id: output.token_ids for output in engine.step() if not output.reason})
    raise AssertionError(f"no end after {STEPS_MAX} steps: {engine.scheduler.groups}")


def expected(model: Any, tokens: list[int], sampling: Sampling) -> list[list[int]]:
    if sampling.temperature:  # generate has one chance for all of a batch: compare with blocks that nobody shares
        return Driver(model).run(tokens, sampling)
    beams = {} if sampling.beams == 1 else {"num_beams": sampling.beams, "num_return_sequences": sampling.n}
    return generated(model, tokens, sampling.max_tokens, **beams)


def test_outputs_under_pressure_are_those_computed_alone() -> None:
    happened: Counter[str] = Counter()
    for seed in SEEDS:
        chance = random.Random(seed)
        model, block_tokens = make(chance.choice(list(KINDS))), chance.choice([2, 4, 8])
        options = EngineOptions(
            mode="embedded",
            memory="8MiB",
            weights_version="random",
            block_tokens=block_tokens,
            device_blocks=chance.choice([20, 24, 32, 64]) * 4 // block_tokens,
            step_tokens=chance.choice([8, 16, 64]),
            sequences=chance.choice([4, 8]),
            preempt_by=chance.choice([PreemptBy.SWAP, PreemptBy.SWAP, PreemptBy.AUTO, PreemptBy.RECOMPUTE]),
            layerwise=chance.choice(list(Layerwise)),
        )
        asked = some_requests(chance, seed)
        with ReferenceEngine(PagedModel(model, block_tokens=block_tokens), options) as engine:
            found = run(engine, asked)
            assert found == {name: expected(model, *asked[name]) for name in found}, f"seed {seed}: {options}"
            engine.forget()
            assert run(engine, {name: asked[name] for name in found}) == found, f"seed {seed}, again: {options}"
            assert engine.blocks.device.free_count == engine.blocks.device.count, f"seed {seed} lost blocks"
            happened += engine.all_counters()
            happened["outputs"] += len(found)
    wanted = ("outputs", "copied", "swapped_in", "recomputed", "loaded_blocks", "loaded_blocks_layerwise")
    assert all(happened[name] > 0 for name in wanted), f"nothing was proved about some of {wanted}: {happened}"
