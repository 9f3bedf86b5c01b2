"""The form in which a tier stores a block, and what a codec does. kvservice.testing.codec_contract holds every codec
to it.

A codec is a pair of functions on bytes. It keeps no state that a block depends on, so any thread may call it at any
time. What decoding needs beside the bytes stands in the header of the block's file (core.segment.blockfile): `codec` is
one step for each codec in the order of encoding, with "+" between. A step is a name, and parameters after a colon.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

from kvservice.core.block.numbers import Numbers
from kvservice.core.segment.blockfile import BlockFileHeader

INTERFACE_VERSION = 1  # of this file; a codec of another package names the one that it was written for
# More than any codec adds to a payload that it cannot make smaller: a tag of 16 bytes, a frame of 32. A file whose
# stored part is longer than the payload and this together is broken, and is not read.
EXTRA_BYTES_MAX = 4096
Buffer: TypeAlias = "bytes | bytearray | memoryview"


@dataclass(frozen=True, slots=True)
class Encoded:
    """A block as a tier stores it: the header of its file, and what follows the header."""

    header: BlockFileHeader
    data: Buffer


@dataclass(frozen=True, slots=True)
class Coded:
    """What one codec makes of a block."""

    data: Buffer
    parameters: str = ""  # for its step in the header: small letters, digits and _.,:-
    digest: int | None = None  # of what decoding gives, from a codec that does not give back the same bytes
    key_id: str = ""  # from a codec that encrypts, for the header
    nonce: bytes = b""  # the same


class Codec(Protocol):
    """One codec. Its methods write nothing but what they return, or `target`."""

    name: str  # in headers and settings: a small letter, then small letters, digits and "_", 16 at most

    def encode(self, header: BlockFileHeader, data: memoryview, numbers: Numbers | None) -> Coded | None:
        """The block in this codec's form; None when that does not pay or cannot be: then it is left as it is.

        `header` and `data` are the block as the codecs before this one left it. `numbers` is what is known of the
        payload's bytes. Raises CodecError when the block must not be stored without this codec.
        """
        ...

    def decode(self, header: BlockFileHeader, parameters: str, data: memoryview, target: memoryview) -> None:
        """Write into `target` what was given to `encode`; it has exactly that length.

        `header.codec` ends with this codec's step, whose parameters are `parameters`. All of this may be anything: it
        comes from a file that others can write. Raises CodecError for what this codec has not made, and KeyUnknown when
        it lacks the key; `target` then holds anything. Writes no byte beyond `target`, and takes no more memory than a
        few times its length.
        """
        ...
