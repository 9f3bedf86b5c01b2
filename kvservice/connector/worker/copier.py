"""The copier: where and when blocks are copied between the engine and slots.

Copies run at once, on a CUDA stream of their own, or in a copy worker (`remote_copier`). One worker owns a copier and
uses it from its main thread only. A copier decides nothing about contents: the plan says which blocks and slots, and
the worker half decides whether they may be copied.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import torch

from kvservice.connector.plan import CopyEntry, PoolInfo
from kvservice.connector.worker.block_copier import BlockCopier, BlockCopiers
from kvservice.connector.worker.devices import check_device
from kvservice.connector.worker.shared_kv import region_layout
from kvservice.copying.cuda.copies import start_across
from kvservice.copying.cuda.driver import Driver
from kvservice.copying.cuda.pinning import Pinning, PinningOnUse
from kvservice.copying.message import Direction
from kvservice.copying.profiling import profiled
from kvservice.core.segment.copy_runs import CopyTemplate, Offsets
from kvservice.errors import KVServiceError, TransferError, UnsupportedLayout
from kvservice.memory.runs import copy_blocks, copy_runs, in_one_pass
from kvservice.observe.failpoints import failpoint
from kvservice.units import BlockKey, KiB, SlotIndex

log = logging.getLogger("kvservice.connector")

HOST_BATCH = 512  # blocks that the processor copies in one call: some milliseconds, for a tenth of one of Python
# Runs of this mean length and more are copied as one batch on a GPU, shorter ones by torch through a buffer there. A
# guess: the benchmark of the campaign compares the two ("batched", "block by block").
BATCHED_RUN_BYTES = 8 * KiB
RUN_BATCH = 64  # Blocks copied by one call: enough to make calling cheap, few enough to return often.
# For a worker to connect or to be replaced, which takes less. If copies run here for longer, the pool is pinned here
# too.
FALLBACK_PIN_SECONDS = 5.0


NO_DIGESTS: Mapping[SlotIndex, int] = MappingProxyType({})


class Ticket(Protocol):
    """A ticket for copies that were started."""

    def query(self) -> bool:
        """Whether all of them have ended: nothing more is read or written for them. Does not block."""
        ...

    def synchronize(self) -> None:
        """Block until they have ended."""
        ...

    def succeeded(self) -> bool:
        """Once they have ended: whether all bytes arrived."""
        ...

    @property
    def borrowed(self) -> int:
        """Once they have ended: how many blocks came from another engine's KV cache instead of their slots."""
        ...

    @property
    def digests(self) -> Mapping[SlotIndex, int]:
        """Once they have ended: the digests of the slots that were read whole, as far as the copy brought them."""
        ...


class LentBlocks(Protocol):
    """Blocks of this engine that other engines may copy."""

    @property
    def is_taken(self) -> bool:
        """Whether a reader has read what it wanted of them."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether nobody reads them, now or later."""
        ...

    def recall(self) -> None:
        """Ask for the end of the loan. Does not block; may be called again."""
        ...


class Copier(Protocol):
    is_inline: bool  # the engine's own thread copies, so that copies have ended when `run` returns

    def adopt(self, memory: torch.Tensor, pool: PoolInfo) -> None:
        """Use this host memory of the pool, `(segment bytes,)` uint8, until `release`."""
        ...

    def release(self) -> None:
        """Stop using the memory, which is about to be unmapped. No copy may be under way."""
        ...

    def run(self, direction: Direction, entries: Sequence[CopyEntry], *, may_borrow: bool = False) -> Ticket:
        """Copy these blocks, after everything that the engine has started so far. The copies may wait for `flush`. With
        `may_borrow`, other engines may lend the blocks of loads; the slots hold the same."""
        ...

    def flush(self) -> None:
        """Start what `run` was given. Called once per step and direction; does not block."""
        ...

    def lend(self, blocks: Sequence[tuple[int, BlockKey]]) -> LentBlocks | None:
        """Let other engines copy these (block id, key), after everything that this engine has started so far. Returns
        None if that is not possible; nothing is lent then."""
        ...

    def take_counters(self) -> dict[str, int]:
        """What was counted since the last call."""
        ...

    def close(self) -> None:
        """The engine ends. Call it after `release`."""
        ...


