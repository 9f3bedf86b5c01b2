"""Payload digest that depends on the block's key: a block's bytes never verify under another block's key.

A plain checksum would accept complete and consistent bytes of the wrong block. xxh3-64 is not cryptographic: it detects
hardware and software faults, not blocks that a peer forges. Pure.

`native` is the C module that copies and digests in one pass, if the installation had a compiler. It is used only after
it has agreed with the library at every length where its loops change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from kvservice.core.segment.copy_runs import Offsets
from kvservice.units import BlockKey, KiB

Payload: TypeAlias = "bytes | bytearray | memoryview"
Words: TypeAlias = "npt.NDArray[np.uint64]"

PIECE_BYTES = 256 * KiB  # stays in a core's cache between the copy and the digest, where there is no C module
SHORT_BYTES = 240  # up to here xxh3 is another function, which the C module leaves to the library
STRIPE_BYTES = 64  # of xxh3: what it reads at once, and the alignment of a target that is written past the caches
# Around every boundary of xxh3 above SHORT_BYTES: a stripe of 64 bytes, a block of 1,024 and its last stripe.
PROVEN_BYTES = (241, 255, 256, 257, 320, 1023, 1024, 1025, 1087, 1088, 1089, 2047, 2048, 2049, 3073, 4133)


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


class OnePass(Protocol):
    """The functions of the C module. `copy` and `copy_blocks` are for memory.runs, which has addresses."""

    def copy(
        self, target_base: int, source_base: int, targets: Offsets, sources: Offsets, lengths: Offsets
    ) -> None: ...

    def copy_blocks(
        self,
        target_base: int,
        source_base: int,
        targets: Offsets,
        sources: Offsets,
        lengths: Offsets,
        ends: Offsets,
        seeds: Words,
        digests: Words,
    ) -> None: ...

    def copy_one(self, target: memoryview, source: Payload, seed: int) -> int: ...

    def levels(self) -> list[str]: ...

    def use(self, level: str) -> None: ...


def agrees(module: OnePass) -> bool:
    """Whether the module's digests and copies are those of the library, with and without an aligned target."""
    numbers = np.arange(PROVEN_BYTES[-1] + 1, dtype=np.uint32)
    noise = (numbers * np.uint32(0x9E3779B1) >> np.uint32(23)).astype(np.uint8)
    for length in PROVEN_BYTES:
        source, target = noise[1 : 1 + length].tobytes(), bytearray(length + 2 * STRIPE_BYTES)
        begin = -np.frombuffer(target, np.uint8).ctypes.data % STRIPE_BYTES + length % 2
        found = module.copy_one(memoryview(target)[begin : begin + length], source, length << 40)
        if found != xxhash.xxh3_64_intdigest(source, seed=length << 40):
            return False
        if target != bytes(begin) + source + bytes(len(target) - length - begin):
            return False
    return True


def _native() -> OnePass | None:
    try:
        from kvservice.core.segment import _one_pass
    except ImportError:  # there was no compiler at the installation
        return None
    is_whole = hasattr(_one_pass, "copy_one")  # `make native` builds another one again
    return _one_pass if is_whole and agrees(_one_pass) else None


native = _native()
