"""How much eviction credit a block earns by having been reused. Learnt online. Pure.

Blocks are told apart by how often they were used again: 0, 1, 2, 4, 8, 16 or more times. Of each kind it is counted
how many were used once more, and how many were not, up to long after they were evicted. Take p as the share that were,
and the time until then as exponential: a block of odds p / (1 - p) that has waited t is as likely to be used in the
next moment as one of other odds that has waited t', when

    t - t' = mean time until a use × (log-odds of the one - log-odds of the other)

So each kind is given that many ticks of credit over blocks that were never used again, never less than none. Where
having been used says nothing about the future, all odds are the same and what is left is LRU. Where most prompts never
come back, those make room first, and a scan does not flush what is in use.

Blocks that are gone are remembered: who comes back has been used again. Two generations of as many as there are blocks,
at least GONE_MIN and at most GONE_MAX, at about 130 bytes each: 9 MB, for more than 32,768 blocks up to 68 MB. The
first ones are short, so that something is known soon.
"""

from __future__ import annotations

import math

from kvservice.units import BlockKey

USES_MAX = 31  # more are not counted
KINDS = USES_MAX.bit_length() + 1
_USES_BITS = USES_MAX.bit_length()
GONE_FIRST = 1024
GONE_MIN = 32_768  # of one generation: small pools need a long memory most
GONE_MAX = 262_144
PRIOR = 2000.0  # blocks of the common share that each kind is taken to have seen: prompts come and go as a whole
ODDS_MAX = 50.0  # p of 0.98
LEARN_EVERY = 256  # observations between two looks at the counts
FADE_AFTER = 4 * 32_768  # observations: then the older ones count half


def kind_of(uses: int) -> int:
    """0, 1, 2 to 3, 4 to 7, 8 to 15, 16 or more uses."""
    return uses.bit_length()


class ReuseMemory:
    """Ticks are the caller's; they never go back."""

    def __init__(self, gone_min: int = GONE_MIN) -> None:
        self._gone_min = gone_min
        self._gone_limit = GONE_FIRST  # of this generation
        self._used = [0.0] * KINDS  # by kind: those used once more
        self._lost = [0.0] * KINDS  # those forgotten without
        self._wait_ticks = 0.0  # of all those in _used
        self._gone: dict[BlockKey, int] = {}  # last tick << _USES_BITS | uses
        self._gone_before: dict[BlockKey, int] = {}
        self._counts = [0] * KINDS  # of _gone, by kind
        self._counts_before = [0] * KINDS
        self._unseen = 0  # observations since the credits were computed
        self._credits = (0,) * KINDS

    def credits(self) -> tuple[int, ...]:
        """Ticks, by kind. The same until something else is observed."""
        if self._unseen >= LEARN_EVERY:
            self._unseen = 0
            self._credits = self._learn()
        return self._credits

    def on_hit(self, uses: int, waited: int) -> int:
        """A block that had been used again so often was used once more after so many ticks. Returns its uses now."""
        self._used[kind_of(uses)] += 1
        self._wait_ticks += waited
        self._unseen += 1
        return min(uses + 1, USES_MAX)

    def on_insert(self, key: BlockKey, tick: int) -> int:
        """The uses of a block that is stored: 0 unless it is remembered."""
        packed = self._gone.pop(key, None)
        counts = self._counts
        if packed is None:
            packed = self._gone_before.pop(key, None)
            counts = self._counts_before
        if packed is None:
            return 0
        uses = packed & USES_MAX
        counts[kind_of(uses)] -= 1
        return self.on_hit(uses, tick - (packed >> _USES_BITS))

    def on_evict(self, key: BlockKey, uses: int, tick: int, block_count: int) -> None:
        """A block was evicted that had last been used then. `block_count`: those that are left."""
        self._gone[key] = tick << _USES_BITS | uses
        self._counts[kind_of(uses)] += 1
        if len(self._gone) >= self._gone_limit:
            self._gone_limit = min(2 * self._gone_limit, max(block_count, self._gone_min), GONE_MAX)
            for kind, count in enumerate(self._counts_before):
                self._lost[kind] += count
                self._unseen += count
            self._gone_before, self._gone = self._gone, {}
            self._counts_before, self._counts = self._counts, [0] * KINDS

    def _learn(self) -> tuple[int, ...]:
        used, lost = sum(self._used), sum(self._lost)
        if used + lost > FADE_AFTER:
            self._used = [count / 2 for count in self._used]
            self._lost = [count / 2 for count in self._lost]
            self._wait_ticks /= 2
            used, lost = used / 2, lost / 2
        if not used or not lost:
            return (0,) * KINDS  # nothing to tell them apart by
        common = PRIOR * used / (used + lost)
        odds = [
            math.log(min((u + common) / (n + PRIOR - common), ODDS_MAX))
            for u, n in zip(self._used, self._lost, strict=True)
        ]
        wait = self._wait_ticks / used
        return tuple(max(0, round(wait * (one - odds[0]))) for one in odds)

    def check_invariants(self) -> None:
        for gone, counts in ((self._gone, self._counts), (self._gone_before, self._counts_before)):
            found = [0] * KINDS
            for packed in gone.values():
                found[kind_of(packed & USES_MAX)] += 1
            assert found == counts, "blocks that are gone are miscounted"
        assert not self._gone.keys() & self._gone_before.keys(), "a block went twice and never came back"
