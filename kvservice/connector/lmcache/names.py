"""How an object of LMCache gets its name in the pool. Pure, and knows no module of LMCache.

LMCache's key says chunk hash, model name, rank, object group and salt. It says nothing of numbers, shapes, order or
weights, so a float16 engine is served what a bfloat16 engine stored. Here all of them are in the fingerprint, which is
part of each block's key: what differs in one of them is another block.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvservice.core.block.numbers import number_fields
from kvservice.units import BlockHash

NAMING = 1  # of the way in which this module names objects
TEXT_CHARS_MAX = 256  # of a layout; a longer one is told by its digest, so that it fits into a namespace
KV_FORMAT = "KV_2LTD"  # K or V, layer, token, the rest: what lookups mean, which do not say a format
# LMCache's server makes all its objects in one format, and calls it by the default of the allocator that it runs with.
SAME_FORMAT = {"UNDEFINED": KV_FORMAT}
TOKEN_AXIS = {KV_FORMAT: 2}  # where an array in a format counts tokens


class ObjectKeyPort(Protocol):
    """LMCache's ObjectKey."""

    @property
    def chunk_hash(self) -> bytes: ...
    @property
    def model_name(self) -> str: ...
    @property
    def kv_rank(self) -> int: ...
    @property
    def object_group_id(self) -> int: ...
    @property
    def cache_salt(self) -> str: ...


@dataclass(frozen=True, slots=True)
class ObjectLayout:
    """What the bytes of an object are."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]  # as torch calls them, one for each shape
    format: str  # the name of LMCache's MemoryFormat
    size_bytes: int

    @classmethod
    def of(cls, shapes: Sequence[Sequence[int]], dtypes: Sequence[Any], format: str) -> ObjectLayout:
        """`dtypes` are torch's, `format` is the name of a MemoryFormat of LMCache."""
        sizes = [math.prod(shape) * int(dtype.itemsize) for shape, dtype in zip(shapes, dtypes, strict=True)]
        names = tuple(str(dtype).removeprefix("torch.") for dtype in dtypes)
        whole = tuple(tuple(int(size) for size in shape) for shape in shapes)
        return cls(whole, names, SAME_FORMAT.get(format, format), sum(sizes))

    @property
    def tokens(self) -> int:
        """Tokens in an object, for people; 1 where the format does not say it."""
        axis = TOKEN_AXIS.get(self.format)
        if axis is None or len(self.shapes) != 1 or len(self.shapes[0]) <= axis:
            return 1
        return max(1, self.shapes[0][axis])

    def __str__(self) -> str:
        parts = [f"{kind} {'x'.join(map(str, shape))}" for kind, shape in zip(self.dtypes, self.shapes, strict=True)]
        text = f"{self.format} {', '.join(parts)}"
        return text if len(text) <= TEXT_CHARS_MAX else hashlib.sha256(text.encode()).hexdigest()


def identity_of(model: str, layout: ObjectLayout, weights_version: str, packing: str) -> dict[str, object]:
    """Everything that changes the bytes of an object without changing LMCache's key, as fields of a fingerprint."""
    fields: dict[str, object] = {
        "lmcache": NAMING,
        "model": model,
        "layout": str(layout),
        "weights_version": weights_version,
        "packing": packing,
    }
    if len(layout.dtypes) == 1 and layout.shapes[0]:
        fields |= number_fields(layout.dtypes[0], layout.shapes[0][-1], 0)
    return fields


def object_hash(key: ObjectKeyPort) -> BlockHash:
    """What LMCache's key says, but the model's name, which is in the fingerprint."""
    hasher = hashlib.sha256(b"kvservice/lmcache/1")
    parts = (key.chunk_hash, b"%d" % key.kv_rank, b"%d" % key.object_group_id, key.cache_salt.encode())
    for part in parts:
        hasher.update(len(part).to_bytes(4, "big"))
        hasher.update(part)
    return BlockHash(hasher.digest())


def rows_of(keys: Sequence[ObjectKeyPort]) -> list[list[int]]:
    """The indices of a lookup's keys, by prompt, rank and group: LMCache gives each in the order of its chunks."""
    found: dict[tuple[object, ...], list[int]] = {}
    for index, key in enumerate(keys):
        found.setdefault((key.model_name, key.kv_rank, key.object_group_id, key.cache_salt), []).append(index)
    return list(found.values())
