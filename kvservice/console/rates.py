"""Rates of counters that only grow, over the last seconds. Pure; one caller at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Hashable

WINDOW_SECONDS = 10.0  # of a rate: long enough for a calm number, short enough to see a change within seconds


class Rates:
    """One series for each key. A counter that falls has begun anew, with the process that counts."""

    def __init__(self, window_seconds: float = WINDOW_SECONDS) -> None:
        self._window = window_seconds
        self._series: dict[Hashable, deque[tuple[float, float]]] = {}  # (when, count), the oldest first

    def put(self, key: Hashable, count: float, now: float) -> None:
        series = self._series.setdefault(key, deque())
        if series and count < series[-1][1]:
            series.clear()
        series.append((now, count))
        while len(series) > 2 and series[1][0] <= now - self._window:
            series.popleft()

    def per_second(self, key: Hashable) -> float:
        """0 for a series that is not known, or that has begun just now."""
        series = self._series.get(key)
        if series is None or len(series) < 2:
            return 0.0
        (first_at, first), (last_at, last) = series[0], series[-1]
        return (last - first) / (last_at - first_at) if last_at > first_at else 0.0

    def keep_only(self, keys: Container[Hashable]) -> None:
        """Forget all other series."""
        for key in [key for key in self._series if key not in keys]:
            del self._series[key]

    def __len__(self) -> int:
        return len(self._series)
