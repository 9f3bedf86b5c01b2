"""The C module that copies and digests in one pass and checks headers, if the installation had a compiler.

It is used only after it has agreed with the libraries: at every length where its loops change, and for headers with and
without a changed bit. Pure.
"""

from __future__ import annotations

import zlib
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from kvservice.core.segment.copy_runs import Offsets
from kvservice.core.segment.geometry import HEADER_BYTES

Words: TypeAlias = "npt.NDArray[np.uint64]"

SHORT_BYTES = 240  # up to here xxh3 is another function, which the C module leaves to the library
CRC_BYTES = 4  # at the end of a header
STRIPE_BYTES = 64  # of xxh3: what it reads at once, and the alignment of a target that is written past the caches
# Around every boundary of xxh3 above SHORT_BYTES: a stripe of 64 bytes, a block of 1,024 and its last stripe.
PROVEN_BYTES = (241, 255, 256, 257, 320, 1023, 1024, 1025, 1087, 1088, 1089, 2047, 2048, 2049, 3073, 4133)


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

    def copy_one(self, target: memoryview, source: bytes | bytearray | memoryview, seed: int) -> int: ...

    def have_crcs(self, headers: bytes) -> bool: ...

    def levels(self) -> list[str]: ...

    def use(self, level: str) -> None: ...


def agrees(module: OnePass) -> bool:
    """Whether the module's digests, copies and checksums are those of the libraries."""
    return _copies_agree(module) and _checksums_agree(module)


def _checksums_agree(module: OnePass) -> bool:
    body = bytes(range(100, 100 + HEADER_BYTES - CRC_BYTES))
    header = body + zlib.crc32(body).to_bytes(CRC_BYTES, "little")
    changed = [bytes(byte ^ (at == place) for at, byte in enumerate(header)) for place in range(HEADER_BYTES)]
    return module.have_crcs(header * 2) and not any(module.have_crcs(header + wrong) for wrong in changed)


def _copies_agree(module: OnePass) -> bool:
    """With and without an aligned target."""
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
    is_whole = hasattr(_one_pass, "have_crcs")  # `make native` builds another one again
    return _one_pass if is_whole and agrees(_one_pass) else None


native = _native()
