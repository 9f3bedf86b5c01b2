"""What the bytes of a block are, as fields of the fingerprint: codecs below the pool know it of every engine. Pure.

An engine that accepts a lossy codec says so here, so its blocks have other keys than those of an engine that does not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "float8_e4m3fn": 1, "float8_e5m2": 1, "uint8": 1}
FIELD, ACCEPT_FIELD = "numbers", "accept_codec"
# The name of a codec, and how far it may drift: more than nothing, less than everything. The same in options.
ACCEPTED = r"[a-z][a-z0-9_]{0,15}(:0\.[0-9]{1,4})?"
_NUMBERS = re.compile(r"([a-z][a-z0-9_]{1,31}) row ([0-9]{1,6}) tokens ([0-9]{1,6})", re.ASCII)
_ACCEPTED = re.compile(ACCEPTED, re.ASCII)


@dataclass(frozen=True, slots=True)
class Numbers:
    """Numbers of one type, in rows of one token, one head and K or V."""

    type: str  # as torch calls it: "bfloat16", "float16", "float32", ...
    item_bytes: int
    row: int = 0  # numbers in a row; 0 = not known, or not the same for K and V
    tokens: int = 0  # that follow one another, each a row of K and one of V; 0 = not known
    accepts: str = ""  # the codec that may change the bytes of these blocks; "" = none may
    drift_max: float = 0.0  # how far it may; 0 = as far as the codec itself allows
    model: str = ""  # whose blocks they are, for people


def number_fields(kind: str, row: int, tokens: int, accepts: str = "") -> dict[str, object]:
    """The fields for numbers of this type. `accepts` is an engine's option: "", "int8" or "int8:0.1"."""
    name = kind.removeprefix("torch.")
    return {FIELD: f"{name} row {row} tokens {tokens}", **({ACCEPT_FIELD: accepts} if accepts else {})}


def numbers_of(fields: Mapping[str, str], model: str = "") -> Numbers | None:
    """What these fields of a fingerprint say; None when they say nothing, or nothing that is known here."""
    found = _NUMBERS.fullmatch(fields.get(FIELD, ""))
    if found is None or found[1] not in ITEM_BYTES:
        return None
    accepted = fields.get(ACCEPT_FIELD, "")
    name, _, limit = accepted.partition(":") if _ACCEPTED.fullmatch(accepted) else ("", "", "")
    kind = found[1]
    return Numbers(kind, ITEM_BYTES[kind], int(found[2]), int(found[3]), name, float(limit or 0), model)
