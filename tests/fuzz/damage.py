"""Bytes that were right, and are not any more."""

from __future__ import annotations

import random


def damaged(draw: random.Random, data: bytes) -> bytes:
    """Some bits flipped, bytes lost, added or replaced by extreme numbers; at most 128 KiB."""
    found = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 6))):
        at, kind = draw.randrange(len(found) + 1), draw.randrange(4)
        if kind == 0 and found:
            found[at % len(found)] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del found[at : at + draw.choice((1, 4, 1 << 20))]
        elif kind == 2:
            found[at:at] = draw.randbytes(draw.choice((1, 2, 8, 300)))
        else:
            found[at : at + 4] = draw.choice((b"\xff\xff\xff\xff", bytes(4), b"\xff\xff", b"\x00\x00\x00\x80"))
    return bytes(found[: 128 << 10])
