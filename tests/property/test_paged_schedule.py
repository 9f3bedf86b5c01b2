"""The scheduler of the reference engine against requests, loads and losses in any order, with K/V that judges itself.

After each step every token that a chunk reads is what was written for it, groups are whole, budgets are kept, and no
block is in both swap lists. With everybody patient, every request ends.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvservice.engine.blocks import BlockAllocator, PagedMemory
from kvservice.engine.schedule import Found, GroupState, Next, Scheduler, SequenceGroup, Step, SwapEstimate
from kvservice.errors import InvalidRequest
from tests.property.paged_world import PagedWorld

STEPS_MAX = 2000  # of the end: far more than what is left can take


def longer(group: SequenceGroup) -> list[Next]:
    return [Next(one.sequence_id, 0, len(one.tokens) + 1 >= group.length_max) for one in group.sequences]


class PagedSchedule(RuleBasedStateMachine):
    @initialize(
        blocks=st.integers(5, 16),
        host=st.sampled_from([0, 4, 16]),
        size=st.sampled_from([1, 2, 4]),
        watermark=st.sampled_from([0.0, 0.1]),
        window=st.sampled_from([0, 0, 3, 5]),
        budget=st.sampled_from([(4, 4), (6, 16), (6, 40)]),
        chunked=st.booleans(),
        speeds=st.sampled_from([(None, None), (1.0, 10.0), (100.0, 10.0)]),
    )
    def start(
        self,
        blocks: int,
        host: int,
        size: int,
        watermark: float,
        window: int,
        budget: tuple[int, int],
        chunked: bool,
        speeds: tuple[float | None, float | None],
    ) -> None:
        device, spare = BlockAllocator("device", range(blocks)), BlockAllocator("host", range(host))
        self.memory = PagedMemory(device, spare, size, watermark=watermark, window=window)
        self.world = PagedWorld(self.memory)
        self.sequences_max, self.tokens_max = budget
        self.found = Found()
        self.loading: dict[str, tuple[int, int]] = {}
        self.added = 0
        self.scheduler = Scheduler(
            self.memory,
            SwapEstimate(1, *speeds),
            tokens_max=self.tokens_max,
            sequences_max=self.sequences_max,
            chunked=chunked or self.tokens_max < 40,
            matched=lambda request_id, local, total: self.found,
        )

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14),
        more=st.integers(1, 10),
        width=st.sampled_from([1, 1, 2, 4]),
        salt=st.sampled_from([b"", b"", b"other"]),
    )
    def add(self, tokens: list[int], more: int, width: int, salt: bytes) -> None:
        self.added += 1
        name = str(self.added)
        length_max = len(tokens) + more
        try:
            self.scheduler.add(name, tokens, length_max=length_max, width=width, salt=salt)
        except InvalidRequest as refused:
            assert "use a larger device pool" in str(refused)

    @rule(blocks=st.integers(0, 4), layered=st.booleans(), wait=st.booleans())
    def cache_finds(self, blocks: int, layered: bool, wait: bool) -> None:
        self.found = Found(blocks * self.memory.block_tokens, layered, wait)

    @precondition(lambda self: self.scheduler.groups)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.scheduler.abort(data.draw(st.sampled_from(self.scheduler.groups)).request_id)

    @precondition(lambda self: self.scheduler.of(GroupState.LOADING, GroupState.ABANDONED))
    @rule(data=st.data(), sound=st.booleans())
    def load_ends(self, data: st.DataObject, sound: bool) -> None:
        group = data.draw(st.sampled_from(self.scheduler.of(GroupState.LOADING, GroupState.ABANDONED)))
        self.end_load(group, sound)

    def end_load(self, group: SequenceGroup, sound: bool) -> None:
        if not sound:
            self.scheduler.lost(group.request_id)
            return
        self.world.write(group.sequences[0], *self.loading[group.request_id])
        self.scheduler.loaded(group.request_id)

    @rule(seed=st.integers(0, 2**16), loses=st.sampled_from([False, False, True]))
    def step(self, seed: int, loses: bool) -> None:
        chance = random.Random(seed)

        def outcome(group: SequenceGroup) -> list[Next]:
            live = 0
            nexts: list[Next] = []
            for _ in range(chance.randint(0, group.width + 1) or chance.randint(0, 1)):
                sequence = chance.choice(group.sequences)
                ends = len(sequence.tokens) + 1 >= group.length_max or chance.random() < 0.1
                live += not ends
                if live <= group.width:
                    nexts.append(Next(sequence.sequence_id, chance.randint(0, 1), ends))
            return nexts

        self.run(self.scheduler.schedule(), outcome, loses)

    @rule(count=st.integers(2, 12))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.run(self.scheduler.schedule(), longer, False)

    def run(self, step: Step, outcome: Callable[[SequenceGroup], list[Next]], loses: bool) -> None:
        self.check_step(step)
        event("swap in" if step.swap_in else "swap out" if step.swap_out else "no swap")
        layered = []
        for each in step.admitted:
            if each.external_tokens:
                span = each.local_tokens, each.local_tokens + each.external_tokens
                self.loading[each.group.request_id] = span
                if each.layered and each.group.state is GroupState.RUNNING:
                    layered.append(each.group)
                    if not loses:
                        self.world.write(each.group.sequences[0], *span)
        came = {swap.request_id for swap in step.swap_in}
        for group in [*layered, *(one for one in self.scheduler.groups if one.request_id in came)] if loses else ():
            self.scheduler.lost(group.request_id)
        self.world.perform(step)
        sampled = {chunk.group.request_id: chunk.group for chunk in step.chunks if chunk.samples}
        self.scheduler.commit({name: outcome(group) for name, group in sampled.items()})
        for group in self.scheduler.finished:
            for sequence in group.ended:
                self.world.check(sequence, sequence.computed)
        self.scheduler.free_finished()

    def check_step(self, step: Step) -> None:
        assert step.tokens <= self.tokens_max
        came = {target for swap in step.swap_in for _, target in swap.pairs}
        left = {source for swap in step.swap_out for source, _ in swap.pairs}
        assert not came & left
        assert not {source for source, _ in step.copy} & {target for _, target in step.copy}
        for group in self.scheduler.of(GroupState.RUNNING):
            chunks = [chunk for chunk in step.chunks if chunk.group is group]
            assert len(chunks) in (0, 1, len(group.sequences))
            if any(chunk.samples for chunk in chunks):
                assert len(chunks) == len(group.sequences), "half of a group is decoded"
        assert all(chunk.group.state is GroupState.RUNNING for chunk in step.chunks)

    @invariant()
    def nothing_is_lost(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        groups = self.scheduler.groups
        self.scheduler.check_invariants()
        self.memory.check_invariants([one for group in groups for one in (*group.sequences, *group.ended)])
        for group in self.scheduler.of(GroupState.RUNNING, GroupState.SWAPPED):
            for sequence in group.sequences:
                self.world.check(sequence, sequence.computed)
        running = self.scheduler.of(GroupState.RUNNING, GroupState.LOADING)
        assert sum(group.width for group in running) <= self.sequences_max

    def teardown(self) -> None:
        """With a cache that answers, every request ends, and everything is free."""
        if not hasattr(self, "scheduler"):
            return
        self.found = Found()

        for _ in range(STEPS_MAX):
            if not self.scheduler.groups:
                break
            for group in self.scheduler.of(GroupState.LOADING, GroupState.ABANDONED):
                self.end_load(group, True)
            self.run(self.scheduler.schedule(), longer, False)
        assert not self.scheduler.groups, "requests make no progress"
        assert self.memory.device.free_count == self.memory.device.count
        assert self.memory.host.free_count == self.memory.host.count


TestPagedSchedule = PagedSchedule.TestCase
TestPagedSchedule.settings = settings(
    max_examples=50, stateful_step_count=30, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)
