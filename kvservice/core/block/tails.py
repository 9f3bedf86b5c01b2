"""Names of partial tails: the last block of a prompt, of which only the first tokens are computed.

A tail of `n` tokens is named by what it follows, by `n` and by its tokens. Who continues a prefix does not know how
long a tail others have left behind it, so it asks for all lengths at once, the longest first, and gets one block. The
names of one question fit into one span, with the key of the block before them at its head: so all of them lie in the
lookup partition of that block. Blocks of more tokens than a span has keys have tails of every second token, every third
and so on. Pure.
"""

from __future__ import annotations

import hashlib
import struct

from kvservice.core.block.keys import SPAN_BLOCKS
from kvservice.units import BlockHash, div_ceil

TAIL_NAMES_MAX = SPAN_BLOCKS - 1  # in one question, beside the head
# What the tails of a first block follow. It is no block; like any block before a tail it says where they are announced.
NO_BLOCK = BlockHash(hashlib.sha256(b"kvservice/tail/0").digest())


def tail_step(block_tokens: int) -> int:
    """Tails of blocks of so many tokens have a multiple of this many: 1 up to 64 tokens, 2 up to 128."""
    return div_ceil(block_tokens, SPAN_BLOCKS)


def tail_tokens(tokens: int, block_tokens: int) -> int:
    """The tokens of the longest tail that can be named of a block with `tokens` of its own; 0 for none."""
    return min(tokens, block_tokens - 1) // tail_step(block_tokens) * tail_step(block_tokens)


def tail_lengths(tokens: int, block_tokens: int) -> range:
    """The lengths of the tails that a prompt with `tokens` more tokens can use, the longest first."""
    step = tail_step(block_tokens)
    return range(tail_tokens(tokens, block_tokens), 0, -step)


def tail_hash(block_hash: BlockHash, tokens: int) -> BlockHash:
    """The hash that a tail's key derives from. `block_hash` is the engine's own for a block that ends there, chained to
    the block before. No whole block has it."""
    return BlockHash(hashlib.sha256(b"kvservice/tail/1" + struct.pack("<I", tokens) + block_hash).digest())
