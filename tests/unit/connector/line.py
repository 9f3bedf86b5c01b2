"""A Session that the test plays by hand: answers come when the test says so, and everything taken is on record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import count, takewhile
from typing import Any, TypeVar

from kvservice.connector.options import Offload
from kvservice.connector.plan import PoolInfo, StepPlan, StepReport
from kvservice.connector.scheduler.half import SchedulerHalf
from kvservice.core.block.window_groups import group_key
from kvservice.core.messages import AcquireRequest, AcquireResult, Attachment, MissReason, RequestReport, SealItem
from kvservice.core.segment.geometry import Geometry, slot_index
from kvservice.core.segment.layout import SlotLayout
from kvservice.core.segment.refs import BlockRef
from kvservice.session.news import BlockNews
from kvservice.session.session import AcquireAnswer
from kvservice.units import (
    AttachmentId,
    BlockHash,
    BlockKey,
    BootEpoch,
    Generation,
    HandoffId,
    LeaseId,
    NodeId,
    SlotIndex,
)

Half = TypeVar("Half", bound=SchedulerHalf)

BLOCK = 16
WINDOW = 4  # blocks that the engine takes next and that are looked at
LAYOUT = SlotLayout(layer_count=2, kv_head_count=2, cell_bytes=1024, block_tokens=BLOCK)
GEOMETRY = Geometry(1 << 20, 8)


def attachment(number: int, boot: int = 1) -> Attachment:
    return Attachment(AttachmentId(number), NodeId("n"), BootEpoch(boot), 10.0, "/dev/shm/none", GEOMETRY, "")


def pool_info(of: Attachment) -> PoolInfo:
    return PoolInfo(of.segment_path, of.geometry, of.epoch, LAYOUT, bytes(16), of.node_directory)


def keys_of(hashes: Sequence[BlockHash], tenant_key: bytes = b"") -> list[BlockKey]:
    return [BlockKey(h[:16]) for h in hashes]


def hashes(prompt: int, blocks: int, shared: int = 0) -> list[BlockHash]:
    """A chain; the first `shared` blocks are the same for every prompt."""
    return [BlockHash(f"{0 if i < shared else prompt:07d}-{i:08d}".encode().ljust(32)) for i in range(blocks)]


def refs(*slots: int) -> tuple[BlockRef, ...]:
    return tuple(BlockRef(SlotIndex(slot), Generation(2)) for slot in slots)


def chains(count: int) -> list[list[BlockKey]]:
    """The keys of prompt 1: of the full blocks, and of those of group 1."""
    full = keys_of(hashes(1, count))
    return [full, [group_key(key, 1) for key in full]]


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


class EngineBlocks(Pins):
    """The blocks of an engine and their free queue: BlockPins and EngineCache. The engine takes blocks from the front
    and frees them to the back; what it takes is gone from its cache."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.queue = list(range(1, count + 1))
        self.count = count
        self.held: dict[int, BlockHash] = {}  # what each cached block holds
        self.used: Counter[int] = Counter()  # by requests and pins

    def take(self, chain: Sequence[BlockHash]) -> tuple[list[int], list[BlockHash]]:
        """Blocks for these hashes, computed at once. Returns their ids, and the hashes that were evicted for them."""
        ids = [self.queue.pop(0) for _ in chain]
        evicted = [self.held.pop(block_id) for block_id in ids if block_id in self.held]
        self.used.update(ids)
        self.held.update(zip(ids, chain, strict=True))
        return ids, evicted

    def share(self, chain: Sequence[BlockHash]) -> list[int]:
        """The engine's own hit: the leading blocks that it still holds."""
        found = list(takewhile(lambda block_id: block_id is not None, map(self.find, chain)))
        ids = [block_id for block_id in found if block_id is not None]
        self._use(ids)
        return ids

    def give_up(self, ids: Sequence[int]) -> None:
        """The last block of a chain goes first."""
        for block_id in reversed(ids):
            self._release(block_id, len(self.queue))

    def find(self, block_hash: BlockHash) -> int | None:
        return next((block_id for block_id, held in self.held.items() if held == block_hash), None)

    def free_blocks(self) -> int:
        return len(self.queue)

    def next_to_go(self) -> list[tuple[int, BlockHash | None]]:
        return [(block_id, self.held.get(block_id)) for block_id in self.queue]

    def give_back(self, block_ids: Sequence[int]) -> None:
        super().unpin(block_ids)
        for block_id in reversed(block_ids):
            self._release(block_id, 0)

    def pin(self, block_ids: Sequence[int]) -> None:
        super().pin(block_ids)
        self._use(block_ids)

    def unpin(self, block_ids: Sequence[int]) -> None:
        super().unpin(block_ids)
        self.give_up(block_ids)

    def free_share(self) -> float:
        return len(self.queue) / self.count

    def _use(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            if not self.used[block_id]:
                self.queue.remove(block_id)
            self.used[block_id] += 1

    def _release(self, block_id: int, place: int) -> None:
        self.used[block_id] -= 1
        assert self.used[block_id] >= 0, "freed more often than used"
        if not self.used[block_id]:
            self.queue.insert(place, block_id)


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
        self.suspects: set[BlockRef] = set()
        self.free = slots
        self.counters: Counter[str] = Counter()
        self.pins = Pins()
        self.handoffs: dict[HandoffId, AttachmentId] = {}  # open ones
        self.closed: list[HandoffId] = []
        self.heard = BlockNews()
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

    def suspect(self, refs: Iterable[BlockRef]) -> None:
        self.suspects.update(refs)

    def news(self) -> BlockNews:
        found, self.heard = self.heard, BlockNews()
        return found

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
            self.heard.answered[item.key] = True

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
        self,
        blocks: int,
        index: int = 0,
        *,
        fetched: int = 0,
        windows: Sequence[int] = (),
        admitted: bool = True,
        skipped_held: int | None = None,
    ) -> str:
        """Answer an acquire with this many promised blocks (at most what was asked), so many of each window group. The
        pool holds the first `skipped_held` of the blocks that the engine has (None: all of them)."""
        request_id, asked_of, request = self.asked.pop(index)
        tail_index = 0
        if request.tail_at is not None and blocks:  # one block, under one of the names that were asked for
            blocks, tail_index = 1, 1 + blocks % (len(request.keys) - 1)
        blocks = 0 if request_id in self.abandoned else min(blocks, len(request.keys) - request.skip)
        refs = tuple(BlockRef(slot_index(1, i), Generation(2)) for i in range(blocks))
        lease_id = LeaseId(next(self._ids) if blocks else 0)
        if blocks:
            self.leases[asked_of, lease_id] = blocks
        miss = MissReason.NONE if request.skip + blocks == len(request.keys) else MissReason.NEVER_STORED
        window_blocks = tuple(
            tuple(BlockRef(slot_index(1 + group, i), Generation(2)) for i in range(window))
            for group, window in enumerate(windows, 1)
        )
        held = request.skip if skipped_held is None else min(skipped_held, request.skip)
        result = AcquireResult(
            lease_id, refs, fetched, miss, window_blocks, admitted, held, tail_index=tail_index if blocks else 0
        )
        self._answers.append(AcquireAnswer(request_id, asked_of, result, request))
        return request_id

    def lose(self) -> None:
        self.attachment = None

    def attach(self, number: int, boot: int = 1) -> None:
        self.attachment = attachment(number, boot)


