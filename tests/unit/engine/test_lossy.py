"""What int8 does to a model's next tokens."""

from __future__ import annotations

import random

import pytest
import torch

from examples.prepare_model import DEFAULT_PATH
from kvservice.engine.lossy import measure_int8
from kvservice.engine.model import PagedModel
from kvservice.errors import InvalidRequest
from tests.unit.engine.tiny_models import BLOCK_TOKENS, VOCABULARY, make

TOKENS = random.Random(4).choices(range(VOCABULARY), k=48)


def tiny() -> PagedModel:
    return PagedModel(make("grouped heads"), block_tokens=BLOCK_TOKENS)


def test_loss_is_small_and_is_measured_behind_the_prefix() -> None:
    found = measure_int8(tiny(), TOKENS)
    assert (found.prefix_tokens, found.asked_tokens) == (36, 12)
    assert 0 < found.kl_mean <= found.kl_max < 0.05
    assert 0 < found.drift_keys < 0.05 and 0 < found.drift_values < 0.05
    assert found.stored_share == pytest.approx((16 + 2) / (16 * 4), rel=0.01)


def test_worse_numbers_show_as_a_larger_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures follow what the model reads: with a sixteenth of the steps the loss is far larger."""
    good = measure_int8(tiny(), TOKENS)
    monkeypatch.setattr("kvservice.codec.int8.LARGEST", 7)
    bad = measure_int8(tiny(), TOKENS)
    assert bad.kl_mean > 10 * good.kl_mean and bad.drift_keys > 10 * good.drift_keys


def test_text_of_less_than_a_block_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="too few"):
        measure_int8(tiny(), TOKENS[: BLOCK_TOKENS - 1])


@pytest.mark.slow
def test_loss_of_a_real_model_is_small() -> None:
    if not (DEFAULT_PATH / "config.json").exists():
        pytest.skip("needs the prepared model: python -m examples.prepare_model")
    model = PagedModel.open(DEFAULT_PATH, dtype=torch.bfloat16)
    text = (DEFAULT_PATH.parent.parent / "docs" / "reliability.md").read_text()
    found = measure_int8(model, model.encode(text)[:640])
    assert found.stored_share == pytest.approx(0.516, abs=0.001)
    assert found.kl_mean < 2e-2 and found.same_first > 0.9
    assert found.drift_keys < 0.05 and found.drift_values < 0.05
