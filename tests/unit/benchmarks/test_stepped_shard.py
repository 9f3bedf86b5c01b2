"""The wall clock of a shard whose clock is set wrong."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks.stepped_shard import CLOCK_VARIABLE, stepped_time


def test_the_clock_is_off_by_what_the_file_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "clock"
    monkeypatch.setenv(CLOCK_VARIABLE, str(file))
    assert abs(stepped_time() - time.time()) < 60
    file.write_text("-3600")
    assert abs(stepped_time() - time.time() + 3600) < 60
