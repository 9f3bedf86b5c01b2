"""Lists slots for people, a page at a time: what is in them, whose it is, and how it is used. And says what became of
blocks. Pure.

A page looks at a bounded number of slots, in their order in the segment, so that no question keeps the shard from its
work. The next page starts where this one ended. Blocks that come or go between two pages may be missed or seen twice.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from kvservice.core.block.window_groups import WINDOW_BIT
from kvservice.core.explain.records import HistoryEntry, name_engine
from kvservice.core.messages import ListedSlot
from kvservice.core.store.blocks import NO_KEY, BlockStore
from kvservice.core.store.reasons import describe_reason
from kvservice.core.store.slots import RESERVED, Slot, SlotState
from kvservice.units import BlockKey, SlotIndex

PAGE_SLOTS_MAX = 512  # listed in one page: half a millisecond, and 60 KiB on the wire
SCANNED_MAX = 4096  # slots looked at for one page, however few match: about 2 ms
assert PAGE_SLOTS_MAX <= SCANNED_MAX


@dataclass(frozen=True, slots=True)
class SlotFilter:
    """Which slots are listed. An empty field lets every slot through."""

    states: frozenset[str] = frozenset()  # names of ShardState.slot_usage; empty = all but free ones
    model: str = ""  # the whole name
    account: str | None = None  # the tenant; None = every tenant's
    key_prefix: str = ""  # the beginning of the block's key, in hex


@dataclass(frozen=True, slots=True)
class SlotPage:
    slots: tuple[ListedSlot, ...]
    next_slot: SlotIndex | None  # where the next page starts; None = this was the last


def list_slots(
    store: BlockStore, sealing: Collection[SlotIndex], wanted: SlotFilter, start: SlotIndex, now: float
) -> SlotPage:
    """The slots from `start` on that match. `sealing` are slots whose digests are being computed."""
    found: list[ListedSlot] = []
    for scanned, slot in enumerate(store.table.slots_from(start)):
        if scanned >= SCANNED_MAX or len(found) >= PAGE_SLOTS_MAX:
            return SlotPage(tuple(found), slot.index)
        listed = _listed(store, slot, sealing, wanted, now)
        if listed is not None:
            found.append(listed)
    return SlotPage(tuple(found), None)


def _listed(
    store: BlockStore, slot: Slot, sealing: Collection[SlotIndex], wanted: SlotFilter, now: float
) -> ListedSlot | None:
    """The slot as it is shown; None when it does not match."""
    state = slot.state.value
    if slot.state is SlotState.WRITING and slot.owner != NO_KEY and slot.index not in sealing:
        state = RESERVED
    if state not in wanted.states if wanted.states else slot.state is SlotState.FREE:
        return None
    if wanted.account is not None and slot.account != wanted.account:
        return None
    block = slot.block
    if block is None:
        if wanted.model or wanted.key_prefix:
            return None
        return ListedSlot(slot.index, state, slot.payload_bytes, slot.account)
    if (wanted.model and block.origin.model != wanted.model) or not block.key.hex().startswith(wanted.key_prefix):
        return None
    return ListedSlot(
        slot.index,
        state,
        slot.payload_bytes,
        slot.account,
        block.key,
        block.origin.model,
        block.position & ~WINDOW_BIT,
        block.is_secondary,
        max(now - block.sealed_at, 0.0),
        store.idle_seconds(block, now),
        store.policy.uses(block.key),
    )


def find_history(
    store: BlockStore, sealing: Mapping[BlockKey, bytes], keys: Sequence[BlockKey], now: float, as_of: float
) -> tuple[HistoryEntry, ...]:
    """Everything that is known of these keys, for the moment `as_of`. Others are left out, and one that was
    evicted and stored again has two entries. `sealing` names the engines that store blocks just now. Slow."""
    evictions = store.evictions.find(keys, now, as_of)
    found: list[HistoryEntry] = []
    for index, key in enumerate(keys):
        block, eviction = store.get(key), evictions.get(key)
        if block is not None:
            found.append(HistoryEntry(index, "held", block.sealed_at, engine=name_engine(block.origin.stored_by)))
        elif key in sealing:
            found.append(HistoryEntry(index, "sealing", now, engine=name_engine(sealing[key])))
        if eviction is not None:
            found.append(
                HistoryEntry(
                    index,
                    "gone",
                    eviction.at,
                    eviction.cause.value,
                    eviction.caused_by,
                    held_seconds=eviction.held_seconds,
                    idle_seconds=eviction.idle_seconds,
                    reason=describe_reason(eviction.reason),
                )
            )
    return tuple(found)
