"""Fingerprint: everything that changes the bytes of a block without changing the engine's block hash.

Two engines share blocks only when all their fields are equal. The digest is part of every block key. The fields travel
when an engine attaches, so that a mismatch is reported as an error and does not appear as a hit rate of zero. Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from kvservice.errors import InvalidRequest

# An engine has a few dozen short fields. A fingerprint with more or longer ones is refused, so that an attached engine
# takes little memory and its errors stay readable.
FIELDS_MAX = 512
FIELD_CHARS_MAX = 4096  # of a name or a value; see FIELDS_MAX
DIFFERENCES_TOLD = 12  # fields named in one error; two models with little in common differ in most fields
SHORT_DIGITS = 12  # of a digest in hex; see Fingerprint.short
ABSENT = "(absent)"
NAMESPACE_FIELD = "namespace"


@dataclass(frozen=True, slots=True)
class FieldDifference:
    """A field in which two fingerprints differ."""

    name: str
    ours: str
    theirs: str


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """(name, value) pairs in order of name. The order is part of the identity, so build it with `of` only."""

    fields: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, fields: Mapping[str, object]) -> Fingerprint:
        """Sorts the fields by name and makes text of the values. Raises InvalidRequest for none, too many, too long
        ones, and those that no UTF-8 can be made of."""
        pairs = tuple(sorted((name, str(value)) for name, value in fields.items()))
        if not pairs or len(pairs) > FIELDS_MAX:
            raise InvalidRequest(f"a fingerprint has 1 to {FIELDS_MAX} fields, not {len(pairs)}")
        for name, value in pairs:
            if not name or len(name) > FIELD_CHARS_MAX or len(value) > FIELD_CHARS_MAX:
                raise InvalidRequest(f"fingerprint field {name[:80]!r} is empty or longer than {FIELD_CHARS_MAX}")
            try:
                (name + value).encode()
            except UnicodeEncodeError as error:
                raise InvalidRequest(f"fingerprint field {name[:80]!r} is no text: {value[:80]!r}") from error
        return cls(pairs)

    def within(self, namespace: str) -> Fingerprint:
        """The same in a namespace: equal engines of two namespaces share no block. The empty one adds nothing."""
        return Fingerprint.of({**dict(self.fields), NAMESPACE_FIELD: namespace}) if namespace else self

    @property
    def digest(self) -> bytes:
        """32 bytes: SHA-256 over length-prefixed names and values, so that no two field lists collide."""
        hasher = hashlib.sha256(b"kvservice/fingerprint/1")
        for text in (part for pair in self.fields for part in pair):
            data = text.encode()
            hasher.update(len(data).to_bytes(4, "big"))
            hasher.update(data)
        return hasher.digest()

    @property
    def block_mark(self) -> bytes:
        """The first 16 bytes of its digest, as blocks carry it in memory, on the wire and in tiers."""
        return self.digest[:16]

    @property
    def engine(self) -> str:
        """The kind of engine, such as vllm or sglang, without its version. Empty if the fields do not name it."""
        return dict(self.fields).get("engine", "").partition(" ")[0]

    @property
    def short(self) -> str:
        """The digest for people: enough digits to tell the fingerprints of one service apart."""
        return self.digest.hex()[:SHORT_DIGITS]

    def differences(self, other: Fingerprint) -> list[FieldDifference]:
        """The fields that differ, in order of name. A field that one of the two lacks counts as ABSENT."""
        ours, theirs = dict(self.fields), dict(other.fields)
        return [
            FieldDifference(name, ours.get(name, ABSENT), theirs.get(name, ABSENT))
            for name in sorted(ours.keys() | theirs.keys())
            if ours.get(name) != theirs.get(name)
        ]

    def difference(self, other: Fingerprint) -> str:
        """The fields that differ, for people: 'dtype: bfloat16 here, float16 there; …'. Empty when equal.

        Of many differences the first DIFFERENCES_TOLD are listed and the rest counted.
        """
        parts = [f"{field.name}: {field.ours} here, {field.theirs} there" for field in self.differences(other)]
        more = len(parts) - DIFFERENCES_TOLD
        return "; ".join(parts[:DIFFERENCES_TOLD]) + (f"; and {more} more fields" if more > 0 else "")
