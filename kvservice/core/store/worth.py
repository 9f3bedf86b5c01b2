"""The default eviction policy: the leaf that is worth least goes first, or the one that LRU or S3-FIFO would evict.

What a block is worth is learnt for its kind and age (core.store.kinds, core.store.worths). LRU and S3-FIFO guard it:
the rule is followed that finds most, as a comparison shows (core.store.guard). Under each of them leaves go before the
prefix they extend, and secondary copies before primary ones, because another node has the primary copy.

Time is counted in prompts, not in seconds, so an idle night ages nothing.

The work is done on stretches (core.store.stretches), and so takes a few steps a prompt: O(1) amortised a block. Pure.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvservice.core.block.tenants import NOBODY
from kvservice.core.block.window_groups import WINDOW_BIT
from kvservice.core.store.guard import PPM, RULE_FIGURE, Rule, RuleGuard
from kvservice.core.store.kinds import USES_MAX, Expected, expected_of, kind_of, pause_of
from kvservice.core.store.orders import ByAge, ByFifo, ByWorth
from kvservice.core.store.reasons import NOT_BY_WORTH, reason_of
from kvservice.core.store.shadows import ShadowFifo, ShadowLru, ShadowWorth
from kvservice.core.store.stretches import Group, IsLeaf, LeafOrder, Rank, Shelf, Stretch, StretchTree
from kvservice.core.store.worths import Worths
from kvservice.units import BlockKey

KINDS_A_PROMPT = 3  # whose worths are computed anew at most: so no prompt pays for all
GONE_MIN = 32_768  # gone blocks that are remembered at least: small pools need a long memory most


@dataclass(frozen=True, slots=True)
class RuleState:
    rule: Rule
    switches: int  # how often the rule changed
    hit_rates: Mapping[Rule, float]  # of late, of the shadow of each rule: a cache as large as the pool

    def figures(self) -> dict[str, int]:
        return {
            RULE_FIGURE: list(Rule).index(self.rule),
            "eviction_rule_changes": self.switches,
            **{rule.hits_figure: round(PPM * rate) for rule, rate in self.hit_rates.items()},
        }


def _rank_of(found: tuple[Shelf, Stretch]) -> tuple[bool, Rank]:
    shelf, stretch = found
    return (not shelf.is_secondary, shelf.order.rank(stretch))


def _is_shadow_leaf(stretch: Stretch) -> bool:
    return stretch.is_shadow_leaf


class GuardedWorth:
    """See the module. Implements core.store.eviction.EvictionPolicy."""

    def __init__(self) -> None:
        self._tree = StretchTree(self._on_cut)
        self._worths = Worths()
        self._guard = RuleGuard()
        self._lru = ShadowLru()
        self._fifo = ShadowFifo()
        self._worth = ShadowWorth(ByWorth(_is_shadow_leaf, self._worths.table))
        self._shelves: dict[int, dict[tuple[str, bool], Shelf]] = {}  # by size, then by account and kind of copy
        self._pinned: set[BlockKey] = set()
        self._found: Group | None = None  # the last blocks that an earlier boot left
        self._parked: set[BlockKey] = set()  # pinned blocks at the end of leaves that were taken out of the order
        self._expected = Expected.NOTHING_SAID  # of the prompt that is being served
        self._tick = 0
        self._capacity = 0  # the most blocks that were resident when room was needed; 0: it was never needed

    # -- what is used ----

    def touch(self, chain: Sequence[BlockKey], now: float) -> None:
        if chain:
            self._begin_prompt()
            fresh = Group(0, self._tick, now)
            self._use(self._tree.walk(chain, fresh), fresh)
        self._expected = Expected.NOTHING_SAID

    def expect(self, expected: Expected) -> None:
        self._expected = expected

    def _begin_prompt(self) -> None:
        self._tick += 1
        shadow = self._worth.order
        for group in self._worths.grow_older(self._tick):
            tips, group.tips = group.tips, []
            for stretch in tips:
                if stretch.group is not group:
                    continue  # it was used again
                is_leaf, is_shadow_leaf = stretch.is_leaf, stretch.is_shadow_leaf
                if is_leaf:
                    assert stretch.shelf is not None
                    stretch.shelf.order.put_older(stretch)
                if is_shadow_leaf:
                    shadow.put_older(stretch)
                stretch.is_tip = is_leaf or is_shadow_leaf
                if stretch.is_tip:
                    group.tips.append(stretch)

    def _use(self, found: Sequence[Stretch], fresh: Group) -> None:
        """A prompt used these stretches, of which those in `fresh` are new."""
        self._count_uses(found, fresh)
        self._regroup(found, fresh.used_at)
        asked = sum(len(stretch.keys) for stretch in found)
        self._worths.asked(asked)
        hits = {
            Rule.LRU: self._lru.use(found),
            Rule.S3_FIFO: self._fifo.use(found),
            Rule.WORTH: self._worth.use(found),
        }
        for stretch in self._joined(found):
            self._tree.queue(stretch)
            self._offer(stretch)
        self._shrink_shadows()
        if self._guard.compare(asked, hits):
            self._change_rule()
        self._forget()
        if self._capacity:  # before that nobody asks what anything is worth
            self._learn()

    def _learn(self) -> None:
        may_raise = self._is_of_one_tenant()
        for _ in range(KINDS_A_PROMPT):
            kind = self._worths.learn(self._capacity, may_raise=may_raise)
            if kind is None:
                break
            for order in self._orders_by_worth():
                order.sort_kind(kind)

    def _joined(self, found: Sequence[Stretch]) -> list[Stretch]:
        """What a prompt used, with neighbours joined that may be one stretch. What an earlier boot left lies block by
        block until it is asked for."""
        runs: list[list[Stretch]] = []
        for stretch in found:
            if runs and runs[-1][-1].may_join(stretch):
                runs[-1].append(stretch)
            else:
                runs.append([stretch])
        return [self._tree.join(run) if len(run) > 1 else run[0] for run in runs]

    def _count_uses(self, found: Sequence[Stretch], fresh: Group) -> None:
        above: Stretch | None = None
        for stretch in found:
            if stretch.group is not fresh:
                self._worths.use(stretch)
                stretch.pause = pause_of(self._tick - stretch.group.tick)
                stretch.uses = min(stretch.uses + 1, USES_MAX)
            elif above is not None:
                stretch.turn = above.turn + (above.group is not fresh)
            above = stretch

    def _regroup(self, found: Sequence[Stretch], now: float) -> None:
        """What a prompt used is of the same age from now on, and of the kinds that the prompt shows."""
        last_turn = found[-1].turn
        last_pause = next((stretch.pause for stretch in reversed(found) if stretch.pause), 0)
        groups: dict[int, Group] = {}
        for stretch in found:
            kind = kind_of(stretch.uses, stretch.turn, stretch.pause, last_turn, last_pause, self._expected)
            group = groups.get(kind)
            if group is None:
                group = groups[kind] = Group(kind, self._tick, now)
            self._move(stretch, group)
        for group in groups.values():
            self._worths.enter(group)

    @staticmethod
    def _move(stretch: Stretch, group: Group) -> None:
        stretch.group = group
        stretch.is_tip = False
        group.count += len(stretch.keys)

    def _on_cut(self, upper: Stretch, lower: Stretch) -> None:
        self._lru.after_cut(upper)
        self._fifo.after_cut(upper)
        self._offer(upper)
        self._offer(lower)

    def _offer(self, stretch: Stretch) -> None:
        """Its last block may go, from the pool or from the shadow of worth, or is of another age now."""
        self._offer_resident(stretch)
        if stretch.is_shadow_leaf:
            self._worth.order.put(stretch)

    @staticmethod
    def _offer_resident(stretch: Stretch) -> None:
        """Its last block may go from the pool."""
        if stretch.is_leaf:
            assert stretch.shelf is not None
            stretch.shelf.order.put(stretch)

    def _offer_by_fifo(self, stretch: Stretch) -> None:
        """Whether the shadow of S3-FIFO holds all of this stretch may have changed."""
        if self._guard.rule is Rule.S3_FIFO:
            self._offer_resident(stretch)

    def _shrink_shadows(self) -> None:
        if self._capacity:
            evicted = self._lru.shrink(self._capacity)
            self._worth.shrink(self._capacity)
            for stretch in self._fifo.shrink(self._capacity):
                self._offer_by_fifo(stretch)
            self._guard.fade(evicted / self._capacity)

    def _change_rule(self) -> None:
        for shelf in self._all_shelves():
            shelf.sort(self._make_order)

    def _make_order(self, is_leaf: IsLeaf) -> LeafOrder:
        if self._guard.rule is Rule.WORTH:
            return ByWorth(is_leaf, self._worths.table)
        return ByFifo(is_leaf) if self._guard.rule is Rule.S3_FIFO else ByAge(is_leaf)

    def _orders_by_worth(self) -> Iterator[ByWorth]:
        yield self._worth.order
        for shelf in self._all_shelves():
            if isinstance(shelf.order, ByWorth):
                yield shelf.order

    def _forget(self) -> None:
        for stretch in self._tree.to_forget(max(GONE_MIN, self._capacity), self._tick):
            self._lru.forget(stretch)
            self._fifo.forget(stretch)
            self._worth.forget(stretch)
            self._tree.forget(stretch)
            self._offer_by_fifo(stretch)

    # -- what comes and goes ----

    def add(
        self,
        key: BlockKey,
        parent: BlockKey | None,
        position: int,
        now: float,
        *,
        is_secondary: bool,
        size_class: int,
        account: str = NOBODY,
    ) -> None:
        shelf = self._shelf(size_class, account, is_secondary)
        stretch = self._tree.of.get(key)
        if stretch is None or stretch.lost_at > stretch.group.tick:
            stretch = self._come(key, parent, position, now, shelf)
        if position >= WINDOW_BIT and not stretch.is_window:
            stretch = self._make_window(key, position)
        offset = stretch.held
        if offset == len(stretch.keys) or stretch.keys[offset] != key:
            offset = stretch.keys.index(key)
        assert offset >= stretch.held, "a block is added once"
        if offset > stretch.held or (stretch.held and stretch.shelf is not shelf):
            self._tree.cut(stretch, offset)
        # One block more at the end of a leaf changes nothing, unless the leaf was taken out because its end was pinned.
        is_offered = stretch.held > 0 and stretch.keys[stretch.held - 1] not in self._parked
        stretch.shelf = shelf
        self._count_resident(stretch, 1)
        if stretch.group is self._found:
            shelf.found.put(stretch)
        elif not is_offered:
            self._offer_resident(stretch)

    def _come(self, key: BlockKey, parent: BlockKey | None, position: int, now: float, shelf: Shelf) -> Stretch:
        """A block is stored that nobody asked for since it was here. What it extends is used with it: an engine that
        has a prefix in its own memory never asks us for it, but without the prefix the block cannot be used."""
        tree = self._tree
        if parent is None and 0 < position < WINDOW_BIT and key not in tree.of:
            return self._find(key, position, now)
        above = None if parent is None or position >= WINDOW_BIT or parent not in tree.of else tree.ending_with(parent)
        if above is not None and above.end != position:
            above = None  # not a chain
        if above is None or above.group.tick != self._tick:
            self._begin_prompt()
        elif key not in tree.of and self._is_like(above, shelf):
            return self._extend(above, key)
        fresh = Group(0, self._tick, now)
        self._expected = Expected.NOTHING_SAID if above is None else expected_of(above.group.kind)
        if above is None and parent is not None and 0 < position < WINDOW_BIT and parent not in tree.of:
            found = tree.walk((parent, key), fresh, position - 1)
        elif key in tree.of:
            found = [tree.single_out(key)]
            tree.link(found[0], above)
        else:
            found = tree.walk((key,), fresh, position, above)
        self._use(found, fresh)
        self._expected = Expected.NOTHING_SAID
        while above is not None and above.group.tick != self._tick:
            self._renew(above, now)
            above = above.above
        return tree.of[key]

    def _find(self, key: BlockKey, position: int, now: float) -> Stretch:
        """An earlier boot left this block. Nobody asks for it now: it is as old as the last prompt."""
        group = self._found
        if group is None or group.tick != self._tick:
            group = self._found = Group(0, self._tick, now)
            self._worths.enter(group)
        stretch = self._tree.make([key], position, None, group)
        self._worths.join(group)
        self._tree.queue(stretch)
        return stretch

    @staticmethod
    def _is_like(above: Stretch, shelf: Shelf) -> bool:
        """Whether a new block below it would have the same history."""
        is_whole = above.held == len(above.keys) and not above.below and above.shelf is shelf
        return is_whole and not above.uses and above.lost_at < 0

    def _extend(self, stretch: Stretch, key: BlockKey) -> Stretch:
        self._worths.extend(stretch.group)
        self._lru.extend(stretch)
        self._fifo.extend(stretch)
        self._worth.extend(stretch)
        stretch.keys.append(key)
        self._tree.of[key] = stretch
        return stretch

    def _renew(self, stretch: Stretch, now: float) -> None:
        """It is as recent as what extends it, but nobody asked for it."""
        stretch.group.count -= len(stretch.keys)
        group = Group(stretch.group.kind, self._tick, now)
        self._move(stretch, group)
        self._worths.enter(group)
        self._lru.use((stretch,))
        self._fifo.use((stretch,))
        self._worth.use((stretch,))
        self._tree.queue(stretch)
        self._offer(stretch)

    def _make_window(self, key: BlockKey, position: int) -> Stretch:
        """It was asked for before it was known to be of a window group."""
        stretch = self._tree.single_out(key)
        above = stretch.above
        self._tree.unlink(stretch)
        stretch.move_to(position)
        self._offer(stretch)
        if above is not None:
            self._offer(above)
        return stretch

    def remove(self, key: BlockKey) -> None:
        assert key not in self._pinned
        stretch = self._tree.of[key]
        if stretch.keys[stretch.held - 1] != key:
            stretch = self._tree.ending_with(key)
        stretch.lost_at = self._tick
        self._count_resident(stretch, -1)
        if not stretch.held and stretch.above is not None:
            self._offer_resident(stretch.above)
        elif stretch.held_below and stretch.held == len(stretch.keys) - 1:
            self._offer_resident(stretch)  # there is a gap behind it now
        self._tree.queue_again(stretch)

    def _count_resident(self, stretch: Stretch, change: int) -> None:
        shelf = stretch.shelf
        assert shelf is not None
        was_held = stretch.held > 0
        stretch.held += change
        if stretch.above is not None:
            stretch.above.held_below += (stretch.held > 0) - was_held
        self._tree.resident_count += change
        shelf.count += change
        if not shelf.count:  # so that tenants without blocks cost nothing
            del self._shelves[shelf.size_class][shelf.account, shelf.is_secondary]
            shelf.close()

    def make_primary(self, key: BlockKey) -> None:
        stretch = self._tree.of[key]
        shelf = stretch.shelf
        assert shelf is not None
        if shelf.is_secondary:
            stretch = self._tree.single_out(key)
            self._count_resident(stretch, -1)
            stretch.shelf = self._shelf(shelf.size_class, shelf.account, is_secondary=False)
            self._count_resident(stretch, 1)
            self._offer_resident(stretch)

    def _shelf(self, size_class: int, account: str, is_secondary: bool) -> Shelf:
        shelves = self._shelves.setdefault(size_class, {})
        shelf = shelves.get((account, is_secondary))
        if shelf is None:
            shelf = shelves[account, is_secondary] = Shelf(size_class, account, is_secondary, self._make_order, ByAge)
        return shelf

    def _is_of_one_tenant(self) -> bool:
        return len({account for shelves in self._shelves.values() for account, _ in shelves}) <= 1

    def _all_shelves(self) -> Iterator[Shelf]:
        return (shelf for shelves in self._shelves.values() for shelf in shelves.values())

    # -- who goes ----

    def pin(self, keys: Collection[BlockKey]) -> None:
        self._pinned.update(keys)

    def unpin(self, keys: Collection[BlockKey]) -> None:
        self._pinned.difference_update(keys)
        for key in [key for key in keys if key in self._parked] if self._parked else ():
            self._parked.discard(key)
            self._offer_resident(self._tree.of[key])

    def victim(self, size_class: int | None, may_go: Callable[[str], bool] | None = None) -> BlockKey | None:
        self._capacity = max(self._capacity, self._tree.resident_count)
        firsts = [(shelf, self._first_of(shelf)) for shelf in self._shelves_of(size_class, may_go)]
        found = [(shelf, stretch) for shelf, stretch in firsts if stretch is not None]
        if not found:
            return None
        best = found[0][1] if len(found) == 1 else min(found, key=_rank_of)[1]
        return best.keys[best.held - 1]

    def _shelves_of(self, size_class: int | None, may_go: Callable[[str], bool] | None) -> Iterator[Shelf]:
        for size in list(self._shelves) if size_class is None else [size_class]:
            for shelf in self._shelves.get(size, {}).values():
                if may_go is None or may_go(shelf.account):
                    yield shelf

    def _first_of(self, shelf: Shelf) -> Stretch | None:
        """The leaf that goes first. One with a pinned end comes back when it is unpinned."""
        while (first := shelf.first()) is not None:
            order, stretch = first
            key = stretch.keys[stretch.held - 1]
            if key not in self._pinned:
                return stretch
            self._parked.add(key)
            order.drop_first()
        return None

    def coldest(self, count: int) -> list[BlockKey]:
        found: list[BlockKey] = []
        streams = [order.in_order() for shelf in self._all_shelves() for order in (shelf.order, shelf.found)]
        queue: list[tuple[bool, Rank, Stretch, int]] = []  # (is primary, rank, stretch, index of its stream or -1)
        taken: set[Stretch] = set()
        left: dict[Stretch, int] = {}  # stretches below that are not in `found` yet

        def put(stretch: Stretch, source: int) -> None:
            assert stretch.shelf is not None
            rank = stretch.shelf.order.rank(stretch)
            heapq.heappush(queue, (not stretch.shelf.is_secondary, rank, stretch, source))

        def put_next_of(source: int) -> None:
            stretch = next(streams[source], None)
            if stretch is not None:
                put(stretch, source)

        for source in range(len(streams)):
            put_next_of(source)
        while queue and len(found) < count:
            _, _, stretch, source = heapq.heappop(queue)
            if source >= 0:
                put_next_of(source)
            if stretch in taken:
                continue
            taken.add(stretch)
            blocks = stretch.keys[stretch.held - 1 :: -1]
            pinned = next((index for index, key in enumerate(blocks) if key in self._pinned), None)
            found += blocks[:pinned]
            above = stretch.above
            if pinned is None and above is not None:
                left[above] = left.get(above, above.held_below) - 1
                if not left[above] and above.held and not above.is_window:
                    put(above, -1)
        return found[:count]

    # -- what is known of a block ----

    def last_touch(self, key: BlockKey) -> int:
        return self._tree.of[key].group.tick

    def used_at(self, key: BlockKey) -> float:
        return self._tree.of[key].group.used_at

    def uses(self, key: BlockKey) -> int:
        return self._tree.of[key].uses

    def parent_of(self, key: BlockKey) -> BlockKey | None:
        stretch = self._tree.of[key]
        offset = stretch.keys.index(key)
        if offset:
            return stretch.keys[offset - 1]
        return None if stretch.above is None or stretch.is_window else stretch.above.keys[-1]

    def by_heat(self) -> list[BlockKey]:
        stretches = [stretch for stretch in dict.fromkeys(self._tree.of.values()) if stretch.held]
        stretches.sort(key=lambda stretch: (-stretch.group.tick, stretch.position))
        return [key for stretch in stretches for key in stretch.keys[: stretch.held]]

    def reason(self, key: BlockKey) -> int:
        if self._guard.rule is not Rule.WORTH:
            return NOT_BY_WORTH
        stretch = self._tree.of[key]
        assert stretch.shelf is not None
        return reason_of(stretch.group.kind, stretch.group.age, is_secondary=stretch.shelf.is_secondary)

    def rule(self) -> RuleState:
        return RuleState(self._guard.rule, self._guard.switches, self._guard.hit_rates)

    def check_invariants(self) -> None:
        self._tree.check_invariants()
        self._worths.check_invariants()
        stretches = list(dict.fromkeys(self._tree.of.values()))
        assert sum(stretch.shadow_lru for stretch in stretches) == self._lru.count, "the shadow of LRU is miscounted"
        assert sum(stretch.shadow_fifo for stretch in stretches) == self._fifo.count, "that of S3-FIFO is miscounted"
        assert sum(stretch.shadow_worth for stretch in stretches) == self._worth.count, "that of worth is miscounted"
        shelves = list(self._all_shelves())
        held = {shelf: 0 for shelf in shelves}
        orders = [order for shelf in shelves for order in (shelf.order, shelf.found)]
        listed = {stretch for order in orders for stretch in order.in_order()}
        for stretch in stretches:
            if stretch.held:
                assert stretch.shelf is not None
                held[stretch.shelf] += stretch.held
                end = stretch.keys[stretch.held - 1]
                is_found = stretch in listed or end in self._parked
                assert is_found or not stretch.is_leaf, f"{end.hex()} is evictable but would never be found"
        groups: dict[Group, int] = {}
        for stretch in stretches:
            groups[stretch.group] = groups.get(stretch.group, 0) + len(stretch.keys)
        assert all(group.count == count for group, count in groups.items()), "the blocks of a group are miscounted"
        assert held == {shelf: shelf.count for shelf in shelves}, "the blocks of a shelf are miscounted"
        assert self._parked <= self._pinned, "a block is held back that is not pinned"
        in_shadow = set(self._worth.order.in_order())
        missing = [stretch for stretch in stretches if stretch.is_shadow_leaf and stretch not in in_shadow]
        assert not missing, "the shadow of worth has lost sight of a leaf"
