"""Slots that engines write: reserved, then sealed or given back. Pure; a part of ShardState.

A reserved slot belongs to its engine until the engine gives it up with Seal or Abort, or until none of its processes is
left. Until then nobody else gets the slot.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvservice.core import events as ev
from kvservice.core.acquire.acquisitions import Acquisitions
from kvservice.core.acquire.attached import EngineAttachment
from kvservice.core.acquire.hinted import Hinted
from kvservice.core.actions import Digest, Refuse, Reply, WatchEngine
from kvservice.core.block.keys import check_keys
from kvservice.core.block.marks import BlockScopes
from kvservice.core.block.window_groups import WINDOW_BIT
from kvservice.core.context import ShardContext
from kvservice.core.explain.records import name_engine
from kvservice.core.messages import SealItem, SealStatus, Statement
from kvservice.core.reconcile import STATED_SLOTS_MAX, Grants
from kvservice.core.segment.refs import BlockRef
from kvservice.core.slices import Work
from kvservice.core.store.blocks import Want
from kvservice.core.store.freshness import Freshness
from kvservice.core.store.slots import Block, Slot, SlotState
from kvservice.errors import InvalidRequest, NotAttached
from kvservice.units import AttachmentId, BlockKey

RESERVE_COUNT_MAX = 4096  # slots in one call; an engine that needs more calls again
U32_COUNT = 1 << 32  # positions and routes have 32 bits in a slot header; larger ones are refused
assert RESERVE_COUNT_MAX <= STATED_SLOTS_MAX, "a statement must have room for a reservation"
assert 2 * WINDOW_BIT == U32_COUNT, "the bit of a window group's block is the highest of its position"


@dataclass(slots=True)
class _SealBatch:
    """One Seal call. It is answered when the last of its digests is known."""

    event: ev.Seal
    statuses: list[SealStatus | None]
    engine: EngineAttachment
    open_count: int = 1  # digests that are not known yet, and 1 while there are slices left
    pinned: list[tuple[Block, float]] = field(default_factory=list)  # sealed blocks, and how long hints pin them


@dataclass(slots=True)
class _Reserving:
    """One Reserve call that is not answered: nobody knows of its slots yet."""

    event: ev.Reserve
    engine: EngineAttachment
    slots: list[Slot] = field(default_factory=list)


@dataclass(slots=True)
class _Sealing:
    item: SealItem
    slot: Slot
    batch: _SealBatch
    position: int  # in the batch

    def scopes(self, freshness: Freshness) -> BlockScopes:
        return freshness.scopes(self.item.key, self.slot.account, self.batch.engine.block_mark)


class Writes:
    """Handles Reserve, Seal, Abort and statements, and what happens to reservations when an engine ends."""

    def __init__(self, shard: ShardContext, acquisitions: Acquisitions, hinted: Hinted) -> None:
        self._hinted = hinted
        self._is_draining = shard.is_draining
        self._store = shard.store
        self._emit = shard.emit
        self._counters = shard.counters
        self._freshness = shard.freshness
        self._acquisitions = acquisitions
        self._slices = shard.slices
        self._node_id = shard.node_id
        self._reserving: dict[int, _Reserving] = {}  # by call
        self._seals: dict[int, AttachmentId] = {}  # Seal calls that have slices left
        self._sealing: dict[int, _Sealing] = {}  # by slot

    def reserve(self, event: ev.Reserve, engine: EngineAttachment, now: float) -> None:
        spec = engine.spec
        if not 0 < event.count <= RESERVE_COUNT_MAX:
            raise InvalidRequest(f"reserve 1 to {RESERVE_COUNT_MAX} slots, not {event.count}", count=event.count)
        layouts = (spec.layout, *(group.layout for group in spec.window_groups))
        if not 0 <= event.group < len(layouts):
            raise InvalidRequest(
                f"this engine has KV cache groups 0 to {len(layouts) - 1}, not {event.group}", group=event.group
            )
        reserving = self._reserving[event.op] = _Reserving(event, engine)
        self._slices.begin(event.op, self._reserve(reserving, layouts[event.group].payload_bytes, now))

    def _reserve(self, reserving: _Reserving, payload_bytes: int, now: float) -> Work:
        event, engine, slots = reserving.event, reserving.engine, reserving.slots
        room_for = f"stores of {engine.spec.model} by engine {name_engine(engine.spec.engine_id)}"
        while not self._is_draining():
            count = min(event.count - len(slots), self._slices.sizes.slots)
            want = Want(payload_bytes, now, engine.account, room_for)
            found = self._store.reserve(count, engine.spec.engine_id, want).slots
            slots += found
            if len(found) < count or len(slots) == event.count:
                break
            now = yield
        del self._reserving[event.op]
        refs = [BlockRef(slot.index, slot.generation) for slot in slots]
        engine.grants.add(event.call, refs)
        self._counters["reserve_shortfall"] += event.count - len(slots)
        self._emit(Reply(event.op, refs))

    def cancel(self, op: int) -> None:
        """Nobody waits for this call. Slots that nobody was told of go back at once; what is sealed is sealed."""
        reserving = self._reserving.pop(op, None)
        if reserving is not None:
            self._slices.drop(op)
            for slot in reserving.slots:
                self._store.abort(slot)

    def drop_attachment(self, attachment: AttachmentId, now: float) -> None:
        """An engine is gone. Its Reserve calls end with nothing, and what it has sealed is sealed. Call this before its
        slots are quarantined or given back."""
        for op in [op for op, each in self._reserving.items() if each.engine.attachment == attachment]:
            self.cancel(op)
            self._emit(Refuse(op, NotAttached(f"attachment {attachment} ended at shard {self._node_id}: attach again")))
        for op in [op for op, of in self._seals.items() if of == attachment]:
            self._slices.finish(op, now)

    def seal(self, event: ev.Seal, engine: EngineAttachment) -> None:
        for item in event.items:
            check_keys((item.key,) if item.parent is None else (item.key, item.parent))
            if not (0 <= item.position < U32_COUNT and 0 <= item.route < U32_COUNT):
                raise InvalidRequest(f"position {item.position} or route {item.route} is not a 32-bit number")
        self._seals[event.op] = engine.attachment
        self._slices.begin(event.op, self._seal(event, _SealBatch(event, [None] * len(event.items), engine)))

    def _seal(self, event: ev.Seal, batch: _SealBatch) -> Work:
        engine_id, size = batch.engine.spec.engine_id, self._slices.sizes.slots
        for position, item in enumerate(event.items):
            if position and position % size == 0:
                yield
            batch.statuses[position] = self._begin_seal(engine_id, item, batch, position)
        del self._seals[event.op]
        batch.open_count -= 1
        self._answer_batch(batch)

    def _begin_seal(self, engine_id: bytes, item: SealItem, batch: _SealBatch, position: int) -> SealStatus | None:
        slot = self._store.written_by(item.ref, engine_id)
        if slot is None or slot.index in self._sealing:
            self._counters["seal_stale"] += 1
            return SealStatus.STALE
        if item.key in self._store or self._acquisitions.is_sealing(item.key):
            self._store.abort(slot)
            self._counters["seal_duplicate"] += 1
            return SealStatus.DUPLICATE
        self._sealing[slot.index] = _Sealing(item, slot, batch, position)
        batch.open_count += 1
        self._acquisitions.sealing(item.key)
        self._emit(Digest(slot.index, slot.payload_bytes, item.key))
        return None

    def digested(self, event: ev.Digested, now: float) -> None:
        wall = self._freshness.wall(now)
        for found in event.found:
            sealing = self._sealing.pop(found.slot, None)
            if sealing is not None:
                self._digested(sealing, found.digest, now, wall)

    def _digested(self, sealing: _Sealing, digest: int | None, now: float, wall: float) -> None:
        item = sealing.item
        status = SealStatus.SEALED
        if digest is None:
            self._store.abort(sealing.slot)
            status = SealStatus.FAILED
        elif item.key in self._store:  # a fetch of the same block was faster
            self._store.abort(sealing.slot)
            status = SealStatus.DUPLICATE
        elif self._freshness.was_cleared(sealing.scopes(self._freshness), sealing.slot.reserved_at):
            self._store.abort(sealing.slot)
            self._counters["seal_cleared"] += 1
            status = SealStatus.STALE
        else:
            block = self._store.seal(
                sealing.slot,
                item.key,
                item.parent,
                item.position,
                item.route,
                digest,
                now,
                is_secondary=False,
                model=sealing.batch.engine.spec.model,
                fingerprint=sealing.batch.engine.block_mark,
                stored_at=wall,
            )
            self._counters["stored_bytes"] += sealing.slot.payload_bytes
            if item.hints.pin_seconds:
                sealing.batch.pinned.append((block, item.hints.pin_seconds))
        if status in (SealStatus.FAILED, SealStatus.STALE):
            self._acquisitions.seal_failed(item.key, now)
        else:
            self._acquisitions.sealed(item.key, now)
        sealing.batch.statuses[sealing.position] = status
        sealing.batch.open_count -= 1
        if not sealing.batch.open_count and sealing.batch.pinned:
            # Those that were evicted while the digests of others were computed are gone.
            here = [(b, seconds) for b, seconds in sealing.batch.pinned if self._store.get(b.key) == b]
            self._hinted.stored(sealing.batch.engine.account, here, now)
        self._answer_batch(sealing.batch)

    def _answer_batch(self, batch: _SealBatch) -> None:
        if batch.open_count:
            return
        self._emit(Reply(batch.event.op, list(batch.statuses)))
        # What was evicted while the digests of others were computed, and what others heard is a duplicate and is not.
        for item in batch.event.items:
            if item.key not in self._store and not self._acquisitions.is_sealing(item.key):
                self._store.removals.add(item.key, batch.engine.account)

    def abort(self, event: ev.Abort, engine_id: bytes) -> None:
        self._slices.begin(event.op, self._aborted(event, engine_id))

    def _aborted(self, event: ev.Abort, engine_id: bytes) -> Work:
        for position, ref in enumerate(event.refs):
            if position and position % self._slices.sizes.slots == 0:
                yield
            slot = self._store.written_by(ref, engine_id)
            if slot is None or slot.index in self._sealing:
                self._counters["abort_ignored"] += 1
            else:
                self._store.abort(slot)
        self._emit(Reply(event.op, None))

    def reconcile(self, statement: Statement, grants: Grants, engine_id: bytes) -> None:
        """Free the slots that the engine says it does not hold. Slots that it sealed or gave back since are not its own
        any more, and a slot whose digest is being computed is settled by that."""
        for ref in grants.denied(statement):
            slot = self._store.written_by(ref, engine_id)
            if slot is not None and slot.index not in self._sealing:
                self._store.abort(slot)
                self._counters["slots_reconciled"] += 1

    def quarantine(self, engine_id: bytes) -> None:
        """Quarantine what the engine reserved and did not give back, until none of its processes can write. Its
        attachment has ended, but one of them may still be copying. Slots being digested are settled by that."""
        for slot in self._store.slots_of(engine_id, SlotState.WRITING):
            if slot.index not in self._sealing:
                self._store.quarantine(slot)
        if self._store.slots_of(engine_id, SlotState.QUARANTINED):
            self._emit(WatchEngine(engine_id))

    def free(self, engine_id: bytes) -> None:
        """No process can write this engine's reservations any more. Slots being digested are settled by that."""
        for slot in self._store.slots_of(engine_id, SlotState.WRITING):
            if slot.index not in self._sealing:
                self._store.abort(slot)
        for slot in self._store.slots_of(engine_id, SlotState.QUARANTINED):
            self._store.end_quarantine(slot)

    @property
    def is_digesting(self) -> bool:
        return bool(self._sealing)

    def sealing(self) -> dict[BlockKey, bytes]:
        """For each block whose digest is being computed, the engine that stored it."""
        return {sealing.item.key: sealing.slot.owner for sealing in self._sealing.values()}

    def sealing_slots(self) -> list[Slot]:
        return [sealing.slot for sealing in self._sealing.values()]

    def check_invariants(self) -> None:
        for index, sealing in self._sealing.items():
            assert sealing.slot.index == index
            assert sealing.slot.state is SlotState.WRITING, "a slot is digested that is not written"
        for op in (*self._reserving, *self._seals):
            assert op in self._slices, "a call waits for a slice that nobody does"
        for reserving in self._reserving.values():
            owner = reserving.engine.spec.engine_id
            for slot in reserving.slots:
                assert (slot.state, slot.owner) == (SlotState.WRITING, owner), "a slot is promised that is not held"
