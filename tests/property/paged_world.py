"""A device and a host whose K/V can be judged: the K/V of a token is a digest of the tokens up to it.

Whatever is read through a block table says by itself whether it is right. Bytes that nobody wrote are junk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from kvservice.engine.blocks import RELEASED, PagedMemory, PagedSequence, Pairs, slot_mapping
from kvservice.engine.schedule import Chunk, Step

JUNK = -1


def digests(tokens: Iterable[int]) -> list[int]:
    """What the K/V of each token is."""
    return list(accumulate(tokens, lambda before, token: hash((before, token)), initial=7))[1:]


class PagedWorld:
    """The bytes of one engine. Slots of both devices, by number."""

    def __init__(self, memory: PagedMemory) -> None:
        self.memory = memory
        self.size = memory.block_tokens
        self.device: dict[int, int] = {}
        self.host: dict[int, int] = {}

    def move(self, pairs: Pairs, source: dict[int, int], target: dict[int, int]) -> None:
        for one, other in pairs:
            for row in range(self.size):
                target[other * self.size + row] = source.get(one * self.size + row, JUNK)

    def copy(self, pairs: Pairs) -> None:
        self.move(pairs, self.device, self.device)

    def write(self, sequence: PagedSequence, begin: int, end: int) -> None:
        values = digests(sequence.tokens)
        for slot, token in zip(slot_mapping(sequence.table, begin, end, self.size), range(begin, end), strict=True):
            self.device[slot] = values[token]

    def check(self, sequence: PagedSequence, end: int) -> None:
        """Every token up to `end` is readable and is what was written, but those that were released."""
        bytes_of = self.host if sequence.on_host else self.device
        first = self.memory.first_token(sequence)
        if self.memory.window:
            assert first <= max(0, end - self.memory.window + 1), "a block inside the window is gone"
        else:
            assert first == 0 and RELEASED not in sequence.table
        read = [bytes_of.get(slot, JUNK) for slot in slot_mapping(sequence.table, first, end, self.size)]
        assert read == digests(sequence.tokens)[first:end]

    def perform(self, step: Step) -> None:
        """Everything of the step, in its order."""
        for swap in step.swap_in:
            self.move(swap.pairs, self.host, self.device)
        for swap in step.swap_out:
            self.move(swap.pairs, self.device, self.host)
        self.copy(step.copy)
        self.forward(step.chunks)

    def forward(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            self.write(chunk.sequence, chunk.begin, chunk.end)
        for chunk in chunks:
            self.check(chunk.sequence, chunk.end)
