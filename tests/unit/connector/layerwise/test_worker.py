"""Layers in order, two ahead and not more; a load that is not sound in the end is never named as such. Real copies."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from kvservice.connector.layerwise.copies import BlockRun, CudaLayers, HostLayers, runs_of
from kvservice.connector.layerwise.lanes import LAYERS_AHEAD
from kvservice.connector.layerwise.worker import LayerwiseWorker
from kvservice.connector.options import Verify
from kvservice.connector.plan import CopyEntry, LoadPlan, StepPlan, StepReport, StorePlan
from kvservice.connector.worker.block_copier import BlockCopier
from kvservice.connector.worker.copier import InlineCopier
from kvservice.copying.message import Direction
from kvservice.core.segment.geometry import slot_index
from kvservice.core.segment.layout import HeadShare
from kvservice.core.segment.refs import BlockRef
from kvservice.memory.liveness import claim
from kvservice.memory.segment import Segment
from kvservice.testing.eventually import eventually
from tests.unit.connector.worker.test_worker import (
    BLOCKS,
    HEADS,
    KEY,
    LAYERS,
    LAYOUT,
    ORDERS,
    engine_tensors,
    info,
    segment,
    write_header,
)

__all__ = ["segment"]  # a fixture
NAMES = [f"layer.{index}" for index in range(LAYERS)]


@pytest.fixture
def started() -> Iterator[list[LayerwiseWorker]]:
    """Workers to close."""
    workers: list[LayerwiseWorker] = []
    yield workers
    for worker in workers:
        worker.close()


def worker_of(
    started: list[LayerwiseWorker], tensors: list[torch.Tensor], heads: range = range(HEADS)
) -> LayerwiseWorker:
    block_copier = BlockCopier(tensors, heads)
    names = [f"layer.{index}" for index in range(len(tensors))]
    made = LayerwiseWorker(block_copier, Verify.FULL, InlineCopier(block_copier), HeadShare(heads), names, save=True)
    started.append(made)
    return made


def save(
    segment: Segment, worker: LayerwiseWorker, entries: Sequence[CopyEntry], layers: Sequence[str] = NAMES
) -> None:
    """A step whose forward writes these layers, and after it whatever is left."""
    plan = StepPlan(pool=info(segment), stores=[StorePlan(1, tuple(entries))])
    for name in layers:
        worker.begin_layer(name)
        worker.end_layer(name, plan)
    worker.start_loads(plan)
    assert worker.store(plan) == {1}


def outcome(worker: LayerwiseWorker) -> bool:
    """Waits for the store's report."""

    def ended() -> StepReport | None:
        report = worker.take_report()
        return report if report is not None and (report.stored or report.failed) else None

    return bool(eventually(ended, "the report of the store").stored)


def load_plan(segment: Segment, *loads: LoadPlan) -> StepPlan:
    return StepPlan(pool=info(segment), loads=list(loads))


def layered(request: str, *entries: CopyEntry) -> LoadPlan:
    return LoadPlan(request, entries, layered=True)


