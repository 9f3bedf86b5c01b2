"""The checks of a slot's header: when its bytes may be read from another node, copied to an engine, or written.

All such comparisons are here. Pure. `data` is always the 64 bytes of a header.
"""

from __future__ import annotations

from kvservice.core.segment.header import has_digest, has_length, is_in_term, is_of
from kvservice.core.segment.refs import BlockHandle, BlockRef
from kvservice.units import BlockKey, BootEpoch


def is_as_located(data: bytes, handle: BlockHandle, epoch: BootEpoch) -> bool:
    """Whether a peer's slot is unchanged since the peer made the handle.

    The header must have been read after the payload.
    """
    is_same = is_of(data, epoch, handle.generation, handle.key)
    return is_same and has_length(data, handle.length) and has_digest(data, handle.digest)


def is_as_promised(data: bytes, epoch: BootEpoch, ref: BlockRef, key: BlockKey, payload_bytes: int) -> bool:
    """Whether the slot still holds the block that was promised.

    It must be sealed in this boot epoch, with exactly `payload_bytes` bytes, so nothing past the slot is read. A
    generation is even while the slot is sealed.
    """
    is_sealed = ref.generation % 2 == 0
    return is_sealed and is_of(data, epoch, ref.generation, key) and has_length(data, payload_bytes)


def is_reserved(data: bytes, epoch: BootEpoch, ref: BlockRef, payload_bytes: int) -> bool:
    """Whether the slot is still the reservation that was granted.

    It must have room for exactly `payload_bytes` bytes, so nothing past the slot is written. A generation is odd while
    the slot is written: a reference to a sealed block never counts.
    """
    is_writing = ref.generation % 2 == 1
    return is_writing and is_in_term(data, epoch, ref.generation) and has_length(data, payload_bytes)
