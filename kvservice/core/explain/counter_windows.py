"""What a shard's counters grew by in the last minute, in the last ten minutes and since the start.

The shard takes a sample every few seconds and keeps those of ten minutes. So everybody who asks gets the same numbers,
and the first answer has them already. Pure; one caller at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

SAMPLE_SECONDS = 5.0  # between two samples: the error of a minute's rate is at most a twelfth
WINDOWS: Mapping[str, float] = {"10m": 600.0, "1m": 60.0}  # name -> seconds
SINCE_START = "start"
# The counters that are kept, so that the samples of ten minutes take some 20 KB.
WINDOW_COUNTERS = (
    "acquires",
    "asked_blocks",
    "hit_local_blocks",
    "hit_remote_blocks",
    "hit_tier_blocks",
    "hit_bytes",
    "stored_bytes",
    "fetched_bytes",
    "served_bytes",
    "evicted_primary",
    "evicted_secondary",
)
SAMPLES_MAX = round(max(WINDOWS.values()) / SAMPLE_SECONDS) + 2  # the longest window, and one sample at each end


@dataclass(frozen=True, slots=True)
class CounterWindow:
    """What each counter of WINDOW_COUNTERS grew by within `seconds`."""

    name: str  # SINCE_START, or a name of WINDOWS
    seconds: float  # that are really covered: fewer than the name says when the shard is younger
    counters: dict[str, int]


class CounterWindows:
    """A ring of samples. `started` is when all counters were 0."""

    def __init__(self, started: float) -> None:
        self._started = started
        self._samples: deque[tuple[float, tuple[int, ...]]] = deque(maxlen=SAMPLES_MAX)
        self._samples.append((started, (0,) * len(WINDOW_COUNTERS)))

    def sample(self, now: float, counters: Mapping[str, int]) -> None:
        self._samples.append((now, _chosen(counters)))

    def read(self, now: float, counters: Mapping[str, int]) -> tuple[CounterWindow, ...]:
        """The windows that end now, the longest first."""
        current = _chosen(counters)
        zeros = (0,) * len(WINDOW_COUNTERS)
        found = [_grown(SINCE_START, now - self._started, zeros, current)]
        for name, seconds in WINDOWS.items():
            at, then = next(
                (sample for sample in self._samples if now - sample[0] <= seconds + SAMPLE_SECONDS), (now, current)
            )
            found.append(_grown(name, now - at, then, current))
        return tuple(found)


def _chosen(counters: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(counters.get(name, 0) for name in WINDOW_COUNTERS)


def _grown(name: str, seconds: float, then: tuple[int, ...], current: tuple[int, ...]) -> CounterWindow:
    grown = {counter: after - before for counter, before, after in zip(WINDOW_COUNTERS, then, current, strict=True)}
    return CounterWindow(name, seconds, grown)
