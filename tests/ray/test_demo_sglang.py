"""`make demo-sglang` shows a remote hit with equal tokens, and leaves nothing behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.demo.network import why_not
from examples.demo.sglang_engine import SITE
from tests.demo_runs import run_demo

pytestmark = [
    pytest.mark.ray,
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not (SITE / "sglang").is_dir(), reason="no SGLang: make .venv-sglang/.installed"),
]

SECONDS_MAX = 1100  # of a busy machine; a quiet one takes three minutes


def test_an_engine_hits_what_one_on_another_node_stored(tmp_path: Path, model_path: Path) -> None:
    done = run_demo("sglang", "--questions", "1", "--out", str(tmp_path), seconds=SECONDS_MAX)
    assert done.code == 0, done.said
    assert not done.left
    shown = json.loads((tmp_path / "sglang.json").read_text())
    first, remote, local, plain = shown["rows"]
    assert first["computed_tokens"] == first["prompt_tokens"] == plain["computed_tokens"]
    assert remote["remote_tokens"] > 500 and local["pool_tokens"] == remote["remote_tokens"]
    assert remote["token_ids"] == local["token_ids"] == plain["token_ids"]
    assert shown["crossing"]["transport"] == ("nixl" if why_not(str(model_path)) is None else "shm")
    assert (tmp_path / "sglang.png").stat().st_size > 10_000