class Done:
    """A ticket for copies that have already ended."""

    borrowed = 0

    def __init__(self, *, copied: bool = True, digests: Mapping[SlotIndex, int] = NO_DIGESTS) -> None:
        self._copied = copied
        self.digests = digests

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return

    def succeeded(self) -> bool:
        return self._copied


class InlineCopier:
    """Copies that have ended when `run` returns, for KV tensors in host memory."""

    is_inline = True

    def __init__(self, block_copiers: BlockCopiers) -> None:
        self._block_copiers = block_copiers
        self._pool: PoolInfo | None = None
        self.counters: Counter[str] = Counter()

    def adopt(self, memory: torch.Tensor, pool: PoolInfo) -> None:
        self._pool = pool

    def release(self) -> None:
        self._pool = None

    def run(self, direction: Direction, entries: Sequence[CopyEntry], *, may_borrow: bool = False) -> Ticket:
        assert self._pool is not None
        copy_entries(self._block_copiers, self._pool, direction, entries)
        return Done()

    def flush(self) -> None:
        return

    def lend(self, blocks: Sequence[tuple[int, BlockKey]]) -> LentBlocks | None:
        return None

    def take_counters(self) -> dict[str, int]:
        counters, self.counters = self.counters, Counter()
        return dict(counters)

    def close(self) -> None:
        return


class RunCopier(InlineCopier):
    """Like InlineCopier, for tensors whose blocks can be described as runs of bytes. A view for every layer and block
    is then not needed."""

    def __init__(self, block_copiers: BlockCopiers) -> None:
        super().__init__(block_copiers)
        # by engine group: address, and the runs of a block
        self._regions: dict[int, tuple[int, CopyTemplate] | None] = {}
        self._memory = 0

    def adopt(self, memory: torch.Tensor, pool: PoolInfo) -> None:
        super().adopt(memory, pool)
        self._memory = memory.data_ptr()
        self._regions.clear()

    def region_of(self, engine_group: int) -> tuple[int, CopyTemplate] | None:
        """Where the tensors of this engine group lie, and the runs of a block in them. None if they cannot be
        described."""
        if engine_group not in self._regions:
            self._regions[engine_group] = _region(self._block_copiers.of(engine_group))
        return self._regions[engine_group]

    def _by_group(
        self, entries: Sequence[CopyEntry], batch: int = RUN_BATCH
    ) -> Iterator[tuple[int, Sequence[CopyEntry]]]:
        """The entries of each engine group, in batches of so many in all."""
        is_one_group = len({entry.engine_group for entry in entries}) == 1
        for start in range(0, len(entries), batch):
            some = entries[start : start + batch]
            if is_one_group:
                yield some[0].engine_group, some
                continue
            by_group: dict[int, list[CopyEntry]] = {}
            for entry in some:
                by_group.setdefault(entry.engine_group, []).append(entry)
            yield from by_group.items()

    def _part_offsets(self, template: CopyTemplate, entries: Sequence[CopyEntry]) -> Offsets:
        assert self._pool is not None
        payloads = self._pool.geometry.payload_offsets([entry.ref.slot for entry in entries], template.payload_bytes)
        return payloads + np.array([entry.part for entry in entries], np.int64) * template.part_bytes


