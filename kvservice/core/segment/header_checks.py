"""The checks of a slot's header: when its bytes may be read from another node, copied to an engine, or written.

All such comparisons are here. Pure. `data` is always the 64 bytes of a header.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvservice.core.segment import header
from kvservice.core.segment.geometry import HEADER_BYTES
from kvservice.core.segment.header import has_digest, has_length, is_in_term, is_of, is_whole
from kvservice.core.segment.native import native
from kvservice.core.segment.refs import BlockHandle, BlockRef
from kvservice.units import BlockKey, BootEpoch

HeaderRows: TypeAlias = "npt.NDArray[np.uint64]"  # (n, 8): the words of n headers, little endian


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


def are_as_promised(
    rows: HeaderRows, epoch: BootEpoch, refs: Sequence[BlockRef], keys: Sequence[BlockKey], sizes: Sequence[int]
) -> bool:
    """`is_as_promised` of each of many headers, together: a fifth of the cost."""
    generations = np.array([ref.generation for ref in refs], np.uint64)
    are_sealed = bool((generations % np.uint64(2) == 0).all())
    return are_sealed and _are_of(rows, epoch, generations, keys, np.array(sizes, np.uint64))


def are_as_located(rows: HeaderRows, handles: Sequence[BlockHandle], epoch: BootEpoch) -> bool:
    """`is_as_located` of each of many headers, together: a fifth of the cost."""
    digests = np.array([handle.digest for handle in handles], np.uint64)
    if not (rows[:, header.DIGEST_WORD] == digests).all():
        return False
    generations = np.array([handle.generation for handle in handles], np.uint64)
    lengths = np.array([handle.length for handle in handles], np.uint64)
    return _are_of(rows, epoch, generations, [handle.key for handle in handles], lengths)


def _are_of(
    rows: HeaderRows, epoch: BootEpoch, generations: HeaderRows, keys: Sequence[BlockKey], lengths: HeaderRows
) -> bool:
    """Whether they are whole headers of this boot, with these generations, keys and lengths, each of one dimension."""
    names = np.frombuffer(b"".join(keys), "<u8").reshape(-1, 2)
    are = (
        (rows[:, header.BEGIN_WORD] & np.uint64(header.BEGIN_MASK) == header.BEGIN_VALUE)
        & (rows[:, header.EPOCH_WORD] == epoch)
        & (rows[:, header.GENERATION_WORD] == generations)
        & (rows[:, header.KEY_WORDS] == names).all(axis=1)
        & (rows[:, header.LENGTH_WORD] & np.uint64(header.LENGTH_MASK) == lengths)
    )
    return bool(are.all()) and _have_crcs(rows.tobytes())


def _have_crcs(data: bytes) -> bool:
    """Whether each of these headers, one behind the other, has its checksum."""
    if native is not None:
        return native.have_crcs(data)
    return all(is_whole(data[at : at + HEADER_BYTES]) for at in range(0, len(data), HEADER_BYTES))


def is_reserved(data: bytes, epoch: BootEpoch, ref: BlockRef, payload_bytes: int) -> bool:
    """Whether the slot is still the reservation that was granted.

    It must have room for exactly `payload_bytes` bytes, so nothing past the slot is written. A generation is odd while
    the slot is written: a reference to a sealed block never counts.
    """
    is_writing = ref.generation % 2 == 1
    return is_writing and is_in_term(data, epoch, ref.generation) and has_length(data, payload_bytes)