def written(segment: Segment, count: int) -> list[BlockRef]:
    """Sealed slots with random bytes."""
    refs = []
    for index in range(count):
        slot = slot_index(0, index)
        payload = torch.randn(LAYOUT.payload_bytes // 2).to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
        segment.payload(slot, LAYOUT.payload_bytes)[:] = payload
        refs.append(write_header(segment, slot, 2))
    return refs


def whole_load(segment: Segment, refs: Sequence[BlockRef], order: str) -> list[torch.Tensor]:
    """What a load of whole blocks makes of them, block i from slot i."""
    tensors = [torch.zeros_like(layer) for layer in engine_tensors(ORDERS["LBHNC"])]
    block_copier = BlockCopier(tensors, range(HEADS))
    block_copier.bind(segment.buffer, LAYOUT)
    for block, ref in enumerate(refs):
        block_copier.load(segment.geometry.payload_offset(ref.slot, LAYOUT.payload_bytes), block)
    block_copier.unbind()
    return tensors


def watch(monkeypatch: pytest.MonkeyPatch, before: Callable[[Direction, int], None]) -> None:
    unpatched = HostLayers.copy

    def copy(self: HostLayers, direction: Direction, layer: int, runs: Sequence[BlockRun]) -> None:
        before(direction, layer)
        unpatched(self, direction, layer, runs)

    monkeypatch.setattr(HostLayers, "copy", copy)


@pytest.mark.parametrize("order", ORDERS)
def test_layered_copies_move_the_same_bytes_as_whole_blocks(
    segment: Segment, started: list[LayerwiseWorker], order: str
) -> None:
    refs = written(segment, 4)
    tensors = engine_tensors(ORDERS[order])
    untouched = [layer[4:].clone() for layer in tensors]
    worker = worker_of(started, tensors)
    # Blocks 0 and 1 lie as their slots do, 2 and 3 the other way round.
    entries = [CopyEntry(block, refs[slot], KEY) for block, slot in ((0, 0), (1, 1), (3, 2), (2, 3))]
    worker.start_loads(load_plan(segment, layered("r", *entries)))
    wanted = whole_load(segment, [refs[0], refs[1], refs[3], refs[2]], order)
    for index, name in enumerate(NAMES):
        worker.begin_layer(name)
        assert torch.equal(tensors[index][:4], wanted[index][:4]), "a layer is there when the forward reads it"
    assert worker.end_layered() == {"r"}
    assert all(torch.equal(tensors[i][4:], untouched[i]) for i in range(LAYERS)), "a neighbour was written"
    back = [CopyEntry(block, write_header(segment, slot_index(0, 4 + block), 3), KEY) for block in range(4)]
    save(segment, worker, back)
    assert outcome(worker)
    for block, slot in enumerate((0, 1, 3, 2)):
        saved = segment.payload(slot_index(0, 4 + block), LAYOUT.payload_bytes)
        assert bytes(saved) == bytes(segment.payload(refs[slot].slot, LAYOUT.payload_bytes))


def test_ranks_with_half_of_the_heads_each_load_their_half(segment: Segment, started: list[LayerwiseWorker]) -> None:
    refs = written(segment, 2)
    wanted = whole_load(segment, refs, "LBHNC")
    entries = [CopyEntry(block, ref, KEY) for block, ref in enumerate(refs)]
    for heads in (range(2), range(2, 4)):
        tensors = engine_tensors(ORDERS["LBNHC"], heads=2)
        worker = worker_of(started, tensors, heads)
        worker.start_loads(load_plan(segment, layered("r", *entries)))
        for name in NAMES:
            worker.begin_layer(name)
        assert worker.end_layered() == {"r"}
        for layer in range(LAYERS):
            assert torch.equal(tensors[layer][:2], wanted[layer][:2, heads.start : heads.stop])


def test_neighbouring_blocks_are_one_copy_a_layer(segment: Segment) -> None:
    entries = [
        CopyEntry(block, BlockRef(slot_index(0, slot), written(segment, 1)[0].generation), KEY)
        for block, slot in ((1, 4), (2, 5), (3, 6), (5, 7), (4, 2), (3, 1))
    ]
    assert [(run.block, run.count) for run in runs_of(entries, info(segment))] == [(1, 3), (5, 1), (4, 1), (3, 1)]


def test_layers_are_copied_in_order_two_ahead_and_not_more(
    segment: Segment, started: list[LayerwiseWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = [torch.zeros(BLOCKS, HEADS, 16, 32, dtype=torch.bfloat16) for _ in range(LAYERS)]
    (ref,) = written(segment, 1)
    order: list[int] = []
    watch(monkeypatch, lambda direction, layer: order.append(layer))
    worker = worker_of(started, tensors)
    worker.start_loads(load_plan(segment, layered("r", CopyEntry(0, ref, KEY))))
    time.sleep(0.1)
    assert order == list(range(LAYERS_AHEAD)), "without a forward only the first layers are copied"
    for index, name in enumerate(NAMES):
        worker.begin_layer(name)
        time.sleep(0.05)
        assert order == list(range(min(index + 1 + LAYERS_AHEAD, LAYERS)))
    assert worker.end_layered() == {"r"}


def test_forward_waits_for_a_slow_layer(
    segment: Segment, started: list[LayerwiseWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = engine_tensors(ORDERS["LBHNC"])
    (ref,) = written(segment, 1)
    wanted = whole_load(segment, [ref], "LBHNC")
    watch(monkeypatch, lambda direction, layer: time.sleep(0.05))
    worker = worker_of(started, tensors)
    worker.start_loads(load_plan(segment, layered("r", CopyEntry(0, ref, KEY))))
    for index, name in enumerate(NAMES):
        worker.begin_layer(name)
        assert torch.equal(tensors[index][0], wanted[index][0])
    assert worker.end_layered() == {"r"}


def test_copy_that_fails_midway_fails_only_its_request(
    segment: Segment, started: list[LayerwiseWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds up nobody."""
    refs = written(segment, 2)
    unpatched = HostLayers.copy

    def copy(self: HostLayers, direction: Direction, layer: int, runs: Sequence[BlockRun]) -> None:
        if layer == 1 and runs[0].block == 3:
            raise ValueError("planted")
        unpatched(self, direction, layer, runs)

    monkeypatch.setattr(HostLayers, "copy", copy)
    worker = worker_of(started, engine_tensors(ORDERS["LBHNC"]))
    bad, good = layered("bad", CopyEntry(3, refs[0], KEY)), layered("good", CopyEntry(0, refs[1], KEY))
    worker.start_loads(load_plan(segment, bad, good))
    for name in NAMES:
        worker.begin_layer(name)
    assert worker.end_layered() == {"good"}


@pytest.mark.parametrize("when", ["before", "during"])
@pytest.mark.parametrize("what", ["generation", "bytes"])
def test_slot_that_is_not_what_was_promised_is_never_named_sound(
    segment: Segment, started: list[LayerwiseWorker], what: str, when: str
) -> None:
    refs = written(segment, 2)

    def spoil() -> None:
        if what == "generation":
            write_header(segment, refs[0].slot, 4)
        else:
            segment.payload(refs[0].slot, LAYOUT.payload_bytes)[-5] ^= 1

    worker = worker_of(started, engine_tensors(ORDERS["LBHNC"]))
    bad, good = layered("bad", CopyEntry(3, refs[0], KEY)), layered("good", CopyEntry(0, refs[1], KEY))
    if when == "before":
        spoil()
    worker.start_loads(load_plan(segment, bad, good))
    for index, name in enumerate(NAMES):
        worker.begin_layer(name)
        if when == "during" and index == LAYERS - 1:
            spoil()
    assert worker.end_layered() == {"good"}
    report = worker.take_report()
    assert report is not None and report.suspects == {refs[0]}


def test_forward_that_skipped_a_wait_is_not_believed(segment: Segment, started: list[LayerwiseWorker]) -> None:
    (ref,) = written(segment, 1)
    worker = worker_of(started, engine_tensors(ORDERS["LBHNC"]))
    worker.start_loads(load_plan(segment, layered("r", CopyEntry(0, ref, KEY))))
    for name in NAMES[:-1]:
        worker.begin_layer(name)
    assert worker.end_layered() == set()
    worker.start_loads(load_plan(segment, layered("r", CopyEntry(0, ref, KEY))))  # e.g. replayed from a full CUDA graph
    assert worker.end_layered() == set()
    assert worker.end_layered() == set(), "nothing is left of an earlier step"


def test_load_whose_copies_never_ran_is_not_believed(segment: Segment, started: list[LayerwiseWorker]) -> None:
    """The lane takes no loads while it has those of a forward whose end it was not told of."""
    refs = written(segment, 2)
    worker = worker_of(started, engine_tensors(ORDERS["LBHNC"]))
    for request, block in (("a", 0), ("b", 1)):
        worker.start_loads(load_plan(segment, layered(request, CopyEntry(block, refs[block], KEY))))
        for name in NAMES:
            worker.begin_layer(name)
    assert worker.end_layered() == {"a"}


def test_store_without_a_thread_fails_and_writes_nothing_later(
    segment: Segment, started: list[LayerwiseWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine may have no thread left. Such a store ended never, and the engine's end waited for it."""
    tensors, refs = engine_tensors(ORDERS["LBHNC"]), written(segment, 2)
    worker = worker_of(started, tensors)

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    failed = [CopyEntry(2, write_header(segment, slot_index(0, 2), 1), KEY)]
    plan = StepPlan(pool=info(segment), stores=[StorePlan(1, tuple(failed))])
    worker.start_loads(plan)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        for call in (lambda: worker.end_layer(NAMES[0], plan), lambda: worker.store(plan)):
            with pytest.raises(RuntimeError):
                call()
        worker.start_loads(load_plan(segment, layered("r", CopyEntry(0, refs[0], KEY))))
        for name in NAMES:
            worker.begin_layer(name)
        assert not worker.end_layered()
    before = bytes(segment.payload(failed[0].ref.slot, LAYOUT.payload_bytes))
    save(segment, worker, [CopyEntry(3, write_header(segment, slot_index(0, 3), 1), KEY)])
    assert outcome(worker)
    assert bytes(segment.payload(failed[0].ref.slot, LAYOUT.payload_bytes)) == before


def test_layer_is_saved_while_the_next_is_computed(
    segment: Segment, started: list[LayerwiseWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[int] = []
    watch(monkeypatch, lambda direction, layer: saved.append(layer))
    tensors = engine_tensors(ORDERS["LBNHC"])
    worker = worker_of(started, tensors)
    ref = write_header(segment, slot_index(0, 0), 1)
    plan = StepPlan(pool=info(segment), stores=[StorePlan(1, (CopyEntry(2, ref, KEY),))])
    for index, name in enumerate(NAMES):
        tensors[index][2] = torch.randn(HEADS, 16, 32).to(torch.bfloat16)  # computed only now
        worker.end_layer(name, plan)
        eventually(lambda: len(saved) > index, "the layer in its slot")  # noqa: B023  asked at once
        assert saved == list(range(index + 1)), "before the forward goes on"
    assert worker.take_report() is None, "not stored before the step has ended"
    worker.store(plan)
    assert outcome(worker)
    expected = torch.stack([layer[2] for layer in tensors]).contiguous().view(torch.uint8).numpy().tobytes()
    assert bytes(segment.payload(ref.slot, LAYOUT.payload_bytes)) == expected


@pytest.mark.parametrize("layers", [[], NAMES[:1], [NAMES[1], NAMES[0], NAMES[2]]])
def test_layers_the_forward_did_not_announce_are_saved_later(
    segment: Segment, started: list[LayerwiseWorker], layers: list[str]
) -> None:
    tensors = engine_tensors(ORDERS["LBNHC"])
    worker = worker_of(started, tensors)
    ref = write_header(segment, slot_index(0, 0), 1)
    save(segment, worker, [CopyEntry(2, ref, KEY)], layers)
    assert outcome(worker)
    expected = torch.stack([layer[2] for layer in tensors]).contiguous().view(torch.uint8).numpy().tobytes()
    assert bytes(segment.payload(ref.slot, LAYOUT.payload_bytes)) == expected


def test_saves_that_find_the_last_ones_under_way_are_dropped(
    segment: Segment, started: list[LayerwiseWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing waits for them."""
    gate = threading.Event()
    watch(monkeypatch, lambda direction, layer: gate.wait(10) and None)
    worker = worker_of(started, engine_tensors(ORDERS["LBNHC"]))
    first, second = (write_header(segment, slot_index(0, index), 1) for index in range(2))
    before = time.monotonic()
    save(segment, worker, [CopyEntry(2, first, KEY)])
    plan = StepPlan(pool=info(segment), stores=[StorePlan(2, (CopyEntry(3, second, KEY),))])
    for name in NAMES:
        worker.end_layer(name, plan)
    assert worker.store(plan) == {2}
    assert time.monotonic() - before < 5
    report = worker.take_report()
    assert report is not None and report.failed == {2: 1} and report.counters["store_behind"] == 1
    gate.set()
    assert outcome(worker)


def test_store_of_an_earlier_boot_is_not_written(segment: Segment, started: list[LayerwiseWorker]) -> None:
    worker = worker_of(started, engine_tensors(ORDERS["LBNHC"]))
    ref = write_header(segment, slot_index(0, 0), 1)
    write_header(segment, ref.slot, 3)
    before = bytes(segment.payload(ref.slot, LAYOUT.payload_bytes))
    save(segment, worker, [CopyEntry(2, ref, KEY)])
    assert not outcome(worker)
    assert bytes(segment.payload(ref.slot, LAYOUT.payload_bytes)) == before


def test_nothing_of_a_cut_forward_is_copied_after_the_close(
    segment: Segment, started: list[LayerwiseWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the end of its lock on, the shard may give the slot to others."""
    held: list[bool] = []

    def copying(direction: Direction, layer: int) -> None:
        time.sleep(0.2)  # the close comes meanwhile
        with claim(segment, info(segment).engine_id) as is_free:
            held.append(not is_free)

    watch(monkeypatch, copying)
    worker = worker_of(started, engine_tensors(ORDERS["LBNHC"]))
    ref = write_header(segment, slot_index(0, 0), 1)
    plan = StepPlan(pool=info(segment), stores=[StorePlan(1, (CopyEntry(2, ref, KEY),))])
    for name in NAMES[:2]:
        worker.end_layer(name, plan)
    worker.close()
    assert held == [True, True]


@pytest.mark.parametrize("heads", [range(HEADS), range(1, HEADS)])
def test_layers_on_a_device_move_the_same_bytes_as_on_the_host(segment: Segment, heads: range) -> None:
    """On a GPU they go through a buffer there; the same code runs on tensors of the host."""
    first, second = (segment.geometry.payload_offset(slot_index(0, i), LAYOUT.payload_bytes) for i in (0, 1))
    runs, own = [BlockRun(1, first, second - first, 2)], engine_tensors(ORDERS["LBHNC"], len(heads))
    slots = slice(first, second + LAYOUT.payload_bytes)
    empty = bytes(slots.stop - slots.start)
    found_by: tuple[type[HostLayers] | type[CudaLayers], ...] = (HostLayers, CudaLayers)
    found: dict[type, tuple[bytes, list[torch.Tensor]]] = {}
    for kind in found_by:
        tensors = [layer.clone() for layer in own]
        block_copier = BlockCopier(tensors, heads)
        segment.buffer[slots] = empty
        block_copier.bind(segment.buffer, LAYOUT)
        layers = kind(block_copier, info(segment))
        for layer in range(LAYERS):
            layers.copy(Direction.STORE, layer, runs)
        stored = bytes(segment.buffer[slots])
        for tensor in tensors:
            tensor.zero_()
        for layer in range(LAYERS):
            layers.copy(Direction.LOAD, layer, runs)
        found[kind] = stored, [tensor.clone() for tensor in tensors]
        block_copier.unbind()
    assert found[HostLayers][0] == found[CudaLayers][0] != empty
    for ours, theirs in zip(found[HostLayers][1], found[CudaLayers][1], strict=True):
        assert torch.equal(ours[1:3], theirs[1:3]) and bool(ours[1:3].any())
