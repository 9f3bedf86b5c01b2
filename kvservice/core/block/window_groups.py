"""Layers that do not read the whole prefix: which blocks before a hit's end they need, and how long a hit can be then.

A KV cache group (group) is a set of layers whose blocks are stored together. Group 0 has full attention: a hit needs
every block of it, and its keys are the request's chain. Every other group is a window group: its layers see only a
sliding window or a chunk, or they keep a state (Mamba, linear attention): what is left of all tokens so far. All groups
are cut at the same tokens, so a position means the same tokens in each of them; a state's block at a position is the
state behind its last token. The keys of a window group are derived from the chain. Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvservice.core.block.keys import KEY_BYTES, KEYS_PER_REQUEST_MAX
from kvservice.core.segment.layout import SlotLayout
from kvservice.errors import UnsupportedLayout
from kvservice.units import BlockKey

# Positions to one slot that waits for a state. An engine keeps a state where a step ends, and a step fills several
# positions; a state is as large as some blocks of attention, so slots that wait for one take much room.
STATE_EVERY = 4
WINDOW_GROUPS_MAX = 16  # models have one to a few. An engine with more is refused; each one costs keys and lookups.
# Set in the position of a window group's block. Such a block is no link of a chain: it has no parent and no children,
# and of two that are equally old the earlier is evicted first.
WINDOW_BIT = 1 << 31
assert KEYS_PER_REQUEST_MAX < WINDOW_BIT, "positions in a chain must not look like a window group's"
assert WINDOW_GROUPS_MAX < 1 << 16, "group_key writes a group's number in two bytes"


@dataclass(frozen=True, slots=True)
class Window:
    """The tokens that a layer reads when the next token is computed. Exactly one of the three fields is set.

    With a sliding window, the `sliding_tokens` - 1 tokens before it; with chunked attention, those of its chunk. A
    state lies with the last token before it. Raises UnsupportedLayout for other values.
    """

    sliding_tokens: int = 0
    chunk_tokens: int = 0
    is_state: bool = False

    def __post_init__(self) -> None:
        sizes = (self.sliding_tokens, self.chunk_tokens, int(self.is_state))
        if min(sizes) < 0 or sum(size > 0 for size in sizes) != 1:
            raise UnsupportedLayout(f"a layer sees a window or a chunk of tokens, or keeps a state, not {self}")

    def first_token(self, tokens: int) -> int:
        """The index of the first of `tokens` tokens that is still read."""
        if self.chunk_tokens:
            return tokens // self.chunk_tokens * self.chunk_tokens
        if self.is_state:
            return max(0, tokens - 1)
        return max(0, tokens - self.sliding_tokens + 1)

    def first_block(self, count: int, block_tokens: int) -> int:
        """The index of the first block that a hit of `count` blocks needs; `count` when it needs none."""
        return self.first_token(count * block_tokens) // block_tokens


@dataclass(frozen=True, slots=True)
class WindowGroup:
    """A KV cache group whose layers all have this window. A slot holds one block: one position, all its layers. A state
    is stored at some positions only: where the engine happened to end a step."""

    layout: SlotLayout
    window: Window


def group_key(key: BlockKey, group: int) -> BlockKey:
    """The key of a window group's block, from the chain's key at the same position. `group` is 1 or more.

    Whoever has the chain can make it, so an Acquire stays one chain whatever the number of groups.
    """
    salt = group.to_bytes(2, "little")
    return BlockKey(hashlib.blake2b(key, digest_size=KEY_BYTES, salt=salt, person=b"kvservice/group").digest())


def longest_whole(count: int, firsts: Sequence[Callable[[int], int]], here: Sequence[Callable[[int], bool]]) -> int:
    """The longest hit of at most `count` blocks that no window group has a gap for.

    `firsts` and `here` have one entry for each window group: the first block that a hit needs, and whether the block at
    a position is present. A hit needs the blocks from `first(hit)` up to its end.
    """
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
        # A hit that ends after a gap, but not later than this one, has the gap in its window as well.
        hit = min(gaps)
    return 0
