"""One shard's decisions: `handle(event, now) -> actions`. Pure; the only writer of everything below it.

Routes events to the attachments, the block store, the leases and the acquisitions. `now` is seconds on the
caller's monotonic clock and never goes back. Nothing is raised for faults of others: callers get a Refuse with a typed
error. An AssertionError is a bug; the performer fences the shard when it sees one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from kvservice.core import events as ev
from kvservice.core.acquire.acquisition import check_seconds
from kvservice.core.acquire.acquisitions import Acquisitions
from kvservice.core.acquire.answers import Answers
from kvservice.core.acquire.attached import kinds_of, list_engines
from kvservice.core.acquire.clearing import Clearing
from kvservice.core.acquire.handoff import Handoffs, check_handoff_id
from kvservice.core.acquire.hinted import Hinted
from kvservice.core.acquire.holds import Holds
from kvservice.core.acquire.pulls import Pulls
from kvservice.core.acquire.suspects import Suspects
from kvservice.core.acquire.tails import Tails
from kvservice.core.acquire.warming import Warming
from kvservice.core.acquire.windowed import WindowedAcquisitions
from kvservice.core.actions import Action, Announce, Refuse, Reply, Retract
from kvservice.core.attachments import Attachments
from kvservice.core.block.keys import check_chain, pack_keys
from kvservice.core.block.tenants import NOBODY, TenantLimits, TenantUsage
from kvservice.core.context import ShardContext
from kvservice.core.drain.receiver import TakeOvers
from kvservice.core.drain.sender import DrainPhase, DrainProgress, Leaving
from kvservice.core.explain.records import Explanation, HistoryEntry, RequestRecords
from kvservice.core.messages import (
    AcquireRequest,
    AttachedEngine,
    EngineStats,
    PeerSpeed,
    Pin,
    UsageRow,
)
from kvservice.core.peer_calls import PeerCalls
from kvservice.core.segment.geometry import Geometry
from kvservice.core.slices import DEFAULT_SLICES, Slices, SliceSizes, Work
from kvservice.core.store.admission import Admission
from kvservice.core.store.blocks import NO_KEY, BlockStore
from kvservice.core.store.eviction import EvictionPolicy
from kvservice.core.store.freshness import Freshness
from kvservice.core.store.leases import LeaseTable
from kvservice.core.store.listing import SlotFilter, SlotPage, find_history, list_slots
from kvservice.core.store.slots import RESERVED, SHOWN_STATES, Block, SlotState
from kvservice.core.store.worth import GuardedWorth, RuleState
from kvservice.core.tier.rules import TierRules, TierUsage
from kvservice.core.tier.spill import Spill, is_spill_offer
from kvservice.core.tier.tiers import Tiers
from kvservice.core.writes import Writes
from kvservice.errors import InvalidRequest, KVServiceError
from kvservice.units import AttachmentId, BlockKey, BootEpoch, NodeId, SlotIndex, SpanRoute


class _Timed(Protocol):
    """A part that has something to do when time passes."""

    def tick(self, now: float) -> None: ...

    def next_deadline(self) -> float | None: ...


class ShardState:
    """The state of one shard. Without `has_directory` it is an embedded pool: no peers and no announcements."""

    def __init__(
        self,
        node_id: NodeId,
        epoch: BootEpoch,
        geometry: Geometry,
        *,
        lease_seconds: float = 10.0,
        has_directory: bool = True,
        policy: EvictionPolicy | None = None,
        tenants: Mapping[str, TenantLimits] | None = None,
        tiers: Sequence[TierRules] = (),
        spills: bool = False,
        max_age_seconds: float = 0.0,
        wall_offset: float = 0.0,  # makes seconds since 1970 of `now`
        slices: SliceSizes = DEFAULT_SLICES,
    ) -> None:
        self.node_id = node_id
        self.epoch = epoch
        self.geometry = geometry
        self.lease_seconds = lease_seconds
        self.has_directory = has_directory
        self.draining = False
        self.counters: Counter[str] = Counter()
        self._actions: list[Action] = []
        self._readable: list[BlockKey] = []  # blocks that became readable in memory by the event being handled
        self._store = BlockStore(geometry, epoch, policy or GuardedWorth(), self._actions.append, self._changed)
        self._leases = LeaseTable()
        self._admission = Admission(lambda: self._store.table.capacity, self.counters)
        self.records = RequestRecords()
        self.freshness = Freshness(max_age_seconds, wall_offset)
        shard = ShardContext(
            node_id,
            epoch,
            geometry,
            lease_seconds,
            has_directory,
            self._store,
            self._leases,
            self._admission,
            self.records,
            self.counters,
            emit=self._actions.append,
            is_draining=lambda: self.draining,
            model_of=lambda attachment: found.spec.model if (found := self._attachments.get(attachment)) else "",
            fingerprint_of=lambda attachment: found.block_mark if (found := self._attachments.get(attachment)) else b"",
            freshness=self.freshness,
            slices=Slices(slices, self._actions.append),
        )
        self._context = shard
        self._tiers = Tiers(tiers, shard, spills=spills)
        self._set_tenants(tenants or {})
        self._holds = Holds(shard)
        self._clearing = Clearing(shard, self._tiers, self._holds)
        self._hinted = Hinted(shard, self._holds)
        self._answers = Answers(shard, self._hinted, lambda *held: self._warming.held(*held))
        self._pulls = Pulls(shard)
        self._handoffs = Handoffs(shard, lambda op, now: self._acquisitions.handoff_over(op, now), self.account_of)
        self._acquisitions = Acquisitions(shard, self._pulls, self._tiers, self._answers, self._handoffs.watch)
        self._windowed = WindowedAcquisitions(shard, self._acquisitions, self._answers)
        self._tails = Tails(shard, self._acquisitions, self._tiers, self._answers)
        self._warming = Warming(shard, self._acquisitions, self._windowed, self._holds, lambda: self._attachments.of())
        self._takeovers = TakeOvers(shard, self._pulls, self._acquisitions.sealed)
        self._leaving = Leaving(shard)
        self._writes = Writes(shard, self._acquisitions, self._hinted)
        self._suspects = Suspects(shard, self._holds)
        self._attachments = Attachments(shard, self._writes, self._end_attachment)
        first = (self._acquisitions, self._tails, self._warming, self._clearing, self._pulls)
        self._timed: tuple[_Timed, ...] = (*first, self._handoffs, self._takeovers, self._leaving)
        self._with_deadlines = tuple(part.next_deadline for part in (self._leases, self._tiers, *self._timed))
        self._handlers = self._make_handlers()

    def _make_handlers(self) -> dict[type, Callable[..., None]]:
        asked = (self._handoffs, self._takeovers, self._leaving, self._tiers, self._acquisitions, self._suspects)
        peers = PeerCalls(self._context, *asked)
        return {
            **self._attachments.handlers(),
            ev.Acquire: self._acquire,
            ev.Reserve: self._reserve,
            ev.Seal: self._seal,
            ev.Abort: self._abort,
            ev.Release: self._release,
            ev.Renew: self._renew,
            ev.Warm: self._warming.start,
            ev.Unpin: lambda e, now: self._actions.append(Reply(e.op, self._holds.unpin(e.account, e.name, now))),
            ev.Clear: self._clearing.clear,
            ev.ClockSet: self._clearing.clock_set,
            ev.Cancel: self._cancel,
            ev.GoOn: lambda e, now: self._context.slices.go_on(e.op, now),
            ev.OpenHandoff: self._open_handoff,
            ev.CloseHandoff: self._close_handoff,
            **peers.handlers(),
            ev.Digested: self._digested,
            ev.Resolved: self._resolved,
            ev.Located: lambda e, now: self._pulls.located(e.fetch, e.result, e.sent_at, now),
            ev.Followed: self._acquisitions.followed,
            ev.Pulled: lambda e, now: self._pulls.pulled(e.job, e.results, now),
            ev.BroughtBack: lambda e, now: self._pulls.brought_back(e.job, e.blocks, now),
            ev.WritesEnded: lambda e, now: self._pulls.writes_ended(e.job),
            ev.TakersFound: lambda e, now: self._offering(e.is_spill).takers_found(e.peers, e.holders, now),
            ev.Offered: lambda e, now: self._offering(is_spill_offer(e.offer)).offered(e, now),
            ev.Adopt: self._adopt,
            ev.Drain: self._drain,
            ev.SetTenants: self._tenants_changed,
            ev.WrittenDown: self._written_down,
            ev.Probed: self._acquisitions.probed,
            ev.TierFound: self._tiers.found,
            ev.Tick: self._tick,
        }

    # -- the one entry ----

    def handle(self, event: ev.Event, now: float) -> list[Action]:
        """Change the state and return what to do, in order. Does not block. Never raises KVServiceError."""
        assert not self._actions
        try:
            self._handlers[type(event)](event, now)
        except KVServiceError as error:
            assert isinstance(event, ev.Call), f"{event} was refused but nobody waits for it"
            self._actions.append(Refuse(event.op, error))
        readable, self._readable = self._readable, []
        for key in readable:
            self._handoffs.sealed(key, now)
            self._tiers.sealed(key, now)
        self._leaving.look(now)
        self._tiers.work(now, is_digesting=self._writes.is_digesting)
        actions = list(self._actions)
        self._actions.clear()
        return actions

    def _changed(self, change: Announce | Retract) -> None:
        """A block has become readable in memory, or has left it."""
        if isinstance(change, Announce):
            self._readable.append(change.key)
        else:
            self._tiers.left_memory(change.key)
        if not self._tiers.hides(change.key):
            self._actions.append(change)

    def next_deadline(self) -> float | None:
        """When the next Tick is due, on the clock of `now`; None when none is."""
        return min([due for part in self._with_deadlines if (due := part()) is not None], default=None)

    # -- what others may look at ----

    def blocks(self) -> list[Block]:
        return self._store.blocks()

    def inventory(self) -> list[tuple[BlockKey, SpanRoute]]:
        """Every block in memory or in a tier of this node, with its route, for a full announcement."""
        found = {block.key: block.route for block in self._tiers.blocks()}
        found.update((block.key, block.route) for block in self._store.blocks())
        return list(found.items())

    def tier_usage(self) -> tuple[TierUsage, ...]:
        return self._tiers.usage()

    def slot_counts(self) -> dict[str, int]:
        return self._store.table.counts()

    def slot_usage(self) -> dict[str, tuple[int, int]]:
        """(slots, payload bytes) by state. `reserved` are slots that engines hold for their stores; `writing` are those
        being fetched, or verified after a store. Cheap."""
        slots, sizes = self._store.table.counts(), self._store.table.byte_counts()
        fetching, fetching_bytes = self._pulls.writing()
        sealing = self._writes.sealing_slots()
        writing = fetching + len(sealing)
        writing_bytes = fetching_bytes + sum(slot.payload_bytes for slot in sealing)
        shown = {state: (count, sizes[state]) for state, count in slots.items()}
        reserved = (slots["writing"] - writing, sizes["writing"] - writing_bytes)
        found = {**shown, RESERVED: reserved, "writing": (writing, writing_bytes)}
        return {state: found[state] for state in SHOWN_STATES}

    def list_slots(self, wanted: SlotFilter, start: SlotIndex, now: float) -> SlotPage:
        """Slots from `start` on, for people: see core.store.listing. Bounded."""
        return list_slots(self._store, {slot.index for slot in self._writes.sealing_slots()}, wanted, start, now)

    def attached_engines(self, now: float) -> list[AttachedEngine]:
        """Every attached engine, the first attached first."""
        return list_engines(self._attachments.of(), now)

    def reserved_slots(self) -> set[SlotIndex]:
        """Slots that an engine may write. Slow: only for checks."""
        slots = self._store.table.all_slots()
        return {slot.index for slot in slots if slot.state is SlotState.WRITING and slot.owner != NO_KEY}

    @property
    def open_handoff_count(self) -> int:
        return self._handoffs.open_count

    @property
    def capacity(self) -> int:
        return self._store.table.capacity

    @property
    def free_slab_count(self) -> int:
        return self._store.table.free_slab_count

    @property
    def secondary_bytes(self) -> int:
        return self._store.secondary_bytes

    @property
    def lease_count(self) -> int:
        return len(self._leases)

    @property
    def attachment_count(self) -> int:
        return len(self._attachments)

    @property
    def drain_phase(self) -> DrainPhase:
        return self._leaving.phase

    def pins(self, now: float) -> tuple[Pin, ...]:
        return self._holds.pins(now)

    def progress(self, now: float) -> DrainProgress:
        return self._leaving.progress(now)

    def explain(self, request_id: str, now: float, account: str | None = None) -> Explanation:
        """What is known of the request with this id, or of all whose id begins with it."""
        return self.records.find(request_id, now, account)

    def block_history(self, keys: tuple[BlockKey, ...], now: float, as_of: float) -> tuple[HistoryEntry, ...]:
        """What became of these blocks here, for the moment `as_of`. Slow: only for questions of people."""
        return find_history(self._store, self._writes.sealing(), keys, now, as_of)

    def engine_stats(self, account: str | None = None) -> EngineStats:
        """What a router needs to know, sorted; with an account, only of its engines."""
        return EngineStats(kinds_of(self._attachments.of(account)), self._acquisitions.peer_speeds(), self.draining)

    def peer_speeds(self) -> tuple[PeerSpeed, ...]:
        return self._acquisitions.peer_speeds()

    def account_of(self, attachment: AttachmentId) -> str:
        """The tenant of an attachment; NOBODY for an unknown one."""
        attached = self._attachments.get(attachment)
        return NOBODY if attached is None else attached.account

    def tenants(self) -> tuple[TenantUsage, ...]:
        return self._tiers.with_disks(self._store.accounts.usage())

    def model_usage(self) -> tuple[UsageRow, ...]:
        return self._answers.usage.rows()

    def all_counters(self) -> dict[str, int]:
        return dict(self.counters + self._store.counters + self._leases.counters)

    @property
    def eviction_rule(self) -> RuleState | None:
        return self._store.eviction_rule

    # -- engines ----

    def _end_attachment(self, attachment: AttachmentId, now: float) -> None:
        self._store.removals.end(attachment)
        self._writes.drop_attachment(attachment, now)
        self._handoffs.end_attachment(attachment, now)
        self._windowed.drop_attachment(attachment)
        self._tails.drop_attachment(attachment, now)
        self._acquisitions.drop_attachment(attachment, now)
        for lease in self._leases.end_holder(("engine", int(attachment))):
            self._store.unpin(lease.slots)

    def _acquire(self, event: ev.Acquire, now: float) -> None:
        attached = self._attachments.require(event.attachment)
        request = event.request
        _check_request(request)
        handoff = request.handoff
        if request.tail_at is not None and not self._leaving.promises_nothing:
            self._tails.start(event.op, attached, request, now)
            return
        if self._tiers.hears_uses:
            self._tiers.used(request.keys, now)
        if request.request_id:
            self.records.asked(
                event.op,
                attached.spec,
                request.request_id,
                pack_keys(request.keys),
                request.skip,
                now,
                attached.account,
                handoff_node="" if handoff is None else str(handoff.node_id),
            )
        if self._leaving.promises_nothing:
            self._answers.refuse(event.op, now)
            return
        attached.seconds_per_block = request.recompute_seconds_per_block or attached.seconds_per_block
        request = self._hinted.asked(request) if request.hints.says_something else request
        if handoff is None:
            self._admission.on_acquire(event.op, attached.account, request.keys)
        if attached.spec.window_groups:
            self._windowed.start(event.op, event.attachment, attached.account, request, attached.spec, now)
            return
        payload_bytes = attached.spec.layout.payload_bytes
        self._acquisitions.start(event.op, event.attachment, attached.account, request, payload_bytes, now)

    def _resolved(self, event: ev.Resolved, now: float) -> None:
        self._acquisitions.resolved(event.op, event.runs, event.complete, now)
        self._tails.resolved(event, now)

    def _cancel(self, event: ev.Cancel, now: float) -> None:
        self._admission.forget(event.op)
        self._acquisitions.cancel(event.op)
        self._writes.cancel(event.op)
        self._tails.cancel(event.op)
        self._handoffs.cancel(event.op)
        self._takeovers.cancel(event.op)
        self._warming.cancel(event.op, now)
        part = self._windowed.cancel(event.op)
        if part:
            self._handoffs.cancel(part)

    def _reserve(self, event: ev.Reserve, now: float) -> None:
        self._writes.reserve(event, self._attachments.require(event.attachment), now)

    def _seal(self, event: ev.Seal, now: float) -> None:
        self._writes.seal(event, self._attachments.require(event.attachment))

    def _abort(self, event: ev.Abort, now: float) -> None:
        self._writes.abort(event, self._attachments.require(event.attachment).spec.engine_id)

    def _release(self, event: ev.Release, now: float) -> None:
        self._attachments.require(event.attachment)
        self._context.slices.begin(event.op, self._released(event))

    def _released(self, event: ev.Release) -> Work:
        count, holder = 0, ("engine", int(event.attachment))
        for lease_id in event.lease_ids:
            if count >= self._context.slices.sizes.blocks:
                count = 0
                yield
            lease = self._leases.release(lease_id, holder)
            if lease is not None:
                count += len(lease.slots)
                self._store.unpin(lease.slots)
        self._actions.append(Reply(event.op, None))

    def _renew(self, event: ev.Renew, now: float) -> None:
        attached = self._attachments.require(event.attachment)
        for report in event.reports:
            self.records.reported(attached.spec, report, now, attached.account)
        self._leases.renew(("engine", int(event.attachment)), event.lease_ids, now, self.lease_seconds)
        if event.statement is not None:
            self._writes.reconcile(event.statement, attached.grants, attached.spec.engine_id)
            self._handoffs.reconcile(event.statement, event.attachment, now)
        self._suspects.named(event.suspects)
        self._actions.append(Reply(event.op, self._store.removals.take(event.attachment, self._store.__contains__)))

    def _digested(self, event: ev.Digested, now: float) -> None:
        self._writes.digested(event, now)
        for found in event.found:
            self._suspects.digested(found, now)

    def _written_down(self, event: ev.WrittenDown, now: float) -> None:
        self._suspects.named(self._tiers.written(event, now))

    # -- hand-offs ----

    def _open_handoff(self, event: ev.OpenHandoff, now: float) -> None:
        self._attachments.require(event.attachment)
        check_handoff_id(event.handoff)
        self._handoffs.open(event.handoff, event.attachment, event.call, now)
        self._actions.append(Reply(event.op, None))

    def _close_handoff(self, event: ev.CloseHandoff, now: float) -> None:
        self._attachments.require(event.attachment)
        check_handoff_id(event.handoff)
        self._handoffs.close(event.handoff, event.attachment, now)
        self._actions.append(Reply(event.op, None))

    # -- the shard itself ----

    def _adopt(self, event: ev.Adopt, now: float) -> None:
        self._store.adopt(event.slot, event.payload_bytes, event.header, now, verified=event.verified)
        self._readable.clear()  # nobody follows it, and it was written into a tier when it was stored

    def watch_list(self) -> set[bytes]:
        """Engines of an earlier boot that may still write quarantined slots."""
        return self._store.writers()

    def _drain(self, event: ev.Drain, now: float) -> None:
        if event.undo:
            if self.draining and not self._leaving.is_open:
                return  # too late: the directory has been told that this node leaves
            self._leaving.undo()
        elif event.timeout_seconds > 0:
            self._holds.let_go()
            self._leaving.begin(event.timeout_seconds, event.handover, now)
        else:
            self._leaving.close()
        self.draining = not event.undo

    def _offering(self, is_spill: bool) -> Spill | Leaving:
        return self._tiers.spill if is_spill else self._leaving

    def _tick(self, event: ev.Tick, now: float) -> None:
        for lease in self._leases.expire(now):
            self._store.unpin(lease.slots)
        for part in self._timed:
            part.tick(now)

    def _set_tenants(self, limits: Mapping[str, TenantLimits]) -> None:
        self._store.accounts.set_limits(limits)
        self._tiers.set_limits(limits)

    def _tenants_changed(self, event: ev.SetTenants, now: float) -> None:
        self._set_tenants(event.limits)
        self._holds.let_go_of_others(event.limits)

    def check_invariants(self) -> None:
        """Check everything that must always hold. O(slots). Raises AssertionError that names what does not hold."""
        first = (self._store, self._leases, self._pulls, self._acquisitions, self._windowed, self._warming, self._holds)
        rest = (
            self._clearing,
            self._tails,
            self._writes,
            self._suspects,
            self._tiers,
            self._handoffs,
            self._takeovers,
            self._leaving,
            self.records,
            self._admission,
        )
        for part in (*first, *rest):
            part.check_invariants()
        reserved = self.reserved_slots() - {slot.index for slot in self._writes.sealing_slots()}
        assert len(reserved) == self.slot_usage()[RESERVED][0], "reserved slots are miscounted"
        pinning = (self._leases.slots(), self._acquisitions.pinned(), self._windowed.pinned(), self._tiers.pinned())
        pins = sum((*pinning, self._suspects.pinned()), Counter[SlotIndex]())
        for slot in self._store.table.all_slots():
            assert slot.pins == pins[slot.index], f"{slot} has {slot.pins} pins, leases say {pins[slot.index]}"


def _check_request(request: AcquireRequest) -> None:
    """Raises InvalidRequest for an acquire that no engine may ask."""
    check_chain(request.keys)
    if not 0 <= request.skip <= len(request.keys):
        raise InvalidRequest(f"skip {request.skip} is not within 0 to {len(request.keys)} keys")
    check_seconds("timeout", request.timeout_seconds)
    if request.handoff is not None:
        check_handoff_id(request.handoff.handoff_id)
