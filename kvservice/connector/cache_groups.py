"""Which of the engine's blocks belong to a position of a request, if the model has one KV cache group or several.

Engine-neutral and pure; used on the scheduler's thread. A *position* is a block of the pool, so it is one slot of each
group. Of the engine it holds one or several blocks, and as many of the engine's hashes as its `stride`; the last of
them names it. A *group* is what the pool stores together: group 0 has full
attention, every other group a window or a state (core.block.window_groups). The engine may have cut a group into
several KV cache groups of its own, each with an index: these are *engine groups*. A *table* is what the engine knows of
a request's blocks: with one group the list of block ids, with several a list for each engine group. NULL_BLOCK in a
table stands for a block that a window has left, and for a state that is not there.

A model of states alone has no full attention. Its group 0 has *signposts*: some zeros at every position, of no block
of the engine, by which a prefix is found there, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Protocol, TypeAlias

from kvservice.connector.plan import CopyEntry
from kvservice.core.block.window_groups import WindowGroup
from kvservice.core.messages import AcquireResult
from kvservice.core.segment.refs import BlockRef
from kvservice.units import BlockHash, BlockKey

NULL_BLOCK = 0  # the id that vLLM gives to its null block; it never holds a request's data
NOWHERE = -1  # in the table of one group: the engine has no such block any more. Never an id.
Table: TypeAlias = "Sequence[Any]"  # of block ids, or of lists of them
Places: TypeAlias = "list[tuple[int, int, int]]"  # (engine group, part, block id) of what goes into one slot


class Grouping(Protocol):
    @property
    def window_groups(self) -> tuple[WindowGroup, ...]: ...

    @property
    def stride(self) -> int:
        """The engine's hashes of a position. The engine's own hit may end behind any of them if there is one group, and
        only between positions if there are several."""
        ...

    def whole(self, positions: int) -> int:
        """How many of these leading positions a hit may have: with their last one a block of the engine ends."""
        ...

    def table(self, block_ids: Sequence[Sequence[int]] | None) -> Table:
        """The table of these lists, one for each engine group; without them an empty one."""
        ...

    def length(self, table: Table) -> int:
        """The number of positions in the table."""
        ...

    def named(self, hashes: Sequence[BlockHash], position: int) -> list[tuple[BlockHash, BlockHash | None]]:
        """(hash, hash of the block before it) of every block of a position that the engine's events name."""
        ...

    def needed_from(self, group: int, end: int) -> int:
        """The first position that a hit up to `end` needs; 0 for group 0."""
        ...

    def stored(self, table: Table, group: int, position: int) -> Places | None:
        """Everything that goes into the slot of this position. None if some of it is gone."""
        ...

    def loaded(self, table: Table, group: int, position: int, end: int) -> Places:
        """The parts of a slot that a hit up to `end` needs. Raises AssertionError if the engine has no block for some
        of them."""
        ...


@dataclass(frozen=True, slots=True)
class OneGroup:
    stride: int = 1  # blocks of the engine in a slot

    def whole(self, positions: int) -> int:
        return positions

    @property
    def window_groups(self) -> tuple[WindowGroup, ...]:
        return ()

    def table(self, block_ids: Sequence[Sequence[int]] | None) -> Table:
        return block_ids[0] if block_ids else []

    def length(self, table: Table) -> int:
        return len(table) // self.stride

    def named(self, hashes: Sequence[BlockHash], position: int) -> list[tuple[BlockHash, BlockHash | None]]:
        first = position * self.stride
        return [(hashes[i], hashes[i - 1] if i else None) for i in range(first, first + self.stride)]

    def needed_from(self, group: int, end: int) -> int:
        return 0

    def stored(self, table: Table, group: int, position: int) -> Places | None:
        first = position * self.stride
        blocks = table[first : first + self.stride]
        return None if NOWHERE in blocks else [(0, part, blocks[part]) for part in range(self.stride)]

    def loaded(self, table: Table, group: int, position: int, end: int) -> Places:
        first = position * self.stride
        return [(0, part, table[first + part]) for part in range(self.stride)]


