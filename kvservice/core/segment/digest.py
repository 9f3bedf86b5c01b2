"""Payload digest that depends on the block's key: a block's bytes never verify under another block's key.

A plain checksum would accept complete and consistent bytes of the wrong block. xxh3-64 is not cryptographic: it detects
hardware and software faults, not blocks that a peer forges. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
import xxhash

from kvservice.core.segment.native import SHORT_BYTES, Words, native
from kvservice.units import BlockKey, KiB

Payload: TypeAlias = "bytes | bytearray | memoryview"

PIECE_BYTES = 256 * KiB  # stays in a core's cache between the copy and the digest, where there is no C module


def copy_and_digest(target: memoryview, source: Payload, key: BlockKey) -> int:
    """Copy `source` into `target`, of the same length, and return the digest of what is in `target` then.

    One pass: each byte is read once. Without a compiler in pieces, so that the digest reads from the cache what the
    copy has just written.
    """
    if native is not None and len(target) > SHORT_BYTES:
        return native.copy_one(target, source, seed_of(key))
    source = memoryview(source)
    digest = xxhash.xxh3_64(seed=seed_of(key))
    for start in range(0, len(target), PIECE_BYTES):
        piece = target[start : start + PIECE_BYTES]
        piece[:] = source[start : start + PIECE_BYTES]
        digest.update(piece)
    return digest.intdigest()


def digest_payload(payload: Payload, key: BlockKey) -> int:
    """xxh3_64 of the payload, seeded with the low 64 bits of the key, as an unsigned integer. About 20 GB/s."""
    return xxhash.xxh3_64_intdigest(payload, seed=seed_of(key))


def digest_pieces(pieces: Iterable[Payload], seed: int) -> int:
    """The digest of the pieces as one payload."""
    digest = xxhash.xxh3_64(seed=seed)
    for piece in pieces:
        digest.update(piece)
    return digest.intdigest()


def seed_of(key: BlockKey) -> int:
    """What binds a digest to its block: the low 64 bits of the key."""
    return int.from_bytes(key[8:16], "big")


def seeds_of(keys: Sequence[BlockKey]) -> Words:
    """`seed_of` each key."""
    return np.frombuffer(b"".join(keys), ">u8")[1::2].astype(np.uint64)
