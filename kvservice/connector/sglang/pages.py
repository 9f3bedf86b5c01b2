"""What a page of SGLang's host memory is made of, and how its bytes become blocks of the pool. Imports no engine.

A page lies in several pieces: K and V apart, or one piece a layer, as the layout of the host memory has it. A block
holds the pieces of one page one behind the other. Where `head_group` cuts a page by heads, each block holds the rows of
its heads from every piece.

What a block is called says what it holds and never who wrote it: the hash of its page, and the heads where the block
does not hold all of them. So a rank finds what ranks of another tensor-parallel size have written.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvservice.api.layout import Array
from kvservice.api.mapped import Copy
from kvservice.errors import ConfigError, UnsupportedLayout
from kvservice.units import BlockHash


@dataclass(frozen=True, slots=True)
class Ranks:
    """Where one rank stands in its engine."""

    tp_rank: int = 0
    tp_size: int = 1
    replicated: bool = False  # all ranks hold the same bytes, as with MLA

    @property
    def mark(self) -> bytes:
        """Of blocks that only this rank can read."""
        return b"" if self.replicated or self.tp_size == 1 else b"R%d/%d" % (self.tp_rank, self.tp_size)


@dataclass(frozen=True, slots=True)
class HeadCut:
    """How the heads of a rank's pages are cut into blocks."""

    rows: int  # rows of heads in one piece of a page
    marks: tuple[bytes, ...]  # of the blocks of one page, in the order of the heads
    group: int  # heads of a block
    total: int  # KV heads of the model


def cut_heads(head_count: int, total: int, rows: int, ranks: Ranks, group: int | None) -> HeadCut:
    """The cut of a rank with `head_count` KV heads of `total`. Raises ConfigError if `group` does not divide them."""
    width = head_count if group is None else group
    if head_count % width:
        raise ConfigError(f"head_group {width} does not divide the {head_count} KV heads of a rank: choose a divisor")
    first = ranks.tp_rank * head_count // width
    count = head_count // width
    if width == total:
        return HeadCut(rows, (b"",), width, total)
    return HeadCut(rows, tuple(b"H%d" % (first + number) for number in range(count)), width, total)


@dataclass(frozen=True, slots=True)
class PageForm:
    """The bytes of one page in one of the engine's host pools."""

    pieces: tuple[int, ...]  # bytes of each
    marks: tuple[bytes, ...] = (b"",)  # one a block of the page; see HeadCut
    rows: int = 0  # rows of heads in each piece; only read where a page is several blocks

    def __post_init__(self) -> None:
        if not self.pieces or min(self.pieces) <= 0:
            raise UnsupportedLayout(f"a page has pieces of {self.pieces} bytes")
        if len(self.marks) > 1 and any(size % (self.rows * len(self.marks)) for size in self.pieces):
            raise UnsupportedLayout(f"pieces of {self.pieces} bytes in {self.rows} rows do not divide by heads")

    @property
    def page_bytes(self) -> int:
        return sum(self.pieces)

    @property
    def block_bytes(self) -> int:
        return self.page_bytes // len(self.marks)

    def names(self, page: str) -> list[BlockHash]:
        """The names of a page's blocks. `page` is SGLang's hash in hex; raises ValueError for anything else."""
        digest = bytes.fromhex(page)
        return [BlockHash(digest + mark) for mark in self.marks]

    def store(self, addresses: Sequence[int], number: int) -> Copy:
        """Copies block `number` of the page at these addresses into a slot."""
        return lambda slot: self._copy(addresses, number, slot, into_slot=True)

    def load(self, addresses: Sequence[int], number: int) -> Copy:
        """The other way round."""
        return lambda slot: self._copy(addresses, number, slot, into_slot=False)

    def _copy(self, addresses: Sequence[int], number: int, slot: Array, *, into_slot: bool) -> None:
        at = 0
        for address, size in zip(addresses, self.pieces, strict=True):
            length = size // len(self.marks)
            in_slot, in_page = slot[at : at + length], _bytes_at(address, size)
            if len(self.marks) > 1:
                width = length // self.rows
                in_slot = in_slot.reshape(self.rows, width)
                in_page = in_page.reshape(self.rows, -1)[:, number * width : (number + 1) * width]
            np.copyto(in_slot, in_page) if into_slot else np.copyto(in_page, in_slot)
            at += length


@dataclass(frozen=True, slots=True)
class SharedPageForm(PageForm):
    """A page that engines of other kinds read too. SGLang keeps K and V apart, each by layers; in the slot they take
    turns: `[layer][K|V]`. Within a layer both are `[token][kv head][element]`."""

    layer_count: int = 1

    def _copy(self, addresses: Sequence[int], number: int, slot: Array, *, into_slot: bool) -> None:
        for in_slot, in_page in zip(self.halves(slot), self.layers_at(addresses), strict=True):
            np.copyto(in_slot, in_page) if into_slot else np.copyto(in_page, in_slot)

    def halves(self, slot: Array) -> list[Array]:
        """The bytes of K and of V in a slot, `(layer, byte)` each."""
        by_layer = slot[: self.page_bytes].reshape(self.layer_count, 2, -1)
        return [by_layer[:, 0], by_layer[:, 1]]

    def layers_at(self, addresses: Sequence[int]) -> list[Array]:
        """The same in SGLang's host memory."""
        pieces = zip(addresses, self.pieces, strict=True)
        return [_bytes_at(address, size).reshape(self.layer_count, -1) for address, size in pieces]


def _bytes_at(address: int, size: int) -> Array:
    return np.ctypeslib.as_array((ctypes.c_ubyte * size).from_address(address))
