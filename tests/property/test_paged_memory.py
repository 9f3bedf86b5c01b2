"""Block tables against a dictionary of token lists, with allocate, append, fork, swap and free in any order.

The K/V of a token is a digest of the tokens up to it (`paged_world`), so that every token read through a table shows
whether it is what was written. References are conserved, and shared blocks are never written.
"""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvservice.engine.blocks import BlockAllocator, PagedMemory, PagedSequence, Room
from kvservice.errors import Exhausted
from tests.property.paged_world import PagedWorld

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=9)


class PagedTables(RuleBasedStateMachine):
    @initialize(
        blocks=st.integers(3, 14),
        host=st.integers(0, 10),
        size=st.sampled_from([1, 2, 3, 4]),
        window=st.sampled_from([0, 0, 2, 5]),
    )
    def start(self, blocks: int, host: int, size: int, window: int) -> None:
        device, spare = BlockAllocator("device", range(blocks)), BlockAllocator("host", range(host))
        self.memory = PagedMemory(device, spare, size, window=window)
        self.world = PagedWorld(self.memory)
        self.groups: list[list[PagedSequence]] = []  # what is forked stays together
        self.said: dict[PagedSequence, list[int]] = {}  # the tokens that are written
        self.pins: Counter[int] = Counter()
        self.next_id = 0

    def group(self, number: int, *, on_host: bool) -> list[PagedSequence] | None:
        found = [group for group in self.groups if group[0].on_host is on_host]
        return found[number % len(found)] if found else None

    def write(self, sequences: list[PagedSequence]) -> None:
        """Compute all tokens of these sequences, if there is room for all."""
        ends = [(sequence, len(sequence.tokens)) for sequence in sequences]
        fits, free = self.memory.can_append(ends), self.memory.device.free_count
        needed = self.memory.appends(ends)
        if not fits:
            for sequence in sequences:
                del sequence.tokens[len(self.said[sequence]) :]
                sequence.hashes = sequence.hashes[: len(sequence.tokens) // self.memory.block_tokens]
            return
        for sequence, end in ends:
            self.world.copy(self.memory.append(sequence, end))
        assert free - self.memory.device.free_count == needed
        for sequence, end in ends:
            self.world.write(sequence, sequence.computed, end)
            self.said[sequence] = list(sequence.tokens)
            self.memory.written(sequence, end)

    @rule(tokens=TOKENS, root=st.sampled_from([b"", b"", b"salt"]))
    def allocate(self, tokens: list[int], root: bytes) -> None:
        sequence = PagedSequence(self.next_id, tokens, root)
        room = self.memory.room_for([sequence])
        if room is Room.NEVER:
            assert self.memory.blocks_for(len(tokens)) > self.memory.device.count
        if room is not Room.OK:
            return
        self.next_id += 1
        hit = self.memory.share_prefix(sequence)
        assert hit < len(tokens)
        self.world.check(sequence, hit)
        self.said[sequence] = tokens[:hit]
        self.groups.append([sequence])
        self.write([sequence])
        assert self.said[sequence] == tokens, "there was room"

    @rule(number=st.integers(0, 9), tokens=st.lists(TOKENS, min_size=1, max_size=4))
    def append(self, number: int, tokens: list[list[int]]) -> None:
        group = self.group(number, on_host=False)
        if group is not None:
            some = group[: len(tokens)]
            for sequence, more in zip(some, tokens, strict=False):
                sequence.tokens += more
            self.write(some)

    @rule(number=st.integers(0, 9), which=st.integers(0, 3))
    def fork(self, number: int, which: int) -> None:
        if self.groups:
            group = self.groups[number % len(self.groups)]
            parent = group[which % len(group)]
            child = self.memory.fork(parent, self.next_id)
            self.next_id += 1
            self.said[child] = list(self.said[parent])
            group.append(child)

    @rule(number=st.integers(0, 9))
    def swap_out(self, number: int) -> None:
        group = self.group(number, on_host=False)
        if group is None:
            return
        if self.memory.can_swap_out(group):
            pairs = self.memory.swap_out(group)
            assert len({source for source, _ in pairs}) == len({target for _, target in pairs}) == len(pairs)
            self.world.move(pairs, self.world.device, self.world.host)
        else:
            self.refuses(self.memory.swap_out, group)

    @rule(number=st.integers(0, 9))
    def swap_in(self, number: int) -> None:
        group = self.group(number, on_host=True)
        if group is None:
            return
        if self.memory.can_swap_in(group) is Room.OK:
            self.world.move(self.memory.swap_in(group), self.world.host, self.world.device)
        elif len(self.memory.blocks_of(group)) > self.memory.device.free_count:
            self.refuses(self.memory.swap_in, group)

    def refuses(self, swap: object, group: list[PagedSequence]) -> None:
        before = [(list(one.table), one.on_host) for one in group]
        try:
            swap(group)  # type: ignore[operator]
        except Exhausted:
            assert [(one.table, one.on_host) for one in group] == before
        else:
            raise AssertionError("there was no room")

    @rule(number=st.integers(0, 9), which=st.integers(0, 3))
    def free(self, number: int, which: int) -> None:
        if self.groups:
            group = self.groups[number % len(self.groups)]
            sequence = group.pop(which % len(group))
            self.memory.free(sequence)
            del self.said[sequence]
            self.groups = [one for one in self.groups if one]

    @rule(number=st.integers(0, 9))
    def pin(self, number: int) -> None:
        group = self.group(number, on_host=False)
        if group is not None and group[0].held:
            self.memory.device.pin(group[0].held)
            self.pins.update(group[0].held)

    @precondition(lambda self: self.pins)
    @rule()
    def unpin(self) -> None:
        self.memory.device.unpin(list(self.pins.elements()))
        self.pins.clear()

    @invariant()
    def every_token_is_what_was_written(self) -> None:
        for sequence, tokens in getattr(self, "said", {}).items():
            assert sequence.tokens == tokens
            self.world.check(sequence, len(tokens))

    @invariant()
    def references_are_conserved(self) -> None:
        if hasattr(self, "memory"):
            self.memory.check_invariants([one for group in self.groups for one in group], self.pins)


TestPagedTables = PagedTables.TestCase
TestPagedTables.settings = settings(max_examples=60, stateful_step_count=30)
