"""Copy descriptors: which contiguous bytes of an engine's KV memory correspond to which bytes of a slot.

`RegionLayout` says where an engine's blocks are in one region of memory, from the strides of its tensors. Together with
a `SlotLayout` it makes a `CopyTemplate`: the runs of one block. A plan of many blocks is the template moved to each
block and to its part of a slot. Runs that are adjacent on both sides are merged, so that a copy engine gets few large
copies whatever layout the engine has. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvservice.core.segment.layout import SlotLayout
from kvservice.errors import InvalidRequest, UnsupportedLayout

Offsets: TypeAlias = "npt.NDArray[np.int64]"

LAYERS_MAX = 4096  # far more than any model has. A layout with more is refused.
BYTES_MAX = 1 << 56  # of offsets, strides and counts, so that sums of them fit into int64. Larger ones are refused.
RUNS_MAX = 1 << 20  # of one block. A layout with more is a mistake and refused; its arrays would take 24 MB.


@dataclass(frozen=True, slots=True)
class RegionLayout:
    """Blocks of one rank in one region of `region_bytes`. All offsets and strides are bytes from the region's start.

    A layer's block is `[part][kv head][token][K‖V]`. `parts` is more than one when the kernels use smaller blocks than
    the engine's block manager. `first_head` is the model's kv head that is this rank's first.
    """

    region_bytes: int
    block_count: int
    layer_offsets: tuple[int, ...]  # where block 0 of each layer begins
    parts: int
    heads: int
    tokens: int  # of a part
    cell_bytes: int  # K‖V of one token and head, contiguous
    block_stride: int
    part_stride: int
    head_stride: int
    token_stride: int
    first_head: int = 0

    def __post_init__(self) -> None:
        sizes = (self.region_bytes, self.block_count, self.parts, self.heads, self.tokens, self.cell_bytes)
        strides = (self.block_stride, self.part_stride, self.head_stride, self.token_stride, self.first_head)
        if max(*sizes, *strides, *self.layer_offsets) > BYTES_MAX:
            raise UnsupportedLayout("a layout of KV memory is larger than any memory")
        if not self.layer_offsets or len(self.layer_offsets) > LAYERS_MAX or min(sizes) <= 0 or min(strides) < 0:
            raise UnsupportedLayout(f"not a layout of KV memory: {self}")
        if len(self.layer_offsets) * self.parts * self.heads * self.tokens > RUNS_MAX:
            raise UnsupportedLayout("a block of this layout has more pieces than can be copied")
        end = (
            max(self.layer_offsets)
            + (self.block_count - 1) * self.block_stride
            + (self.parts - 1) * self.part_stride
            + (self.heads - 1) * self.head_stride
            + (self.tokens - 1) * self.token_stride
            + self.cell_bytes
        )
        if min(self.layer_offsets) < 0 or end > self.region_bytes:
            raise UnsupportedLayout(f"blocks reach byte {end} of a region of {self.region_bytes}")

    def fields(self) -> dict[str, object]:
        return {**asdict(self), "layer_offsets": list(self.layer_offsets)}

    @classmethod
    def of(cls, fields: Mapping[str, object]) -> RegionLayout:
        """The layout that another process described with `fields`. Raises InvalidRequest or UnsupportedLayout."""
        layers = fields.get("layer_offsets")
        numbers = {name: value for name, value in fields.items() if name != "layer_offsets"}
        whole = all(type(value) is int for value in numbers.values())
        if not whole or not isinstance(layers, list) or not all(type(offset) is int for offset in layers):
            raise InvalidRequest("a layout of KV memory is whole numbers")
        try:
            return cls(layer_offsets=tuple(layers), **numbers)  # type: ignore[arg-type]
        except TypeError as error:
            raise InvalidRequest(f"a layout of KV memory has other fields: {error}") from error


@dataclass(frozen=True, slots=True)
class Descriptors:
    """Three int64 arrays of equal length: `lengths[i]` bytes at `engine[i]` of the region and `segment[i]`."""

    engine: Offsets
    segment: Offsets
    lengths: Offsets

    @property
    def byte_count(self) -> int:
        return int(self.lengths.sum())


class CopyTemplate:
    """The runs of one block: `engine` offsets for block 0, `slot` offsets from where its part begins, and `lengths`.

    All three are int64 arrays of one length, in bytes, in the order of the slot.
    """

    def __init__(self, region: RegionLayout, slot: SlotLayout) -> None:
        """Raises UnsupportedLayout when region and slot do not hold the same bytes."""
        found = (len(region.layer_offsets), region.parts * region.tokens * region.cell_bytes)
        wanted = (slot.layer_count, slot.cell_bytes)
        if found != wanted or region.first_head + region.heads > slot.kv_head_count:
            raise UnsupportedLayout(
                f"(layers, cell bytes) are {found}, the slot has {wanted}; heads {region.first_head} to "
                f"{region.first_head + region.heads - 1} of {slot.kv_head_count}"
            )
        self.region = region
        self.payload_bytes, self.part_bytes, self.parts = slot.payload_bytes, slot.part_bytes, slot.parts
        self.part_layers = slot.layer_count
        heads = np.arange(region.heads, dtype=np.int64)
        parts = np.arange(region.parts, dtype=np.int64)
        tokens = np.arange(region.tokens, dtype=np.int64)
        layers = np.asarray(region.layer_offsets, dtype=np.int64)
        engine = (
            layers[:, None, None, None]
            + (heads * region.head_stride)[None, :, None, None]
            + (parts * region.part_stride)[None, None, :, None]
            + (tokens * region.token_stride)[None, None, None, :]
        )
        part_bytes = region.tokens * region.cell_bytes
        payload = (
            (np.arange(len(layers), dtype=np.int64) * slot.layer_bytes)[:, None, None, None]
            + ((heads + region.first_head) * slot.cell_bytes)[None, :, None, None]
            + (parts * part_bytes)[None, None, :, None]
            + (tokens * region.cell_bytes)[None, None, None, :]
        )
        lengths = np.full(engine.size, region.cell_bytes, dtype=np.int64)
        merged = merge_runs(engine.reshape(-1), payload.reshape(-1), lengths)
        self.engine, self.slot, self.lengths = merged.engine, merged.segment, merged.lengths

    def expand(self, block_ids: Sequence[int] | Offsets, part_offsets: Sequence[int] | Offsets) -> Descriptors:
        """The runs of these blocks, each with the part of a slot at the same index, merged, in order of engine offset.

        Raises InvalidRequest for a block outside the region.
        """
        blocks, parts = _blocks_of(self.region, block_ids), np.asarray(part_offsets, dtype=np.int64)
        engine = (self.engine[:, None] + (blocks * self.region.block_stride)[None, :]).reshape(-1)
        segment = (self.slot[:, None] + parts[None, :]).reshape(-1)
        order = np.argsort(engine, kind="stable")
        lengths = np.repeat(self.lengths, blocks.size)
        return merge_runs(engine[order], segment[order], lengths[order])

    @property
    def fills_slots(self) -> bool:
        """Whether the blocks of this region are all that a slot holds."""
        return int(self.lengths.sum()) == self.part_bytes * self.part_layers

    def expand_by_slot(
        self, block_ids: Sequence[int] | Offsets, payload_offsets: Sequence[int] | Offsets
    ) -> tuple[Descriptors, Offsets]:
        """The runs of whole slots, slot after slot, each in the order of its bytes: a CPU copies fastest forward, and a
        digest is made so. `block_ids` has the block of each part, part after part of each slot.

        Returns them with the index behind the last run of each slot. Raises InvalidRequest for a block outside the
        region.
        """
        blocks, payloads = _blocks_of(self.region, block_ids), np.asarray(payload_offsets, dtype=np.int64)
        within = (np.arange(self.parts)[:, None] * self.part_bytes + self.slot[None, :]).reshape(-1)
        engine = ((blocks * self.region.block_stride)[:, None] + self.engine[None, :]).reshape(-1, within.size)
        lengths = np.tile(self.lengths, (payloads.size, self.parts))
        if self.parts == 1 or not payloads.size:
            ends = np.arange(1, payloads.size + 1) * within.size
            segment = (payloads[:, None] + within[None, :]).reshape(-1)
            return Descriptors(engine.reshape(-1), segment, lengths.reshape(-1)), ends
        order = np.argsort(within, kind="stable")
        engine, within, lengths = engine[:, order], within[order], lengths[:, order]
        segment = payloads[:, None] + within[None, :]
        begins = np.ones(engine.shape, dtype=bool)
        begins[:, 1:] = (engine[:, 1:] != engine[:, :-1] + lengths[:, :-1]) | (
            within[1:] != within[:-1] + lengths[0, :-1]
        )
        starts = np.flatnonzero(begins)
        merged = Descriptors(
            engine.reshape(-1)[starts], segment.reshape(-1)[starts], np.add.reduceat(lengths.reshape(-1), starts)
        )
        return merged, np.cumsum(begins.sum(axis=1))


class DirectTemplate:
    """The runs from a block of one region to a block of another, for two engines with the same slot layout."""

    def __init__(self, source: CopyTemplate, target: CopyTemplate) -> None:
        """Raises UnsupportedLayout when the two do not hold the same part of a slot."""
        ends = [template.slot + template.lengths for template in (source, target)]
        cuts = np.unique(np.concatenate([source.slot, target.slot, *ends]))
        starts, lengths = cuts[:-1], np.diff(cuts)
        inside = [_run_at(template, starts) for template in (source, target)]
        if not np.array_equal(inside[0] >= 0, inside[1] >= 0) or source.part_bytes != target.part_bytes:
            raise UnsupportedLayout("the two engines hold different parts of a block")
        held = inside[0] >= 0
        self.source_region, self.target_region = source.region, target.region
        self._source, self._target = (
            template.engine[index[held]] + starts[held] - template.slot[index[held]]
            for template, index in zip((source, target), inside, strict=True)
        )
        self._lengths = lengths[held]

    def expand(self, source_blocks: Sequence[int] | Offsets, target_blocks: Sequence[int] | Offsets) -> Descriptors:
        """In the result, `engine` is in the target region and `segment` in the source region.

        Raises InvalidRequest for a block outside its region.
        """
        source, target = _blocks_of(self.source_region, source_blocks), _blocks_of(self.target_region, target_blocks)
        engine = (self._target[:, None] + (target * self.target_region.block_stride)[None, :]).reshape(-1)
        segment = (self._source[:, None] + (source * self.source_region.block_stride)[None, :]).reshape(-1)
        order = np.argsort(engine, kind="stable")
        return merge_runs(engine[order], segment[order], np.repeat(self._lengths, target.size)[order])


def _blocks_of(region: RegionLayout, block_ids: Sequence[int] | Offsets) -> Offsets:
    """Raises InvalidRequest for a block outside the region."""
    blocks = np.asarray(block_ids, dtype=np.int64)
    if blocks.size and (int(blocks.min()) < 0 or int(blocks.max()) >= region.block_count):
        raise InvalidRequest(f"blocks {blocks.min()} to {blocks.max()} of {region.block_count}")
    return blocks


def _run_at(template: CopyTemplate, slot_offsets: Offsets) -> Offsets:
    """For each offset in the slot, the index of the run that holds it; -1 when no run does. Runs are in slot order."""
    index = np.searchsorted(template.slot, slot_offsets, side="right") - 1
    held = (index >= 0) & (slot_offsets < template.slot[index] + template.lengths[index])
    return np.where(held, index, -1)


def merge_runs(engine: Offsets, segment: Offsets, lengths: Offsets) -> Descriptors:
    """Join each run with the one before it when it continues that one on both sides. Keeps the order."""
    if engine.size == 0:
        return Descriptors(engine, segment, lengths)
    continues = np.zeros(engine.size, dtype=bool)
    continues[1:] = (engine[1:] == engine[:-1] + lengths[:-1]) & (segment[1:] == segment[:-1] + lengths[:-1])
    starts = np.flatnonzero(~continues)
    return Descriptors(engine[starts], segment[starts], np.add.reduceat(lengths, starts))


def cut_runs(
    targets: Offsets, sources: Offsets, lengths: Offsets, piece_bytes: int
) -> tuple[Offsets, Offsets, Offsets]:
    """Cut runs of `lengths` bytes into pieces of at most `piece_bytes`. Returns targets, sources and lengths of the
    pieces, in the order of the runs."""
    if lengths.size == 0 or int(lengths.max()) <= piece_bytes:
        return targets, sources, lengths
    counts = -(-lengths // piece_bytes)
    within = (np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)) * piece_bytes
    left = np.minimum(np.repeat(lengths, counts) - within, piece_bytes)
    return np.repeat(targets, counts) + within, np.repeat(sources, counts) + within, left


def through_staging(runs: Descriptors, limit: int) -> Iterator[tuple[Descriptors, Descriptors]]:
    """Cut the runs into rounds that each fit a buffer of `limit` bytes. Yields (gathered, carried) for each round.

    The buffer holds a round's runs in the order of the segment. `gathered` copies between region (`engine`) and buffer
    (`segment`). `carried` copies between buffer (`engine`) and segment, merged whatever the engine's layout is. No run
    may be longer than `limit`.
    """
    order = np.argsort(runs.segment, kind="stable")
    engine, segment, lengths = runs.engine[order], runs.segment[order], runs.lengths[order]
    ends = np.cumsum(lengths)
    start = 0
    while start < lengths.size:
        before = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, before + limit, side="right"))
        assert stop > start, "a run longer than the buffer"
        part = slice(start, stop)
        buffer = ends[part] - lengths[part] - before
        yield Descriptors(engine[part], buffer, lengths[part]), merge_runs(buffer, segment[part], lengths[part])
        start = stop
