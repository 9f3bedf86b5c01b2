"""Payloads as float32 and back, for the types that codecs look into. Copies; NumPy has no bfloat16."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvservice.codec.base import Buffer
from kvservice.core.block.numbers import ITEM_BYTES as ITEM_BYTES_OF

Floats: TypeAlias = "npt.NDArray[np.float32]"
ITEM_BYTES = {kind: ITEM_BYTES_OF[kind] for kind in ("bfloat16", "float16", "float32")}  # the types that are known here
FLOAT16_MAX = 65504.0  # of the type; a decoded number beyond it would become infinite
BFLOAT16_ROUNDING = 0x7FFF  # half of what is cut off, less one


def to_floats(data: Buffer, kind: str) -> Floats:
    """The numbers of a payload as float32, exactly. A row of all of them, in their order."""
    if kind == "bfloat16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, "<f2" if kind == "float16" else "<f4").astype(np.float32)


def from_floats(rows: Floats, kind: str, target: memoryview) -> None:
    """Round to the nearest numbers of this type, and write them into `target`."""
    if kind == "bfloat16":
        bits = rows.view(np.uint32)
        rounded = bits + (BFLOAT16_ROUNDING + ((bits >> 16) & 1))
        made: npt.NDArray[Any] = (rounded >> 16).astype("<u2")
    elif kind == "float16":
        made = np.clip(rows, -FLOAT16_MAX, FLOAT16_MAX).astype("<f2")
    else:
        made = rows.astype("<f4")
    np.frombuffer(target, np.uint8)[:] = made.reshape(-1).view(np.uint8)
