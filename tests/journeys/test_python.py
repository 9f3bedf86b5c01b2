"""A Python developer with the wheel and docs/start/python.md has the first hit within ten minutes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.journeys.journey import Journey

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(900)]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "start" / "python.md"
WHEEL = "dist/kvservice-*.whl"
MINUTES_MAX = 10


def test_the_first_hit_comes_within_ten_minutes(wheel: Path, empty_folder: Path) -> None:
    with Journey("python", [PAGE], empty_folder, replace={WHEEL: str(wheel)}) as journey:
        journey.play()
        assert journey.seconds < 60 * MINUTES_MAX
