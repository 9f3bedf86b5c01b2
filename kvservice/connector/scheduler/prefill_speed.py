"""How fast the engine computes prompts. A fetch has to be faster. Pure."""

from __future__ import annotations

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