class HostCopier(RunCopier):
    """For KV tensors in host memory: one call of the processor copies the runs of many blocks. Loads of whole slots
    bring their digests with them."""

    def run(self, direction: Direction, entries: Sequence[CopyEntry], *, may_borrow: bool = False) -> Ticket:
        digests: dict[SlotIndex, int] = {}
        for engine_group, own in self._by_group(entries, HOST_BATCH):
            region = self.region_of(engine_group)
            if region is None:
                assert self._pool is not None
                copy_entries(self._block_copiers, self._pool, direction, own)
                continue
            address, template = region
            rest: Sequence[CopyEntry] = own
            if template.parts == 1 or direction is Direction.LOAD:
                whole, rest = _of_whole_slots(own, template.parts)
                self._copy_slots(direction, address, template, whole, digests)
            if rest:
                self._copy_parts(direction, address, template, rest)
            failpoint(f"engine.{direction.name.lower()}")
        return Done(digests=digests)

    def _copy_slots(
        self,
        direction: Direction,
        address: int,
        template: CopyTemplate,
        entries: Sequence[CopyEntry],
        digests: dict[SlotIndex, int],
    ) -> None:
        """Copy slots of which all parts are there, part after part. Adds the digests of those that were read."""
        assert self._pool is not None
        if not entries:
            return
        firsts = entries[:: template.parts]
        places = [entry.ref.slot for entry in firsts]
        payloads = self._pool.geometry.payload_offsets(places, template.payload_bytes)
        runs, ends = template.expand_by_slot([entry.block_id for entry in entries], payloads)
        if direction is Direction.STORE:
            copy_runs(self._memory, address, runs.segment, runs.engine, runs.lengths)
        elif not (template.fills_slots and in_one_pass()):
            copy_runs(address, self._memory, runs.engine, runs.segment, runs.lengths)
        else:
            keys = [entry.key for entry in firsts]
            found = copy_blocks(address, self._memory, runs.engine, runs.segment, runs.lengths, ends, keys)
            digests.update(zip(places, found.tolist(), strict=True))

    def _copy_parts(
        self, direction: Direction, address: int, template: CopyTemplate, entries: Sequence[CopyEntry]
    ) -> None:
        """Copy parts of slots. Those that are neighbours in the engine, too, are one run."""
        runs = template.expand([entry.block_id for entry in entries], self._part_offsets(template, entries))
        if direction is Direction.LOAD:
            copy_runs(address, self._memory, runs.engine, runs.segment, runs.lengths)
        else:
            copy_runs(self._memory, address, runs.segment, runs.engine, runs.lengths)


def _of_whole_slots(entries: Sequence[CopyEntry], parts: int) -> tuple[Sequence[CopyEntry], Sequence[CopyEntry]]:
    """(the entries of slots that are there with all their parts, in the order of these; the other entries)."""
    if parts == 1:
        return entries, ()
    whole: list[CopyEntry] = []
    rest: list[CopyEntry] = []
    at = 0
    while at < len(entries):
        group = entries[at : at + parts]
        if [(entry.ref, entry.part) for entry in group] == [(group[0].ref, part) for part in range(parts)]:
            whole += group
            at += parts
        else:
            rest.append(entries[at])
            at += 1
    return whole, rest


def _region(block_copier: BlockCopier) -> tuple[int, CopyTemplate] | None:
    """None if blocks must go through the block copier: their tensors cannot be described by runs, or engine groups
    share slots."""
    if not block_copier.fills_slots:
        return None
    layers = block_copier.layers
    first = layers[0]
    address = min(layer.data_ptr() for layer in layers)
    span = sum((size - 1) * stride for size, stride in zip(first.shape, first.stride(), strict=True)) + 1
    end = max(layer.data_ptr() for layer in layers) + span * first.element_size()
    try:
        layout = region_layout(layers, block_copier.heads, address, end - address)
        return address, CopyTemplate(layout, block_copier.layout)
    except UnsupportedLayout:
        return None


class _Recorded:
    borrowed = 0
    digests = NO_DIGESTS

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def query(self) -> bool:
        return bool(self._event.query())

    def synchronize(self) -> None:
        with profiled("wait"):
            self._event.synchronize()

    def succeeded(self) -> bool:
        return True  # a copy that fails makes the context unusable, and the engine with it


