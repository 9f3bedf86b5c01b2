"""What the pool does with hints of clients: it counts them, holds what is pinned, and fetches what is to be fetched.

A pin is a hold for a bounded time, within the budget of warmed blocks, so clients cannot fill a pool with it. Blocks to
write down or to share, expected reuse and last turns are told to the eviction policy, for which prompts with a hint are
kinds of their own (core.store.kinds). Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from kvservice.core.acquire.holds import HOLD_SECONDS_MAX, Holds
from kvservice.core.context import ShardContext
from kvservice.core.messages import AcquireRequest, Hints
from kvservice.core.store.kinds import Expected
from kvservice.core.store.slots import Block, Slot

SOON_SECONDS = 300.0  # a next use that is expected within it is soon: a tool call, or a person who reads an answer


def expectation(hints: Hints) -> Expected:
    """What an eviction policy makes of hints. Of several the most certain one counts."""
    if hints.last_turn:
        return Expected.LAST_TURN
    if hints.reuse_seconds:
        return Expected.SOON if hints.reuse_seconds <= SOON_SECONDS else Expected.LATER
    if hints.write_down:
        return Expected.LATER
    return Expected.SHARED if hints.share else Expected.NOTHING_SAID


class Hinted:
    """Call `asked` for each Acquire that hints something, `promised` for its blocks, `stored` for sealed blocks."""

    def __init__(self, shard: ShardContext, holds: Holds) -> None:
        self._shard = shard
        self._holds = holds

    def asked(self, request: AcquireRequest) -> AcquireRequest:
        """Count what is hinted. Returns the request as it is performed."""
        hints = request.hints
        said = {
            "pin": hints.pin_seconds,
            "prefetch": hints.prefetch,
            "write_down": hints.write_down,
            "share": hints.share,
            "no_store": hints.no_store,
            "reuse": hints.reuse_seconds,
            "last_turn": hints.last_turn,
        }
        for name in (name for name, value in said.items() if value):
            self._shard.counters[f"hints_{name}"] += 1
        return replace(request, recompute_seconds_per_block=0.0) if hints.prefetch else request

    def promised(self, account: str, slots: Sequence[Slot], seconds: float, now: float) -> None:
        """Hold the blocks of a promise."""
        self._hold(account, [slot for slot in slots if slot.block is not None], seconds, now)

    def stored(self, account: str, blocks: Iterable[tuple[Block, float]], now: float) -> None:
        """Hold blocks that were sealed just now, each for its time."""
        by_time: dict[float, list[Slot]] = {}
        for block, seconds in blocks:
            by_time.setdefault(seconds, []).append(block.slot)
        for seconds, slots in by_time.items():
            self._hold(account, slots, seconds, now)

    def _hold(self, account: str, slots: Sequence[Slot], seconds: float, now: float) -> None:
        if not slots or self._shard.is_draining():
            return
        self._shard.store.pin(slots)
        held = self._holds.warm(account, slots, min(seconds, HOLD_SECONDS_MAX), now)
        self._shard.counters["hints_pinned_blocks"] += held
