"""How fast the engine computes prompts. A fetch has to be faster. Pure."""

from __future__ import annotations

from collections import deque

NEWEST_WEIGHT = 0.2  # Weight of the newest sample in the running mean: it follows a change within some ten prompts.
TOKENS_MIN = 64  # Smaller steps are decodes and tell nothing about prefill; they are not counted.


class PrefillSpeed:
    def __init__(self) -> None:
        self._seconds_per_token: float | None = None  # None until a step was large enough

    def add(self, tokens: int, seconds: float) -> None:
        """Note that a step computed `tokens` in `seconds`."""
        if tokens < TOKENS_MIN or seconds <= 0:
            return
        sample, before = seconds / tokens, self._seconds_per_token
        self._seconds_per_token = sample if before is None else before + NEWEST_WEIGHT * (sample - before)

    def seconds_for(self, tokens: int) -> float:
        """The estimated seconds for so many tokens; 0.0 while nothing is known."""
        return (self._seconds_per_token or 0.0) * tokens


class StepTimes:
    """How long the engine computed each step. An engine may plan a step while earlier ones still run."""

    def __init__(self, ahead: int = 0) -> None:
        """`ahead` is how many earlier steps may run when one is planned. Steps that end unheard of are left out."""
        self._running: deque[tuple[float, int]] = deque(maxlen=1 + ahead)  # (planned at, tokens)
        self._last_end = 0.0

    def begin(self, tokens: int, now: float) -> None:
        """A step is planned that computes so many tokens."""
        self._running.append((now, tokens))

    def end(self, now: float) -> tuple[int, float] | None:
        """The oldest step has ended. Returns its tokens, and the seconds since it was planned or the one before it
        ended, whichever came later."""
        if not self._running:
            return None
        planned_at, tokens = self._running.popleft()
        began, self._last_end = max(planned_at, self._last_end), now
        return tokens, now - began