class CudaCopier(RunCopier):
    """Copies on CUDA streams of its own, one per direction. They start when the forwards launched so far have ended, so
    a block is never copied before it is written, nor overwritten while an earlier forward reads it. The next forward
    does not wait.

    Large runs go straight between the KV cache and the pool, by the batched copies that a copy worker uses too, once
    the pool's memory is pinned. Everything else goes through the tensors: small runs, which torch gathers in the
    engine's own time, and all runs where the driver has no batched copy. On ROCm `torch.cuda` is HIP; there is no CUDA
    driver, and everything goes through the tensors.
    """

    is_inline = False

    def __init__(self, block_copiers: BlockCopiers, pin_after: float = 0.0) -> None:
        """`pin_after` is how many seconds copies must have run here before the pool's memory is pinned."""
        super().__init__(block_copiers)
        self._device = block_copiers.device
        self._streams = {direction: torch.cuda.Stream(self._device) for direction in Direction}
        self._pin_after = pin_after
        self._pinning: PinningOnUse | None = None
        self._driver = _batching_driver(self._device)

    def adopt(self, memory: torch.Tensor, pool: PoolInfo) -> None:
        super().adopt(memory, pool)
        address, geometry = memory.data_ptr(), pool.geometry
        self._pinning = PinningOnUse(
            lambda: Pinning(address, geometry, _pin, _unpin, lambda: torch.cuda.set_device(self._device)),
            self._pin_after,
        )

    def release(self) -> None:
        super().release()
        if self._pinning is not None:
            self._pinning.undo()
            self._pinning = None

    def run(self, direction: Direction, entries: Sequence[CopyEntry], *, may_borrow: bool = False) -> Ticket:
        assert self._pool is not None and self._pinning is not None
        # Until its memory is pinned, a copy goes through a buffer of the driver and blocks the calling thread.
        self._pinning.used()
        stream, computed = self._streams[direction], torch.cuda.Event()
        computed.record(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream), profiled(direction.name.lower()):
            stream.wait_event(computed)
            try:
                for engine_group, own in self._by_group(entries):
                    self._start(direction, engine_group, own, stream.cuda_stream)
            except BaseException:
                stream.synchronize()  # no copy may run after its failure was reported
                raise
            copied = torch.cuda.Event()
            copied.record(stream)
        return _Recorded(copied)

    def _start(self, direction: Direction, engine_group: int, entries: Sequence[CopyEntry], stream: int) -> None:
        assert self._pool is not None and self._pinning is not None
        region = self.region_of(engine_group) if self._driver is not None else None
        if self._driver is not None and region is not None:
            address, template = region
            runs = template.expand([entry.block_id for entry in entries], self._part_offsets(template, entries))
            is_large = runs.byte_count >= BATCHED_RUN_BYTES * runs.lengths.size
            if is_large and self._pinning.covers(int((runs.segment + runs.lengths).max())):
                device, host = address + runs.engine, self._memory + runs.segment
                start_across(self._driver, direction, device, host, runs.lengths, stream, is_pinned=True)
                self.counters["copy_batched_blocks"] += len(entries)
                failpoint(f"engine.{direction.name.lower()}")
                return
        copy_entries(self._block_copiers, self._pool, direction, entries)


def _batching_driver(device: torch.device) -> Driver | None:
    """The driver of this GPU. None if it has no batched copy, or if it is not CUDA's."""
    if torch.version.hip is not None:
        return None
    try:
        found = Driver.of_device(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except KVServiceError as error:
        log.warning("blocks are copied one by one: %s", error.message)
        return None
    return found if found.has_batch_copy else None


def _pin(address: int, byte_count: int) -> None:
    _check("cudaHostRegister", torch.cuda.cudart().cudaHostRegister(address, byte_count, 0))


def _unpin(address: int) -> None:
    _check("cudaHostUnregister", torch.cuda.cudart().cudaHostUnregister(address))


def _check(name: str, result: Any) -> None:
    error = int(getattr(result, "value", result))  # an enum whose type depends on torch
    if error:
        raise TransferError(f"{name}: CUDA error {error}")


def copy_entries(
    block_copiers: BlockCopiers, pool: PoolInfo, direction: Direction, entries: Sequence[CopyEntry]
) -> None:
    """Copy block by block through the block copier of each engine group; `store` and `load` say when such a copy has
    ended."""
    for entry in entries:
        own = block_copiers.of(entry.engine_group)
        offset = pool.geometry.payload_offset(entry.ref.slot, own.payload_bytes)
        if direction is Direction.LOAD:
            own.load(offset, entry.block_id, entry.part)
        else:
            own.store(entry.block_id, offset, entry.part)
        failpoint(f"engine.{direction.name.lower()}")


def in_process_copier(block_copiers: BlockCopiers, *, is_fallback: bool = False) -> InlineCopier:
    """The copier for the engine's device. `is_fallback` means that a copy worker is wanted and will do most copies.
    Raises UnsupportedDevice for a device that is known not to work. Blocks of an unknown one are copied through the
    tensors."""
    check_device(block_copiers.device.type)
    if block_copiers.device.type == "cuda":
        return CudaCopier(block_copiers, FALLBACK_PIN_SECONDS if is_fallback else 0.0)
    return HostCopier(block_copiers) if block_copiers.device.type == "cpu" else InlineCopier(block_copiers)