def half_of(kind: type[Half], line: Line, **options: Any) -> Half:
    """A scheduler half that asks this line, and pins there. `options` are its own."""
    usual = {"block_tokens": BLOCK, "worker_count": 1, "fetch_timeout_seconds": 2.0, "evicting_blocks": WINDOW}
    made = kind(line, keys_of, pool_info, **{**usual, **options})
    made.pin_with(line.pins)
    return made


half = partial(half_of, SchedulerHalf)


def half_with(
    line: Line, engine: EngineBlocks, offload: Offload = Offload.EAGER, kind: type[SchedulerHalf] = SchedulerHalf
) -> SchedulerHalf:
    """A scheduler half that looks into the engine's own cache."""
    made = half_of(kind, line, offload=offload)
    made.pin_with(engine)
    made.read_cache(engine)
    return made


def run_step(scheduler: SchedulerHalf, request: str, chain: Sequence[BlockHash], computed: int) -> StepPlan:
    return plan_step(scheduler, [(request, chain, computed, lambda: range(100, 100 + len(chain) + 1))])


def plan_step(scheduler: SchedulerHalf, scheduled: Sequence[Any] = (), preempted: Sequence[str] = ()) -> StepPlan:
    plan = StepPlan()
    scheduler.begin_step(plan, 0.0)
    scheduler.plan_stores(plan, scheduled, preempted)
    return plan


def report(plan: StepPlan, **outcome: int) -> StepReport:
    name = "failed" if outcome.get("failed") else "stored"
    return StepReport(**{name: {store.store_id: 1 for store in plan.stores}})  # type: ignore[arg-type]
