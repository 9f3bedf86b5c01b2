"""`make demo-two-engines` shows that vLLM, SGLang and the reference engine hit what any of them computed."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest

from examples.demo.sglang_engine import SITE
from examples.demo.two_engines_report import ENGINES, Asked, shortfalls
from tests.demo_runs import run_demo

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not (SITE / "sglang").is_dir(), reason="no SGLang: make .venv-sglang/.installed"),
]

SECONDS_MAX = 800  # of a busy machine


def test_each_kind_of_engine_hits_what_another_one_computed(tmp_path: Path, model_path: Path) -> None:
    done = run_demo(
        "two-engines", "--model", str(model_path), "--out", str(tmp_path), seconds=SECONDS_MAX, runtime_files="*.sock"
    )
    assert done.code == 0, done.said
    assert not done.left
    found = {(one["writer"], one["engine"]): one for one in json.loads((tmp_path / "two_engines.json").read_text())}
    for writer, engine in product(ENGINES, ENGINES):
        one = found[writer, engine]
        # What a hit ends with is a block of the reader: 32 tokens of vLLM, a page of the others.
        usable = (one["prompt_tokens"] - 1) // 32 * 32
        assert one["hit_tokens"] >= usable if engine != writer else one["hit_tokens"] == 0
        assert one["token_ids"] == found[writer, writer]["token_ids"]


def played(hit_tokens: int = 96, token_ids: tuple[int, ...] = (1, 2)) -> list[Asked]:
    """All as it should be, but for vLLM at the prompt of SGLang."""
    good = [Asked(w, e, 100, 0 if w == e else 96, 0.1, [1, 2]) for w, e in product(ENGINES, ENGINES)]
    odd = Asked("SGLang", "vLLM", 100, hit_tokens, 0.1, list(token_ids))
    return [odd if (one.writer, one.engine) == ("SGLang", "vLLM") else one for one in good]


def test_a_hit_that_was_not_seen_is_named() -> None:
    assert shortfalls(played()) == []
    assert shortfalls(played(hit_tokens=0)) == ["vLLM hit nothing of what SGLang computed"]
    assert shortfalls(played(token_ids=(3,))) == ["vLLM says other tokens than SGLang for the prompt of SGLang"]
