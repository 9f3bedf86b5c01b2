"""Builders for specs, chains and peers, and `CoreHarness`: a shard's core over dictionaries instead of a segment.

The harness performs at once what the core asks for in memory (headers, slabs, announcements). What has an answer
(digests, lookups, leases of peers, pulls) it keeps until the test answers it. Time is a number that the test advances.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Mapping, Sequence

from kvservice.core import actions as act
from kvservice.core import events as ev
from kvservice.core.acquire.clearing import ClearResult
from kvservice.core.attachments import AttachReply
from kvservice.core.block.fingerprint import Fingerprint
from kvservice.core.block.keys import block_keys, chain_hashes, span_route
from kvservice.core.block.marks import Mark, MarkKind
from kvservice.core.block.tenants import NOBODY, TenantLimits
from kvservice.core.messages import (
    AcquireRequest,
    AcquireResult,
    EngineSpec,
    FollowResult,
    Handoff,
    HandoffState,
    Holder,
    HolderRun,
    LocateResult,
    SealItem,
    SealStatus,
    WarmRequest,
)
from kvservice.core.segment.digest import digest_payload
from kvservice.core.segment.geometry import Geometry, slab_of
from kvservice.core.segment.header import SlotHeader
from kvservice.core.segment.layout import SlotLayout
from kvservice.core.segment.refs import BlockHandle, BlockRef
from kvservice.core.shard import ShardState
from kvservice.core.slices import DEFAULT_SLICES, SliceSizes
from kvservice.core.tier.rules import TierRules
from kvservice.units import (
    AttachmentId,
    BlockKey,
    BootEpoch,
    Generation,
    KiB,
    LeaseId,
    MiB,
    NodeId,
    SlotIndex,
)

WALL = 1.7e9  # seconds since 1970 at time 0 of the harness
SMALL = 250 * KiB  # four of them fit a slab of 1 MiB
LARGE = 500 * KiB  # two of them fit a slab of 1 MiB


def make_layout(payload_bytes: int = SMALL) -> SlotLayout:
    return SlotLayout(layer_count=1, kv_head_count=1, cell_bytes=payload_bytes, block_tokens=16)


def make_spec(
    name: str = "engine",
    model: str = "model",
    *,
    payload_bytes: int = SMALL,
    namespace: str = "",
    dtype: str = "bf16",
    engine: str = "",
) -> EngineSpec:
    kind = {"engine": engine} if engine else {}
    return EngineSpec(
        engine_id=hashlib.sha256(name.encode()).digest()[:16],
        model=model,
        fingerprint=Fingerprint.of({"model": model, "dtype": dtype, **kind}),
        layout=make_layout(payload_bytes),
        namespace=namespace,
    )


def make_chain(length: int, tag: str = "prompt", model: str = "model") -> tuple[BlockKey, ...]:
    """The keys of a chain of blocks. Chains with the same tag share their prefix."""
    digest = Fingerprint.of({"model": model}).digest
    return tuple(block_keys(digest, chain_hashes(range(16 * length), 16, tag.encode())))


def content_of(key: BlockKey) -> bytes:
    """The only bytes that are right under this key. They are short: the harness stores no whole payloads."""
    return b"bytes of " + key


def make_holder(name: str = "peer", epoch: int = 1) -> Holder:
    return Holder(NodeId(name), f"{name}:7000", BootEpoch(epoch))


def run_of(start: int, count: int, *holders: Holder) -> HolderRun:
    return HolderRun(start, count, holders or (make_holder(),))


def make_handle(key: BlockKey, slot: int, *, length: int, stored_at: float = 0.0) -> BlockHandle:
    digest = digest_payload(content_of(key), key)
    return BlockHandle(key, SlotIndex(slot), Generation(2), length, digest, position=0, stored_at=stored_at)


def make_located(
    keys: Sequence[BlockKey | None],
    *,
    length: int = SMALL,
    lease: int = 7,
    lease_seconds: float = 10.0,
    stored_at: float = 0.0,
) -> LocateResult:
    """A peer's answer to Locate. A key of None stands for a block that the peer does not hold."""
    handles = tuple(
        None if key is None else make_handle(key, slot, length=length, stored_at=stored_at)
        for slot, key in enumerate(keys)
    )
    return LocateResult(BootEpoch(1), LeaseId(lease), lease_seconds, handles)


