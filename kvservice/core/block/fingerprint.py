"""Fingerprint: everything that changes the bytes of a block without changing the engine's block hash.

Two engines share blocks only when every field is equal. The digest is part of every block key; the fields travel when
an engine attaches so that a mismatch can be explained instead of showing up as a silent zero hit rate.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from kvservice.errors import InvalidRequest

FIELDS_MAX = 512
FIELD_CHARS_MAX = 4096
DIFFERENCES_TOLD = 12


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Ordered (name, value) pairs; order is part of the identity, so always build it with `of`."""

    fields: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, fields: Mapping[str, object]) -> Fingerprint:
        """Sorted by name, values as text. Raises InvalidRequest when it is empty or oversized."""
        pairs = tuple(sorted((name, str(value)) for name, value in fields.items()))
        if not pairs or len(pairs) > FIELDS_MAX:
            raise InvalidRequest(f"a fingerprint has 1 to {FIELDS_MAX} fields, not {len(pairs)}")
        for name, value in pairs:
            if not name or len(name) > FIELD_CHARS_MAX or len(value) > FIELD_CHARS_MAX:
                raise InvalidRequest(f"fingerprint field {name[:80]!r} is empty or longer than {FIELD_CHARS_MAX}")
        return cls(pairs)

    @property
    def digest(self) -> bytes:
        """32 bytes: SHA-256 over length-prefixed names and values, so that no two field lists collide."""
        hasher = hashlib.sha256(b"kvservice/fingerprint/1")
        for text in (part for pair in self.fields for part in pair):
            data = text.encode()
            hasher.update(len(data).to_bytes(4, "big"))
            hasher.update(data)
        return hasher.digest()

    def difference(self, other: Fingerprint) -> str:
        """Readable list of the fields that differ: 'dtype: bfloat16 here, float16 there; …'. Empty when equal; of two
        models that have little in common, the first fields and how many more differ."""
        ours, theirs = dict(self.fields), dict(other.fields)
        parts = [
            f"{name}: {ours.get(name, '(absent)')} here, {theirs.get(name, '(absent)')} there"
            for name in sorted(ours.keys() | theirs.keys())
            if ours.get(name) != theirs.get(name)
        ]
        more = len(parts) - DIFFERENCES_TOLD
        return "; ".join(parts[:DIFFERENCES_TOLD]) + (f"; and {more} more fields" if more > 0 else "")
