"""`make demo-sglang` shows a remote hit with equal tokens, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from examples.demo.network import why_not
from examples.demo.sglang_engine import SITE

pytestmark = [
    pytest.mark.ray,
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not (SITE / "sglang").is_dir(), reason="no SGLang: make .venv-sglang/.installed"),
]

ROOT = Path(__file__).parents[2]
SECONDS_MAX = 1100  # of a busy machine; a quiet one takes three minutes


def test_an_engine_hits_what_one_on_another_node_stored(tmp_path: Path, model_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="kvd-") as runtime:
        done = subprocess.run(
            [sys.executable, "-m", "examples.demo", "sglang", "--questions", "1", "--out", str(tmp_path)],
            cwd=ROOT,
            env={**os.environ, "KVSERVICE_RUNTIME_DIR": runtime, "COLUMNS": "200"},
            capture_output=True,
            text=True,
            timeout=SECONDS_MAX,
        )
        left = [str(path) for path in Path(runtime).rglob("*") if not path.is_dir()]
    assert done.returncode == 0, done.stdout + done.stderr
    assert not left
    shown = json.loads((tmp_path / "sglang.json").read_text())
    first, remote, local, plain = shown["rows"]
    assert first["computed_tokens"] == first["prompt_tokens"] == plain["computed_tokens"]
    assert remote["remote_tokens"] > 500 and local["pool_tokens"] == remote["remote_tokens"]
    assert remote["token_ids"] == local["token_ids"] == plain["token_ids"]
    assert shown["crossing"]["transport"] == ("nixl" if why_not(str(model_path)) is None else "shm")
    assert (tmp_path / "sglang.png").stat().st_size > 10_000
