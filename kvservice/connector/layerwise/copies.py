"""Copies of one layer of some blocks between the engine and the slots: on the host, or through a GPU buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from kvservice.connector.plan import CopyEntry, PoolInfo
from kvservice.connector.worker.block_copier import BlockCopier
from kvservice.copying.message import Direction

# By bytes an element: numpy has no bfloat16 and no fp8, and a copy needs only the width.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class BlockRun:
    """`count` blocks that follow each other in the engine, `stride` bytes apart in the segment."""

    block: int
    offset: int
    stride: int
    count: int


def runs_of(entries: Sequence[CopyEntry], pool: PoolInfo) -> list[BlockRun]:
    """Neighbours merged: one strided copy a layer for each run, in place of one a block."""
    payload_bytes, part_bytes = pool.layout.payload_bytes, pool.layout.part_bytes
    runs: list[BlockRun] = []
    for entry in entries:
        offset = pool.geometry.payload_offset(entry.ref.slot, payload_bytes) + entry.part * part_bytes
        last = runs[-1] if runs else None
        if last is not None and entry.block_id == last.block + last.count:
            step = offset - last.offset if last.count == 1 else last.stride
            if step > 0 and offset == last.offset + last.count * step:
                runs[-1] = BlockRun(last.block, last.offset, step, last.count + 1)
                continue
        runs.append(BlockRun(entry.block_id, offset, part_bytes, 1))
    return runs


class LayerCopy(Protocol):
    """Copies one layer of some blocks. On CUDA: enqueued on the current stream."""

    def copy(self, direction: Direction, layer: int, runs: Sequence[BlockRun]) -> None: ...


class HostLayers:
    """For KV tensors in host memory; lets go of the interpreter while bytes move."""

    def __init__(self, block_copier: BlockCopier, pool: PoolInfo) -> None:
        assert block_copier.slots is not None
        self._layers = [_integers(layer).numpy().swapaxes(1, 2) for layer in block_copier.layers]  # head before part
        self._slots = block_copier.slots.numpy()
        self._layout = pool.layout
        self._heads = block_copier.heads

    def copy(self, direction: Direction, layer: int, runs: Sequence[BlockRun]) -> None:
        engine = self._layers[layer]
        shape, item = engine.shape[1:], engine.itemsize  # (head, part, token, K‖V)
        inner = tuple(int(np.prod(shape[i + 1 :], dtype=np.int64)) * item for i in range(len(shape)))
        first = layer * self._layout.layer_bytes + self._heads.start * self._layout.cell_bytes
        for run in runs:
            slots: np.ndarray[Any, Any] = np.ndarray(
                (run.count, *shape), engine.dtype, self._slots, run.offset + first, (run.stride, *inner)
            )
            blocks = engine[run.block : run.block + run.count]
            if direction is Direction.LOAD:
                np.copyto(blocks, slots)
            else:
                np.copyto(slots, blocks)


class CudaLayers:
    """For KV tensors on a GPU: through a buffer there, so that only contiguous bytes cross the bus."""

    def __init__(self, block_copier: BlockCopier, pool: PoolInfo) -> None:
        assert block_copier.slots is not None
        self._layers = block_copier.layers
        self._slots = block_copier.slots
        self._layout = pool.layout
        self._heads = block_copier.heads

    def copy(self, direction: Direction, layer: int, runs: Sequence[BlockRun]) -> None:
        engine = self._layers[layer]
        first = layer * self._layout.layer_bytes + self._heads.start * self._layout.cell_bytes
        length = len(self._heads) * self._layout.cell_bytes
        _, parts, heads, tokens, width = engine.shape
        for run in runs:
            blocks = engine[run.block : run.block + run.count].transpose(1, 2)
            staging = torch.empty((run.count, length), dtype=torch.uint8, device=engine.device)
            typed = staging.view(engine.dtype).view(run.count, heads, parts, tokens, width)
            if direction is Direction.STORE:
                typed.copy_(blocks)
            for index in range(run.count):
                start = run.offset + first + index * run.stride
                there, here = self._slots[start : start + length], staging[index]
                if direction is Direction.STORE:
                    there.copy_(here, non_blocking=True)
                else:
                    here.copy_(there, non_blocking=True)
            if direction is Direction.LOAD:
                blocks.copy_(typed)


def _integers(layer: torch.Tensor) -> torch.Tensor:
    """The same bytes in a type that numpy has."""
    return layer.view(_INTEGERS[layer.element_size()])
