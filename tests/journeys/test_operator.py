"""An operator with the wheel and docs/howto/operate.md: a service without Ray, looked at and drained."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.journeys.journey import Journey

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(900)]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "operate.md"
WHEEL = "dist/kvservice-*.whl"


def test_an_operator_needs_no_more_than_the_page(wheel: Path, empty_folder: Path) -> None:
    with Journey("operator", [PAGE], empty_folder, replace={WHEEL: str(wheel)}) as journey:
        journey.play()
        assert journey.seconds < 600
