"""Circuit breaker: a peer or a store that does not answer is not asked again for a while. `now` is passed in. Pure."""

from __future__ import annotations

from dataclasses import dataclass

FAILURES_TO_OPEN = 3  # in a row: a single lost call says little
OPEN_SECONDS_FIRST = 1.0  # how long nobody asks at first; it doubles with each further failure
OPEN_SECONDS_MAX = 10.0  # by default at most, so that who is back is found soon
assert OPEN_SECONDS_FIRST <= OPEN_SECONDS_MAX


@dataclass(slots=True)
class Breaker:
    """The failures of one peer or store, and until when it is not asked."""

    failures: int = 0
    open_until: float = 0.0
    open_seconds_max: float = OPEN_SECONDS_MAX
    failures_to_open: int = FAILURES_TO_OPEN
    is_tried: bool = False  # one caller was let through, and has not said what came of it

    def allows(self, now: float) -> bool:
        return now >= self.open_until

    def admits(self, now: float, trial_seconds: float) -> bool:
        """Like `allows`, for callers who ask many things at once: after an opening only one of them tries it, every
        `trial_seconds`, until one has succeeded."""
        if not self.allows(now):
            return False
        if self.failures >= self.failures_to_open:
            self.open_until, self.is_tried = now + trial_seconds, True
        return True

    def succeeded(self) -> None:
        self.failures = 0
        self.open_until, self.is_tried = 0.0, False

    def failed(self, now: float) -> None:
        """Count a failure. After so many in a row the breaker opens, for a time that doubles with each further one."""
        self.failures += 1
        if self.failures >= self.failures_to_open:
            doubled = min(self.failures - self.failures_to_open, 16)  # a float holds no 2 ** 1024
            seconds = OPEN_SECONDS_FIRST * 2**doubled
            self.open_until = now + min(seconds, self.open_seconds_max)

    def failed_once(self, now: float) -> bool:
        """Like `failed`, for callers with many calls under way: of those that fail while it is open, none counts but a
        trial. Returns whether it has opened."""
        if not self.allows(now) and not self.is_tried:
            return False
        self.is_tried = False
        self.failed(now)
        return not self.allows(now)
