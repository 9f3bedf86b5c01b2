"""A node with a disk and a shared store that are slow, full, lossy, wrong or silent, in any order.

After every step: what is announced is in memory or in the books of the disk; a slot that is being written down keeps
its block; every block in memory has its bytes. In the end nobody waits, although the tiers never answer again; and when
they do answer, nothing is held for them.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvservice.core import actions as act
from kvservice.core import events as ev
from kvservice.core.events import PullResult
from kvservice.core.messages import AcquireResult
from kvservice.core.segment.blockfile import disk_room
from kvservice.core.tier.rules import TierRules, WriteMoment
from kvservice.core.tier.tier_block import TierBlock
from kvservice.testing.builders import SMALL, CoreHarness, content_of, make_chain
from kvservice.units import BlockKey, NodeId

CHAINS = [make_chain(6, tag) for tag in ("one", "two", "three")]
chains = st.sampled_from(CHAINS)
moments = st.sampled_from(list(WriteMoment))


class TierMachine(RuleBasedStateMachine):
    @initialize(disk=moments, store=moments, room=st.sampled_from([3, 9, 100]), alone=st.booleans())
    def start(self, disk: WriteMoment, store: WriteMoment, room: int, alone: bool) -> None:
        budget = room * disk_room(SMALL)
        own = TierRules("disk", budget_bytes=budget, write=disk, extra_bytes=16)
        tiers = (own, TierRules("objects", is_shared=True, write=store))
        self.harness = CoreHarness(slab_count=3, tiers=tiers, has_directory=not alone)
        self.files: dict[str, dict[BlockKey, TierBlock]] = {"disk": {}, "objects": {}}
        self.begin()

    def begin(self) -> None:
        self.engine = self.harness.attach()
        self.asked: list[int] = []

    # -- engines and other nodes ----

    @rule(chain=chains, count=st.integers(1, 6))
    def store(self, chain: tuple[BlockKey, ...], count: int) -> None:
        self.harness.store(self.engine, chain[:count])

    @rule(chain=chains, count=st.integers(1, 6), timeout=st.sampled_from([0.0, 0.2, 5.0]), recompute=st.booleans())
    def acquire(self, chain: tuple[BlockKey, ...], count: int, timeout: float, recompute: bool) -> None:
        seconds = 0.05 if recompute else 0.0
        self.asked.append(self.harness.acquire(self.engine, chain[:count], timeout=timeout, recompute=seconds))

    @rule(chain=chains, start=st.integers(0, 5), wait=st.sampled_from([0.0, 0.5]))
    def locate(self, chain: tuple[BlockKey, ...], start: int, wait: float) -> None:
        op = self.harness.next_op()
        self.harness.send(ev.PeerLocate(op, NodeId("reader"), self.harness.state.epoch, chain[start:], wait))
        self.asked.append(op)

    @precondition(lambda self: self.asked)
    @rule(which=st.integers(0, 99))
    def cancel(self, which: int) -> None:
        op = self.asked[which % len(self.asked)]
        if self.harness.open(op):
            self.asked.remove(op)
            self.harness.send(ev.Cancel(op))

    @precondition(lambda self: self.harness.resolves)
    @rule(complete=st.booleans())
    def resolve(self, complete: bool) -> None:
        self.harness.resolved(self.harness.resolves.pop().op, complete=complete)

    @rule(seconds=st.sampled_from([0.05, 0.2, 2.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.harness.advance(seconds)

    # -- tiers ----

    def work(self, kind: type) -> list[act.TierWork]:
        return [one for one in self.harness.tier_work if isinstance(one, kind)]

    @precondition(lambda self: self.work(act.WriteDown))
    @rule(which=st.integers(0, 99), fails=st.sampled_from([False, False, True]), stored=st.integers(0, SMALL + 16))
    def written(self, which: int, fails: bool, stored: int) -> None:
        writes = self.work(act.WriteDown)
        write = writes[which % len(writes)]
        assert isinstance(write, act.WriteDown)
        if not fails:
            taken = {block.key: replace(block, stored_bytes=stored) for block, _ in write.items}
            self.files[write.tier].update(taken)
        self.harness.written(write, not fails, stored_bytes=stored)

    @precondition(lambda self: self.work(act.BringBack))
    @rule(which=st.integers(0, 99), damage=st.sampled_from([None, None, PullResult.CORRUPT, PullResult.FAILED]))
    def brought(self, which: int, damage: PullResult | None) -> None:
        reads = self.work(act.BringBack)
        read = reads[which % len(reads)]
        assert isinstance(read, act.BringBack)
        there = [block.key in self.files[read.tier] for block, _ in read.items]
        self.harness.brought(read, *((damage or PullResult.OK) if is_there else PullResult.STALE for is_there in there))

    @precondition(lambda self: self.work(act.Probe))
    @rule(is_late=st.booleans())
    def probed(self, is_late: bool) -> None:
        probe = self.work(act.Probe)[0]
        assert isinstance(probe, act.Probe)
        self.harness.tier_work.remove(probe)
        count = 0
        while not is_late and count < len(probe.chain) - probe.start:
            if probe.chain[probe.start + count] not in self.files["objects"]:
                break
            count += 1
        self.harness.probed(probe.op, count)

    @precondition(lambda self: any(self.files.values()))
    @rule(which=st.integers(0, 99))
    def lose_a_file(self, which: int) -> None:
        """Whatever the books say, a tier may lose any block."""
        named = [(tier, key) for tier, files in self.files.items() for key in files]
        tier, key = named[which % len(named)]
        del self.files[tier][key]

    @rule(often=st.integers(0, 9))
    def restart(self, often: int) -> None:
        """The disk says what it has; some of it the memory kept, too."""
        if often:
            return
        self.harness.restart()
        self.harness.send(ev.TierFound("disk", tuple(self.files["disk"].values())))
        self.harness.send(ev.TierFound("objects", ()))
        self.begin()

    # -- what must hold ----

    @invariant()
    def erased_files_are_gone(self) -> None:
        for erase in self.work(act.Erase):
            assert isinstance(erase, act.Erase)
            self.harness.tier_work.remove(erase)
            for key in erase.keys:
                self.files[erase.tier].pop(key, None)

    @invariant()
    def what_is_announced_is_here(self) -> None:
        announced = {key for key, count in self.harness.announced.items() if count}
        assert set(self.harness.announced.values()) <= {0, 1}, "announced twice, or taken back twice"
        assert announced == {key for key, _ in self.harness.state.inventory()}
        assert self.harness.keys_held() <= announced

    @invariant()
    def blocks_have_their_bytes(self) -> None:
        for block in self.harness.state.blocks():
            assert self.harness.contents[block.slot.index] == content_of(block.key)

    @invariant()
    def what_is_written_down_stays(self) -> None:
        slots = {block.key: block.slot.index for block in self.harness.state.blocks()}
        for write in self.work(act.WriteDown):
            assert isinstance(write, act.WriteDown)
            assert all(slots[block.key] == slot for block, slot in write.items), "a slot went while it was written down"

    @invariant()
    def answers_are_taken(self) -> None:
        for op in [op for op in self.asked if not self.harness.open(op)]:
            self.asked.remove(op)
            value = self.harness.reply(op)
            if isinstance(value, AcquireResult) and value.lease_id:
                self.harness.release(self.engine, value.lease_id)

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        self.harness.advance(6.0)
        self.answers_are_taken()
        assert not self.asked, "a request waits for a tier that never answers"
        for seconds in (11.0, 0.0):  # leases end, and the cleaner looks again
            self.harness.advance(seconds)
            while work := self.work(act.WriteDown) + self.work(act.BringBack):
                if isinstance(work[0], act.WriteDown):
                    self.harness.written(work[0], False)
                elif isinstance(work[0], act.BringBack):
                    self.harness.brought(work[0], PullResult.FAILED)
            self.harness.digest_all()  # of what a tier did not take
        assert self.harness.slots("leased") == self.harness.slots("writing") == 0, "a tier holds memory for nothing"


TestTierMachine = TierMachine.TestCase
TestTierMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
