"""Quotas against a model that knows only who stored what: sums, ceilings, and who pays for whose room."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvservice.core import actions as act
from kvservice.core import events as ev
from kvservice.core.block.tenants import TenantLimits, tag_of
from kvservice.core.messages import TakeOverItem
from kvservice.core.segment.refs import BlockRef
from kvservice.testing.builders import (
    LARGE,
    SMALL,
    CoreHarness,
    make_chain,
    make_holder,
    make_located,
    make_spec,
    run_of,
)
from kvservice.units import AttachmentId, LeaseId, SpanRoute

TENANTS = ("tight", "roomy", "free")
SIZES = {"tight": SMALL, "roomy": LARGE, "free": SMALL}
START = {"tight": TenantLimits(2 * SMALL), "roomy": TenantLimits(2 * LARGE), "free": TenantLimits(in_flight=3)}
CHAINS = {(who, n): make_chain(5, f"{who}{n}") for who in TENANTS for n in range(3)}
OWNER = {key: who for (who, _), chain in CHAINS.items() for key in chain}

tenants = st.sampled_from(TENANTS)
prompts = st.integers(0, 2)
lengths = st.integers(1, 5)


class QuotaMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.harness = CoreHarness(slab_count=2, tenants=START)
        self.writes: dict[str, list[BlockRef]] = {who: [] for who in TENANTS}
        self.leases: dict[str, list[LeaseId]] = {who: [] for who in TENANTS}
        self.attach()

    def attach(self) -> None:
        self.engines: dict[str, AttachmentId] = {
            who: self.harness.attach(make_spec(who, who, payload_bytes=SIZES[who]), who) for who in TENANTS
        }

    # -- what the model knows ----

    def held(self) -> Counter[str]:
        return Counter(OWNER[key] for key in self.harness.keys_held())

    def used(self) -> dict[str, int]:
        held = self.held()
        return {who: SIZES[who] * (held[who] + len(self.writes[who])) for who in TENANTS}

    def room(self, who: str) -> int:
        """Blocks until its quota."""
        quota = self.harness.tenants[who].quota_bytes
        return 1000 if not quota else max(quota - self.used()[who], 0) // SIZES[who]

    def protected(self, who: str) -> float:
        """What nobody may take from it: its quota, or its share of a pool that is smaller than all quotas together."""
        quotas = {name: limits.quota_bytes for name, limits in self.harness.tenants.items()}
        pool = self.harness.geometry.slabs_bytes
        return quotas[who] * min(1.0, pool / sum(quotas.values()))

    def by(self, who: str, what: Callable[[], object]) -> None:
        """Run what this tenant does, and judge what it cost the others."""
        before, used, room = self.held(), self.used(), self.room(who)
        what()
        after, lost = self.held(), 0
        for other in TENANTS:
            if other == who or after[other] >= before[other]:
                continue
            lost += before[other] - after[other]
            kept = min(int(self.protected(other)), used[other])
            assert self.used()[other] >= kept, f"{who} pushed {other} below its quota"
        assert room or not lost, f"{who} was at its quota, and {lost} blocks of others went for it"

    # -- rules ----

    @rule(who=tenants, prompt=prompts, length=lengths)
    def store(self, who: str, prompt: int, length: int) -> None:
        self.by(who, lambda: self.harness.store(self.engines[who], CHAINS[who, prompt][:length]))

    @rule(who=tenants, count=lengths)
    def reserve(self, who: str, count: int) -> None:
        flying = len(self.writes[who])

        def reserve() -> None:
            self.writes[who] += self.harness.reserve(self.engines[who], count)

        self.by(who, reserve)
        limit = self.harness.tenants[who].in_flight
        assert not limit or len(self.writes[who]) <= max(limit, flying)

    @rule(who=tenants)
    def abort(self, who: str) -> None:
        self.harness.send(ev.Abort(self.harness.next_op(), self.engines[who], tuple(self.writes[who])))
        self.writes[who] = []

    @rule(who=tenants, prompt=prompts, there=st.booleans())
    def ask(self, who: str, prompt: int, there: bool) -> None:
        """Some of it may be fetched; what is promised stays leased."""
        chain, harness = CHAINS[who, prompt], self.harness

        def ask() -> None:
            op = harness.acquire(self.engines[who], chain)
            start = next((i for i, key in enumerate(chain) if key not in harness.keys_held()), 0)
            if harness.open(op) and there:
                asked = len(harness.locates)
                harness.resolved(op, run_of(start, len(chain) - start))
                for locate in harness.locates[asked:]:
                    self.fetch(locate, SIZES[who])
            if harness.open(op):
                harness.resolved(op)
            if harness.open(op):
                harness.advance(6.0)
            lease = harness.result(op).lease_id
            self.leases[who] += [lease] if lease else []

        self.by(who, ask)

    def fetch(self, asked: act.Locate, size: int) -> None:
        """The peer has what it was asked for."""
        harness, pulls = self.harness, len(self.harness.pulls)
        harness.located(asked, make_located(asked.keys, length=size))
        if len(harness.pulls) > pulls:
            harness.pulled(harness.pulls[-1], ev.PullResult.OK)

    @rule(who=tenants)
    def let_go(self, who: str) -> None:
        self.harness.release(self.engines[who], *self.leases[who])
        self.leases[who] = []

    @rule(who=tenants, prompt=prompts)
    def take_over(self, who: str, prompt: int) -> None:
        chain, harness = CHAINS[who, prompt], self.harness
        items = tuple(
            TakeOverItem(key, chain[i - 1] if i else None, i, SpanRoute(1), 0.0, tag_of(who))
            for i, key in enumerate(chain)
        )

        def offer() -> None:
            op = harness.next_op()
            leaver = make_holder("leaver")
            harness.send(ev.PeerTakeOver(op, harness.state.epoch, leaver, SIZES[who], items, 5.0))
            if harness.open(op):
                harness.now += 0.001
                self.fetch(harness.locates[-1], SIZES[who])

        self.by(who, offer)

    @rule(blocks=st.integers(1, 6))
    def change_quota(self, blocks: int) -> None:
        self.harness.set_tenants(**{**START, "tight": TenantLimits(blocks * SMALL)})

    @precondition(lambda self: not any(self.writes.values()))
    @rule()
    def restart(self) -> None:
        self.harness.restart()
        self.leases = {who: [] for who in TENANTS}
        self.attach()

    # -- always ----

    @invariant()
    def sums_are_those_of_the_model(self) -> None:
        used = self.used()
        assert {row.name: row.used_bytes for row in self.harness.state.tenants()} == used
        assert {row.name: row.in_flight for row in self.harness.state.tenants()} == {
            who: len(self.writes[who]) for who in TENANTS
        }


TestQuotas = QuotaMachine.TestCase
TestQuotas.settings = settings(max_examples=40, stateful_step_count=30)
