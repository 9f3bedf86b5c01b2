"""The tutorial, typed in as it stands: two nodes, two real vLLM servers, a hit, and a shard that is killed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.journeys.journey import Journey
from tests.vllm.shared_memory import vllm_segments_removed

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
COMMANDS = ROOT / ".venv" / "bin"  # what the page's first block makes
SECONDS_MAX = 600.0  # on two cores that do nothing else


def test_the_tutorial_prints_what_its_page_shows(empty_folder: Path) -> None:
    environment = {
        "PATH": f"{COMMANDS}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    replace = {
        "/run/kvservice": str(empty_folder / "run"),
        "models/SmolLM2-135M-Instruct": str(ROOT / "models" / "SmolLM2-135M-Instruct"),
        "LICENSE": str(ROOT / "LICENSE"),
    }
    with (
        vllm_segments_removed(),
        Journey(
            "tutorial", [ROOT / "docs/tutorial.md"], empty_folder, replace=replace, environment=environment
        ) as user,
    ):
        user.play()
    assert user.seconds < SECONDS_MAX * float(os.environ.get("KVSERVICE_TEST_PATIENCE", "1"))
