"""Chooses the blocks that a step stores, and their slots. Engine-neutral; no I/O except taking slots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field

from kvservice.connector.cache_groups import Grouping, Places, Table, entries_of
from kvservice.connector.plan import CopyEntry
from kvservice.connector.scheduler.ports import StoredBlock
from kvservice.connector.scheduler.request import EngineRequest
from kvservice.core.block.keys import span_route
from kvservice.core.block.window_groups import WINDOW_BIT
from kvservice.core.messages import Hints, SealItem
from kvservice.core.segment.refs import BlockRef
from kvservice.observe import tracing
from kvservice.units import AttachmentId, BlockHash, BlockKey, HandoffId

GiveBack = Callable[[Sequence[int]], None]  # unpins blocks of the engine
TakeSlots = Callable[[int, int], Sequence[BlockRef]]  # (count, group) -> at most `count` slots


@dataclass(slots=True)
class StorePart:
    """What one request has to store in a step. The parts of a step are stored together."""

    request: EngineRequest
    hashes: Sequence[BlockHash]  # the engine's
    end: int  # its positions before it are full
    table: Table
    wanted: list[tuple[int, int, Places]] = field(default_factory=list)  # (position, group, places) not in the pool
    positions: list[int] = field(default_factory=list)  # of group 0's blocks that found a slot
    done: int = 0  # everything before this position is stored, known or gone
    found: int = 0  # its blocks that found a slot


@dataclass(slots=True)
class PlannedStore:
    items: list[SealItem] = field(default_factory=list)
    entries: list[CopyEntry] = field(default_factory=list)
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
    handoffs: set[HandoffId]  # those that are not over before it has ended
    reports: Counter[str] = field(default_factory=Counter)
    give_back: GiveBack | None = None  # unpins the blocks in the engine's pins' place
    spans: Sequence[tracing.Span] = ()  # of its requests, from the plan until it is sent to be sealed
    is_void: bool = False  # what it copies may be wrong, so its slots are given back instead of sealed


def plan_store(
    grouping: Grouping, parts: Sequence[StorePart], known: Container[BlockKey], room: int, take_slots: TakeSlots
) -> PlannedStore:
    """Plan the blocks of all parts whose keys are not `known`, part by part and position by position, up to the first
    position that does not find all its slots. A block that a window has left is skipped. At least `room` blocks are
    looked for before the remaining parts are left for the next step. Fills in what the parts say of themselves."""
    planned, group_count = PlannedStore(), 1 + len(grouping.window_groups)
    counts = [0] * group_count
    coming: set[BlockKey] = set()  # in the parts so far
    looked_at = 0
    for part in parts:
        part.done = part.request.stored
        if sum(counts) < room:
            _want(grouping, part, known, coming)
            looked_at += 1
            for _, group, _ in part.wanted:
                counts[group] += 1
    slots = [list(take_slots(count, group))[::-1] if count else [] for group, count in enumerate(counts)]
    planned.put_off = sum(counts) - sum(map(len, slots))
    for part in parts[:looked_at]:
        if not _give(part, slots, planned):
            break
    planned.unused = [ref for left in slots for ref in left]
    return planned


def _want(grouping: Grouping, part: StorePart, known: Container[BlockKey], coming: set[BlockKey]) -> None:
    """Find what the part has to store. Blocks before the first of them are done, if no part before it brings them."""
    chains, is_done = part.request.chains, True
    for position in range(part.request.stored, part.end):
        for group, keys in enumerate(chains):
            key = keys[position]
            if key in known:
                continue
            if key in coming:
                is_done = False
                continue
            places = grouping.stored(part.table, group, position)
            if places is not None:
                part.wanted.append((position, group, places))
                coming.add(key)
                is_done = False
        if is_done:
            part.done = position + 1


def _give(part: StorePart, slots: Sequence[list[BlockRef]], planned: PlannedStore) -> bool:
    """Give the part its slots. Returns whether each of its blocks found one."""
    request = part.request
    stop = _first_without(part.wanted, slots) if planned.put_off else None
    for position, group, places in part.wanted:
        if stop is not None and position >= stop:
            break
        keys = request.window_keys[group - 1] if group else request.keys
        ref = slots[group].pop()
        planned.items.append(_seal_item(ref, keys, group, position, request.terms.hints))
        planned.entries += entries_of(places, ref, keys[position])
        part.found += 1
        if not group:
            part.positions.append(position)
    part.done = part.end if stop is None else stop
    return stop is None


def _first_without(wanted: Sequence[tuple[int, int, object]], slots: Sequence[Sequence[BlockRef]]) -> int | None:
    """The first position that does not get a slot for each of its blocks."""
    left = [len(one) for one in slots]
    for position, group, _ in wanted:
        if not left[group]:
            return position
        left[group] -= 1
    return None


def _seal_item(ref: BlockRef, keys: Sequence[BlockKey], group: int, position: int, hints: Hints) -> SealItem:
    route = span_route(keys, position)
    if group:
        return SealItem(ref, keys[position], None, WINDOW_BIT | position, route, hints)
    return SealItem(ref, keys[position], keys[position - 1] if position else None, position, route, hints)
