"""The copier: where and when blocks are copied between the engine and slots.

Copies run at once, on a CUDA stream of their own, or in a copy worker (`remote_copier`). One worker owns a copier and
uses it from its main thread only. A copier decides nothing about contents: the plan says which blocks and slots, and
the worker half decides whether they may be copied.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from kvservice.connector.plan import CopyEntry, PoolInfo
from kvservice.connector.worker.block_copier import BlockCopier, BlockCopiers
from kvservice.connector.worker.shared_kv import region_layout
from kvservice.copying.cuda.pinning import Pinning, PinningOnUse
from kvservice.copying.message import Direction
from kvservice.core.segment.copy_runs import CopyTemplate
from kvservice.errors import TransferError, UnsupportedLayout
from kvservice.memory.runs import copy_runs
from kvservice.observe.failpoints import failpoint
from kvservice.units import BlockKey

HOST_BATCH = 64  # Blocks copied by one call: enough to make calling cheap, few enough to return often.
# For a worker to connect or to be replaced, which takes less. If copies run here for longer, the pool is pinned here
# too.
FALLBACK_PIN_SECONDS = 5.0


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


class Copier(Protocol):
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

    def recall(self, loan: LentBlocks) -> None:
        """Ask for the end of a loan of this copier. Does not block; may be called again."""
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

    def __init__(self, *, copied: bool = True) -> None:
        self._copied = copied

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return

    def succeeded(self) -> bool:
        return self._copied


class InlineCopier:
    """Copies that have ended when `run` returns, for KV tensors in host memory."""

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

    def recall(self, loan: LentBlocks) -> None:
        return

    def take_counters(self) -> dict[str, int]:
        counters, self.counters = self.counters, Counter()
        return dict(counters)

    def close(self) -> None:
        return


class HostCopier(InlineCopier):
    """Like InlineCopier, but one call of the processor copies the runs of many blocks, if the tensors allow it.
    InlineCopier needs a view for every layer and block."""

    def __init__(self, block_copiers: BlockCopiers) -> None:
        super().__init__(block_copiers)
        # by engine group: address, and the runs of a block
        self._regions: dict[int, tuple[int, CopyTemplate] | None] = {}
        self._memory = 0

    def adopt(self, memory: torch.Tensor, pool: PoolInfo) -> None:
        super().adopt(memory, pool)
        self._memory = memory.data_ptr()
        self._regions.clear()

    def run(self, direction: Direction, entries: Sequence[CopyEntry], *, may_borrow: bool = False) -> Ticket:
        for start in range(0, len(entries), HOST_BATCH):
            by_group: dict[int, list[CopyEntry]] = {}
            for entry in entries[start : start + HOST_BATCH]:
                by_group.setdefault(entry.engine_group, []).append(entry)
            for engine_group, own in by_group.items():
                self._copy(direction, engine_group, own)
        return Done()

    def region_of(self, engine_group: int) -> tuple[int, CopyTemplate] | None:
        """Where the tensors of this engine group lie, and the runs of a block in them. None if they cannot be
        described."""
        if engine_group not in self._regions:
            self._regions[engine_group] = _host_region(self._block_copiers.of(engine_group))
        return self._regions[engine_group]

    def _copy(self, direction: Direction, engine_group: int, entries: list[CopyEntry]) -> None:
        assert self._pool is not None
        region = self.region_of(engine_group)
        if region is None:
            copy_entries(self._block_copiers, self._pool, direction, entries)
            return
        address, template = region
        slots = [entry.ref.slot for entry in entries]
        offsets = self._pool.geometry.payload_offsets(slots, template.payload_bytes)
        runs = template.expand_by_block([entry.block_id for entry in entries], offsets)
        if direction is Direction.LOAD:
            copy_runs(address, self._memory, runs.engine, runs.segment, runs.lengths)
        else:
            copy_runs(self._memory, address, runs.segment, runs.engine, runs.lengths)
        failpoint(f"engine.{direction.name.lower()}")


def _host_region(block_copier: BlockCopier) -> tuple[int, CopyTemplate] | None:
    """None if blocks must go through the block copier: their tensors cannot be described by runs, or blocks share
    slots."""
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

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def query(self) -> bool:
        return bool(self._event.query())

    def synchronize(self) -> None:
        self._event.synchronize()

    def succeeded(self) -> bool:
        return True  # a copy that fails makes the context unusable, and the engine with it


class CudaCopier(InlineCopier):
    """Copies on a CUDA stream of its own. They start when the forwards launched so far have ended, so a block is never
    copied before it is written, nor overwritten while an earlier forward reads it. The next forward does not wait.

    It has not run on a GPU yet.
    """

    def __init__(self, block_copiers: BlockCopiers, pin_after: float = 0.0) -> None:
        """`pin_after` is how many seconds copies must have run here before the pool's memory is pinned."""
        super().__init__(block_copiers)
        self._device = block_copiers.device
        self._stream = torch.cuda.Stream(self._device)
        self._pin_after = pin_after
        self._pinning: PinningOnUse | None = None

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
        computed = torch.cuda.Event()
        computed.record(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(computed)
            copy_entries(self._block_copiers, self._pool, direction, entries)
            copied = torch.cuda.Event()
            copied.record(self._stream)
        return _Recorded(copied)


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
    Never raises for an unknown device; its blocks are copied through the tensors."""
    if block_copiers.device.type == "cuda":
        return CudaCopier(block_copiers, FALLBACK_PIN_SECONDS if is_fallback else 0.0)
    return HostCopier(block_copiers) if block_copiers.device.type == "cpu" else InlineCopier(block_copiers)
