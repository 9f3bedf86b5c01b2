"""Slot table: the state, generation and owner of every slot, its block, and which slab belongs to which payload size.

Pure bookkeeping. It does not decide why a slot is taken or given back (core.store.blocks does) and touches no memory.
`check_invariants` checks conservation, and the shard runs it in production: over the assigned slabs,
free + writing + sealed + leased + quarantined == capacity, and the sets are disjoint.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain, islice

from kvservice.core.block.tenants import NOBODY, Accounts
from kvservice.core.segment.geometry import Geometry, index_in_slab, slab_of, slot_index
from kvservice.core.segment.refs import PackedRefs
from kvservice.core.store.pins import loops_for
from kvservice.core.transitions import InvalidTransition
from kvservice.units import BlockKey, Generation, SlotIndex, SpanRoute


class SlotState(Enum):
    FREE = "free"
    WRITING = "writing"  # reserved for one owner, who may write it at any time
    SEALED = "sealed"  # holds a verified block that no lease covers
    LEASED = "leased"  # holds a verified block that at least one lease covers
    QUARANTINED = "quarantined"  # somebody may still write it, or its bytes failed verification

    __hash__ = object.__hash__  # members are unique; Enum's own hash is slow, and every change of a slot looks up two


# What people are shown: the states, and apart from `writing` the slots that engines hold for their next stores.
RESERVED = "reserved"
SHOWN_STATES = ("free", RESERVED, "writing", "sealed", "leased", "quarantined")

_FREE, _WRITING, _SEALED, _LEASED = SlotState.FREE, SlotState.WRITING, SlotState.SEALED, SlotState.LEASED
_READABLE = frozenset((_SEALED, _LEASED))


class SlotEvent(Enum):
    RESERVE = "reserve"
    SEAL = "seal"
    ABORT = "abort"
    PIN = "pin"
    UNPIN = "unpin"  # the last lease ended
    EVICT = "evict"
    QUARANTINE = "quarantine"
    END_QUARANTINE = "end_quarantine"  # nothing can write the slot any more
    ADOPT = "adopt"  # a sealed block found in the segment after a restart
    ADOPT_WRITING = "adopt_writing"  # a half-written block found after a restart: its writer may be alive

    __hash__ = object.__hash__


TRANSITIONS: dict[tuple[SlotState, SlotEvent], SlotState] = {
    (SlotState.FREE, SlotEvent.RESERVE): SlotState.WRITING,
    (SlotState.FREE, SlotEvent.ADOPT): SlotState.SEALED,
    (SlotState.FREE, SlotEvent.ADOPT_WRITING): SlotState.QUARANTINED,
    (SlotState.WRITING, SlotEvent.SEAL): SlotState.SEALED,
    (SlotState.WRITING, SlotEvent.ABORT): SlotState.FREE,
    (SlotState.WRITING, SlotEvent.QUARANTINE): SlotState.QUARANTINED,
    (SlotState.SEALED, SlotEvent.PIN): SlotState.LEASED,
    (SlotState.SEALED, SlotEvent.EVICT): SlotState.FREE,
    (SlotState.SEALED, SlotEvent.QUARANTINE): SlotState.QUARANTINED,
    (SlotState.LEASED, SlotEvent.PIN): SlotState.LEASED,
    (SlotState.LEASED, SlotEvent.UNPIN): SlotState.SEALED,
    (SlotState.QUARANTINED, SlotEvent.END_QUARANTINE): SlotState.FREE,
}
# `pin` and `unpin` take whole chains, so core.store.pins makes these moves itself, in one pass.
assert TRANSITIONS[_SEALED, SlotEvent.PIN] is TRANSITIONS[_LEASED, SlotEvent.PIN] is _LEASED
assert TRANSITIONS[_LEASED, SlotEvent.UNPIN] is _SEALED


@dataclass(slots=True, eq=False)
class Slot:
    """One slot. Mutable: it is the table's own record, and inside the core it stands for itself; engines and peers get
    its index."""

    index: SlotIndex
    payload_bytes: int
    generation: Generation  # odd exactly while WRITING or QUARANTINED out of WRITING
    state: SlotState = SlotState.FREE
    pins: int = 0  # leases and operations that cover it; > 0 exactly when LEASED
    owner: bytes = b""  # engine id (or b"" for the shard itself) while WRITING or QUARANTINED
    account: str = NOBODY  # the tenant that is charged for it, unless FREE
    reserved_at: float = 0.0  # while WRITING: when it was reserved, on the shard's clock
    block: Block | None = field(default=None, repr=False)  # while SEALED or LEASED; None when it was given up since


loops = loops_for(Slot, _SEALED, _LEASED)


def refs_of(slots: Iterable[Slot]) -> PackedRefs:
    """What an engine is told of these slots."""
    return PackedRefs(loops.refs(slots))


@dataclass(frozen=True, slots=True)
class BlockOrigin:
    """Whose blocks these are. All blocks of one store share it."""

    stored_by: bytes = b""  # id of the engine that stored them here; b"": fetched, or found after a restart
    model: str = ""  # of the engine that stored them, or that they were fetched for; "": not known
    fingerprint: bytes = b""  # first 16 bytes of the digest of that engine's fingerprint; b"": not known


NOT_KNOWN = BlockOrigin()


@dataclass(frozen=True, slots=True)
class Block:
    """A sealed, verified block of this shard. A pool has many, so its size counts: benchmarks/books.py measures it."""

    key: BlockKey
    slot: Slot  # where it lies, or lay until it was evicted
    digest: int
    position: int
    route: SpanRoute
    is_secondary: bool
    sealed_at: float = 0.0  # seconds on the shard's clock
    stored_at: float = 0.0  # when its bytes were computed: seconds since 1970; 0 = not known
    origin: BlockOrigin = NOT_KNOWN

    @property
    def payload_bytes(self) -> int:
        return self.slot.payload_bytes

    @property
    def account(self) -> str:
        """The tenant that is charged for it."""
        return self.slot.account


class SlotTable:
    """All slots of one segment. A slot exists once its slab has been assigned a payload size."""

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        self.accounts = Accounts(geometry.slabs_bytes)
        self._slots: dict[int, list[Slot]] = {}  # by slab
        self._slot_count = 0
        self._free: dict[int, deque[SlotIndex]] = {}  # by payload size; never has slots of a slab that was taken back
        self._free_slabs: deque[int] = deque(range(geometry.slab_count))
        self._slab_payload: dict[int, int] = {}
        self._counts: dict[int, Counter[SlotState]] = {}  # by payload size
        self._generation_floor = Generation(0)  # even; slots of a reassigned slab never repeat a generation

    def __getitem__(self, index: SlotIndex) -> Slot:
        return self._slots[slab_of(index)][index_in_slab(index)]

    def get(self, index: SlotIndex) -> Slot | None:
        """None for an index that no slot has: it may come from anybody."""
        slots, place = self._slots.get(slab_of(index), ()), index_in_slab(index)
        return slots[place] if place < len(slots) else None

    def all_slots(self) -> Iterable[Slot]:
        return chain.from_iterable(self._slots.values())

    @property
    def capacity(self) -> int:
        return self._slot_count

    @property
    def free_slab_count(self) -> int:
        return len(self._free_slabs)

    @property
    def payload_sizes(self) -> tuple[int, ...]:
        return tuple(sorted(set(self._slab_payload.values())))

    def counts(self) -> dict[str, int]:
        return {state.value: sum(counts[state] for counts in self._counts.values()) for state in SlotState}

    def byte_counts(self) -> dict[str, int]:
        """Payload bytes of the slots in each state."""
        return {state.value: sum(size * counts[state] for size, counts in self._counts.items()) for state in SlotState}

    @property
    def free_bytes(self) -> int:
        """Payload bytes of the free slots."""
        return sum(size * len(indices) for size, indices in self._free.items())

    def slabs_of(self, payload_bytes: int) -> list[int]:
        return [slab for slab, size in self._slab_payload.items() if size == payload_bytes]

    def slots_from(self, first: SlotIndex) -> Iterator[Slot]:
        """The slots with this index or a higher one, in their order. Do not change the table meanwhile."""
        for slab in sorted(slab for slab in self._slab_payload if slab >= slab_of(first)):
            skipped = index_in_slab(first) if slab == slab_of(first) else 0
            yield from islice(self._slots[slab], skipped, None)

    def slots_of_slab(self, slab: int) -> list[Slot]:
        """Do not change the list."""
        return self._slots[slab]

    def assign_slab(self, payload_bytes: int, slab: int | None = None) -> int | None:
        """Assign a free slab to this payload size. None when no slab is free (or the named one is not)."""
        if slab is None:
            if not self._free_slabs:
                return None
            slab = self._free_slabs.popleft()
        elif slab in self._slab_payload:
            return None
        else:
            self._free_slabs.remove(slab)
        self._slab_payload[slab] = payload_bytes
        free = self._free.setdefault(payload_bytes, deque())
        counts = self._counts.setdefault(payload_bytes, Counter())
        indices = [slot_index(slab, i) for i in range(self._geometry.slots_per_slab(payload_bytes))]
        self._slots[slab] = [Slot(index, payload_bytes, self._generation_floor) for index in indices]
        free.extend(indices)
        counts[_FREE] += len(indices)
        self._slot_count += len(indices)
        return slab

    def unassign_slab(self, slab: int) -> None:
        """Take back a slab whose slots are all free."""
        payload_bytes = self._slab_payload.pop(slab)
        slots = self._slots.pop(slab)
        for slot in slots:
            assert slot.state is _FREE
            even = Generation(slot.generation + slot.generation % 2)
            self._generation_floor = max(self._generation_floor, even)
        self._counts[payload_bytes][_FREE] -= len(slots)
        self._slot_count -= len(slots)
        kept = deque(index for index in self._free[payload_bytes] if slab_of(index) != slab)
        self._free[payload_bytes] = kept
        self._free_slabs.append(slab)

    def take_free(self, payload_bytes: int, owner: bytes, account: str = NOBODY) -> Slot | None:
        """FREE -> WRITING with the next odd generation; None when no slot of this size is free."""
        free = self._free.get(payload_bytes)
        if not free:
            return None
        slot = self[free.popleft()]
        slot.account = account
        self._move(slot, SlotEvent.RESERVE)
        slot.generation = Generation(slot.generation + 1 + slot.generation % 2)
        slot.owner = owner
        return slot

    def adopt(self, index: SlotIndex, generation: Generation, owner: bytes | None, account: str = NOBODY) -> None:
        """Take over a slot found in the segment at start: sealed when `owner` is None, else being written."""
        slot = self[index]
        self._free[slot.payload_bytes].remove(index)
        slot.account = account
        self._move(slot, SlotEvent.ADOPT if owner is None else SlotEvent.ADOPT_WRITING)
        slot.generation = generation
        slot.owner = owner or b""

    def seal(self, slot: Slot) -> None:
        self._move(slot, SlotEvent.SEAL)
        slot.generation = Generation(slot.generation + 1)
        slot.owner = b""

    def pin(self, slots: Iterable[Slot]) -> None:
        """One more reader for each of these slots, in one pass."""
        self._recount(loops.pin(slots), _SEALED, _LEASED)

    def unpin(self, slots: Iterable[Slot]) -> list[Slot]:
        """One reader less for each of these slots, in one pass. Returns those that have none any more."""
        last = loops.unpin(slots)
        self._recount(last, _LEASED, _SEALED)
        return last

    def _recount(self, slots: list[Slot], source: SlotState, target: SlotState) -> None:
        for size, number in loops.sizes(slots).items():
            self._counts[size][source] -= number
            self._counts[size][target] += number

    def free(self, slot: Slot, event: SlotEvent) -> None:
        """Give a slot back by ABORT, EVICT or END_QUARANTINE."""
        self._move(slot, event)
        assert slot.state is SlotState.FREE
        slot.owner, slot.account, slot.block = b"", NOBODY, None
        self._free[slot.payload_bytes].append(slot.index)

    def quarantine(self, slot: Slot) -> None:
        self._move(slot, SlotEvent.QUARANTINE)

    def _move(self, slot: Slot, event: SlotEvent) -> None:
        target = TRANSITIONS.get((slot.state, event))
        if target is None:
            raise InvalidTransition(f"slot {slot.index} is {slot.state.value}, cannot {event.value}: {slot}")
        counts = self._counts[slot.payload_bytes]
        counts[slot.state] -= 1
        counts[target] += 1
        if slot.account:
            self._charge(slot, target)
        slot.state = target

    def _charge(self, slot: Slot, target: SlotState) -> None:
        accounts, account = self.accounts, slot.account
        accounts.used[account] += slot.payload_bytes * ((target is not _FREE) - (slot.state is not _FREE))
        accounts.writing[account] += (target is _WRITING) - (slot.state is _WRITING)
        if target is _FREE and not accounts.used[account]:  # so that tenants without slots take no memory
            del accounts.used[account], accounts.writing[account]

    def check_invariants(self) -> None:
        """Recounts everything. Raises AssertionError that names the first thing that does not add up."""
        counted: dict[int, Counter[SlotState]] = {size: Counter() for size in self._counts}
        used: dict[str, int] = {}
        writing: dict[str, int] = {}
        for slot in self.all_slots():
            state, account, is_odd = slot.state, slot.account, slot.generation % 2 == 1
            counted[slot.payload_bytes][state] += 1
            assert (slot.pins > 0) == (state is _LEASED), f"pins and state disagree: {slot}"
            assert is_odd or state is not _WRITING, f"written under an even generation: {slot}"
            assert not is_odd or state not in _READABLE, f"sealed under an odd generation: {slot}"
            assert slot.block is None or (state in _READABLE and slot.block.slot is slot), f"not its block: {slot}"
            if account:
                assert state is not _FREE, f"somebody is charged for a free slot: {slot}"
                used[account] = used.get(account, 0) + slot.payload_bytes
                writing[account] = writing.get(account, 0) + (state is _WRITING)
        assert counted == self._counts, f"slots by size and state: {counted}, counters {self._counts}"
        free = [index for indices in self._free.values() for index in indices]
        assert len(free) == len(set(free)) == self.counts()["free"], "free list and free slots differ"
        assert self.free_bytes == self.byte_counts()["free"], "free slots of a size are on the list of another"
        for index in free:
            assert self[index].state is _FREE, f"slot {index} is on the free list but not free"
        assert Counter(used) == self.accounts.used, "what tenants hold does not add up"
        assert Counter(writing) == self.accounts.writing, "what tenants write does not add up"
        assert self._slot_count == sum(map(len, self._slots.values())), "slots are miscounted"
        assert self._slots.keys() == self._slab_payload.keys(), "slots of a slab that has no size, or a slab without"
        slabs = set(self._free_slabs) | set(self._slab_payload)
        assert slabs == set(range(self._geometry.slab_count)), "a slab is lost"
        assert not set(self._free_slabs) & set(self._slab_payload), "a slab is free and assigned"
