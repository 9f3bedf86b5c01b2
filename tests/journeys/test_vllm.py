"""Somebody with vLLM on one machine: from the wheel to the first hit, by what the page says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.journeys.journey import Journey
from tests.vllm.shared_memory import vllm_segments_removed

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
SECONDS_MAX = 600.0  # to the first hit, on two cores that do nothing else


def test_from_the_wheel_to_the_first_hit_in_ten_minutes(wheel: Path, empty_folder: Path) -> None:
    environment = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    replace = {
        "dist/kvservice-*.whl": str(wheel),
        "MODEL": str(ROOT / "models" / "SmolLM2-135M-Instruct"),
    }
    page = ROOT / "docs" / "start" / "one-machine.md"
    with (
        vllm_segments_removed(),
        Journey("vllm", [page], empty_folder, replace=replace, environment=environment) as user,
    ):
        command = empty_folder / "bin" / "vllm"  # what pip makes with vLLM, which is in the lock here
        command.write_text('#!/bin/sh\nexec python -m vllm.entrypoints.cli.main "$@"\n')
        command.chmod(0o755)
        user.play()
    assert user.seconds < SECONDS_MAX * float(os.environ.get("KVSERVICE_TEST_PATIENCE", "1"))
