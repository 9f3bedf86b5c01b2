"""A Session that the test plays by hand: answers come when the test says so, and everything taken is on record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import count

from kvservice.connector.plan import PoolInfo
from kvservice.core.messages import AcquireRequest, AcquireResult, Attachment, MissReason, RequestReport, SealItem
from kvservice.core.segment.geometry import Geometry, slot_index
from kvservice.core.segment.layout import SlotLayout
from kvservice.core.segment.refs import BlockRef
from kvservice.session.session import AcquireAnswer
from kvservice.units import AttachmentId, BlockHash, BlockKey, BootEpoch, Generation, HandoffId, LeaseId, NodeId

BLOCK = 16
LAYOUT = SlotLayout(layer_count=2, kv_head_count=2, cell_bytes=1024, block_tokens=BLOCK)
GEOMETRY = Geometry(1 << 20, 8)


def attachment(number: int) -> Attachment:
    return Attachment(AttachmentId(number), NodeId("n"), BootEpoch(1), 10.0, "/dev/shm/none", GEOMETRY, "")


def pool_info(of: Attachment) -> PoolInfo:
    return PoolInfo(of.segment_path, of.geometry, of.epoch, LAYOUT, bytes(16), of.node_directory)


def keys_of(hashes: Sequence[BlockHash], tenant_key: bytes = b"") -> list[BlockKey]:
    return [BlockKey(h[:16]) for h in hashes]


def hashes(prompt: int, blocks: int, shared: int = 0) -> list[BlockHash]:
    """A chain; the first `shared` blocks are the same for every prompt."""
    return [BlockHash(f"{0 if i < shared else prompt:07d}-{i:08d}".encode().ljust(32)) for i in range(blocks)]


class Pins:
    """BlockPins that knows how often each of the engine's blocks is pinned."""

    def __init__(self) -> None:
        self.pinned: Counter[int] = Counter()
        self.free = 1.0
        self.forgotten: set[int] = set()

    def free_share(self) -> float:
        return self.free

    def pin(self, block_ids: Sequence[int]) -> None:
        self.pinned.update(block_ids)

    def unpin(self, block_ids: Sequence[int]) -> None:
        self.pinned.subtract(block_ids)
        assert min(self.pinned.values()) >= 0, "unpinned more often than pinned"
        self.pinned = +self.pinned

    def forget(self, block_ids: Sequence[int]) -> None:
        self.forgotten.update(block_ids)


class Line:
    """SessionPort. Leases and slots belong to the attachment of their time and are void after `lose`."""

    def __init__(self, slots: int = 64) -> None:
        self.attachment: Attachment | None = attachment(1)
        self.asked: list[tuple[str, AttachmentId, AcquireRequest]] = []
        self.leases: dict[tuple[AttachmentId, LeaseId], int] = {}  # live ones -> blocks
        self.slots: set[tuple[AttachmentId, BlockRef]] = set()  # taken, neither sealed nor aborted
        self.sealed: list[SealItem] = []
        self.expected = 0
        self.abandoned: set[str] = set()
        self.reports: dict[str, RequestReport] = {}
        self.free = slots
        self.counters: Counter[str] = Counter()
        self.pins = Pins()
        self.handoffs: dict[HandoffId, AttachmentId] = {}  # open ones
        self.closed: list[HandoffId] = []
        self._answers: list[AcquireAnswer] = []
        self._ids = count(1)

    def acquire(self, request_id: str, request: AcquireRequest) -> AttachmentId | None:
        if self.attachment is None:
            return None
        self.asked.append((request_id, self.attachment.attachment_id, request))
        return self.attachment.attachment_id

    def answers(self) -> list[AcquireAnswer]:
        found, self._answers = self._answers, []
        return found

    def abandon(self, request_id: str) -> None:
        self.abandoned.add(request_id)

    def report(self, report: RequestReport) -> None:
        self.reports[report.request_id] = report

    def expect(self, count: int) -> None:
        self.expected += count
        assert self.expected >= 0

    def take_slots(self, attachment: AttachmentId, count: int, group: int = 0) -> list[BlockRef]:
        if self.attachment is None or self.attachment.attachment_id != attachment:
            return []
        taken = [BlockRef(slot_index(0, next(self._ids)), Generation(1)) for _ in range(min(count, self.free))]
        self.free -= len(taken)
        self.slots.update((attachment, ref) for ref in taken)
        return taken

    def seal(self, attachment: AttachmentId, items: Sequence[SealItem]) -> None:
        for item in items:
            self._end_slot(attachment, item.ref)
            self.sealed.append(item)

    def abort(self, attachment: AttachmentId, refs: Sequence[BlockRef]) -> None:
        for ref in refs:
            self._end_slot(attachment, ref)
            self.counters["aborted"] += 1

    def open_handoff(self, handoff: HandoffId) -> AttachmentId | None:
        if self.attachment is None:
            return None
        self.handoffs[handoff] = self.attachment.attachment_id
        return self.attachment.attachment_id

    def close_handoff(self, attachment: AttachmentId, handoff: HandoffId) -> None:
        assert self.handoffs.pop(handoff) == attachment, "closed twice, or for another attachment"
        self.closed.append(handoff)

    def release(self, attachment: AttachmentId, lease_id: LeaseId) -> None:
        assert (attachment, lease_id) in self.leases, "released twice, or never promised"
        del self.leases[attachment, lease_id]

    def _end_slot(self, attachment: AttachmentId, ref: BlockRef) -> None:
        assert (attachment, ref) in self.slots, "sealed or aborted twice, or never reserved"
        self.slots.remove((attachment, ref))
        self.free += 1

    # -- what tests call ----

    def answer(
        self, blocks: int, index: int = 0, *, fetched: int = 0, windows: Sequence[int] = (), admitted: bool = True
    ) -> str:
        """Answer an acquire with this many promised blocks (at most what was asked), so many of each window group."""
        request_id, asked_of, request = self.asked.pop(index)
        blocks = 0 if request_id in self.abandoned else min(blocks, len(request.keys))
        refs = tuple(BlockRef(slot_index(1, i), Generation(2)) for i in range(blocks))
        lease_id = LeaseId(next(self._ids) if blocks else 0)
        if blocks:
            self.leases[asked_of, lease_id] = blocks
        miss = MissReason.NONE if blocks == len(request.keys) else MissReason.NEVER_STORED
        window_blocks = tuple(
            tuple(BlockRef(slot_index(1 + group, i), Generation(2)) for i in range(window))
            for group, window in enumerate(windows, 1)
        )
        result = AcquireResult(lease_id, refs, fetched, miss, window_blocks, admitted)
        self._answers.append(AcquireAnswer(request_id, asked_of, result, request))
        return request_id

    def lose(self) -> None:
        self.attachment = None

    def attach(self, number: int) -> None:
        self.attachment = attachment(number)
