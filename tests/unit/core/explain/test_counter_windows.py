"""Windows of time over counters: what a minute's hit rate is made of."""

from __future__ import annotations

from kvservice.core.explain.counter_windows import SAMPLE_SECONDS, CounterWindow, CounterWindows


def windows_after(seconds: int, per_second: int = 1) -> dict[str, CounterWindow]:
    """A counter that grows evenly, sampled as a shard samples it."""
    windows = CounterWindows(started=1000.0)
    for step in range(1, int(seconds / SAMPLE_SECONDS) + 1):
        passed = step * SAMPLE_SECONDS
        windows.sample(1000.0 + passed, {"asked_blocks": int(passed * per_second), "other": 7})
    return {one.name: one for one in windows.read(1000.0 + seconds, {"asked_blocks": seconds * per_second})}


def test_a_young_shard_says_how_little_its_windows_cover() -> None:
    assert {name: one.seconds for name, one in windows_after(12).items()} == {"start": 12, "10m": 12, "1m": 12}


def test_each_window_has_what_its_own_time_brought() -> None:
    found = windows_after(4000)
    assert {name: one.counters["asked_blocks"] for name, one in found.items()} == {"start": 4000, "10m": 605, "1m": 65}
    assert {name: one.seconds for name, one in found.items()} == {"start": 4000, "10m": 605, "1m": 65}
    assert "other" not in found["1m"].counters


def test_counters_that_begin_before_the_first_sample_count() -> None:
    window = CounterWindows(0.0).read(3.0, {"hit_local_blocks": 9})[2]
    assert (window.name, window.counters["hit_local_blocks"]) == ("1m", 9)


def test_a_shard_that_did_not_sample_shows_an_empty_minute() -> None:
    windows = CounterWindows(0.0)
    assert [one.seconds for one in windows.read(900.0, {"acquires": 5})] == [900.0, 0.0, 0.0]
