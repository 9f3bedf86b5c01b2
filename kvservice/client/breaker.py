"""Circuit breaker: a peer that does not answer costs nothing until it is worth another try. `now` is passed in."""

from __future__ import annotations

from dataclasses import dataclass

FAILURES_TO_OPEN = 3
OPEN_SECONDS_FIRST = 1.0
OPEN_SECONDS_MAX = 10.0


@dataclass(slots=True)
class Breaker:
    failures: int = 0
    open_until: float = 0.0
    open_seconds_max: float = OPEN_SECONDS_MAX

    def allows(self, now: float) -> bool:
        return now >= self.open_until

    def succeeded(self) -> None:
        self.failures = 0
        self.open_until = 0.0

    def failed(self, now: float) -> None:
        """Opens after three failures in a row, for a time that doubles with each further one."""
        self.failures += 1
        if self.failures >= FAILURES_TO_OPEN:
            seconds = OPEN_SECONDS_FIRST * 2 ** min(self.failures - FAILURES_TO_OPEN, 16)  # 2 ** 1024 is no float
            self.open_until = now + min(seconds, self.open_seconds_max)
