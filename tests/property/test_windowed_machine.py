"""A shard with engines that have a window, under random stores, asks, losses and answers of peers that lie or are late.

The harness checks every invariant after every event, among them that each pin belongs to a lease or to an acquisition.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvservice.core import events as ev
from kvservice.core.block.keys import span_route
from kvservice.core.block.window_groups import WINDOW_BIT, Window, WindowGroup, group_key
from kvservice.core.messages import AcquireResult, Handoff
from kvservice.testing.builders import (
    SMALL,
    CoreHarness,
    SealItem,
    make_chain,
    make_layout,
    make_located,
    make_spec,
    run_of,
)
from kvservice.units import BlockKey, HandoffId, NodeId

CHAIN = make_chain(10)
GROUPS = (
    WindowGroup(make_layout(2 * SMALL), Window(sliding_tokens=33)),
    WindowGroup(make_layout(3 * SMALL), Window(chunk_tokens=64)),
    WindowGroup(make_layout(4 * SMALL), Window(is_state=True)),
)
KEYS = [list(CHAIN), *([group_key(key, group) for key in CHAIN] for group in (1, 2, 3))]
LENGTHS: dict[BlockKey, int] = {key: (group + 1) * SMALL for group, keys in enumerate(KEYS) for key in keys}
HANDOFF = HandoffId(b"h" * 16)


class WindowedMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.harness = CoreHarness(slab_count=20)
        self.spec = replace(make_spec(), window_groups=GROUPS)
        self.engine = self.harness.attach(self.spec)
        self.asked: dict[int, int] = {}  # call -> blocks asked for
        self.leases: list[AcquireResult] = []
        self.answered = [0, 0, 0, 0]  # resolves, locates, pulls, follows

    @rule(group=st.integers(0, 3), positions=st.sets(st.integers(0, 9), min_size=1))
    def store(self, group: int, positions: set[int]) -> None:
        refs = self.harness.reserve(self.engine, len(positions), group=group)
        items: list[SealItem] = []
        for ref, i in zip(refs, sorted(positions), strict=False):
            key = KEYS[group][i]
            self.harness.write(ref, key)
            parent = CHAIN[i - 1] if i and not group else None
            position = i | WINDOW_BIT if group else i
            items.append(SealItem(ref, key, parent, position, span_route(KEYS[group], i)))
        if items:
            self.harness.begin_seal(self.engine, tuple(items))
            self.harness.digest_all()

    @rule(count=st.integers(1, 10))
    def store_prefix(self, count: int) -> None:
        for group in range(4):
            self.store(group, set(range(count)))

    @rule(count=st.integers(1, 10), timeout=st.sampled_from([9.0, 5.0, 1.0, 0.0]), follow=st.integers(0, 4))
    def acquire(self, count: int, timeout: float, follow: int) -> None:
        handoff = Handoff(HANDOFF, NodeId("peer")) if follow == 4 else None
        op = self.harness.acquire(self.engine, CHAIN[:count], timeout=timeout, handoff=handoff)
        self.asked[op] = count

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        op = data.draw(st.sampled_from(sorted(self.asked)))
        del self.asked[op]
        self.harness.send(ev.Cancel(op))

    @precondition(lambda self: self.answered[0] < len(self.harness.resolves))
    @rule(late=st.integers(0, 3), count=st.sampled_from([10, 10, 2, 1, 0]), complete=st.booleans())
    def resolve(self, late: int, count: int, complete: bool) -> None:
        wanted = self.harness.resolves[self.answered[0]]
        self.answered[0] += 1
        runs = (run_of(wanted.start + max(late - 2, 0), count),) if count else ()
        self.harness.resolved(wanted.op, *runs, complete=complete)

    @precondition(lambda self: self.answered[1] < len(self.harness.locates))
    @rule(count=st.sampled_from([10, 10, 10, 2, 0]), fails=st.integers(0, 4))
    def locate(self, count: int, fails: int) -> None:
        wanted = self.harness.locates[self.answered[1]]
        self.answered[1] += 1
        keys = [key if i < count else None for i, key in enumerate(wanted.keys)]
        found = make_located(keys, length=LENGTHS[wanted.keys[0]])
        self.harness.located(wanted, None if fails == 4 else found)

    @precondition(lambda self: self.answered[2] < len(self.harness.pulls))
    @rule(results=st.lists(st.sampled_from(list(ev.PullResult)), min_size=10, max_size=10), bad=st.integers(0, 3))
    def pull(self, results: list[ev.PullResult], bad: int) -> None:
        wanted = self.harness.pulls[self.answered[2]]
        self.answered[2] += 1
        self.harness.pulled(wanted, *(results if bad == 3 else [ev.PullResult.OK] * 10))

    @precondition(lambda self: self.answered[3] < len(self.harness.follows))
    @rule(fails=st.booleans())
    def follow(self, fails: bool) -> None:
        wanted = self.harness.follows[self.answered[3]]
        self.answered[3] += 1
        if fails:
            self.harness.send(ev.Followed(wanted.follow, wanted.op, None, None, self.harness.now))
        elif LENGTHS[wanted.keys[0]] == SMALL:
            self.harness.followed(wanted, len(wanted.keys))

    @rule(seconds=st.sampled_from([0.1, 0.1, 0.1, 2.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.harness.advance(seconds)

    @precondition(lambda self: self.leases)
    @rule()
    def release(self) -> None:
        self.harness.release(self.engine, self.leases.pop().lease_id)

    @rule(again=st.integers(0, 9))
    def attach_again(self, again: int) -> None:
        if again != 9:
            return
        self.harness.send(ev.Detach(self.engine))
        self.leases.clear()
        self.engine = self.harness.attach(self.spec)

    @invariant()
    def what_is_promised_is_complete(self) -> None:
        for op in [op for op in self.asked if not self.harness.open(op)]:
            count = self.asked.pop(op)
            result = self.harness.result(op)
            end = len(result.blocks)
            assert end <= count
            for number, refs in enumerate((result.blocks, *result.window_blocks)):
                first = GROUPS[number - 1].window.first_block(end, 16) if number else 0
                # Of leases that have not run out yet; their slots hold what was promised.
                assert [self.harness.headers[ref.slot].key for ref in refs] == KEYS[number][first:end]
            if result.lease_id:
                self.leases.append(result)

    def teardown(self) -> None:
        """Nothing waits for ever and nothing stays pinned."""
        self.harness.advance(20.0)
        for op in self.asked:
            assert not self.harness.open(op), "a call hangs"
        self.harness.advance(11.0)
        assert self.harness.slots("leased") == 0


TestWindowedMachine = WindowedMachine.TestCase
TestWindowedMachine.settings = settings(max_examples=60, stateful_step_count=30)
