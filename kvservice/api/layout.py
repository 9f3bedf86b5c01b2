"""What a block looks like, and how a caller's arrays become blocks."""

from __future__ import annotations

import math
import re
import struct
import sys
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvservice.api.arguments import each, whole_number
from kvservice.core.block.numbers import ACCEPTED
from kvservice.core.segment.layout import SlotLayout
from kvservice.errors import InvalidRequest

if TYPE_CHECKING:
    import torch

Array: TypeAlias = npt.NDArray[Any]
Arrays: TypeAlias = "Array | torch.Tensor | Sequence[Array] | Sequence[torch.Tensor]"
DType: TypeAlias = "str | type[Any] | np.dtype[Any] | torch.dtype"
Tokens: TypeAlias = "Sequence[int] | Array | torch.Tensor"

# Types that NumPy does not know, with the type of the same size that stands for them in NumPy's arrays.
FOREIGN_TYPES = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}


@dataclass(frozen=True)
class Layout:
    """One block: an array of `shape` and `dtype` with the keys and values of `block_tokens` tokens.

    Hits and what is evicted are whole blocks: with 256 tokens a small model has a sixteenth of the names of 16, and a
    shared prefix that is shorter is no hit. The pool does not look into a block, so the order of the axes is yours.
    `dtype` is a name or a type of NumPy or torch. In NumPy's arrays `uint16` stands for `bfloat16`, and `uint8` for the
    8-bit floating-point types.

    `accept_codec="int8"` lets tiers below the memory store rows of the last axis as 8-bit numbers, so that a block may
    come back a little changed; programs with another choice do not share blocks. See docs/codecs.md.

    Raises InvalidRequest for a type that the pool cannot hold, or sizes that are not positive.

    >>> from kvservice import Layout
    >>> layout = Layout(block_tokens=16, shape=(30, 2, 3, 16, 64), dtype="bfloat16")  # layer, K or V, head, token, size
    >>> layout.block_bytes
    368640
    """

    block_tokens: int
    shape: tuple[int, ...]
    dtype: str = "float32"
    accept_codec: str = ""

    if TYPE_CHECKING:  # it takes more than it keeps

        def __init__(
            self, block_tokens: int, shape: Sequence[int], dtype: DType = "float32", accept_codec: str = ""
        ) -> None: ...

    def __post_init__(self) -> None:
        object.__setattr__(self, "block_tokens", whole_number("block_tokens", self.block_tokens))
        shape = each("shape", self.shape, "sizes, such as (4, 2, 64)")
        object.__setattr__(self, "shape", tuple(whole_number("a size of the shape", size) for size in shape))
        object.__setattr__(self, "dtype", _type_name(self.dtype))
        if self.block_tokens <= 0 or not self.shape or min(self.shape) <= 0:
            raise InvalidRequest(f"block_tokens and every size of the shape must be positive: {self}")
        if self.accept_codec and not re.fullmatch(ACCEPTED, str(self.accept_codec)):
            raise InvalidRequest(f"accept_codec is the name of a codec, such as int8, not {self.accept_codec!r}")

    @property
    def block_bytes(self) -> int:
        """The bytes of one block."""
        return math.prod(self.shape) * self.numpy_type.itemsize

    @property
    def numpy_type(self) -> np.dtype[Any]:
        """The type of NumPy's arrays that hold blocks."""
        return np.dtype(FOREIGN_TYPES.get(self.dtype, self.dtype))

    def slot_layout(self) -> SlotLayout:
        """The same for the pool, which sees bytes."""
        return SlotLayout(1, 1, self.block_bytes, self.block_tokens)

    def blocks_of(self, arrays: Arrays) -> list[Array]:
        """The caller's blocks as arrays of this layout, without a copy where that can be. Raises InvalidRequest."""
        if _is_tensor(arrays):
            return list(self._checked(_from_torch(arrays, self.dtype), self.shape, first_axis=True))
        if isinstance(arrays, np.ndarray):
            return list(self._checked(arrays, self.shape, first_axis=True))
        blocks = each("arrays", arrays, "blocks, or one array")
        try:
            found = [_from_torch(block, self.dtype) if _is_tensor(block) else np.asarray(block) for block in blocks]
        except ValueError as error:
            raise InvalidRequest(f"what was given as a block is no array: {error}") from error
        return [self._checked(block, self.shape, first_axis=False) for block in found]

    def _checked(self, array: Array, shape: tuple[int, ...], *, first_axis: bool) -> Array:
        found = array.shape[1:] if first_axis else array.shape
        if found != shape or array.dtype != self.numpy_type:
            wanted = f"(blocks, {', '.join(map(str, shape))})" if first_axis else str(shape)
            raise InvalidRequest(f"blocks are {wanted} of {self.numpy_type}, not {array.shape} of {array.dtype}")
        return array


def pack_tokens(tokens: Tokens) -> bytes:
    """The tokens as little-endian u32. Raises InvalidRequest for something else than a row of whole numbers."""
    if _is_tensor(tokens):
        tokens = _from_torch(tokens, "whole numbers")
    if isinstance(tokens, np.ndarray):
        fits = tokens.ndim == 1 and tokens.dtype.kind in "iu"
        if not fits or (tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < 1 << 32):
            raise InvalidRequest(
                f"tokens are one row of whole numbers from 0 to 2^32 - 1, not {tokens.dtype}{tokens.shape}"
            )
        return tokens.astype("<u4").tobytes()
    if isinstance(tokens, (Set, Mapping)):  # it has no order and no token twice: other prompts would have this name
        raise InvalidRequest(f"tokens are a row of whole numbers from 0 to 2^32 - 1, not a {type(tokens).__name__}")
    try:
        return struct.pack(f"<{len(tokens)}I", *tokens)
    except (struct.error, TypeError) as error:
        raise InvalidRequest(f"tokens are whole numbers from 0 to 2^32 - 1: {error}") from error


def _type_name(kind: object) -> str:
    name = "nothing" if kind is None else str(kind).removeprefix("torch.")  # NumPy takes None for float64
    if name in FOREIGN_TYPES:
        return name
    try:
        found = np.dtype(name if isinstance(kind, str) or name != str(kind) else kind)  # type: ignore[call-overload]
    except TypeError as error:
        raise InvalidRequest(f"{kind!r} is no type of numbers that a block can have") from error
    if found.kind not in "biufc" or found.str[0] == ">":
        raise InvalidRequest(f"{kind!r} is no type of numbers that a block can have")
    return str(found.name)


def _is_tensor(value: object) -> bool:
    # Who has a tensor has imported torch. While another thread imports it, it has no tensors yet.
    kind = getattr(sys.modules.get("torch"), "Tensor", None)
    return kind is not None and isinstance(value, kind)


def _from_torch(tensor: Any, wanted: str) -> Array:
    """A type that NumPy does not know goes by its bits, if it is the one that is wanted. Raises InvalidRequest."""
    import torch

    name = str(tensor.dtype).removeprefix("torch.")
    if name in FOREIGN_TYPES and name != wanted:
        raise InvalidRequest(f"give a tensor of {wanted}, not of {tensor.dtype}")
    stands_for = FOREIGN_TYPES.get(name)
    try:
        held = tensor.detach().cpu()
        found: Array = (held if stands_for is None else held.view(getattr(torch, stands_for))).numpy(force=True)
    except (TypeError, NotImplementedError) as error:  # it is sparse, quantized or without data
        raise InvalidRequest(f"no array can be made of this tensor: {error}") from error
    return found
