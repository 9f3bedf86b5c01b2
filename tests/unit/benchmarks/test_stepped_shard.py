"""The wall clock of a shard whose clock is set wrong."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks.stepped_shard import CLOCK_VARIABLE, stepped_time
from kvservice.testing.cluster import LocalCluster
from kvservice.units import MiB


def test_the_clock_is_off_by_what_the_file_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "clock"
    monkeypatch.setenv(CLOCK_VARIABLE, str(file))
    assert abs(stepped_time() - time.time()) < 60
    file.write_text("-3600")
    assert abs(stepped_time() - time.time() + 3600) < 60


@pytest.mark.processes
def test_a_shard_takes_the_clock_that_is_set_wrong(tmp_path: Path) -> None:
    """Its boot epoch is at least the time of its clock."""
    clock = tmp_path / "clock"
    clock.write_text("1e6")
    settings = {CLOCK_VARIABLE: str(clock)}
    with LocalCluster(
        1, pool_bytes=16 * MiB, transport="shm", environment=settings, shard_module="benchmarks.stepped_shard"
    ) as cluster:
        assert cluster.stats("n0").node.epoch > time.time() + 9e5