class CoreHarness:
    """A shard's core with everything around it simulated. Send every event through `send`, which checks all invariants
    and that no call is answered twice."""

    def __init__(
        self,
        slab_count: int = 2,
        *,
        slab_bytes: int = MiB,
        lease_seconds: float = 10.0,
        has_directory: bool = True,
        tenants: Mapping[str, TenantLimits] | None = None,
        tiers: Sequence[TierRules] = (),
        spills: bool = False,
        max_age: float = 0.0,
        slices: SliceSizes = DEFAULT_SLICES,
        waits: bool = False,  # long calls go on only when the test says so, with `go_on`
    ) -> None:
        self.max_age = max_age
        self.slices = slices
        self.waits = waits
        self.marks: tuple[Mark, ...] = ()  # that a restart finds
        self.geometry = Geometry(slab_bytes=slab_bytes, slab_count=slab_count)
        self.lease_seconds = lease_seconds
        self.has_directory = has_directory
        self.tenants = dict(tenants or {})
        self.tiers = tuple(tiers)
        self.spills = spills
        self.now = 100.0
        self.headers: dict[SlotIndex, SlotHeader] = {}
        self.contents: dict[SlotIndex, bytes] = {}
        self.slabs: dict[int, int] = {}  # slab -> payload bytes, as recorded in the segment
        self._next_op = 1
        self._epoch = 0
        self._boot()
        for tier in self.tiers:  # they are open, and empty; after a restart the test says what is found
            self.send(ev.TierFound(tier.name, ()))

    def _boot(self) -> None:
        self._epoch += 1
        self.state = ShardState(
            NodeId("here"),
            BootEpoch(self._epoch),
            self.geometry,
            lease_seconds=self.lease_seconds,
            has_directory=self.has_directory,
            tenants=self.tenants,
            tiers=self.tiers,
            spills=self.spills,
            max_age_seconds=self.max_age,
            wall_offset=WALL,
            slices=self.slices,
        )
        self.state.freshness.marks.add(self.marks)
        self.answers: dict[int, act.Reply | act.Refuse] = {}
        self.announced: Counter[BlockKey] = Counter()
        self.retracted: list[BlockKey] = []  # in this boot, the first one first
        self.digests: deque[act.Digest] = deque()
        self.turns: deque[int] = deque()  # long calls that have slices left
        self.resolves: list[act.Resolve] = []
        self.locates: list[act.Locate] = []
        self.follows: list[act.Follow] = []
        self.pulls: list[act.Pull] = []
        self.remote_releases: list[act.ReleaseRemote] = []
        self.tier_work: list[act.TierWork] = []
        self.watched: list[bytes] = []
        self.searches: list[act.FindTakers] = []
        self.offers: list[act.Offer] = []
        self.farewells = 0

    def restart(self) -> list[act.Action]:
        """Restart the shard over the same memory. Returns the actions that adopting caused."""
        self._boot()
        found = sorted((slot, header) for slot, header in self.headers.items() if slab_of(slot) in self.slabs)
        done: list[act.Action] = []
        for slot, header in found:
            verified = header.is_stable and self.digest_now(slot, header.key) == header.digest
            done += self.send(ev.Adopt(slot, self.slabs[slab_of(slot)], header, verified))
        return done

    # -- events in, actions out ----

    def send(self, event: ev.Event) -> list[act.Action]:
        actions = self.state.handle(event, self.now)
        for action in actions:
            self._perform(action)
        self.state.check_invariants()
        while self.turns and not self.waits:
            actions += self.go_on()
        return actions

    def go_on(self) -> list[act.Action]:
        """The next slice of the long call that has waited longest."""
        return self.send(ev.GoOn(self.turns.popleft()))

    def _perform(self, action: act.Action) -> None:
        match action:
            case act.Reply() | act.Refuse():
                assert action.op not in self.answers, f"call {action.op} was answered twice"
                self.answers[action.op] = action
            case act.NextTurn(op):
                self.turns.append(op)
            case act.WriteHeader(slot, header):
                self.headers[slot] = header
            case act.ClearHeader(slot):
                self.headers.pop(slot, None)
            case act.AssignSlab(slab, payload_bytes):
                self.slabs[slab] = payload_bytes
                # The slots now lie elsewhere in the slab.
                self.headers = {slot: kept for slot, kept in self.headers.items() if slab_of(slot) != slab}
                self.contents = {slot: kept for slot, kept in self.contents.items() if slab_of(slot) != slab}
            case act.Announce(key):
                self.announced[key] += 1
            case act.Retract(key):
                self.announced[key] -= 1
                self.retracted.append(key)
            case _:
                self._keep(action)

    def _keep(self, action: act.Digest | act.Pull | act.WatchEngine | act.TierWork | act.Outgoing) -> None:
        """Keep what the test will answer later."""
        match action:
            case act.Digest():
                self.digests.append(action)
            case act.Resolve():
                self.resolves.append(action)
            case act.Locate():
                self.locates.append(action)
            case act.Follow():
                self.follows.append(action)
            case act.Pull():
                self.pulls.append(action)
            case act.ReleaseRemote():
                self.remote_releases.append(action)
            case act.WriteDown() | act.BringBack() | act.Erase() | act.Probe():
                self.tier_work.append(action)
            case act.WatchEngine(engine_id):
                self.watched.append(engine_id)
            case act.FindTakers():
                self.searches.append(action)
            case act.Offer():
                self.offers.append(action)
            case act.Farewell():
                self.farewells += 1
            case _:
                act.nobody_performs(action)

    def next_op(self) -> int:
        self._next_op += 1
        return self._next_op

    def reply(self, op: int) -> object:
        """The value of an answered call. Raises the error that it was refused with."""
        answer = self.answers[op]
        if isinstance(answer, act.Refuse):
            raise answer.error
        return answer.value

    def result(self, op: int) -> AcquireResult:
        value = self.reply(op)
        assert isinstance(value, AcquireResult)
        return value

    def open(self, op: int) -> bool:
        return op not in self.answers

    def advance(self, seconds: float) -> list[act.Action]:
        """Let time pass, then send a Tick."""
        self.now += seconds
        return self.send(ev.Tick())

    # -- an engine's calls ----

    def set_tenants(self, **limits: TenantLimits) -> None:
        self.tenants = limits
        self.send(ev.SetTenants(limits))

    def attach(self, spec: EngineSpec | None = None, tenant: str = NOBODY) -> AttachmentId:
        op = self.next_op()
        self.send(ev.Attach(op, spec or make_spec(tenant or "engine"), tenant))
        value = self.reply(op)
        assert isinstance(value, AttachReply)
        return value.attachment

    def reserve(self, attachment: AttachmentId, count: int = 1, group: int = 0, call: int = 0) -> list[BlockRef]:
        op = self.next_op()
        self.send(ev.Reserve(op, attachment, count, group, call))
        value = self.reply(op)
        assert isinstance(value, list)
        return value

    def write(self, ref: BlockRef, key: BlockKey) -> None:
        """Copy the block of this key into the slot, as an engine's worker does."""
        self.contents[ref.slot] = content_of(key)

    def items(self, refs: Sequence[BlockRef], chain: Sequence[BlockKey], start: int = 0) -> tuple[SealItem, ...]:
        return tuple(
            SealItem(ref, chain[i], chain[i - 1] if i else None, i, span_route(chain, i))
            for i, ref in enumerate(refs, start)
        )

    def begin_seal(self, attachment: AttachmentId, items: tuple[SealItem, ...]) -> int:
        """Ask to seal. The digests wait in `digests`."""
        op = self.next_op()
        self.send(ev.Seal(op, attachment, items))
        return op

    def statuses(self, op: int) -> list[SealStatus]:
        value = self.reply(op)
        assert isinstance(value, list)
        return value

    def store(self, attachment: AttachmentId, chain: Sequence[BlockKey], start: int = 0) -> list[SealStatus]:
        """Reserve, write and seal the blocks of a chain from `start` on."""
        refs = self.reserve(attachment, len(chain) - start)
        for ref, key in zip(refs, chain[start:], strict=False):
            self.write(ref, key)
        op = self.begin_seal(attachment, self.items(refs, chain, start))
        self.digest_all()
        return self.statuses(op)

    def digest_now(self, slot: SlotIndex, key: BlockKey) -> int:
        return digest_payload(self.contents.get(slot, b""), key)

    def digest_all(self, *, readable: bool = True) -> None:
        while self.digests:
            wanted = self.digests.popleft()
            digest = self.digest_now(wanted.slot, wanted.key) if readable else None
            self.send(ev.Digested((ev.SlotDigest(wanted.slot, wanted.key, digest),)))

    def acquire(
        self,
        attachment: AttachmentId,
        chain: Sequence[BlockKey],
        *,
        skip: int = 0,
        timeout: float = 5.0,
        recompute: float = 0.0,
        handoff: Handoff | None = None,
    ) -> int:
        op = self.next_op()
        self.send(ev.Acquire(op, attachment, AcquireRequest(tuple(chain), skip, timeout, recompute, handoff)))
        return op

    def ask_tail(self, attachment: AttachmentId, keys: Sequence[BlockKey], at: int, *, timeout: float = 5.0) -> int:
        """Ask for the first tail of position `at` that somebody has; keys[0] is the block before it."""
        op = self.next_op()
        self.send(ev.Acquire(op, attachment, AcquireRequest(tuple(keys), 1, timeout, tail_at=at)))
        return op

    def hit(self, attachment: AttachmentId, chain: Sequence[BlockKey], *, skip: int = 0) -> AcquireResult:
        """Acquire when no other node holds anything."""
        op = self.acquire(attachment, chain, skip=skip)
        if self.open(op) and self.resolves and self.resolves[-1].op == op:
            self.resolved(op)
        return self.result(op)

    def warm(
        self,
        chain: Sequence[BlockKey],
        *,
        hold: float = 30.0,
        timeout: float = 5.0,
        pin: str = "",
        tenant: str = NOBODY,
        spec: EngineSpec | None = None,
    ) -> int:
        """Begin a Warm for engines with this spec."""
        op = self.next_op()
        digest = (spec or make_spec()).fingerprint.digest
        self.send(ev.Warm(op, tenant, WarmRequest(digest, tuple(chain), timeout, 0.0 if pin else hold, pin)))
        return op

    def clear(
        self, kind: MarkKind, name: str = "", keys: Sequence[BlockKey] = (), at: float | None = None
    ) -> ClearResult:
        op = self.next_op()
        when = self.state.freshness.wall(self.now) if at is None else at
        self.send(ev.Clear(op, (Mark(kind, when, name, tuple(keys)),)))
        return self.cleared(op)

    def cleared(self, op: int) -> ClearResult:
        """The answer to a clear, after as many Ticks as its walk takes."""
        while self.open(op) and self.state.next_deadline() == 0.0:
            self.advance(0.0)
        value = self.reply(op)
        assert isinstance(value, ClearResult)
        return value

    def release(self, attachment: AttachmentId, *lease_ids: LeaseId) -> None:
        op = self.next_op()
        self.send(ev.Release(op, attachment, lease_ids))
        self.reply(op)

    # -- answers of peers and the directory ----

    def resolved(self, op: int, *runs: HolderRun, complete: bool = True) -> list[act.Action]:
        return self.send(ev.Resolved(op, runs, complete))

    def located(self, locate: act.Locate, result: LocateResult | None) -> list[act.Action]:
        return self.send(ev.Located(locate.fetch, result, self.now))

    def followed(
        self, follow: act.Follow, count: int, *, state: HandoffState = HandoffState.OPEN, holder: Holder | None = None
    ) -> list[act.Action]:
        """Answer that the writer's node has the first `count` blocks that were asked for."""
        result = FollowResult(state, make_located(follow.keys[:count], lease=7 if count else 0))
        return self.send(ev.Followed(follow.follow, follow.op, holder or make_holder(), result, self.now))

    def pulled(self, pull: act.Pull, *results: ev.PullResult) -> list[act.Action]:
        """Answer a pull. Blocks that are OK arrive with their right bytes. One result stands for all."""
        each = results * len(pull.items) if len(results) == 1 else results
        for (handle, slot), result in zip(pull.items, each, strict=False):
            if result is ev.PullResult.OK:
                self.contents[slot] = content_of(handle.key)
        return self.send(ev.Pulled(pull.job, each))

    def fetch_all(self, op: int, chain: Sequence[BlockKey], start: int = 0, *, length: int = SMALL) -> None:
        """Let one peer have the chain from `start` on, and let everything succeed."""
        self.resolved(op, run_of(start, len(chain) - start))
        locate = self.locates[-1]
        self.located(locate, make_located(locate.keys, length=length))
        self.pulled(self.pulls[-1], ev.PullResult.OK)

    # -- answers of tiers ----

    def writes(self, tier: str = "disk") -> list[act.WriteDown]:
        """Writes into a tier that were not answered with `written`."""
        return [work for work in self.tier_work if isinstance(work, act.WriteDown) and work.tier == tier]

    def erased(self, tier: str = "disk") -> list[BlockKey]:
        return [
            key for work in self.tier_work if isinstance(work, act.Erase) and work.tier == tier for key in work.keys
        ]

    def written(
        self, write: act.WriteDown, *results: bool, is_full: bool = False, stored_bytes: int = 0
    ) -> list[act.Action]:
        """Answer a write. One result stands for all, and so does what a block takes."""
        self.tier_work.remove(write)
        each = results * len(write.items) if len(results) == 1 else results
        return self.send(ev.WrittenDown(write.job, each, is_full, (stored_bytes,) * len(each)))

    def write_all(self, tier: str = "disk") -> list[BlockKey]:
        """Let every write into a tier succeed, also those that begin then. Returns what was written, in its order."""
        found: list[BlockKey] = []
        while writes := self.writes(tier):
            found += [block.key for block, _ in writes[0].items]
            self.written(writes[0], True)
        return found

    def reads(self, tier: str = "disk") -> list[act.BringBack]:
        """Blocks being brought back from a tier that were not answered with `brought`."""
        return [work for work in self.tier_work if isinstance(work, act.BringBack) and work.tier == tier]

    def brought(self, read: act.BringBack, *results: ev.PullResult, stored_at: float | None = None) -> list[act.Action]:
        """Answer a read. Blocks that are OK arrive with their right bytes. One result stands for all. Without
        `stored_at` they are as old as the read says."""
        self.tier_work.remove(read)
        each = results * len(read.items) if len(results) == 1 else results
        found = [ev.BroughtBlock(result) for result in each]
        for place, ((block, slot), result) in enumerate(zip(read.items, each, strict=False)):
            if result is ev.PullResult.OK:
                self.contents[slot] = content_of(block.key)
                digest, age = self.digest_now(slot, block.key), block.stored_at if stored_at is None else stored_at
                found[place] = ev.BroughtBlock(result, digest, age)
        return self.send(ev.BroughtBack(read.job, tuple(found)))

    def probed(self, op: int, count: int, tier: str = "objects", *, is_end: bool = False) -> list[act.Action]:
        return self.send(ev.Probed(op, tier, count, is_end))

    # -- state ----

    def slots(self, state: str) -> int:
        return self.state.slot_counts()[state]

    def keys_held(self) -> set[BlockKey]:
        return {block.key for block in self.state.blocks()}

    def count(self, name: str) -> int:
        return self.state.all_counters().get(name, 0)
