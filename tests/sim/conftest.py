"""The simulator computes in the time that nobody else wants, so how long a test takes says nothing about it."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
SECONDS_MAX = 7200  # all schedules take ten minutes on an idle machine; this ends only a test that hangs


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.timeout(SECONDS_MAX))
