"""How a block in a slot is named: to the engine it is promised to, and to the peer that reads it."""

from __future__ import annotations

from dataclasses import dataclass

from kvservice.units import BlockKey, Generation, SlotIndex


@dataclass(frozen=True, slots=True)
class BlockRef:
    """A slot as it was promised: the generation must be the same before and after the bytes are copied."""

    slot: SlotIndex
    generation: Generation


@dataclass(frozen=True, slots=True)
class BlockHandle:
    """Enough to read one block of a peer one-sided and to know afterwards that it was the right one."""

    key: BlockKey
    slot: SlotIndex
    generation: Generation
    length: int
    digest: int
    position: int
