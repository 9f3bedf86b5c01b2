"""What the parts of one shard's core share: the shard's name, its blocks and leases, and the way to emit actions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from kvservice.core.actions import Action
from kvservice.core.block.tenants import tag_of
from kvservice.core.explain.records import RequestRecords
from kvservice.core.messages import LocateResult, TakeOverItem
from kvservice.core.segment.geometry import Geometry
from kvservice.core.segment.refs import BlockHandle
from kvservice.core.slices import Slices
from kvservice.core.store.admission import Admission
from kvservice.core.store.blocks import BlockStore
from kvservice.core.store.freshness import Freshness
from kvservice.core.store.leases import LeaseOwner, LeaseTable
from kvservice.core.store.slots import Block, Slot
from kvservice.units import AttachmentId, BlockKey, BootEpoch, LeaseId, MiB, NodeId

OFFER_BLOCKS_MAX = 64  # of one offer, so that a failed one costs little; more blocks are further offers
OFFER_BYTES_MAX = 64 * MiB  # of one offer: it is read within seconds even over a slow link


@dataclass(frozen=True, slots=True)
class ShardContext:
    """Made once for each shard, before its parts."""

    node_id: NodeId
    epoch: BootEpoch
    geometry: Geometry
    lease_seconds: float
    has_directory: bool
    store: BlockStore
    leases: LeaseTable
    admission: Admission
    records: RequestRecords
    counters: Counter[str]
    emit: Callable[[Action], None]  # appends an action to those of the event being handled
    is_draining: Callable[[], bool]  # when True, nothing is written or fetched any more
    model_of: Callable[[AttachmentId], str]  # "" for an unknown attachment
    fingerprint_of: Callable[[AttachmentId], bytes]  # its first 16 bytes; b"" for an unknown attachment
    freshness: Freshness
    slices: Slices

    def lease(self, owner: LeaseOwner, slots: Sequence[Slot], now: float) -> LeaseId:
        """Lease slots that the caller has pinned. The lease owns the pins from now on. Returns 0 for no slots."""
        if not slots:
            return LeaseId(0)
        return self.leases.grant(owner, tuple(slots), now, self.lease_seconds).lease_id

    def lend(self, reader: NodeId, blocks: Sequence[Block | None], now: float) -> LocateResult:
        """Lease to another node the blocks that are not None. The result has a position for each of `blocks`."""
        held = [block for block in blocks if block is not None]
        self.counters["served_bytes"] += sum(block.payload_bytes for block in held)
        slots = [block.slot for block in held]
        self.store.pin(slots)
        lease_id = self.lease(("peer", reader), slots, now)
        handles = tuple(None if block is None else self.store.handle(block) for block in blocks)
        return LocateResult(self.epoch, lease_id, self.lease_seconds, handles)

    def offered(self, block: Block, idle_seconds: float) -> TakeOverItem:
        """The block as another node is offered it. It was used last `idle_seconds` ago."""
        parent, tag, fingerprint = self.store.parent_of(block), tag_of(block.account), block.origin.fingerprint
        names = self.freshness.names_of(fingerprint)
        item = TakeOverItem(block.key, parent, block.position, block.route, max(idle_seconds, 0.0), tag)
        return item if names is None else replace(item, fingerprint=fingerprint, names=names)

    def next_offer(self, keys: Iterable[BlockKey], bytes_max: int = OFFER_BYTES_MAX) -> tuple[list[Block], int]:
        """The blocks of one offer, all of one size, and how many of the keys they take: those of the first keys that
        are still here. A block may have gone and been stored again in another slot."""
        found: list[Block] = []
        count = 0
        for key in keys:
            block = self.store.get(key)
            if block is not None:
                size = block.payload_bytes
                if found and (size != found[0].payload_bytes or size * (len(found) + 1) > bytes_max):
                    break
                found.append(block)
            count += 1
            if len(found) == OFFER_BLOCKS_MAX:
                break
        return found, count

    def may_keep(self, handle: BlockHandle, slot: Slot, account: str, fingerprint: bytes, now: float) -> bool:
        """Whether a block that came from elsewhere into this slot is served: not if it is from before a clear, if its
        like was cleared while it was on its way, or if it is too old."""
        scopes = self.freshness.scopes(handle.key, account, fingerprint)
        if self.freshness.was_cleared(scopes, slot.reserved_at):
            self.counters["arrived_cleared"] += 1
            return False
        if not self.freshness.accepts(scopes, handle.stored_at, now):
            self.counters["arrived_too_old"] += 1
            return False
        return True
