"""How much eviction credit a block earns by having been reused. Learnt online. Pure.

Blocks are grouped into kinds by how often they were used again: 0, 1, 2, 4, 8, 16 or more times. For each kind we count
how many blocks were used once more and how many were not, until long after their eviction. Let p be the share that was
used once more, and let the time until that use be exponential. Then a block with odds p / (1 - p) that has waited for t
is as likely to be used in the next moment as a block with other odds that has waited for t', when

    t - t' = mean time until a use × (log-odds of the first - log-odds of the second)

So each kind gets that many ticks of credit over blocks that were never used again, and never less than 0. If past use
says nothing about the future, all odds are equal and the policy is LRU. If most prompts never come back, their blocks
are evicted first, and a scan does not flush the blocks in use.

Evicted blocks are remembered, so that one that is stored again counts as used again. There are two generations, each
with as many keys as the pool has blocks, but at least GONE_MIN and at most GONE_MAX, at about 130 bytes a key: 9 MB,
and with more than 32,768 blocks up to 68 MB. The first generations are shorter, so that something is known soon.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvservice.units import BlockKey

USES_MAX = 31  # five bits of a remembered block; further uses are not counted, as the last kind begins at 16
KINDS = USES_MAX.bit_length() + 1  # 0 uses, and one kind for each power of two up to USES_MAX
_USES_BITS = USES_MAX.bit_length()
GONE_FIRST = 1024  # keys of the first generation; each further one is twice as long, up to its limit
GONE_MIN = 32_768  # keys of a generation at least: small pools need a long memory most. About 9 MB for two.
GONE_MAX = 262_144  # keys of a generation at most: about 68 MB for two. What is older is counted as not used again.
PRIOR = 2000.0  # each kind starts as if it had seen so many blocks of the common share: blocks come in whole prompts
ODDS_MAX = 50.0  # a p of 0.98; it bounds the credit of a kind that hardly ever lost a block
LEARN_EVERY = 256  # observations until the credits are computed again, so that choosing a victim stays cheap
FADE_AFTER = 4 * 32_768  # observations; then older ones count half, so that a changed workload is learnt

assert GONE_FIRST <= GONE_MIN <= GONE_MAX
assert LEARN_EVERY < FADE_AFTER


def kind_of(uses: int) -> int:
    """The kind of a block: 0 uses, 1, 2 to 3, 4 to 7, 8 to 15, 16 or more uses."""
    return uses.bit_length()


class ReuseMemory:
    """Counts uses and evictions, and computes credits. Ticks are the caller's and never go back."""

    def __init__(self, gone_min: int = GONE_MIN) -> None:
        self._gone_min = gone_min
        self._gone_limit = GONE_FIRST  # of this generation
        self._used = [0.0] * KINDS  # by kind: blocks that were used once more
        self._lost = [0.0] * KINDS  # by kind: blocks that were forgotten without a further use
        self._wait_ticks = 0.0  # the sum of the waits of all blocks in _used
        self._gone: dict[BlockKey, int] = {}  # last tick << _USES_BITS | uses
        self._gone_before: dict[BlockKey, int] = {}  # the previous generation
        self._counts = [0] * KINDS  # blocks in _gone, by kind
        self._counts_before = [0] * KINDS
        self._unseen = 0  # observations since the credits were computed
        self._credits = (0,) * KINDS

    def credits(self) -> tuple[int, ...]:
        """Ticks of credit, by kind. They change only after further observations."""
        if self._unseen >= LEARN_EVERY:
            self._unseen = 0
            self._credits = self._learn()
        return self._credits

    def on_hits(self, blocks: Sequence[int], waited: int) -> None:
        """So many blocks of each kind were used once more, after so many ticks in sum."""
        self._used = [used + count for used, count in zip(self._used, blocks, strict=True)]
        self._wait_ticks += waited
        self._unseen += sum(blocks)

    def on_hit(self, uses: int, waited: int) -> int:
        """A block with `uses` uses was used once more after `waited` ticks. Returns its uses now."""
        self._used[kind_of(uses)] += 1
        self._wait_ticks += waited
        self._unseen += 1
        return min(uses + 1, USES_MAX)

    def on_insert(self, key: BlockKey, tick: int) -> int:
        """The uses of a block that is stored now: 0 unless it is remembered."""
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
        """A block was evicted that had last been used at `tick`. `block_count` blocks are left."""
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
            return (0,) * KINDS  # nothing tells the kinds apart
        common = PRIOR * used / (used + lost)
        odds = [
            math.log(min((u + common) / (n + PRIOR - common), ODDS_MAX))
            for u, n in zip(self._used, self._lost, strict=True)
        ]
        wait = self._wait_ticks / used
        return tuple(max(0, round(wait * (kind_odds - odds[0]))) for kind_odds in odds)

    def check_invariants(self) -> None:
        for gone, counts in ((self._gone, self._counts), (self._gone_before, self._counts_before)):
            found = [0] * KINDS
            for packed in gone.values():
                found[kind_of(packed & USES_MAX)] += 1
            assert found == counts, "blocks that are gone are miscounted"
        assert not self._gone.keys() & self._gone_before.keys(), "a block was evicted twice and not stored in between"