@dataclass(frozen=True, slots=True)
class PagesOfBlocks:
    """One KV cache group whose blocks hold several slots each. A position is a slot with a hash of its own. Its part is
    its place in the engine's block."""

    pages: int  # slots of a block

    @property
    def stride(self) -> int:
        return 1

    @property
    def window_groups(self) -> tuple[WindowGroup, ...]:
        return ()

    def whole(self, positions: int) -> int:
        return positions - positions % self.pages

    def table(self, block_ids: Sequence[Sequence[int]] | None) -> Table:
        return block_ids[0] if block_ids else []

    def length(self, table: Table) -> int:
        return len(table) * self.pages

    def named(self, hashes: Sequence[BlockHash], position: int) -> list[tuple[BlockHash, BlockHash | None]]:
        return []  # the engine's events know nothing of pages

    def needed_from(self, group: int, end: int) -> int:
        return 0

    def stored(self, table: Table, group: int, position: int) -> Places | None:
        return self.loaded(table, group, position, position)

    def loaded(self, table: Table, group: int, position: int, end: int) -> Places:
        return [(0, position % self.pages, table[position // self.pages])]


@dataclass(frozen=True, slots=True)
class EngineGroup:
    """One KV cache group of the engine. `parts` of its blocks lie in one slot, because groups may have blocks of
    different sizes."""

    group: int  # the pool's group that it belongs to
    parts: int = 1


@dataclass(frozen=True, slots=True)
class SeveralGroups:
    engine_groups: tuple[EngineGroup, ...]  # by the engine's index
    window_groups: tuple[WindowGroup, ...]  # groups 1, 2, …
    block_tokens: int  # tokens of a position
    stride: int = 1
    signposts: int | None = None  # the engine group by which signposts are copied, behind those of the engine

    def whole(self, positions: int) -> int:
        return positions

    def table(self, block_ids: Sequence[Sequence[int]] | None) -> Table:
        return block_ids or [[] for _ in self.engine_groups]

    def length(self, table: Table) -> int:
        return min(len(ids) // one.parts for ids, one in zip(table, self.engine_groups, strict=True))

    def named(self, hashes: Sequence[BlockHash], position: int) -> list[tuple[BlockHash, BlockHash | None]]:
        """One block of all its tokens, as vLLM names blocks that are larger than what it hashes."""
        last = (position + 1) * self.stride - 1
        return [(hashes[last], hashes[last - self.stride] if position else None)]

    def needed_from(self, group: int, end: int) -> int:
        return self.window_groups[group - 1].window.first_block(end, self.block_tokens) if group else 0

    def stored(self, table: Table, group: int, position: int) -> Places | None:
        if not group and self.signposts is not None:
            return [(self.signposts, 0, NULL_BLOCK)]
        found = self._blocks(table, group, position)
        return None if any(block_id == NULL_BLOCK for _, _, block_id in found) else found

    def loaded(self, table: Table, group: int, position: int, end: int) -> Places:
        found = self._blocks(table, group, position)
        if not group:
            assert all(block_id != NULL_BLOCK for _, _, block_id in found), "a block of the prefix is missing"
            return found
        first_token = self.window_groups[group - 1].window.first_token(end * self.block_tokens)
        needed: Places = []
        for index, part, block_id in found:
            tokens = self.block_tokens // self.engine_groups[index].parts
            if position * self.block_tokens + (part + 1) * tokens > first_token:
                assert block_id != NULL_BLOCK, "the engine has no block for the window of this hit"
                needed.append((index, part, block_id))
        return needed

    @property
    def has_states(self) -> bool:
        return any(group.window.is_state for group in self.window_groups)

    def only_states_at(self, table: Table, positions: Set[int]) -> Table:
        """The table with, of states, only the blocks at these positions. The engine overwrites, moves and frees the
        others as it goes on."""
        return tuple(
            [block_id if position in positions else NULL_BLOCK for position, block_id in enumerate(ids)]
            if one.group and self.window_groups[one.group - 1].window.is_state
            else ids
            for ids, one in zip(table, self.engine_groups, strict=True)
        )

    def _blocks(self, table: Table, group: int, position: int) -> Places:
        return [
            (index, part, table[index][position * one.parts + part])
            for index, one in enumerate(self.engine_groups)
            if one.group == group
            for part in range(one.parts)
        ]


def state_positions(begin: int, end: int, block_tokens: int, offered: Iterable[int] = ()) -> set[int]:
    """Where an engine's blocks hold states when a step has computed a request's tokens from `begin` to `end`: where the
    step began and where it ended, if that is between two positions. The engine has copied the former to go on from it.
    `offered` are further numbers of tokens whose states it keeps."""
    return {tokens // block_tokens - 1 for tokens in (begin, end, *offered) if tokens and tokens % block_tokens == 0}


def entries_of(places: Places, ref: BlockRef, key: BlockKey) -> list[CopyEntry]:
    return [CopyEntry(block_id, ref, key, index, part) for index, part, block_id in places]


def load_entries(
    grouping: Grouping,
    chains: Sequence[Sequence[BlockKey]],
    result: AcquireResult,
    table: Table,
    local: int,
    skip: int = 0,
) -> list[CopyEntry]:
    """All copies that fill the engine's blocks from number `local` to the end of the hit. `chains` has the keys of each
    group; the promise begins at position `skip`. Raises AssertionError if promise and table do not fit."""
    end, stride = skip + len(result.blocks), grouping.stride
    entries: list[CopyEntry] = []
    for group, refs in enumerate((result.blocks, *result.window_blocks)):
        start = end - len(refs)
        needed = max(grouping.needed_from(group, end), skip)
        assert start == needed, "a window is promised that this hit does not have"
        for position in range(max(start, local // stride), end):
            places = grouping.loaded(table, group, position, end)
            own = local - position * stride  # parts of it that the engine has, and may be computing on
            places = [place for place in places if place[1] >= own]
            entries += entries_of(places, refs[position - start], chains[group][position])
    return entries


def is_whole(grouping: Grouping, result: AcquireResult) -> bool:
    """Whether every window group has what the promised prefix needs."""
    end = len(result.blocks)
    return not end or [len(refs) for refs in result.window_blocks] == [
        end - grouping.needed_from(group, end) for group in range(1, len(grouping.window_groups) + 1)
    ]


def usable(grouping: Grouping, result: AcquireResult, suspects: Set[BlockRef], counters: Counter[str]) -> AcquireResult:
    """Cut before the first block whose bytes were found wrong: it would only fail again. With several groups
    another end has other windows, so nothing is left."""
    suspect = (i for i, ref in enumerate(result.blocks if suspects else ()) if ref in suspects)
    index = next(suspect, None)
    if not grouping.window_groups:
        if index is None:
            return result
        counters["promises_cut_at_suspect"] += 1
        return replace(result, blocks=result.blocks[:index])
    sound = index is None and suspects.isdisjoint(chain.from_iterable(result.window_blocks))
    if sound and is_whole(grouping, result):
        return result
    counters["promises_dropped"] += 1
    return replace(result, blocks=(), window_blocks=())
