"""Chooses the blocks of a request that are stored next, and their slots. Engine-neutral; no I/O except taking slots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field

from kvservice.connector.cache_groups import Grouping, Table, entries_of
from kvservice.connector.plan import CopyEntry
from kvservice.connector.scheduler.ports import StoredBlock
from kvservice.core.block.keys import span_route
from kvservice.core.block.window_groups import WINDOW_BIT
from kvservice.core.messages import SealItem
from kvservice.core.segment.refs import BlockRef
from kvservice.observe import tracing
from kvservice.units import AttachmentId, BlockKey, HandoffId

GiveBack = Callable[[Sequence[int]], None]  # unpins blocks of the engine
TakeSlots = Callable[[int, int], Sequence[BlockRef]]  # (count, group) -> at most `count` slots


@dataclass(slots=True)
class PlannedStore:
    items: list[SealItem] = field(default_factory=list)
    entries: list[CopyEntry] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)  # of group 0's blocks among them
    done: int = 0  # everything before this position is stored, known or gone
    put_off: int = 0  # blocks that found no slot
    unused: list[BlockRef] = field(default_factory=list)  # slots to give back


@dataclass(slots=True)
class OpenStore:
    """A store that is being copied. It is sealed once every worker has reported."""

    attachment: AttachmentId
    items: list[SealItem]
    blocks: list[StoredBlock]
    block_ids: list[int]
    planned_at: float
    handoff: HandoffId | None
    reports: Counter[str] = field(default_factory=Counter)
    give_back: GiveBack | None = None  # unpins the blocks in the engine's pins' place
    span: tracing.Span = field(default_factory=tracing.Span)  # from the plan until it is sent to be sealed
    is_void: bool = False  # the weights changed meanwhile, so its slots are given back instead of sealed


def plan_store(
    grouping: Grouping,
    chains: Sequence[Sequence[BlockKey]],
    table: Table,
    begin: int,
    end: int,
    known: Container[BlockKey],
    take_slots: TakeSlots,
) -> PlannedStore:
    """Plan the blocks of positions [begin, end) whose keys are not `known`, position by position, up to the first that
    does not find all its slots. A block that a window has left is skipped. `chains` has the keys of each group, group 0
    first."""
    planned = PlannedStore(done=begin)
    wanted: list[tuple[int, int, list[tuple[int, int, int]]]] = []  # (position, group, places)
    for position in range(begin, end):
        for group, keys in enumerate(chains):
            if keys[position] not in known:
                places = grouping.stored(table, group, position)
                if places is not None:
                    wanted.append((position, group, places))
        if not wanted:
            planned.done = position + 1
    if not wanted:
        return planned
    slots: list[list[BlockRef]] = []
    for group in range(len(chains)):
        count = sum(1 for _, of, _ in wanted if of == group)
        taken = list(take_slots(count, group)) if count else []
        planned.put_off += count - len(taken)
        slots.append(taken[::-1])
    stop = _first_without(wanted, slots)
    for position, group, places in wanted:
        if position >= stop:
            break
        ref, key = slots[group].pop(), chains[group][position]
        planned.items.append(_seal_item(ref, chains[group], group, position))
        planned.entries += entries_of(places, ref, key)
        if not group:
            planned.positions.append(position)
        planned.done = position + 1
    planned.unused = [ref for left in slots for ref in left]
    return planned


def _first_without(wanted: Sequence[tuple[int, int, object]], slots: Sequence[Sequence[BlockRef]]) -> int:
    """The first position that does not get a slot for each of its blocks; the position behind all of them if there is
    none."""
    left = [len(one) for one in slots]
    for position, group, _ in wanted:
        if not left[group]:
            return position
        left[group] -= 1
    return wanted[-1][0] + 1


def _seal_item(ref: BlockRef, keys: Sequence[BlockKey], group: int, position: int) -> SealItem:
    route = span_route(keys, position)
    if group:
        return SealItem(ref, keys[position], None, WINDOW_BIT | position, route)
    return SealItem(ref, keys[position], keys[position - 1] if position else None, position, route)
