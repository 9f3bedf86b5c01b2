"""What a slot's header must say for its bytes to be trusted, read from another node, copied to an engine, or written.

Pure; the one place for these comparisons, wherever they are made.
"""

from __future__ import annotations

from kvservice.core.segment.header import has_digest, has_length, is_in_term, is_of
from kvservice.core.segment.refs import BlockHandle, BlockRef
from kvservice.units import BlockKey, BootEpoch


def is_as_located(data: bytes, handle: BlockHandle, epoch: BootEpoch) -> bool:
    """`data`: the 64 header bytes of a peer's slot, read after its payload was. True when the slot was not touched
    since the peer made the handle."""
    is_same = is_of(data, epoch, handle.generation, handle.key)
    return is_same and has_length(data, handle.length) and has_digest(data, handle.digest)


def is_as_promised(data: bytes, epoch: BootEpoch, ref: BlockRef, key: BlockKey, payload_bytes: int) -> bool:
    """`data`: the 64 header bytes of the slot of a promise. True when it holds the block that was promised, sealed by
    this boot of the shard and as large as what is to be read: nothing beyond it is."""
    return is_of(data, epoch, ref.generation, key) and has_length(data, payload_bytes)


def is_reserved(data: bytes, epoch: BootEpoch, ref: BlockRef, payload_bytes: int) -> bool:
    """The slot with these 64 header bytes is still the reservation that was given, and as large as what is to be
    written: nobody else may write it, and nothing beyond it is."""
    return is_in_term(data, epoch, ref.generation) and has_length(data, payload_bytes)
