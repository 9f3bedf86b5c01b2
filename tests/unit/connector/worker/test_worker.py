"""Blocks between engine tensors of any layout and slots, and what the worker half refuses to load or store."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from kvservice.connector.options import DeferStores, Verify
from kvservice.connector.plan import CopyEntry, LoadPlan, PoolInfo, StepPlan, StorePlan
from kvservice.connector.worker import copier, half
from kvservice.connector.worker.block_copier import BlockCopier
from kvservice.connector.worker.copier import NO_DIGESTS, InlineCopier
from kvservice.connector.worker.half import MAP_AGAIN_SECONDS, WorkerHalf
from kvservice.copying.message import Direction
from kvservice.core.segment.digest import digest_payload
from kvservice.core.segment.geometry import Geometry, plan_geometry, slot_index
from kvservice.core.segment.header import SlotHeader
from kvservice.core.segment.layout import HeadShare, SlotLayout
from kvservice.core.segment.refs import BlockRef
from kvservice.errors import UnsupportedLayout
from kvservice.memory.liveness import claim
from kvservice.memory.segment import Segment
from kvservice.testing.unique import unique_name
from kvservice.units import BlockKey, BootEpoch, Generation, MiB, SlotIndex, SpanRoute

LAYERS, HEADS, TOKENS, WIDTH, BLOCKS = 3, 4, 16, 32, 6
LAYOUT = SlotLayout(LAYERS, HEADS, TOKENS * WIDTH * 2, TOKENS)
KEY = BlockKey(b"0123456789abcdef")
# Physical order of the dimensions (block, layer, head, token, width), outermost first.
ORDERS = {
    "LBHNC": ("l", "b", "h", "n", "c"),
    "LBNHC": ("l", "b", "n", "h", "c"),
    "BLHNC": ("b", "l", "h", "n", "c"),
    "BLNHC": ("b", "l", "n", "h", "c"),
    "LHBNC": ("l", "h", "b", "n", "c"),
}
SIZES = {"l": LAYERS, "b": BLOCKS, "h": HEADS, "n": TOKENS, "c": WIDTH}


def engine_tensors(order: tuple[str, ...], heads: int = HEADS) -> list[torch.Tensor]:
    """One logical [block, head, token, width] view a layer over one storage, in this physical order."""
    sizes = {**SIZES, "h": heads}
    backing = torch.randn([sizes[name] for name in order]).to(torch.bfloat16)
    logical = backing.permute([order.index(name) for name in "lbhnc"])
    return list(logical.unbind(0))


@pytest.fixture
def segment() -> Iterator[Segment]:
    path = Path(f"/dev/shm/kvservice-test{unique_name()}-n")
    made = Segment.create(path, plan_geometry(8 * MiB), "n")
    made.assign_slab(0, LAYOUT.payload_bytes)
    yield made
    made.close()
    made.unlink()


def info(segment: Segment) -> PoolInfo:
    return PoolInfo(str(segment.path), segment.geometry, BootEpoch(segment.epoch), LAYOUT, bytes(16))


def write_header(segment: Segment, slot: SlotIndex, generation: int, key: BlockKey = KEY) -> BlockRef:
    digest = digest_payload(segment.payload(slot, LAYOUT.payload_bytes), key)
    segment.write_header(
        slot,
        SlotHeader(
            BootEpoch(segment.epoch), Generation(generation), key, LAYOUT.payload_bytes, SpanRoute(0), digest, 0
        ),
    )
    return BlockRef(slot, Generation(generation))


def store(segment: Segment, worker: WorkerHalf, block: int, ref: BlockRef) -> bool:
    worker.start_loads(StepPlan(pool=info(segment)))
    worker.store(StepPlan(stores=[StorePlan(1, (CopyEntry(block, ref, KEY),))]))
    report = worker.take_report()
    assert report is not None
    return report.stored == {1: 1}


def load(segment: Segment, worker: WorkerHalf, ref: BlockRef, block: int) -> bool:
    plan = StepPlan(pool=info(segment), loads=[LoadPlan("r", (CopyEntry(block, ref, KEY),))])
    worker.start_loads(plan)
    loaded, failed = worker.take_loaded()
    assert loaded == {"r"}, "a load ends in the step that it was planned for, whatever its outcome"
    return not failed


@pytest.mark.parametrize("target", ORDERS)
@pytest.mark.parametrize("source", ["LBHNC", "BLNHC"])
def test_block_survives_a_slot_between_any_two_layouts(segment: Segment, source: str, target: str) -> None:
    one, other = engine_tensors(ORDERS[source]), engine_tensors(ORDERS[target])
    untouched = [layer.clone() for layer in other]
    writer = WorkerHalf(BlockCopier(one, range(HEADS)), Verify.FULL)
    reader = WorkerHalf(BlockCopier(other, range(HEADS)), Verify.FULL)
    slot = slot_index(0, 3)
    assert store(segment, writer, 2, write_header(segment, slot, 1))
    assert load(segment, reader, write_header(segment, slot, 2), 4)
    for layer in range(LAYERS):
        assert torch.equal(other[layer][4], one[layer][2])
        others = [block for block in range(BLOCKS) if block != 4]
        assert torch.equal(other[layer][others], untouched[layer][others]), "a neighbour was written"


@pytest.mark.parametrize("order", ORDERS)
def test_a_tail_is_stored_with_zeros_behind_it(segment: Segment, order: str) -> None:
    """Each rank zeroes behind its own heads, whatever the other has written so far."""
    whole = engine_tensors(ORDERS[order])
    ranks = [range(2), range(2, 4)]
    workers = [WorkerHalf(BlockCopier([t[:, r.start : r.stop] for t in whole], r), Verify.OFF) for r in ranks]
    ref = write_header(segment, slot_index(0, 3), 1)
    for worker in workers:
        worker.start_loads(StepPlan(pool=info(segment)))
        worker.store(StepPlan(stores=[StorePlan(1, (CopyEntry(2, ref, KEY, tokens=5),))]))
        report = worker.take_report()
        assert report is not None and report.stored == {1: 1}
    other = engine_tensors(ORDERS["LBHNC"])
    reader = WorkerHalf(BlockCopier(other, range(HEADS)), Verify.FULL)
    assert load(segment, reader, write_header(segment, slot_index(0, 3), 2), 4)
    for layer, there in zip(whole, other, strict=True):
        assert torch.equal(there[4, :, :5], layer[2, :, :5])
        assert not there[4, :, 5:].any(), "what other requests left in the block"


def test_a_tail_of_unknown_bytes_is_not_stored(segment: Segment) -> None:
    """Where nobody knows which bytes are behind it, it may hold what others left."""
    layers = engine_tensors(ORDERS["LBHNC"])
    nobody = torch.empty(0, dtype=torch.int64)
    worker = WorkerHalf(BlockCopier(layers, range(HEADS), token_of=nobody), Verify.OFF)
    worker.start_loads(StepPlan(pool=info(segment)))
    ref = write_header(segment, slot_index(0, 3), 1)
    worker.store(StepPlan(stores=[StorePlan(1, (CopyEntry(2, ref, KEY, tokens=5),))]))
    report = worker.take_report()
    assert report is not None and not report.stored and report.failed == {1: 1}
    assert report.counters["store_tail_not_blanked"] == 1


def test_slot_of_another_size_is_not_written(segment: Segment) -> None:
    worker = WorkerHalf(BlockCopier(engine_tensors(ORDERS["LBHNC"]), range(HEADS)), Verify.OFF)
    slot, before = slot_index(0, 0), bytes(segment.payload(slot_index(0, 0), LAYOUT.payload_bytes))
    small = SlotHeader(
        BootEpoch(segment.epoch), Generation(1), KEY, LAYOUT.payload_bytes - 64, SpanRoute(0), digest=0, position=0
    )
    segment.write_header(slot, small)
    assert not store(segment, worker, 0, BlockRef(slot, Generation(1)))
    assert bytes(segment.payload(slot, LAYOUT.payload_bytes)) == before


def test_slot_holds_layer_then_head_then_cell(segment: Segment) -> None:
    """It does so whatever the engine's layout is."""
    layers = engine_tensors(ORDERS["LBNHC"])
    worker = WorkerHalf(BlockCopier(layers, range(HEADS)), Verify.OFF)
    slot = slot_index(0, 0)
    assert store(segment, worker, 5, write_header(segment, slot, 1))
    expected = torch.stack([layer[5] for layer in layers]).contiguous().view(torch.uint8).numpy().tobytes()
    assert bytes(segment.payload(slot, LAYOUT.payload_bytes)) == expected


