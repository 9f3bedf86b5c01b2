"""The world of the shard's property test: engines, chains and peers, open calls, and the rules of nodes that leave."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from kvservice.core import actions as act
from kvservice.core import events as ev
from kvservice.core.block.keys import block_keys, chain_hashes
from kvservice.core.events import PullResult
from kvservice.core.messages import AcquireRequest, EngineSpec, Holder, Peer, TakeOverItem, TakeOverResult
from kvservice.core.segment.refs import BlockRef
from kvservice.errors import Unavailable
from kvservice.testing.builders import LARGE, CoreHarness, make_holder, make_spec, run_of
from kvservice.units import AttachmentId, BlockKey, Generation, KiB, SlotIndex, SpanRoute

LEASE = 10.0
SLABS = 2
SIZES = {"a": 330 * KiB, "b": LARGE}  # 3 and 2 slots in a slab
GARBAGE = b"garbage"


def chain_of(model: str, *tokens: int) -> tuple[BlockKey, ...]:
    return tuple(block_keys(model.encode() * 16, chain_hashes(tokens, 1)))


CHAINS = {
    "a": (chain_of("a", 1, 2, 3, 4, 5), chain_of("a", 1, 2, 8, 9), chain_of("a", 7)),
    "b": (chain_of("b", 1, 2, 3), chain_of("b", 1, 5)),
}
SPECS = [
    replace(make_spec("first", "a", payload_bytes=SIZES["a"]), hears_removals=True),
    make_spec("second", "a", payload_bytes=SIZES["a"]),
    make_spec("third", "b", payload_bytes=SIZES["b"]),
]
PEERS = [make_holder("peer"), make_holder("other"), make_holder("here")]

engines = st.integers(0, len(SPECS) - 1)
somebody_attached = precondition(lambda self: any(engine.attachment is not None for engine in self.engines))
somebody_writes = precondition(lambda self: any(engine.attachment and engine.writes for engine in self.engines))
promised = precondition(lambda self: self.promises)
lived_long = precondition(lambda self: self.steps >= 12)  # what ends everything is rare, or nothing would happen
any_index = st.integers(0, 1 << 16)
holders = st.lists(st.sampled_from(PEERS), min_size=1, max_size=4).map(tuple)
helpful = st.sampled_from([(PEERS[0],), (PEERS[1], PEERS[0])])
counts = st.sampled_from([1, 2, 5, 1 << 40])
runs = st.tuples(st.integers(-1, 4), counts, holders).map(lambda run: run_of(run[0], run[1], *run[2]))
results = st.lists(st.sampled_from(PullResult), min_size=1, max_size=5)


@dataclass
class Write:
    """A slot that somebody may write at any moment."""

    slot: SlotIndex
    payload_bytes: int
    key: BlockKey
    generation: Generation  # under which it was given away

    @property
    def ref(self) -> BlockRef:
        return BlockRef(self.slot, self.generation)


@dataclass
class Engine:
    """A process with workers. It may write what it reserved until it sealed, aborted, detached, re-attached or died."""

    spec: EngineSpec
    attachment: AttachmentId | None = None
    writes: list[Write] = field(default_factory=list)
    void: list[Write] = field(default_factory=list)  # reservations of earlier times

    def forget_writes(self) -> None:
        self.void = self.writes + self.void[:3]
        self.writes = []

    @property
    def chains(self) -> tuple[tuple[BlockKey, ...], ...]:
        return CHAINS[self.spec.model]


@dataclass
class Promise:
    holder: tuple[str, object]
    blocks: list[tuple[BlockRef, BlockKey]]
    until: float


@dataclass
class Asked:
    """An open call."""

    at: float
    holder: tuple[str, object]
    keys: tuple[BlockKey, ...] = ()
    deadline: float | None = None


class LeavingRules(RuleBasedStateMachine):
    """Drains of this shard, and offers of others. Part of ShardMachine."""

    harness: CoreHarness

    def _ask(self, event: ev.Event, asked: Asked) -> int:
        raise NotImplementedError

    # -- nodes that leave ----

    @lived_long
    @rule(timeout=st.sampled_from([0.5, 5.0, 40.0]), handover=st.booleans())
    def leave(self, timeout: float, handover: bool) -> None:
        self.harness.send(ev.Drain(timeout_seconds=timeout, handover=handover))
        assert self.harness.state.draining

    @precondition(lambda self: self.harness.searches)
    @rule(found=st.lists(st.sampled_from(PEERS), max_size=3, unique=True), draining=st.booleans(), which=any_index)
    def takers_found(self, found: list[Holder], draining: bool, which: int) -> None:
        peers = tuple(Peer(one, 1 << 20, 1 << 21, 10.0 * place, draining) for place, one in enumerate(found))
        keys = [key for key, _ in self.harness.searches[-1].blocks]
        held = {key: tuple(found) for place, key in enumerate(keys) if found and which >> place & 1}
        self.harness.send(ev.TakersFound(peers, held))

    @precondition(lambda self: self.harness.offers)
    @rule(
        which=any_index,
        kept=st.lists(st.booleans(), min_size=5, max_size=5),
        full=st.booleans(),
        dead=st.integers(0, 4),
    )
    def offered(self, which: int, kept: list[bool], full: bool, dead: int) -> None:
        """Any offer of this boot, also one that was answered before."""
        offer = self.harness.offers[-1 - which % min(4, len(self.harness.offers))]
        taken = tuple(kept[place % 5] for place in range(len(offer.items)))
        self.harness.send(ev.Offered(offer.offer, TakeOverResult(taken, full) if dead else None))

    @rule(
        which=any_index,
        model=st.sampled_from("ab"),
        idle=st.sampled_from([0.0, 5.0, 1e6]),
        wait=st.sampled_from([0.0, 2.0, 20.0]),
    )
    def take_over(self, which: int, model: str, idle: float, wait: float) -> None:
        chain = CHAINS[model][which % len(CHAINS[model])]
        items = tuple(
            TakeOverItem(key, chain[place - 1] if place else None, place, SpanRoute(7), idle)
            for place, key in enumerate(chain)
        )
        op, now = self.harness.next_op(), self.harness.now
        offer = ev.PeerTakeOver(op, self.harness.state.epoch, make_holder("leaver"), SIZES[model], items, wait)
        self._ask(offer, Asked(now, ("peer", "leaver"), chain, now + wait))
        if self.harness.state.draining:
            answer = self.harness.answers[op]
            assert isinstance(answer, act.Refuse) and isinstance(answer.error, Unavailable)


class TailRules(LeavingRules):
    """Questions for partial tails. Part of ShardMachine."""

    def _attached(self, one: int) -> Engine:
        raise NotImplementedError

    @somebody_attached
    @rule(one=engines, which=any_index, at=st.integers(0, 3), timeout=st.sampled_from([0.0, 0.5, 3.0]))
    def ask_for_a_tail(self, one: int, which: int, at: int, timeout: float) -> None:
        """Some of its names are of whole blocks, which is nobody's harm but its own."""
        engine = self._attached(one)
        assert engine.attachment is not None
        keys = engine.chains[which % len(engine.chains)][:4]
        now, op = self.harness.now, self.harness.next_op()
        request = AcquireRequest(keys, 1, timeout, tail_at=at)
        self._ask(
            ev.Acquire(op, engine.attachment, request),
            Asked(now, ("engine", int(engine.attachment)), keys[1:], now + timeout),
        )
