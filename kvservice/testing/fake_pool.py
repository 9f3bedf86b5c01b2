"""A PoolPort in this process over a real segment, with dictionaries instead of the shard's state machine. For tests.

It keeps the promises of the port that an engine can see (leases, odd and even generations, digests, what a loss voids).
It also counts what a real pool would forgive, so that a test can demand that nothing is left over or given back twice.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path

from kvservice.core.messages import (
    AcquireRequest,
    AcquireResult,
    Attachment,
    EngineSpec,
    MissReason,
    Removed,
    RequestReport,
    SealItem,
    SealStatus,
    Statement,
    WarmRequest,
    WarmResult,
)
from kvservice.core.reconcile import Grants, is_settled
from kvservice.core.segment.digest import digest_payload
from kvservice.core.segment.geometry import Geometry, slot_index
from kvservice.core.segment.header import SlotHeader
from kvservice.core.segment.refs import BlockRef
from kvservice.errors import NotAttached, Unavailable
from kvservice.memory.segment import Segment
from kvservice.units import (
    AttachmentId,
    BlockKey,
    BootEpoch,
    Generation,
    HandoffId,
    LeaseId,
    NodeId,
    SlotIndex,
    SpanRoute,
)


class FakePool:
    """A pool for one engine at a time. `latency` is how long every call takes; `refuse` makes calls fail until it is
    cleared."""

    def __init__(self, path: Path, geometry: Geometry, lease_seconds: float = 10.0) -> None:
        self.segment = Segment.create(path, geometry, "fake")
        self.lease_seconds = lease_seconds
        self.latency = 0.0
        self.refuse = False
        self.closed = False
        self.counters: Counter[str] = Counter()
        self.sealed: dict[BlockKey, BlockRef] = {}
        self._sealed_as: dict[BlockRef, tuple[SealItem, int]] = {}  # and its digest
        self.leases: dict[LeaseId, tuple[BlockRef, ...]] = {}
        self.reserved: dict[SlotIndex, Generation] = {}
        self.renewed: list[LeaseId] = []  # by the last heartbeat
        self.reported: list[RequestReport] = []
        self.handoffs: dict[HandoffId, bool] = {}  # -> whether it is open
        self._handoff_calls: dict[HandoffId, int] = {}
        self._grants = Grants()
        self._payload_bytes = 0
        self._free: list[SlotIndex] = []
        self._generations: Counter[SlotIndex] = Counter()
        self._attachment: AttachmentId | None = None
        self._on_lost: Callable[[str], None] | None = None
        self._next_id = 1

    async def attach(self, spec: EngineSpec, on_lost: Callable[[str], None]) -> Attachment:
        await self._enter("attach")
        if not self._payload_bytes:
            self._payload_bytes = spec.layout.payload_bytes
            geometry = self.segment.geometry
            for slab in range(geometry.slab_count):
                self.segment.assign_slab(slab, self._payload_bytes)
                self._free += [slot_index(slab, i) for i in range(geometry.slots_per_slab(self._payload_bytes))]
        self._attachment, self._on_lost = AttachmentId(self._take_id()), on_lost
        return Attachment(
            self._attachment,
            NodeId("fake"),
            BootEpoch(self.segment.epoch),
            self.lease_seconds,
            str(self.segment.path),
            self.segment.geometry,
            "",
        )

    async def detach(self, attachment: AttachmentId) -> None:
        await self._enter("detach", attachment)
        self._void()

    async def acquire(self, attachment: AttachmentId, request: AcquireRequest) -> AcquireResult:
        await self._enter("acquire", attachment)
        found: list[BlockRef] = []
        for key in request.keys[request.skip :]:
            if key not in self.sealed:
                break
            found.append(self.sealed[key])
        skipped = list(takewhile(self.sealed.__contains__, request.keys[: request.skip]))
        miss = MissReason.NONE if request.skip + len(found) == len(request.keys) else MissReason.NEVER_STORED
        if not found:
            return AcquireResult(LeaseId(0), (), 0, miss, skipped_held=len(skipped))
        lease_id = LeaseId(self._take_id())
        self.leases[lease_id] = tuple(found)
        return AcquireResult(lease_id, tuple(found), 0, miss, skipped_held=len(skipped))

    async def reserve(self, attachment: AttachmentId, count: int, group: int = 0, call: int = 0) -> list[BlockRef]:
        await self._enter("reserve", attachment)
        refs: list[BlockRef] = []
        while self._free and len(refs) < count:
            slot = self._free.pop()
            self._generations[slot] += 1 if self._generations[slot] % 2 == 0 else 2
            generation = Generation(self._generations[slot])
            self.reserved[slot] = generation
            self._write_header(slot, BlockKey(bytes(16)), 0, SpanRoute(0), 0)
            refs.append(BlockRef(slot, generation))
        self._grants.add(call, refs)
        return refs

    async def seal(self, attachment: AttachmentId, items: Sequence[SealItem]) -> list[SealStatus]:
        await self._enter("seal", attachment)
        return [self._seal(item) for item in items]

    def _seal(self, item: SealItem) -> SealStatus:
        slot = item.ref.slot
        if self.reserved.get(slot) != item.ref.generation:
            self.counters["seal_unknown"] += 1
            return SealStatus.STALE
        del self.reserved[slot]
        if item.key in self.sealed:
            self._give_back(slot)
            return SealStatus.DUPLICATE
        self._generations[slot] += 1
        digest = digest_payload(self.segment.payload(slot, self._payload_bytes), item.key)
        self._write_header(slot, item.key, digest, item.route, item.position)
        ref = self.sealed[item.key] = BlockRef(slot, Generation(self._generations[slot]))
        self._sealed_as[ref] = (item, digest)
        return SealStatus.SEALED

    async def abort(self, attachment: AttachmentId, refs: Sequence[BlockRef]) -> None:
        await self._enter("abort", attachment)
        self.counters["abort_unknown"] += len(refs) - self._abort(refs)

    def _abort(self, refs: Sequence[BlockRef]) -> int:
        mine = [ref for ref in refs if self.reserved.get(ref.slot) == ref.generation]
        for ref in mine:
            del self.reserved[ref.slot]
            self._give_back(ref.slot)
        return len(mine)

    async def release(self, attachment: AttachmentId, lease_ids: Sequence[LeaseId]) -> None:
        await self._enter("release", attachment)
        for lease_id in lease_ids:
            if self.leases.pop(lease_id, None) is None:
                self.counters["release_unknown"] += 1

    async def open_handoff(self, attachment: AttachmentId, handoff: HandoffId, call: int = 0) -> None:
        await self._enter("open_handoff", attachment)
        self.handoffs.setdefault(handoff, True)
        self._handoff_calls[handoff] = call

    async def close_handoff(self, attachment: AttachmentId, handoff: HandoffId) -> None:
        await self._enter("close_handoff", attachment)
        self.handoffs[handoff] = False

    async def renew(
        self,
        attachment: AttachmentId,
        lease_ids: Sequence[LeaseId],
        reports: Sequence[RequestReport] = (),
        statement: Statement | None = None,
        suspects: Sequence[BlockRef] = (),
    ) -> Removed:
        await self._enter("renew", attachment)
        self.renewed = list(lease_ids)
        self.reported += reports
        if statement is not None:
            self._reconcile(statement)
        for ref in suspects:
            self._look_at(ref)
        return Removed()

    def _look_at(self, ref: BlockRef) -> None:
        item, digest = self._sealed_as[ref]
        if digest_payload(self.segment.payload(ref.slot, self._payload_bytes), item.key) == digest:
            self._write_header(ref.slot, item.key, digest, item.route, item.position)
        elif self.sealed.get(item.key) == ref:
            del self.sealed[item.key]  # its slot is not used again

    def _reconcile(self, statement: Statement) -> None:
        self.counters["slots_reconciled"] += self._abort(self._grants.denied(statement))
        for handoff in statement.handoffs:
            self.handoffs.setdefault(handoff, True)
            self._handoff_calls.setdefault(handoff, statement.calls)
        for handoff in self.handoffs.keys() - set(statement.handoffs):
            if is_settled(self._handoff_calls.get(handoff, 0), statement):
                self.handoffs[handoff] = False

    async def warm(self, request: WarmRequest) -> WarmResult:
        """Nothing is evicted by itself here, so there is nothing to hold."""
        await self._enter("warm")
        here = len(list(takewhile(self.sealed.__contains__, request.keys)))
        miss = MissReason.NONE if here == len(request.keys) else MissReason.NEVER_STORED
        return WarmResult(len(request.keys), here, (), here, request.hold_seconds, miss)

    async def close(self) -> None:
        self.closed = True
        self.segment.close()

    # -- called by tests ----

    def lose(self, reason: str) -> None:
        """End the attachment as a dying shard would. Call it on the pool's loop."""
        on_lost, self._on_lost = self._on_lost, None
        self._void()
        if on_lost is not None:
            on_lost(reason)

    def evict(self, key: BlockKey) -> None:
        """Forget a sealed block and free its slot."""
        self._give_back(self.sealed.pop(key).slot)

    # -- inside ----

    async def _enter(self, what: str, attachment: AttachmentId | None = None) -> None:
        self.counters[what] += 1
        if self.latency:
            await asyncio.sleep(self.latency)
        if self.refuse:
            raise Unavailable(f"the fake pool refuses {what}")
        if attachment is not None and attachment != self._attachment:
            raise NotAttached(f"{what}: no attachment {attachment}")

    def _void(self) -> None:
        self._attachment = None
        self._grants = Grants()
        self.leases.clear()
        for slot in list(self.reserved):
            del self.reserved[slot]
            self._give_back(slot)

    def _give_back(self, slot: SlotIndex) -> None:
        self.segment.clear_header(slot)
        self._free.append(slot)

    def _write_header(self, slot: SlotIndex, key: BlockKey, digest: int, route: SpanRoute, position: int) -> None:
        generation = Generation(self._generations[slot])
        epoch = BootEpoch(self.segment.epoch)
        header = SlotHeader(epoch, generation, key, self._payload_bytes, route, digest, position)
        self.segment.write_header(slot, header)

    def _take_id(self) -> int:
        self._next_id += 1
        return self._next_id
