"""How a block in a slot is named: for the engine it is promised to, and for the peer that reads it."""

from __future__ import annotations

from dataclasses import dataclass

from kvservice.units import BlockKey, Generation, SlotIndex


@dataclass(frozen=True, slots=True)
class BlockRef:
    """A slot that was promised or reserved. Its generation must be the same before and after the bytes are copied."""

    slot: SlotIndex
    generation: Generation


@dataclass(frozen=True, slots=True)
class BlockHandle:
    """What a peer needs to read one block one-sided and to check afterwards that it read the right one."""

    key: BlockKey
    slot: SlotIndex
    generation: Generation
    length: int
    digest: int
    position: int
    stored_at: float = 0.0  # when its bytes were computed: seconds since 1970; 0 = not known
