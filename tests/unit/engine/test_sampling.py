"""What a request chooses from logits, without a model: nucleus sampling, seeds, outputs that fork, and beams."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from kvservice.engine.sampling import Generation, Growth, Sampling
from tests.unit.engine.tiny_models import VOCABULARY, Driver, generated, make, prompt


def logits(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows).log()


def test_greedy_takes_the_likeliest_and_ends_at_its_length() -> None:
    generation = Generation(Sampling(max_tokens=2))
    assert generation.choose(logits([0.1, 0.6, 0.3])) == [Growth(0, 1)]
    assert generation.choose(logits([0.1, 0.2, 0.7])) == [Growth(0, 2, ends=True)]
    assert generation.outputs == [[1, 2]]


def test_output_ends_with_the_token_that_ends_texts() -> None:
    generation = Generation(Sampling(max_tokens=9), eos=frozenset([2, 5]))
    assert generation.choose(logits([0.1, 0.2, 0.7])) == [Growth(0, 2, ends=True)]
    assert generation.outputs == [[2]]


def test_outputs_begin_as_one_and_go_on_without_those_that_ended() -> None:
    """Rows belong to the outputs that go on: when one ends, the next ones move up."""
    generation = Generation(Sampling(max_tokens=9, temperature=1.0, n=3, seed=3), eos=frozenset([0]))
    first = generation.choose(logits([0.0, 0.5, 0.5]))
    assert [growth.parent for growth in first] == [0, 0, 0]
    second = generation.choose(logits([0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]))
    assert second == [Growth(0, 1), Growth(1, 0, ends=True), Growth(2, 2)]
    third = generation.choose(logits([0.0, 0.0, 1.0], [0.0, 1.0, 0.0]))
    assert third == [Growth(0, 2), Growth(1, 1)]
    beginnings = [growth.token for growth in first]
    assert generation.outputs == [[beginnings[0], 1, 2], [beginnings[1], 0], [beginnings[2], 2, 1]]


def test_nucleus_leaves_out_unlikely_tokens() -> None:
    """0.5 and 0.3 reach 0.75 together, so the other two are never chosen; without top_p they are."""
    row = logits([0.5, 0.3, 0.15, 0.05])[0]
    nucleus = Generation(Sampling(temperature=1.0, top_p=0.75))
    counted = Counter(nucleus.pick(row, 0, position) for position in range(2000))
    assert counted.keys() == {0, 1}
    assert counted[0] / 2000 == pytest.approx(0.5 / 0.8, abs=0.05)
    everything = Counter(Generation(Sampling(temperature=1.0)).pick(row, 0, position) for position in range(2000))
    assert [everything[token] / 2000 for token in range(4)] == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.05)


def test_low_temperature_prefers_likely_tokens() -> None:
    row = logits([0.6, 0.4])[0]
    cold = Generation(Sampling(temperature=0.2))
    assert sum(cold.pick(row, 0, position) for position in range(1000)) / 1000 == pytest.approx(
        0.4**5 / 0.6**5, abs=0.05
    )


def test_chance_is_of_seed_output_and_position_alone() -> None:
    row = torch.zeros(50)

    def chosen(seed: int, output: int) -> list[int]:
        generation = Generation(Sampling(temperature=1.0, seed=seed, n=8))
        return [generation.pick(row, output, position) for position in range(20)]

    assert chosen(1, 0) == chosen(1, 0)
    assert len({tuple(chosen(seed, output)) for seed in range(3) for output in range(8)}) == 24


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_tokens": 0}, "at least 1"),
        ({"top_p": 0.0, "temperature": 1.0}, "top_p"),
        ({"max_tokens": 1.5}, "whole numbers"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 1e-40}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"beams": 2, "length_penalty": 1e9}, "length_penalty"),
        ({"beams": 2, "length_penalty": float("nan")}, "length_penalty"),
        ({"n": 2}, "would be equal"),
        ({"beams": 2, "n": 3}, "2 outputs, not 3"),
        ({"beams": 2, "temperature": 1.0}, "leave temperature"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Sampling(**settings)


@pytest.mark.parametrize("eos", [[], [3, 60, 140]], ids=["no end", "ends"])
@pytest.mark.parametrize("stopping", [False, True, "never"])
@pytest.mark.parametrize("penalty", [1.0, 0.0, 2.0])
def test_beams_score_and_stop_as_in_generate(penalty: float, stopping: Any, eos: list[int]) -> None:
    """The end is made likely, so that outputs of many lengths compete."""
    model, tokens = make("grouped heads", seed=5), prompt(11, 5)
    if eos:
        with torch.no_grad():
            model.lm_head.weight *= 0.5
            model.lm_head.weight[eos] *= 3
    settings: dict[str, Any] = {"length_penalty": penalty, "early_stopping": stopping}
    expected = generated(model, tokens, 9, num_beams=3, num_return_sequences=3, eos_token_id=eos or None, **settings)
    padded = VOCABULARY - 1
    expected = [[token for token in row if token != padded] for row in expected]
    found = Driver(model).run(tokens, Sampling(max_tokens=9, beams=3, n=3, **settings), frozenset(eos))
    assert found == expected
    if eos and penalty < 2:  # which favours the longest ones
        assert len({len(output) for output in found} | {9}) > 1, "some outputs end early"


@pytest.mark.parametrize(("stopping", "is_done"), [(False, True), ("never", False)])
def test_search_stops_once_no_beam_is_likely_to_do_better(stopping: Any, is_done: bool) -> None:
    """After two steps two outputs have ended, and a running beam has a worse mean. "never" still hopes: over 50 tokens
    the same sum would be a better mean."""
    generation = Generation(Sampling(max_tokens=50, beams=2, early_stopping=stopping), eos=frozenset([0]))
    row = [0.9, 0.06, 0.04]
    assert generation.choose(logits(row)) == [Growth(0, 1), Growth(0, 2)]
    assert (generation.choose(logits(row, row)) == []) == is_done
    assert generation.outputs == [[0]]


def test_every_beam_goes_on_if_all_the_likeliest_tokens_end() -> None:
    """Three ends, each likelier than what goes on: four candidates would leave one beam."""
    generation = Generation(Sampling(max_tokens=9, beams=2, early_stopping="never"), eos=frozenset([0, 1, 2]))
    assert generation.choose(logits([0.35, 0.3, 0.25, 0.06, 0.04])) == [Growth(0, 3), Growth(0, 4)]


def test_beam_search_of_one_token() -> None:
    """All candidates end at once."""
    generation = Generation(Sampling(max_tokens=1, beams=2, n=2))
    assert generation.choose(logits([0.1, 0.2, 0.3, 0.4])) == []
    assert generation.outputs == [[3], [2]]
