"""`make demo-tiers` shows hits from a disk after a restart and from an S3 API, and leaves nothing behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.demo.tiers_report import Answers, shortfalls
from tests.demo_runs import run_demo

pytestmark = [pytest.mark.ray, pytest.mark.slow]

SECONDS_MAX = 600  # of a busy machine


def test_each_tier_gives_back_prompts_with_equal_tokens(tmp_path: Path, model_path: Path) -> None:
    done = run_demo(
        "tiers", "--model", str(model_path), "--out", str(tmp_path), seconds=SECONDS_MAX, runtime_files="*.sock"
    )
    assert done.code == 0, done.said
    assert not done.left
    computed, disk, objects = json.loads((tmp_path / "tiers.json").read_text())
    assert computed["token_ids"] == disk["token_ids"] == objects["token_ids"]
    assert disk["tier_blocks"]["disk"] > 0 and objects["tier_blocks"]["objects"] > 0
    assert (tmp_path / "tiers.png").stat().st_size > 5_000


def test_a_source_that_was_not_seen_is_named() -> None:
    played = [Answers(name, [[1]], [16], [0 if name == "computed" else 16]) for name in ("computed", "disk", "objects")]
    played[1].tier_blocks = {"disk": 1}
    assert shortfalls(played) == ["no block came from objects"]
    played[2].token_ids = [[2]]
    assert "tokens after objects differ" in shortfalls(played)
