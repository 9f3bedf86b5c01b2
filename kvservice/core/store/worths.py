"""What a block is worth: the most hits per tick of room that it will bring. Learnt from history. Pure.

For each kind of block (core.store.kinds) and each age, which is the time since its last use, we count how many blocks
reached that age and how many were used at it. Blocks count until they are forgotten, resident or gone: so the counts do
not depend on what the policy evicts. From them follows the chance of a use at each age, and from the chances

    worth(age) = max over horizons of (expected uses until the horizon) / (expected ticks until then, or until a use)

This is Gittins' index of the block as an investment of room ("Bandit processes and dynamic allocation indices", 1979),
and what LHD calls hit density (Beckmann et al., NSDI 2018), there estimated from what its own evictions let it see.

What comes together, like a batch that is read twice, is one observation, however many blocks it has. So kinds are
pulled towards what all kinds have in common, by a weight that grows with the capacity.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from kvservice.core.store.kinds import HINTED, KINDS, PAUSES, PRIVATE, SHARED, Expected, expected_of, sort_of
from kvservice.core.store.stretches import Group, Stretch

# Ages begin at these ticks: the first few each, then two an octave.
AGE_STARTS = (0, 1, 2, 3, 4, 5, *(int(2 ** (half / 2)) for half in range(6, 35)))
AGES = len(AGE_STARTS)
LEARN_SHARE = 1 / 32  # worths are computed anew, kind by kind, when the counts have grown by so much
LEARN_MIN = 512  # blocks, or more
FADE_AFTER = 200_000  # blocks; then older counts count half, so that a changed workload is learnt
PRIOR_PROMPTS = 5  # the weight of what kinds have in common: as many blocks as so many prompts have
PRIOR_SHARE = 0.2  # or this share of the capacity, if that is more
AGES_ALIKE = 0.1  # of that weight: how much all ages are taken to be alike before they are known
RATE_MAX = 0.999  # nothing is certain; a rate of 1 would leave no chance for later ages
# By sort: how much more often than all blocks together its blocks are expected to be used again, before it is known.
# So much that a scan does not flush what was used, and so little that a few prompts of a sort outweigh it.
PRIVATE_LIFT = (0.3, 1.0, 2.0, 3.0, 4.0)  # by turns: who went on will go on
USED_LIFT = (4.0, 6.0, 8.0, 12.0, 16.0)  # by uses
LIFT = PRIVATE_LIFT + USED_LIFT + USED_LIFT
# The same for prompts with hints, beside those of as many turns without one. No more than that: what people say of the
# future is often wrong, and what it was worth is soon known.
HINT_LIFT = {Expected.LAST_TURN: 0.1, Expected.LATER: 0.5, Expected.SOON: 2.0, Expected.SHARED: 2.0}


class Worths:
    """Counts uses, and computes worths from the counts. `table[kind][age]` is the worth of a block."""

    def __init__(self) -> None:
        self.table = [[1 / (1 + start) for start in AGE_STARTS] for _ in range(KINDS)]  # of nothing more is known
        self._reached = [[0.0] * AGES for _ in range(KINDS)]
        self._used = [[0.0] * AGES for _ in range(KINDS)]
        self._rows: list[deque[Group]] = [deque() for _ in range(AGES - 1)]  # groups by age, the oldest first
        self._counted = 0.0
        self._learn_at = float(LEARN_MIN)
        self._due: list[int] = []  # kinds whose worths are to be computed anew, the next one last
        self._is_fading = False
        self._prior = 0.0  # blocks; of this pass, as the rest
        self._common = [0.0] * AGES
        self._of_sort = [0.0] * AGES
        self._sort = -1  # which sort that is
        self._asked = 0  # blocks
        self._prompts = 0

    def asked(self, blocks: int) -> None:
        self._prompts += 1
        self._asked += blocks

    def enter(self, group: Group) -> None:
        """These blocks are used now."""
        self._reached[group.kind][0] += group.count
        self._counted += group.count
        self._rows[0].append(group)

    def extend(self, group: Group) -> None:
        """One more block is used with this group, which entered now."""
        self._asked += 1
        group.count += 1
        self.join(group)

    def join(self, group: Group) -> None:
        """One more block of this group, which entered now, is counted. Nobody asked for it."""
        self._reached[group.kind][0] += 1
        self._counted += 1

    def use(self, stretch: Stretch) -> None:
        """These blocks leave their group, because they are used again."""
        group, count = stretch.group, len(stretch.keys)
        self._used[group.kind][group.age] += count
        group.count -= count

    def grow_older(self, tick: int) -> list[Group]:
        """Let groups reach their next age. Returns those that did and have something that can be evicted from."""
        found: list[Group] = []
        for age, row in enumerate(self._rows, 1):
            latest = tick - AGE_STARTS[age]
            while row and row[0].tick <= latest:
                group = row.popleft()
                if group.count:
                    group.age = age
                    self._reached[group.kind][age] += group.count
                    if age < AGES - 1:  # there it stays
                        self._rows[age].append(group)
                    if group.tips:
                        found.append(group)
        return found

    def learn(self, capacity: int, *, may_raise: bool = True) -> int | None:
        """Compute the worths of one kind anew, in turn, if enough was counted since. Returns the kind.

        Without `may_raise` a hint lowers what a block is worth, or changes nothing. So no tenant keeps the blocks of
        others out with hints.
        """
        if not self._due:
            if self._counted < self._learn_at:
                return None
            self._begin_pass(capacity)
        kind = self._due.pop()
        if sort_of(kind) != self._sort:
            self._begin_sort(sort_of(kind))
        self.table[kind] = self._worths_of(kind, may_raise)
        return kind

    def _begin_pass(self, capacity: int) -> None:
        self._is_fading = self._counted > FADE_AFTER
        if self._is_fading:
            self._counted /= 2
        self._learn_at = self._counted + max(LEARN_MIN, self._counted * LEARN_SHARE)
        self._prior = max(PRIOR_PROMPTS * self._asked / self._prompts, PRIOR_SHARE * capacity)
        self._due = sorted((kind for kind in range(KINDS) if self._reached[kind][0]), key=sort_of)
        reached, used = _summed(self._reached, self._due), _summed(self._used, self._due)
        self._common = _rates(used, reached, [sum(used) / sum(reached)] * AGES, self._prior * AGES_ALIKE)
        self._sort = -1

    def _begin_sort(self, sort: int) -> None:
        self._sort = sort
        kinds = range(sort * PAUSES, (sort + 1) * PAUSES)
        if self._is_fading:
            hinted = range(HINTED + sort - PRIVATE, KINDS, SHARED - PRIVATE) if sort < SHARED else ()
            for counts in (self._reached, self._used):
                for kind in (*kinds, *hinted):
                    counts[kind] = [count / 2 for count in counts[kind]]
        expected = [rate * LIFT[sort] for rate in self._common]
        self._of_sort = _rates(_summed(self._used, kinds), _summed(self._reached, kinds), expected, self._prior)

    def _worths_of(self, kind: int, may_raise: bool) -> list[float]:
        """The worth of a kind of the sort that was begun, by age."""
        used, reached, expected = self._used[kind], self._reached[kind], expected_of(kind)
        if expected is Expected.NOTHING_SAID:
            return worth_by_age(_rates(used, reached, self._of_sort, self._prior))
        lift = HINT_LIFT[expected] if may_raise else min(HINT_LIFT[expected], 1.0)
        worths = worth_by_age(_rates(used, reached, [rate * lift for rate in self._of_sort], self._prior))
        if may_raise:
            return worths
        return [min(pair) for pair in zip(worths, worth_by_age(self._of_sort), strict=True)]

    def check_invariants(self) -> None:
        for age, row in enumerate(self._rows):
            assert all(group.age == age for group in row), "a group is not of the age that it is listed at"
            ticks = [group.tick for group in row]
            assert ticks == sorted(ticks), "groups do not grow older in their order"


def _summed(rows: Sequence[Sequence[float]], kinds: Iterable[int]) -> list[float]:
    return [sum(column) for column in zip(*(rows[kind] for kind in kinds), strict=True)]


def _smooth(counts: Sequence[float]) -> list[float]:
    """Each age with half of its neighbours, but for the first two and the last."""
    middle = zip(counts[1:-2], counts[2:-1], counts[3:], strict=True)
    return [*counts[:2], *((before + 2 * here + after) / 4 for before, here, after in middle), counts[-1]]


def _rates(used: Sequence[float], reached: Sequence[float], expected: Sequence[float], prior: float) -> list[float]:
    """The chance of a use at each age, pulled towards what was expected."""
    rows = zip(_smooth(used), _smooth(reached), expected, strict=True)
    return [min((count + prior * rate) / (among + prior), RATE_MAX) for count, among, rate in rows]


def worth_by_age(rates: Sequence[float]) -> list[float]:
    """Gittins' index at each age: the best ratio of expected uses to expected ticks over all horizons.

    From the last age to the first. The best horizon of an age ends where the next age's own best ratio is lower, so
    what follows is taken over as one piece: O(ages).
    """
    worths = [0.0] * AGES
    pieces: list[tuple[float, float, float, float]] = []  # (ratio, uses, ticks, chance to get behind it), nearest last
    for age in range(AGES - 2, -1, -1):  # of the last age, nothing is known
        rate = rates[age]
        uses, ticks = rate, (AGE_STARTS[age + 1] - AGE_STARTS[age]) * (1 - rate / 2)
        left = 1 - rate
        while pieces and pieces[-1][0] * ticks > uses:
            _, more_uses, more_ticks, more_left = pieces.pop()
            uses, ticks, left = uses + left * more_uses, ticks + left * more_ticks, left * more_left
        worths[age] = uses / ticks
        pieces.append((uses / ticks, uses, ticks, left))
    return worths
