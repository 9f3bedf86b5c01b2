"""Layers that do not read the whole prefix: which blocks before a hit's end they need, and how long a hit can be then.

A KV cache group (group) is a set of layers whose blocks are stored together. Group 0 has full attention: a hit needs
every block of it, and its keys are the request's chain. Every other group is a window group: its layers see a sliding
window or a chunk only. All groups are cut at the same tokens, so a position names the same tokens in each of them. The
keys of a window group are derived from the chain. Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvservice.core.block.keys import KEY_BYTES, SPAN_BLOCKS, route_of_head
from kvservice.core.segment.layout import SlotLayout
from kvservice.errors import UnsupportedLayout
from kvservice.units import BlockKey, SpanRoute

WINDOW_GROUPS_MAX = 16
# Set in the position of a window group's block. Such a block is no link of a chain: it has no parent and no children,
# and of two that are equally old the earlier is evicted first.
WINDOW_BIT = 1 << 31


@dataclass(frozen=True, slots=True)
class Window:
    """What a layer still reads when the next token is computed: of a sliding window the `sliding_tokens` - 1 tokens
    before it, of chunked attention those of its chunk. Exactly one of the two is not 0. Raises UnsupportedLayout."""

    sliding_tokens: int = 0
    chunk_tokens: int = 0

    def __post_init__(self) -> None:
        sizes = (self.sliding_tokens, self.chunk_tokens)
        if min(sizes) != 0 or max(sizes) <= 0:
            raise UnsupportedLayout(f"a layer sees a window or a chunk of tokens, not {self}")

    def first_token(self, tokens: int) -> int:
        """The first of `tokens` that is still read."""
        if self.chunk_tokens:
            return tokens // self.chunk_tokens * self.chunk_tokens
        return max(0, tokens - self.sliding_tokens + 1)

    def first_block(self, count: int, block_tokens: int) -> int:
        """The first block that a hit of `count` blocks needs; `count` when it needs none."""
        return self.first_token(count * block_tokens) // block_tokens


@dataclass(frozen=True, slots=True)
class WindowGroup:
    """A KV cache group whose layers all have this window. A slot holds the block of all its layers at one position."""

    layout: SlotLayout
    window: Window


def group_key(key: BlockKey, group: int) -> BlockKey:
    """The key of a window group's block at the position where `key` is the chain's. `group` is 1 or more."""
    salt = group.to_bytes(2, "little")
    return BlockKey(hashlib.blake2b(key, digest_size=KEY_BYTES, salt=salt, person=b"kvservice/group").digest())


def group_route(keys: Sequence[BlockKey], position: int, group: int) -> SpanRoute:
    """Like span_route, for a window group's block. `keys` is the chain of group 0."""
    return route_of_head(group_key(keys[position - position % SPAN_BLOCKS], group))


def reconcile(count: int, firsts: Sequence[Callable[[int], int]], here: Sequence[Callable[[int], bool]]) -> int:
    """The longest hit of at most `count` blocks for which every window group has its blocks from `first(hit)` up to
    the hit. `firsts` and `here` have an entry for each window group; `here` says whether it has a position's block."""
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
