"""Layers that do not read the whole prefix: which blocks before a hit's end they need, and how long a hit can be then.

A model of several cache groups has one *main* family of groups, whose every block is needed, and *sides*: families
whose layers see a window or a chunk only. All families are cut at the same tokens, so that a position names the same
tokens in each; a side's blocks have keys of their own, derived from the main chain. Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvservice.core.block.keys import KEY_BYTES, SPAN_BLOCKS, route_of_head
from kvservice.core.segment.layout import SlotLayout
from kvservice.errors import UnsupportedLayout
from kvservice.units import BlockKey, SpanRoute

SIDES_MAX = 16
# Set in the position of a side's block: it is no link of a chain, and of two equally old ones the earlier goes first.
SIDE_POSITION = 1 << 31


@dataclass(frozen=True, slots=True)
class Reach:
    """What a layer still reads when the next token is computed: the `window` - 1 tokens before it, or those of its
    chunk. Exactly one of the two is not 0."""

    window: int = 0
    chunk: int = 0

    def __post_init__(self) -> None:
        if min(self.window, self.chunk) != 0 or max(self.window, self.chunk) <= 0:
            raise UnsupportedLayout(f"a layer sees a window or a chunk of tokens, not {self}")

    def first_token(self, tokens: int) -> int:
        """The first of `tokens` that is still read."""
        return tokens // self.chunk * self.chunk if self.chunk else max(0, tokens - self.window + 1)

    def first_block(self, count: int, block_tokens: int) -> int:
        """The first block that a hit of `count` blocks needs; `count` when it needs none."""
        return self.first_token(count * block_tokens) // block_tokens


@dataclass(frozen=True, slots=True)
class Side:
    """A family of cache groups with the same reach: one slot holds the blocks of all of them at one position."""

    layout: SlotLayout
    reach: Reach


def side_key(key: BlockKey, side: int) -> BlockKey:
    """The key of a side's block at the position of the main family's block `key`. Sides are counted from 1."""
    return BlockKey(
        hashlib.blake2b(key, digest_size=KEY_BYTES, salt=side.to_bytes(2, "little"), person=b"kvservice/side").digest()
    )


def side_route(keys: Sequence[BlockKey], position: int, side: int) -> SpanRoute:
    """Like span_route, for a side's block; `keys` is the main chain."""
    return route_of_head(side_key(keys[position - position % SPAN_BLOCKS], side))


def reconcile(count: int, firsts: Sequence[Callable[[int], int]], here: Sequence[Callable[[int], bool]]) -> int:
    """The longest hit of at most `count` blocks for which every side has the blocks from `firsts[side](hit)` up to the
    hit. `here` says whether a side has the block of a position."""
    hit = count
    while hit:
        gaps = [
            gap
            for first, has in zip(firsts, here, strict=True)
            for gap in [next((i for i in range(hit - 1, first(hit) - 1, -1) if not has(i)), None)]
            if gap is not None
        ]
        if not gaps:
            return hit
        # A hit that ends behind a gap, but not later than this one, has the gap within its window, too.
        hit = min(gaps)
    return 0
