"""Requests at random on SGLang's own tree, before a model that shows every wrong byte: see hashing_tree.py."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from examples.demo.sglang_engine import SITE, environment
from tests.sim.mutation import Mutant

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.timeout(900),  # as in test_engines
    pytest.mark.skipif(not (SITE / "sglang").is_dir(), reason="no SGLang: make .venv-sglang/.installed"),
]

WRITE_THROUGH = {"page_size": 8}
WRITE_BACK = {"page_size": 4, "hicache_write_policy": "write_back"}
ENGINES: tuple[dict[str, Any], ...] = (
    {"settings": WRITE_THROUGH, "seeds": [1, 2]},
    {"settings": WRITE_THROUGH, "seeds": [3, 4], "failures": 0.05},
    {"settings": WRITE_BACK, "seeds": [5, 6], "failures": 0.02},
    {"settings": {"page_size": 16, "hicache_storage_prefetch_policy": "timeout"}, "seeds": [7, 8]},
)
MODULE = "kvservice.connector.sglang.page_pool"
BUGS = (
    Mutant(
        "a page is stored under its own name",
        MODULE,
        "self._form.store(addresses[page], block)",
        "self._form.store(addresses[page and page - 1], block)",
    ),
    Mutant("new weights have new names", MODULE, "            self._term = term\n", "            pass\n"),
    Mutant(
        "a load counts no page that did not come",
        MODULE,
        "return [number < loaded for number in range(len(pages))]",
        "return [True for number in range(len(pages))]",
    ),
)


def played(model: Path, engines: Sequence[dict[str, Any]]) -> list[Any]:
    """Of each engine: what was counted, or what was wrong."""
    command = [sys.executable, "-m", "tests.sglang.hashing_tree", str(model), json.dumps(engines)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=800)
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_no_byte_is_wrong_on_its_own_tree(model_path: Path) -> None:
    """Nothing raises into SGLang's threads, and nothing is promised when all requests have ended."""
    for engine, found in zip(ENGINES, played(model_path, ENGINES), strict=True):
        assert isinstance(found, dict), (engine, found)
        assert found.get("tokens_checked") and found.get("loaded_pages"), (engine, found)


def test_a_planted_bug_shows_as_wrong_bytes(model_path: Path) -> None:
    engines = [{**ENGINES[1], "seeds": list(range(1, 9)), "bug": asdict(bug)} for bug in BUGS]
    for bug, found in zip(BUGS, played(model_path, engines), strict=True):
        assert "wrong" in found, (bug.name, found)
