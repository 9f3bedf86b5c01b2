"""The shard's machine with hand-offs on top: writers that stop, readers that leave, answers that are late or wrong."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from kvservice.core import actions as act
from kvservice.core import events as ev
from kvservice.core.messages import AcquireRequest, FollowResult, Handoff, HandoffState, LocateResult
from kvservice.testing.builders import make_handle, make_holder
from kvservice.units import BlockKey, BootEpoch, HandoffId, LeaseId, NodeId
from tests.property.test_shard_machine import (
    CHAINS,
    SIZES,
    Asked,
    ShardMachine,
    Write,
    any_index,
    engines,
    somebody_attached,
)

IDS = [HandoffId(bytes([number]) * 16) for number in range(1, 4)]
ids = st.sampled_from(IDS)


class HandoffMachine(ShardMachine):
    @somebody_attached
    @rule(one=engines, handoff=ids, closes=st.booleans())
    def handoff(self, one: int, handoff: HandoffId, closes: bool) -> None:
        engine = self._attached(one)
        assert engine.attachment is not None
        kind = ev.CloseHandoff if closes else ev.OpenHandoff
        self._ask(kind(self.harness.next_op(), engine.attachment, handoff), Asked(self.harness.now, ("engine", 0)))

    @somebody_attached
    @rule(
        one=engines,
        which=any_index,
        skip=st.integers(0, 2),
        timeout=st.sampled_from([0.0, 0.5, 20.0, 20.0]),
        handoff=ids,
        node=st.sampled_from(["peer", "here", "other"]),
    )
    def acquire_handed_off(
        self, one: int, which: int, skip: int, timeout: float, handoff: HandoffId, node: str
    ) -> None:
        engine = self._attached(one)
        assert engine.attachment is not None
        keys = engine.chains[which % len(engine.chains)]
        skip = min(skip, len(keys))
        now, op = self.harness.now, self.harness.next_op()
        request = AcquireRequest(keys, skip, timeout, 0.0, Handoff(handoff, NodeId(node)))
        asked = Asked(now, ("engine", int(engine.attachment)), keys[skip:], now + timeout)
        self._ask(ev.Acquire(op, engine.attachment, request), asked)

    @precondition(lambda self: self.harness.follows)
    @rule(
        which=any_index,
        count=st.integers(0, 5),
        first=st.integers(0, 2),
        state=st.sampled_from(HandoffState),
        damage=st.sampled_from(["", "", "", "key", "length", "silent"]),
    )
    def writer_answers(self, which: int, count: int, first: int, state: HandoffState, damage: str) -> None:
        """Any question to a writer of this boot, also one that was answered before; blocks in any order."""
        wanted = self.harness.follows[-1 - which % min(4, len(self.harness.follows))]
        if damage == "silent":
            self.harness.send(ev.Followed(wanted.follow, wanted.op, None, None, self.harness.now))
            return
        size = SIZES["a" if any(wanted.keys[0] in chain for chain in CHAINS["a"]) else "b"]
        handles = tuple(
            make_handle(BlockKey(b"x" * 16) if damage == "key" else key, slot, length=size + (damage == "length"))
            for slot, key in enumerate(wanted.keys[first : first + count])
        )
        before = len(self.harness.pulls)
        located = LocateResult(BootEpoch(1), LeaseId(6 if handles else 0), 10.0, handles)
        result = FollowResult(state, located)
        self.harness.send(ev.Followed(wanted.follow, wanted.op, make_holder(), result, self.harness.now))
        for pull in self.harness.pulls[before:]:
            self.pulls[pull.job] = [
                Write(slot, size, handle.key, self.harness.headers[slot].generation) for handle, slot in pull.items
            ]

    @rule(
        which=any_index,
        handoff=ids,
        reader=st.sampled_from(["peer", "other"]),
        wait=st.sampled_from([0.0, 1.0]),
        model=st.sampled_from("ab"),
        start=st.integers(0, 2),
    )
    def peer_follows(self, which: int, handoff: HandoffId, reader: str, wait: float, model: str, start: int) -> None:
        keys = CHAINS[model][which % len(CHAINS[model])][start:]
        now, op = self.harness.now, self.harness.next_op()
        event = ev.PeerFollow(op, NodeId(reader), self.harness.state.epoch, handoff, keys, wait)
        self._ask(event, Asked(now, ("peer", reader), keys, now + wait))

    @precondition(lambda self: self.asked)
    @rule(which=any_index)
    def caller_leaves(self, which: int) -> None:
        waiting = [op for op, asked in self.asked.items() if op not in self.harness.answers and asked.deadline]
        if waiting:
            op = waiting[which % len(waiting)]
            self.harness.send(ev.Cancel(op))
            del self.asked[op]
            self.harness.advance(0.0)
            assert self.harness.open(op), "a call that was cancelled was answered"

    @invariant()
    def answers_are_taken(self) -> None:
        for op, asked in self.asked.items():
            answer = self.harness.answers.get(op)
            if isinstance(answer, act.Reply) and isinstance(answer.value, FollowResult):
                located = answer.value.located
                assert [handle.key for handle in located.handles if handle] == list(asked.keys[: len(located.handles)])
                filled = located.handles + (None,) * (len(asked.keys) - len(located.handles))
                moved = LocateResult(located.epoch, located.lease_id, located.lease_seconds, filled)
                # A lease counts from its answer; what the reader may rely on counts from when it asked.
                self.harness.answers[op] = act.Reply(op, moved)
        super().answers_are_taken()


TestHandoff = HandoffMachine.TestCase
TestHandoff.settings = settings(
    max_examples=150,
    stateful_step_count=50,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
