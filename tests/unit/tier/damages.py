"""What may have become of a block's file or object, and what a read of it says: the same in every tier."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvservice.core.events import PullResult
from kvservice.core.segment.blockfile import FILE_HEADER_BYTES

Damage = Callable[[bytes], bytes]
_BEHIND = FILE_HEADER_BYTES + 1  # the second byte of the payload
_FOUND: dict[str, tuple[Damage, PullResult]] = {
    "a byte": (lambda data: data[: _BEHIND - 1] + bytes([data[_BEHIND - 1] ^ 1]) + data[_BEHIND:], PullResult.CORRUPT),
    "cut": (lambda data: data[:-1], PullResult.CORRUPT),
    "longer": (lambda data: data + b"x", PullResult.CORRUPT),
    "header": (lambda data: b"x" + data[1:], PullResult.CORRUPT),
    "no header": (lambda data: data[:100], PullResult.STALE),
    "empty": (lambda data: b"", PullResult.STALE),
    "much longer": (lambda data: data + bytes(8192), PullResult.STALE),
    "another version": (
        lambda data: data.replace(b'"kvservice_block":"1"', b'"kvservice_block":"2"'),
        PullResult.STALE,
    ),
}
each_damage = pytest.mark.parametrize(("damage", "wanted"), _FOUND.values(), ids=_FOUND)
