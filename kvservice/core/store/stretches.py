"""What the worth policy remembers of blocks, resident or gone: a tree of stretches.

A stretch is a run of consecutive blocks of one chain that have always been asked for together. Where two prompts part,
a stretch is cut in two. So a prompt of a hundred blocks costs a few steps, and what is known about a block is kept once
for all blocks like it.

Of each stretch the leading `held` blocks are resident, because a prefix outlives what extends it. Blocks that are gone
stay in the tree until they are forgotten, the longest unused first. The shadow caches of the guard keep their
counts here as well. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from kvservice.core.block.window_groups import WINDOW_BIT
from kvservice.units import BlockKey

GARBAGE_MIN = 256  # entries of an order or a line before outdated ones are swept out


class Group:
    """The blocks of one kind that one prompt used. They grow older together."""

    __slots__ = ("age", "count", "kind", "tick", "tips", "used_at")

    def __init__(self, kind: int, tick: int, used_at: float) -> None:
        self.kind = kind
        self.tick = tick
        self.used_at = used_at  # in seconds
        self.age = 0  # index into AGE_STARTS
        self.count = 0  # its blocks that are remembered and were not used since
        self.tips: list[Stretch] = []  # those that could be evicted from, now or before


class Stretch:
    """Consecutive blocks of one chain that share their history. Only the tree and the policy change it."""

    __slots__ = (
        "above",  # the stretch that ends right before this one; None: it begins a chain, or that is not known
        "below",  # how many stretches name this one as `above`
        "fifo_entered",  # how often it entered a queue of the shadow of S3-FIFO
        "fifo_gone_at",  # blocks that had gone from the small queue there when it went last; -1: it never did
        "fifo_uses",  # in its queue there, as far as they count
        "group",  # the blocks it was last used with
        "held",  # its leading blocks that are resident
        "held_below",  # stretches below that hold a block: while there is one, this stretch gives none up
        "is_new",  # whether it is, or was last, in the small queue of the shadow of S3-FIFO
        "is_queued",  # whether it waits to be forgotten
        "is_tip",  # whether its group knows that it is the end of something
        "keys",
        "lost_at",  # tick at which it lost a block; -1: it never did
        "number",  # in the order in which stretches were made; breaks ties
        "pause",  # step of the time between its last two uses (core.store.kinds); 0: it was used once
        "position",  # of its first block
        "precedence",  # of stretches that were used at the same time, the one with the smallest goes first
        "shadow_fifo",  # its leading blocks that the shadow of S3-FIFO holds
        "shadow_lru",  # its leading blocks that the shadow of LRU holds
        "shadow_worth",  # its leading blocks that the shadow of worth holds
        "shadow_worth_below",  # stretches below of which the shadow of worth holds a block
        "shelf",  # where it is offered for eviction; None: it never held a block
        "turn",  # how often its chain had been extended when it was new
        "uses",  # how often it was used again
    )

    def __init__(self, keys: list[BlockKey], position: int, number: int, group: Group) -> None:
        self.keys = keys
        self.move_to(position)
        self.number = number
        self.group = group
        self.above: Stretch | None = None
        self.shelf: Shelf | None = None
        self.below = self.held = self.held_below = 0
        self.pause = self.turn = self.uses = 0
        self.shadow_fifo = self.shadow_lru = self.shadow_worth = self.shadow_worth_below = 0
        self.fifo_entered = self.fifo_uses = 0
        self.fifo_gone_at = -1
        self.lost_at = -1
        self.is_tip = self.is_new = self.is_queued = False

    def may_join(self, below: Stretch) -> bool:
        """Whether the stretch below it has the same history, and nothing else hangs here."""
        is_like = self.group is below.group and self.uses == below.uses and self.pause == below.pause
        is_alike_here = self.shelf is below.shelf and self.lost_at == below.lost_at and self.turn == below.turn
        is_alike_there = self.is_new == below.is_new
        is_prefix = self.held == len(self.keys) or not below.held
        return is_like and is_alike_here and is_alike_there and is_prefix and below.above is self and self.below == 1

    def move_to(self, position: int) -> None:
        """The deepest goes first. Of a window group's blocks, the earlier ones serve only shorter hits, so they go
        first, and before all others."""
        self.position = position
        self.precedence = position - 2 * WINDOW_BIT if position >= WINDOW_BIT else -position

    @property
    def end(self) -> int:
        """The position behind its last block."""
        return self.position + len(self.keys)

    @property
    def is_window(self) -> bool:
        """Blocks of window groups are no links of a chain."""
        return self.position >= WINDOW_BIT

    @property
    def is_leaf(self) -> bool:
        """Whether its last resident block may be evicted, as far as other blocks go. Copies in front of a gap may: the
        blocks behind it are of use to nodes that have what is between. Of primary blocks those behind the gap go
        first, for nobody can reach them."""
        if not self.held_below or self.position >= WINDOW_BIT:
            return self.held > 0
        return 0 < self.held < len(self.keys) and self.shelf is not None and self.shelf.is_secondary

    @property
    def is_shadow_leaf(self) -> bool:
        return self.shadow_worth > 0 and (not self.shadow_worth_below or self.position >= WINDOW_BIT)


Rank = tuple[float, int, int, int, int]  # (worth, kind and age, tick, precedence, number): the smallest goes first
IsLeaf = Callable[[Stretch], bool]


class LeafOrder(Protocol):
    def put(self, stretch: Stretch) -> None:
        """It is a leaf now, or its group has changed."""
        ...

    def put_older(self, stretch: Stretch) -> None:
        """Its group has just reached its next age."""
        ...

    def first(self) -> Stretch | None:
        """The leaf that goes first. It stays."""
        ...

    def drop_first(self) -> None:
        """Leave the first leaf out until it is put in again."""
        ...

    def rank(self, stretch: Stretch) -> Rank: ...

    def in_order(self) -> Iterator[Stretch]:
        """All leaves as they would go if none made another one a leaf. Changes nothing."""
        ...


class Shelf:
    """The resident blocks of one size, account and kind of copy, with the order in which its leaves go."""

    __slots__ = ("account", "count", "found", "is_secondary", "order", "size_class")

    def __init__(
        self,
        size_class: int,
        account: str,
        is_secondary: bool,
        make_order: Callable[[IsLeaf], LeafOrder],
        make_found: Callable[[IsLeaf], LeafOrder],
    ) -> None:
        self.size_class = size_class
        self.account = account
        self.is_secondary = is_secondary
        self.count = 0  # blocks
        self.order = make_order(self.has_leaf)
        # Blocks that an earlier boot left, until somebody asks for them. They may be all there are, and lie one by one:
        # sorting them anew whenever they grow older or the rule changes would hold everybody up.
        self.found = make_found(self.has_leaf)

    def has_leaf(self, stretch: Stretch) -> bool:
        return stretch.shelf is self and stretch.is_leaf

    def first(self) -> tuple[LeafOrder, Stretch] | None:
        """The leaf that goes first, and the order that it lies in."""
        found, ordered = self.found.first(), self.order.first()
        if found is not None and (ordered is None or self.order.rank(found) < self.order.rank(ordered)):
            return self.found, found
        return None if ordered is None else (self.order, ordered)

    def sort(self, make_order: Callable[[IsLeaf], LeafOrder]) -> None:
        """Put the leaves into another order."""
        leaves = list(self.order.in_order())
        self.order = make_order(self.has_leaf)
        for stretch in leaves:
            self.order.put(stretch)

    def close(self) -> None:
        """Let go of the orders; nothing is asked of the shelf any more. Each holds a method of the shelf, and a cycle
        is freed by the garbage collector only, which a busy shard lets look at what is new and at nothing else."""
        del self.order, self.found


class UseLine:
    """Stretches in the order of their last use. Entries that are outdated are dropped when they come to the front, or
    when there are more of them than others."""

    __slots__ = ("_entries", "_sweep_at")

    def __init__(self) -> None:
        self._entries: deque[tuple[int, Stretch]] = deque()  # (tick of the use, stretch)
        self._sweep_at = GARBAGE_MIN

    def __len__(self) -> int:
        return len(self._entries)

    def used(self, stretch: Stretch) -> None:
        """It was used later than all others."""
        entries = self._entries
        entries.append((stretch.group.tick, stretch))
        if len(entries) > self._sweep_at:
            self._entries = deque(entry for entry in entries if entry[0] == entry[1].group.tick and entry[1].keys)
            self._sweep_at = max(2 * len(self._entries), GARBAGE_MIN)

    def put_first(self, stretch: Stretch) -> None:
        self._entries.appendleft((stretch.group.tick, stretch))

    def first(self) -> Stretch | None:
        """The longest unused one."""
        while self._entries:
            tick, stretch = self._entries[0]
            if tick == stretch.group.tick:
                return stretch
            self._entries.popleft()
        return None

    def drop_first(self) -> None:
        self._entries.popleft()


class StretchTree:
    """Finds stretches by key, cuts them, links them, and forgets what is gone. `on_cut` hears of each cut, with the
    upper and the lower part."""

    def __init__(self, on_cut: Callable[[Stretch, Stretch], None]) -> None:
        self._on_cut = on_cut
        self.of: dict[BlockKey, Stretch] = {}  # every remembered block, resident or gone
        self.resident_count = 0
        self._made = 0
        self._oldest = UseLine()  # what to forget first

    def make(self, keys: list[BlockKey], position: int, above: Stretch | None, group: Group) -> Stretch:
        """A stretch of blocks that were not known."""
        self._made += 1
        made = Stretch(keys, position, self._made, group)
        self.of.update(dict.fromkeys(keys, made))
        group.count += len(keys)
        self.link(made, above)
        return made

    def link(self, stretch: Stretch, above: Stretch | None) -> None:
        """Learn what a stretch extends. Only if the positions follow: so no circle can be closed, whatever is claimed.
        A circle would never be evicted."""
        if above is None or stretch.above is not None or stretch.is_window or above.end != stretch.position:
            return
        stretch.above = above
        above.below += 1
        above.held_below += stretch.held > 0
        above.shadow_worth_below += stretch.shadow_worth > 0

    def unlink(self, stretch: Stretch) -> None:
        above = stretch.above
        if above is not None:
            stretch.above = None
            above.below -= 1
            above.held_below -= stretch.held > 0
            above.shadow_worth_below -= stretch.shadow_worth > 0

    def cut(self, stretch: Stretch, offset: int) -> Stretch:
        """Cut a stretch before its block number `offset`. Returns the upper part, which is a new stretch: what hangs
        below names the lower one. O(length of the upper part), which a prompt that parts here has been asked for."""
        self._made += 1
        keys = stretch.keys[:offset]
        upper = Stretch(keys, stretch.position, self._made, stretch.group)
        self.of.update(dict.fromkeys(keys, upper))
        for name in ("above", "fifo_gone_at", "fifo_uses", "is_new", "lost_at", "pause", "shelf", "turn", "uses"):
            setattr(upper, name, getattr(stretch, name))
        for name in ("held", "shadow_fifo", "shadow_lru", "shadow_worth"):
            count = getattr(stretch, name)
            setattr(upper, name, min(count, offset))
            setattr(stretch, name, max(count - offset, 0))
        upper.below = 1
        upper.held_below = int(stretch.held > 0)
        upper.shadow_worth_below = int(stretch.shadow_worth > 0)
        stretch.above = upper
        stretch.keys = stretch.keys[offset:]
        stretch.move_to(stretch.position + offset)
        self.queue_again(upper)
        self._on_cut(upper, stretch)
        return upper

    def join(self, run: Sequence[Stretch]) -> Stretch:
        """Make stretches that follow each other one again. It is the last of them, on which others may hang."""
        joined, first = run[-1], run[0]
        keys = [key for stretch in run for key in stretch.keys]
        joined.above = first.above
        joined.move_to(first.position)
        for name in ("held", "shadow_fifo", "shadow_lru", "shadow_worth"):
            setattr(joined, name, sum(getattr(stretch, name) for stretch in run))
        for stretch in run[:-1]:
            stretch.keys = []
            stretch.above = None
            stretch.held = stretch.shadow_fifo = stretch.shadow_lru = stretch.shadow_worth = 0
        joined.keys = keys
        self.of.update(dict.fromkeys(keys, joined))
        return joined

    def walk(
        self, chain: Sequence[BlockKey], group: Group, position: int = 0, above: Stretch | None = None
    ) -> list[Stretch]:
        """The stretches that these blocks are, in order, cut to fit. Unknown blocks become stretches of `group`.

        The first block is at `position`, and right below `above`, as far as that is known.
        """
        keys = list(chain)
        if len(set(keys)) < len(keys):  # nothing keeps a caller from naming a block twice, but few do
            keys = list(dict.fromkeys(keys))
        found: list[Stretch] = []
        start = 0
        while start < len(keys):
            stretch = self.of.get(keys[start])
            if stretch is None:
                end = start + 1
                while end < len(keys) and keys[end] not in self.of:
                    end += 1
                first = position + start if above is None or above.is_window else above.end
                stretch = self.make(keys[start:end], first, above, group)
            else:
                stretch = self._fit(stretch, keys, start)
                self.link(stretch, above)
            found.append(stretch)
            above = stretch
            start += len(stretch.keys)
        return found

    def _fit(self, stretch: Stretch, keys: list[BlockKey], start: int) -> Stretch:
        """The part of a stretch that is equal to `keys` from `start` on, as a stretch of its own."""
        own = stretch.keys
        if own[0] != keys[start]:
            self.cut(stretch, own.index(keys[start]))
            own = stretch.keys
        if own == keys[start : start + len(own)]:
            return stretch
        both = zip(own, keys[start:], strict=False)
        equal = next((count for count, (one, other) in enumerate(both) if one != other), len(keys) - start)
        return self.cut(stretch, equal)

    def ending_with(self, key: BlockKey) -> Stretch:
        """The stretch with this remembered block, cut so that the block is its last."""
        stretch = self.of[key]
        if stretch.keys[-1] == key:
            return stretch
        return self.cut(stretch, stretch.keys.index(key) + 1)

    def single_out(self, key: BlockKey) -> Stretch:
        """A stretch of this remembered block alone."""
        stretch = self.ending_with(key)
        if len(stretch.keys) > 1:
            self.cut(stretch, len(stretch.keys) - 1)
        return stretch

    # -- forgetting ----

    def queue(self, stretch: Stretch) -> None:
        """It was used now, so everything else is forgotten before it."""
        stretch.is_queued = True
        self._oldest.used(stretch)

    def queue_again(self, stretch: Stretch) -> None:
        """Something of an old stretch may be forgotten that could not before."""
        if not stretch.is_queued:
            stretch.is_queued = True
            self._oldest.put_first(stretch)

    def to_forget(self, limit: int, before: int) -> Iterator[Stretch]:
        """Stretches of which what is gone is to be forgotten, until no more than `limit` blocks are gone. None of them
        was used at the tick `before` or later."""
        while len(self.of) - self.resident_count > limit:
            stretch = self._oldest.first()
            if stretch is None or stretch.group.tick >= before:
                return
            self._oldest.drop_first()
            stretch.is_queued = False
            if not stretch.below and stretch.held < len(stretch.keys):
                yield stretch

    def forget(self, stretch: Stretch) -> None:
        """Forget the blocks of a stretch that are gone. Nothing hangs below it."""
        for key in stretch.keys[stretch.held :]:
            del self.of[key]
        stretch.group.count -= len(stretch.keys) - stretch.held
        del stretch.keys[stretch.held :]
        above = stretch.above
        if not stretch.keys:
            self.unlink(stretch)
            if above is not None:
                self.queue_again(above)

    def check_invariants(self) -> None:
        stretches = dict.fromkeys(self.of.values())
        below: dict[Stretch, list[Stretch]] = {}
        for stretch in stretches:
            assert all(self.of[key] is stretch for key in stretch.keys), "a block is in two stretches"
            assert 0 <= stretch.held <= len(stretch.keys), "more blocks are resident than there are"
            if stretch.above is not None:
                assert stretch.above in stretches, "a stretch hangs on a forgotten one"
                below.setdefault(stretch.above, []).append(stretch)
        assert sum(len(stretch.keys) for stretch in stretches) == len(self.of), "a stretch has a block that is unknown"
        assert sum(stretch.held for stretch in stretches) == self.resident_count, "resident blocks are miscounted"
        for stretch in stretches:
            hanging = below.get(stretch, [])
            assert stretch.below == len(hanging), "what hangs below a stretch is miscounted"
            assert stretch.held_below == sum(one.held > 0 for one in hanging), "resident stretches are miscounted"
            in_shadow = sum(one.shadow_worth > 0 for one in hanging)
            assert stretch.shadow_worth_below == in_shadow, "stretches in a shadow are miscounted"