def test_block_in_smaller_kernel_blocks_is_the_same_slot(segment: Segment) -> None:
    whole = engine_tensors(ORDERS["LBNHC"])
    split = [torch.randn(BLOCKS, 2, HEADS, TOKENS // 2, WIDTH).to(torch.bfloat16) for _ in range(LAYERS)]
    slot = slot_index(0, 1)
    writer = WorkerHalf(BlockCopier(whole, range(HEADS)), Verify.OFF)
    assert store(segment, writer, 0, write_header(segment, slot, 1))
    reader = WorkerHalf(BlockCopier(split, range(HEADS)), Verify.FULL)
    assert load(segment, reader, write_header(segment, slot, 2), 5)
    for layer in range(LAYERS):
        assert torch.equal(torch.cat([split[layer][5][0], split[layer][5][1]], dim=1), whole[layer][0])


def test_layers_in_tensors_of_their_own_are_copied_one_by_one(segment: Segment) -> None:
    one = [layer.clone() for layer in engine_tensors(ORDERS["LBHNC"])]
    other = [layer.clone() for layer in engine_tensors(ORDERS["LBHNC"])]
    slot = slot_index(0, 1)
    assert store(segment, WorkerHalf(BlockCopier(one, range(HEADS)), Verify.OFF), 0, write_header(segment, slot, 1))
    reader = WorkerHalf(BlockCopier(other, range(HEADS)), Verify.FULL)
    assert load(segment, reader, write_header(segment, slot, 2), 1)
    assert all(torch.equal(a[0], b[1]) for a, b in zip(one, other, strict=True))


def test_block_of_two_ranks_is_read_by_one(segment: Segment) -> None:
    """The other way round holds as well."""
    whole = engine_tensors(ORDERS["LBHNC"])
    halves = [[layer[:, part].clone() for layer in whole] for part in (slice(0, 2), slice(2, 4))]
    slot = slot_index(0, 2)
    ref = write_header(segment, slot, 1)
    for rank, tensors in enumerate(halves):
        assert store(segment, WorkerHalf(BlockCopier(tensors, range(rank * 2, rank * 2 + 2)), Verify.OFF), 1, ref)
    target = engine_tensors(ORDERS["BLHNC"])
    sealed = write_header(segment, slot, 2)
    assert load(segment, WorkerHalf(BlockCopier(target, range(HEADS)), Verify.FULL), sealed, 0)
    assert all(torch.equal(target[i][0], whole[i][1]) for i in range(LAYERS))
    second = engine_tensors(ORDERS["LBHNC"], heads=2)
    assert load(segment, WorkerHalf(BlockCopier(second, range(2, 4)), Verify.FULL), sealed, 3)
    assert all(torch.equal(second[i][3], whole[i][1][2:4]) for i in range(LAYERS))


@pytest.mark.parametrize("change", ["generation", "key", "epoch", "no header"])
def test_slot_that_is_not_what_was_promised_fails_the_load(segment: Segment, change: str) -> None:
    worker = WorkerHalf(BlockCopier(engine_tensors(ORDERS["LBHNC"]), range(HEADS)), Verify.OFF)
    slot = slot_index(0, 0)
    ref = write_header(segment, slot, 2)
    if change == "generation":
        write_header(segment, slot, 4)
    elif change == "key":
        write_header(segment, slot, 2, BlockKey(b"another block..."))
    elif change == "epoch":
        segment.epoch = BootEpoch(segment.epoch + 1)
        write_header(segment, slot, 2)
        segment.epoch = BootEpoch(segment.epoch - 1)
    else:
        segment.clear_header(slot)
    assert not load(segment, worker, ref, 0)
    report = worker.take_report()
    assert report is not None
    assert report.counters["load_stale"] == 1


class HandTicket:
    def __init__(self, copy: Callable[[], object]) -> None:
        self.copy = copy
        self.done = False
        self.copied = True
        self.borrowed = 0
        self.digests = NO_DIGESTS

    def succeeded(self) -> bool:
        return self.copied

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        if not self.done:
            self.copy()
        self.done = True


class HandCopier(InlineCopier):
    """Copies run when the test says so, as on a device with a queue of its own."""

    def __init__(self, block_copier: BlockCopier) -> None:
        super().__init__(block_copier)
        self.started: list[HandTicket] = []
        self.memory: torch.Tensor | None = None

    def adopt(self, memory: torch.Tensor, pool: PoolInfo) -> None:
        super().adopt(memory, pool)
        self.memory = memory

    def release(self) -> None:
        assert all(ticket.done for ticket in self.started), "unmapped under a copy"
        self.memory = None

    def run(self, direction: Direction, entries: Sequence[CopyEntry], *, may_borrow: bool = False) -> HandTicket:
        self.started.append(HandTicket(partial(super().run, direction, entries)))
        return self.started[-1]

    def finish(self) -> None:
        for ticket in self.started:
            ticket.synchronize()


def test_nothing_is_reported_before_its_copies_have_ended(segment: Segment) -> None:
    block_copier = BlockCopier(engine_tensors(ORDERS["LBHNC"]), range(HEADS))
    copier = HandCopier(block_copier)
    worker = WorkerHalf(block_copier, Verify.FULL, copier)
    source, target = slot_index(0, 0), slot_index(0, 1)
    segment.payload(source, LAYOUT.payload_bytes)[:] = bytes(range(256)) * (LAYOUT.payload_bytes // 256)
    loading, storing = write_header(segment, source, 2), write_header(segment, target, 1)
    plan = StepPlan(
        info(segment),
        [LoadPlan("r", (CopyEntry(4, loading, KEY),))],
        [StorePlan(7, (CopyEntry(4, storing, KEY),))],
    )
    assert worker.start_loads(plan) == {"r"}
    assert worker.store(plan) == {7}
    assert worker.take_loaded() == (set(), set())
    assert worker.take_report() is None
    copier.finish()
    assert worker.take_loaded() == ({"r"}, set())
    report = worker.take_report()
    assert report is not None
    assert report.stored == {7: 1}
    assert bytes(segment.payload(target, LAYOUT.payload_bytes)) == bytes(segment.payload(source, LAYOUT.payload_bytes))
    assert worker.take_loaded() == (set(), set()), "said once"


def test_slot_that_changed_before_a_copy_ended_fails_the_load(segment: Segment) -> None:
    block_copier = BlockCopier(engine_tensors(ORDERS["LBHNC"]), range(HEADS))
    copier = HandCopier(block_copier)
    worker = WorkerHalf(block_copier, Verify.OFF, copier)
    slot = slot_index(0, 0)
    ref = write_header(segment, slot, 2)
    worker.start_loads(StepPlan(info(segment), [LoadPlan("r", (CopyEntry(0, ref, KEY),))]))
    write_header(segment, slot, 4)
    copier.finish()
    assert worker.take_loaded() == ({"r"}, {"r"})
    report = worker.take_report()
    assert report is not None
    assert report.suspects == {ref}


def test_memory_is_unmapped_only_after_the_copies_under_way(segment: Segment) -> None:
    block_copier = BlockCopier(engine_tensors(ORDERS["LBHNC"]), range(HEADS))
    copier = HandCopier(block_copier)
    worker = WorkerHalf(block_copier, Verify.OFF, copier)
    ref = write_header(segment, slot_index(0, 0), 2)
    worker.start_loads(StepPlan(info(segment), [LoadPlan("r", (CopyEntry(0, ref, KEY),))]))
    worker.start_loads(
        StepPlan(PoolInfo("/dev/shm/kvservice-test-gone", segment.geometry, BootEpoch(9), LAYOUT, bytes(16)))
    )
    assert copier.memory is None
    assert worker.take_loaded() == ({"r"}, set()), "what had ended before is still said"


def test_copies_that_failed_are_a_failed_load_and_a_failed_store(segment: Segment) -> None:
    block_copier = BlockCopier(engine_tensors(ORDERS["LBHNC"]), range(HEADS))
    copier = HandCopier(block_copier)
    worker = WorkerHalf(block_copier, Verify.OFF, copier)
    loading, storing = write_header(segment, slot_index(0, 0), 2), write_header(segment, slot_index(0, 1), 1)
    loads, stores = [LoadPlan("r", (CopyEntry(0, loading, KEY),))], [StorePlan(7, (CopyEntry(0, storing, KEY),))]
    worker.start_loads(StepPlan(info(segment), loads, stores))
    worker.store(StepPlan(info(segment), loads, stores))
    copier.finish()
    for ticket in copier.started:
        ticket.copied = False
    assert worker.take_loaded() == ({"r"}, {"r"})
    report = worker.take_report()
    assert report is not None
    assert (report.stored, report.failed) == ({}, {7: 1})


def test_plan_that_raises_leaves_others_their_answers(segment: Segment) -> None:
    block_copier = BlockCopier(engine_tensors(ORDERS["LBHNC"]), range(HEADS))
    copier = HandCopier(block_copier)
    worker = WorkerHalf(block_copier, Verify.OFF, copier)
    loading, storing = write_header(segment, slot_index(0, 0), 2), write_header(segment, slot_index(0, 1), 1)
    nonsense = CopyEntry(0, None, KEY)  # type: ignore[arg-type]
    loads = [LoadPlan("a", (CopyEntry(0, loading, KEY),)), LoadPlan("b", (nonsense,))]
    stores = [StorePlan(1, (CopyEntry(1, storing, KEY),)), StorePlan(2, (nonsense,))]
    assert worker.start_loads(StepPlan(info(segment), loads, stores)) == {"a", "b"}
    assert worker.store(StepPlan(info(segment), loads, stores)) == {1, 2}
    assert worker.take_loaded() == ({"b"}, {"b"}), "a is still under way"
    copier.finish()
    assert worker.take_loaded() == ({"a"}, set())
    report = worker.take_report()
    assert report is not None
    assert (report.stored, report.failed) == ({1: 1}, {2: 1})


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("heads", [range(HEADS), range(1, 3)])
def test_staged_copies_put_the_same_bytes_in_the_same_places(segment: Segment, order: str, heads: range) -> None:
    source, target = (engine_tensors(ORDERS[order], len(heads)) for _ in range(2))
    before = (bytes(range(251)) * (LAYOUT.payload_bytes // 251 + 1))[: LAYOUT.payload_bytes]
    found: list[bytes] = []
    for staged in (False, True):
        slot = slot_index(0, int(staged))
        segment.payload(slot, LAYOUT.payload_bytes)[:] = before
        block_copier = BlockCopier(source, heads, staged=staged)
        block_copier.bind(segment.buffer, LAYOUT)
        block_copier.store(3, segment.geometry.payload_offset(slot, LAYOUT.payload_bytes))
        block_copier.unbind()
        found.append(bytes(segment.payload(slot, LAYOUT.payload_bytes)))
    assert found[0] == found[1] != before
    block_copier = BlockCopier(target, heads, staged=True)
    block_copier.bind(segment.buffer, LAYOUT)
    block_copier.load(segment.geometry.payload_offset(slot_index(0, 0), LAYOUT.payload_bytes), 2)
    block_copier.unbind()
    for one, other in zip(source, target, strict=True):
        assert torch.equal(one[3], other[2])


def test_slot_that_changes_while_it_is_copied_fails_the_load(segment: Segment) -> None:
    class Slow(BlockCopier):
        def load(self, payload_offset: int, block_id: int, part: int = 0) -> None:
            super().load(payload_offset, block_id, part)
            write_header(segment, slot, 4)

    slot = slot_index(0, 0)
    slow = Slow(engine_tensors(ORDERS["LBHNC"]), range(HEADS))
    worker = WorkerHalf(slow, Verify.OFF, InlineCopier(slow))
    assert not load(segment, worker, write_header(segment, slot, 2), 0)


def test_one_flipped_bit_fails_a_verified_load(segment: Segment) -> None:
    worker = WorkerHalf(BlockCopier(engine_tensors(ORDERS["LBHNC"]), range(HEADS)), Verify.FULL)
    slot = slot_index(0, 0)
    ref = write_header(segment, slot, 2)
    assert load(segment, worker, ref, 0)
    segment.payload(slot, LAYOUT.payload_bytes)[1234] ^= 1
    assert not load(segment, worker, ref, 0)


@pytest.mark.parametrize(
    ("verify", "one_pass", "looked_at"),
    [
        (Verify.SAMPLED, True, 32),
        (Verify.SAMPLED, False, 2),
        (Verify.FULL, True, 32),
        (Verify.FULL, False, 32),
        (Verify.OFF, True, 0),
        (Verify.OFF, False, 0),
    ],
)
def test_a_digest_that_costs_nothing_is_always_looked_at(
    segment: Segment, monkeypatch: pytest.MonkeyPatch, verify: Verify, one_pass: bool, looked_at: int
) -> None:
    """By default. Where it is another pass over the bytes, one block in sixteen is looked at."""
    monkeypatch.setattr(copier, "in_one_pass", lambda: one_pass)
    worker = WorkerHalf(BlockCopier(engine_tensors(ORDERS["LBHNC"]), range(HEADS)), verify)
    ref = write_header(segment, slot_index(0, 0), 2)
    for _ in range(32):
        assert load(segment, worker, ref, 0)
    report = worker.take_report()
    assert report is not None
    assert report.counters.get("load_verified_blocks", 0) == looked_at


def test_one_flipped_bit_fails_every_load_by_default(segment: Segment) -> None:
    worker = WorkerHalf(BlockCopier(engine_tensors(ORDERS["LBHNC"]), range(HEADS)), Verify.SAMPLED)
    ref = write_header(segment, slot_index(0, 0), 2)
    segment.payload(slot_index(0, 0), LAYOUT.payload_bytes)[77] ^= 1
    assert not any(load(segment, worker, ref, 0) for _ in range(3))
    report = worker.take_report()
    assert report is not None and report.counters["load_corrupt"] == 3 and report.suspects == {ref}


def test_nothing_is_written_into_a_slot_not_reserved_for_it(segment: Segment) -> None:
    worker = WorkerHalf(BlockCopier(engine_tensors(ORDERS["LBHNC"]), range(HEADS)), Verify.OFF)
    slot = slot_index(0, 0)
    before = bytes(segment.payload(slot, LAYOUT.payload_bytes))
    ref = write_header(segment, slot, 1)
    write_header(segment, slot, 3)  # given to somebody else meanwhile
    assert not store(segment, worker, 0, ref)
    assert bytes(segment.payload(slot, LAYOUT.payload_bytes)) == before


def test_restarted_shard_gets_no_late_writes(segment: Segment) -> None:
    worker = WorkerHalf(BlockCopier(engine_tensors(ORDERS["LBHNC"]), range(HEADS)), Verify.OFF)
    ref = write_header(segment, slot_index(0, 0), 1)
    worker.start_loads(StepPlan(pool=info(segment)))
    segment.epoch = BootEpoch(segment.epoch + 1)
    segment.write_control("n")
    worker.store(StepPlan(stores=[StorePlan(1, (CopyEntry(0, ref, KEY),))]))
    report = worker.take_report()
    assert report is not None
    assert report.failed == {1: 1}


@pytest.mark.parametrize("what", ["retired", "another boot"])
def test_memory_of_a_gone_shard_is_let_go_at_the_next_step(segment: Segment, what: str) -> None:
    """A new segment may not fit beside it, and what it kept from being reused is free again."""
    worker = WorkerHalf(BlockCopier(engine_tensors(ORDERS["LBHNC"]), range(HEADS)), Verify.OFF)
    assert store(segment, worker, 0, write_header(segment, slot_index(0, 0), 1))
    with claim(segment, bytes(16)) as is_free:
        assert not is_free
    if what == "retired":
        segment.retire()
    else:
        segment.epoch = BootEpoch(segment.epoch + 1)
        segment.write_control("n")
    worker.start_loads(StepPlan())
    with claim(segment, bytes(16)) as is_free:
        assert is_free
    mapped = Path("/proc/self/maps").read_text().count(str(segment.path))
    assert mapped == 1, "the shard's own mapping only"


def test_memory_that_cannot_be_mapped_fails_every_copy(segment: Segment, caplog: pytest.LogCaptureFixture) -> None:
    """This is said once."""
    worker = WorkerHalf(BlockCopier(engine_tensors(ORDERS["LBHNC"]), range(HEADS)), Verify.OFF)
    gone = PoolInfo("/dev/shm/kvservice-test-gone", segment.geometry, BootEpoch(1), LAYOUT, bytes(16))
    ref = BlockRef(slot_index(0, 0), Generation(2))
    for _ in range(3):
        worker.start_loads(StepPlan(pool=gone, loads=[LoadPlan("r", (CopyEntry(0, ref, KEY),))]))
        assert worker.take_loaded() == ({"r"}, {"r"})
    assert len([record for record in caplog.records if "map" in record.message]) == 1


def test_slot_and_tensors_that_differ_are_refused_by_number() -> None:
    block_copier = BlockCopier(engine_tensors(ORDERS["LBHNC"]), range(HEADS))
    smaller = SlotLayout(LAYERS - 1, HEADS, LAYOUT.cell_bytes, TOKENS)
    with pytest.raises(UnsupportedLayout, match=r"3, 4, 1024.*2, 4, 1024"):
        block_copier.bind(memoryview(bytearray(16)), smaller)


def test_tensors_that_are_not_alike_are_refused() -> None:
    with pytest.raises(UnsupportedLayout, match="alike"):
        BlockCopier([torch.zeros(2, 2, 2, 2), torch.zeros(2, 2, 2, 4)], range(2))


def test_ranks_with_the_same_heads_write_each_block_once(segment: Segment) -> None:
    """All of them report it."""
    ranks = []
    for replica in range(3):
        layers = engine_tensors(ORDERS["LBNHC"])
        for layer in layers:
            layer[2].fill_(replica)
        share = HeadShare(range(HEADS), replica, 3)
        ranks.append(WorkerHalf(BlockCopier(layers, share.heads), Verify.OFF, share=share))
    for index in range(6):
        ref = write_header(segment, slot_index(0, index), 1)
        assert [store(segment, rank, 2, ref) for rank in ranks] == [True] * 3
    written = [
        torch.frombuffer(bytearray(segment.payload(slot_index(0, index), LAYOUT.payload_bytes)), dtype=torch.bfloat16)
        for index in range(6)
    ]
    assert [set(values.tolist()) for values in written] == [{0.0}, {1.0}, {2.0}] * 2


# -- deferred stores ----


def deferring(choice: DeferStores = DeferStores.ON) -> WorkerHalf:
    return WorkerHalf(BlockCopier(engine_tensors(ORDERS["LBHNC"]), range(HEADS)), Verify.OFF, defer_stores=choice)


def store_of_two(segment: Segment, worker: WorkerHalf) -> set[int]:
    """Step k: plan a store of two blocks. Returns the ids that the worker took on."""
    entries = tuple(CopyEntry(block, write_header(segment, slot_index(0, block), 1), KEY) for block in (1, 2))
    plan = StepPlan(pool=info(segment), stores=[StorePlan(7, entries)])
    worker.start_loads(plan)
    return worker.store(plan)


@pytest.mark.parametrize("choice", [DeferStores.ON, DeferStores.AUTO])
def test_deferred_store_is_copied_at_the_start_of_the_next_step(segment: Segment, choice: DeferStores) -> None:
    """So the tokens of its own step are sampled and sent before its copies run."""
    worker = deferring(choice)
    before = bytes(segment.payload(slot_index(0, 1), LAYOUT.payload_bytes))
    assert store_of_two(segment, worker) == {7}
    assert worker.take_report() is None
    assert bytes(segment.payload(slot_index(0, 1), LAYOUT.payload_bytes)) == before, "nothing is copied in its step"
    worker.start_loads(StepPlan(pool=info(segment)))
    report = worker.take_report()
    assert report is not None
    assert report.stored == {7: 1}
    assert report.counters["copied_blocks"] == 2


def test_store_that_is_not_deferred_is_copied_in_its_step(segment: Segment) -> None:
    worker = deferring(DeferStores.OFF)
    store_of_two(segment, worker)
    report = worker.take_report()
    assert report is not None
    assert report.counters["copied_blocks"] == 2


def test_deferred_store_of_a_pool_that_went_is_reported_failed(segment: Segment) -> None:
    worker = deferring()
    store_of_two(segment, worker)
    segment.retire()
    worker.start_loads(StepPlan())
    report = worker.take_report()
    assert report is not None
    assert report.failed == {7: 1}


def test_copies_that_leave_the_engines_thread_are_not_deferred() -> None:
    """`auto` is for copies that the engine would wait for."""

    class Elsewhere(InlineCopier):
        is_inline = False

    copiers = BlockCopier(engine_tensors(ORDERS["LBHNC"]), range(HEADS))
    worker = WorkerHalf(copiers, Verify.OFF, Elsewhere(copiers), defer_stores=DeferStores.AUTO)
    assert not worker._defers


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "no descriptor"), RuntimeError("can't start new thread")])
def test_a_pool_that_could_not_be_mapped_is_tried_again(
    segment: Segment, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """No free descriptor, for example, is a matter of a moment."""
    tensors, real, tries = engine_tensors(ORDERS["LBHNC"]), Segment.attach, list[Path]()
    worker = WorkerHalf(BlockCopier(tensors, range(HEADS)), Verify.FULL)

    def attach(path: Path, geometry: Geometry) -> Segment:
        tries.append(path)
        if len(tries) == 1:
            raise error
        return real(path, geometry)

    monkeypatch.setattr(Segment, "attach", attach)
    now = 100.0
    monkeypatch.setattr(half.time, "monotonic", lambda: now)
    ref = write_header(segment, slot_index(0, 0), 2)
    assert [load(segment, worker, ref, 0) for _ in range(2)] == [False, False] and len(tries) == 1
    now += MAP_AGAIN_SECONDS
    assert [load(segment, worker, ref, 0) for _ in range(2)] == [True, True]
    assert len(tries) == 2
    worker.close()
