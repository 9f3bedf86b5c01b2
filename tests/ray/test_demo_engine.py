"""`make demo-engine` shows what it promises, within its two minutes on a quiet machine, and leaves nothing behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.demo.network import why_not
from tests.demo_runs import run_demo

pytestmark = [pytest.mark.ray, pytest.mark.slow]

SECONDS_MAX = 400  # of a busy machine


def test_two_engines_hit_swap_and_copy_with_equal_tokens(tmp_path: Path, model_path: Path) -> None:
    done = run_demo("engine", "--out", str(tmp_path), seconds=SECONDS_MAX)
    assert done.code == 0, done.said
    assert not done.left
    shown = json.loads((tmp_path / "engine.json").read_text())
    for engine in (shown["first"], shown["second"]):
        assert engine["token_ids"] == shown["wanted"]
    counters = shown["second"]["counters"]
    assert counters["load_blocks_remote"] > 0 and counters["copied"] > 0
    assert counters["swapped_out"] > 0 and counters["swapped_in"] > 0
    crossed = "nixl" if why_not(str(model_path)) is None else "shm"
    assert shown["crossing"]["transport"] == crossed
    assert (tmp_path / "engine.png").stat().st_size > 10_000
