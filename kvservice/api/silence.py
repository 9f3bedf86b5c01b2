"""A shard that is silent costs one call its whole time, and the calls behind it none. Used on one loop."""

from __future__ import annotations

import asyncio

from kvservice.breaker import Breaker

# A shard that hangs keeps a call for its whole time, until its heartbeat is missed. One call that took all of it, and
# no less than this, makes the others go on without.
SILENT_SECONDS = 0.4
REST_SECONDS_MAX = 2.0  # between two calls that try a silent shard again: one that comes back is used soon


class ShardSilence:
    """Whether the shard is asked now."""

    def __init__(self) -> None:
        self._breaker = Breaker(open_seconds_max=REST_SECONDS_MAX, failures_to_open=1)

    def spares(self, seconds: float) -> bool:
        """Whether a call that may take so long is left out: the shard is silent, and others try it."""
        return not self._breaker.admits(asyncio.get_running_loop().time(), seconds)

    def ended(self, began: float, seconds: float, *, answered: bool) -> None:
        """A call that was not left out has ended. It began then, by the loop's clock. One that fails before its time
        hears of a connection that has ended or of a refusal: the shard is not silent, and the next call asks it."""
        now = asyncio.get_running_loop().time()
        if not answered and now - began >= max(seconds, SILENT_SECONDS):
            self._breaker.failed(now)
        else:
            self._breaker.succeeded()
