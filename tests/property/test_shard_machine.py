"""A shard's core against engines, peers, transports and a directory that are late, wrong, silent, repeated or dead.

The memory is a dictionary of contents, and everybody who may still write a slot can do so at any step: engines whose
connection is lost, transfers that are stuck, workers that are slow. After every step every sealed block must hold the
bytes of its key, every promise that is still in time must be kept, and the directory must have been told the truth.
In the end, with everybody gone, every slot must be usable again.
"""

from __future__ import annotations

from itertools import chain

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from kvservice.core import actions as act
from kvservice.core import events as ev
from kvservice.core.attachments import AttachReply
from kvservice.core.block.marks import MarkKind
from kvservice.core.drain.sender import DrainPhase
from kvservice.core.events import PullResult
from kvservice.core.messages import (
    NO_HINTS,
    AcquireRequest,
    AcquireResult,
    Hints,
    Holder,
    HolderRun,
    LocateResult,
    SealItem,
    SealStatus,
    TakeOverResult,
)
from kvservice.core.segment.geometry import slab_of
from kvservice.core.segment.refs import BlockHandle, BlockRef
from kvservice.core.slices import SliceSizes
from kvservice.errors import KVServiceError, NotAttached, StaleEpoch, Unavailable
from kvservice.testing.builders import CoreHarness, content_of, make_handle, run_of
from kvservice.units import AttachmentId, BlockKey, BootEpoch, LeaseId, NodeId, SpanRoute
from tests.property.shard_world import (
    CHAINS,
    GARBAGE,
    LEASE,
    SIZES,
    SLABS,
    SPECS,
    Asked,
    Engine,
    Promise,
    TailRules,
    Write,
    any_index,
    engines,
    helpful,
    lived_long,
    promised,
    results,
    runs,
    somebody_attached,
    somebody_writes,
)


class ShardMachine(TailRules):
    def __init__(self) -> None:
        super().__init__()
        self.engines = [Engine(spec) for spec in SPECS]
        self.harness = CoreHarness(slab_count=SLABS, lease_seconds=LEASE, slices=SliceSizes(2, 1))
        self._forget_boot()

    def _forget_boot(self) -> None:
        self.asked: dict[int, Asked] = {}
        self.promises: dict[LeaseId, Promise] = {}
        self.pulls: dict[int, list[Write]] = {}  # transfers that have not reported
        self.stuck: dict[int, list[Write]] = {}
        self.reported: list[ev.Pulled] = []
        self.heard: dict[AttachmentId, int] = {}  # how many of the blocks that went its engine has heard of
        self.steps = 0

    @initialize()
    def start(self) -> None:
        for one in range(len(SPECS)):
            self.attach(one)

    def _attached(self, one: int) -> Engine:
        """The engine of this number, or the next one that is attached."""
        order = [self.engines[(one + step) % len(self.engines)] for step in range(len(self.engines))]
        return next(engine for engine in order if engine.attachment is not None)

    # -- engines ----

    def _ask(self, event: ev.Event, asked: Asked) -> int:
        op = getattr(event, "op")  # noqa: B009
        self.asked[op] = asked
        self.harness.send(event)
        assert asked.deadline is not None or isinstance(event, ev.Seal) or op in self.harness.answers
        return int(op)

    @precondition(lambda self: any(engine.attachment is None for engine in self.engines))
    @rule(one=engines)
    def attach(self, one: int) -> None:
        engine = self.engines[one]
        if engine.attachment is not None:
            return
        engine.forget_writes()  # it waits for its workers before it attaches again
        op = self._ask(ev.Attach(self.harness.next_op(), engine.spec), Asked(self.harness.now, ("engine", 0)))
        answer = self.harness.answers[op]
        if isinstance(answer, act.Reply):
            assert isinstance(answer.value, AttachReply)
            engine.attachment = answer.value.attachment
            self.heard[engine.attachment] = len(self.harness.retracted)
        else:
            assert self.harness.state.draining and isinstance(answer.error, Unavailable)

    @lived_long
    @rule(one=engines)
    def attach_again_before_the_loss_was_noticed(self, one: int) -> None:
        engine = self.engines[one]
        if engine.attachment is not None and not self.harness.state.draining:
            old, engine.attachment = engine.attachment, None
            self.attach(one)
            self._ended(old)
            self.harness.send(ev.AttachmentLost(old))

    @lived_long
    @rule(one=engines, dies=st.booleans())
    def detach(self, one: int, dies: bool) -> None:
        """Its scheduler leaves; its workers may be in the middle of a copy, and end that first."""
        engine = self.engines[one]
        if dies:
            engine.forget_writes()
        if engine.attachment is not None:
            self.harness.send(ev.Detach(engine.attachment))
            self._ended(engine.attachment)
            engine.attachment = None

    @lived_long
    @rule(one=engines, dies=st.booleans())
    def lose(self, one: int, dies: bool) -> None:
        engine = self.engines[one]
        if dies:
            engine.forget_writes()
        if engine.attachment is not None:
            self.harness.send(ev.AttachmentLost(engine.attachment))
            self._ended(engine.attachment)
            engine.attachment = None

    @precondition(lambda self: self.harness.watched)
    @rule(one=engines)
    def report_gone(self, one: int) -> None:
        """Late reports about an engine that is back again are possible; false ones are not."""
        engine = self.engines[one]
        if engine.spec.engine_id in self.harness.watched and (engine.attachment is not None or not engine.writes):
            self.harness.send(ev.EngineGone(engine.spec.engine_id))

    @somebody_attached
    @precondition(lambda self: sum(len(engine.writes) for engine in self.engines) < 5)
    @rule(one=engines, count=st.integers(1, 6), which=any_index)
    def reserve(self, one: int, count: int, which: int) -> None:
        engine = self._attached(one)
        assert engine.attachment is not None
        chain = engine.chains[which % len(engine.chains)]
        for place, ref in enumerate(self.harness.reserve(engine.attachment, count)):
            size = engine.spec.layout.payload_bytes
            engine.writes.append(Write(ref.slot, size, chain[(which + place) % len(chain)], ref.generation))

    @precondition(lambda self: any(engine.writes for engine in self.engines))
    @rule(one=engines, which=any_index, half=st.booleans())
    def worker_writes(self, one: int, which: int, half: bool) -> None:
        writes = self.engines[one].writes
        if writes:
            write = writes[which % len(writes)]
            self._write(write, GARBAGE if half else content_of(write.key))

    @somebody_writes
    @rule(one=engines, which=any_index, count=st.integers(1, 4), claim=st.integers(-1, 6))
    def seal(self, one: int, which: int, count: int, claim: int) -> None:
        """Workers finish, then the scheduler seals; parents and positions are whatever the engine claims."""
        engine = self._attached(one)
        start = which % (len(engine.writes) or 1)
        chosen = engine.writes[start : start + count]
        items = []
        for write in chosen:
            self._write(write, content_of(write.key))
            engine.writes.remove(write)
            chain = next(one for one in engine.chains if write.key in one)
            position = chain.index(write.key)
            parent = chain[position - 1] if position else None
            if claim >= 0:
                parent, position = chain[claim % len(chain)], claim
            items.append(self.harness.items([write.ref], (write.key,))[0])
            items[-1] = type(items[-1])(write.ref, write.key, parent, position, items[-1].route)
        op = self.harness.next_op()
        assert engine.attachment is not None
        self._ask(ev.Seal(op, engine.attachment, tuple(items)), Asked(self.harness.now, ("engine", 0)))

    @somebody_attached
    @rule(one=engines, which=any_index, count=st.integers(1, 5))
    def store(self, one: int, which: int, count: int) -> None:
        """A prefix stored without any trouble."""
        engine = self._attached(one)
        assert engine.attachment is not None
        chain = engine.chains[which % len(engine.chains)]
        statuses = self.harness.store(engine.attachment, chain[:count])
        assert SealStatus.FAILED not in statuses and SealStatus.STALE not in statuses

    @precondition(lambda self: any(engine.attachment and engine.void for engine in self.engines))
    @rule(seal=st.booleans())
    def use_what_is_void(self, seal: bool) -> None:
        for engine in self.engines:
            if engine.attachment is not None and engine.void:
                op, now, refs = self.harness.next_op(), self.harness.now, [write.ref for write in engine.void]
                items = tuple(SealItem(ref, engine.chains[-1][0], None, 0, SpanRoute(0)) for ref in refs)
                event = ev.Seal(op, engine.attachment, items) if seal else ev.Abort(op, engine.attachment, tuple(refs))
                self._ask(event, Asked(now, ("engine", 0)))
                answer = self.harness.reply(op)
                assert answer == [SealStatus.STALE] * len(refs) if seal else answer is None

    @somebody_writes
    @rule(one=engines, which=any_index)
    def abort(self, one: int, which: int) -> None:
        engine = self.engines[one]
        if engine.attachment is not None and engine.writes:
            write = engine.writes.pop(which % len(engine.writes))
            refs = (write.ref, write.ref, BlockRef(write.ref.slot, type(write.ref.generation)(0)))
            event = ev.Abort(self.harness.next_op(), engine.attachment, refs)
            self._ask(event, Asked(self.harness.now, ("engine", 0)))

    @precondition(lambda self: self.harness.digests)
    @rule(which=any_index, readable=st.integers(0, 9))
    def digest(self, which: int, readable: int) -> None:
        self.harness.digests.rotate(which)
        wanted = self.harness.digests.popleft()
        digest = self.harness.digest_now(wanted.slot, wanted.key) if readable else None
        self.harness.send(ev.Digested((ev.SlotDigest(wanted.slot, wanted.key, digest),)))

    @rule(
        one=engines,
        which=any_index,
        skip=st.integers(0, 2),
        timeout=st.sampled_from([0.0, 0.5, 3.0, 20.0]),
        recompute=st.sampled_from([0.0, 0.01, 1.0]),
        hints=st.sampled_from([NO_HINTS, NO_HINTS, Hints(pin_seconds=2.0), Hints(prefetch=True, last_turn=True)]),
        waits=st.booleans(),
    )
    def acquire(
        self, one: int, which: int, skip: int, timeout: float, recompute: float, hints: Hints, waits: bool = False
    ) -> None:
        engine = self.engines[one]
        attachment = AttachmentId(999) if engine.attachment is None else engine.attachment
        chain = engine.chains[which % len(engine.chains)]
        keys = chain[: 1 + which // 7 % len(chain)]
        skip, now, op = min(skip, len(keys)), self.harness.now, self.harness.next_op()
        asked = Asked(now, ("engine", int(attachment)), keys[skip:], now + timeout)
        self.harness.waits = waits  # then the next event comes between its first slice and the others
        self._ask(ev.Acquire(op, attachment, AcquireRequest(keys, skip, timeout, recompute, hints=hints)), asked)
        self.harness.waits = False
        if engine.attachment is None:
            answer = self.harness.answers[op]
            assert isinstance(answer, act.Refuse) and isinstance(answer.error, NotAttached)

    @promised
    @somebody_attached
    @rule(one=engines, which=any_index, twice=st.booleans())
    def release(self, one: int, which: int, twice: bool) -> None:
        """Also what is not its own: that must not end anything."""
        engine = self._attached(one)
        assert engine.attachment is not None
        lease_id = sorted(self.promises)[which % len(self.promises)]
        if self.promises[lease_id].holder == ("engine", int(engine.attachment)):
            del self.promises[lease_id]
        for _ in range(1 + twice):
            self.harness.release(engine.attachment, lease_id)

    @somebody_attached
    @rule(one=engines, doubts=st.booleans())
    def renew(self, one: int, doubts: bool) -> None:
        engine = self._attached(one)
        assert engine.attachment is not None
        op, now = self.harness.next_op(), self.harness.now
        doubted = [ref for promise in self.promises.values() for ref, _ in promise.blocks if doubts]
        self._ask(ev.Renew(op, engine.attachment, tuple(self.promises), suspects=doubted), Asked(now, ("engine", 0)))
        gone, held = self.harness.retracted[self.heard[engine.attachment] :], self.harness.keys_held()
        heard = set(self.harness.reply(op).keys)  # type: ignore[attr-defined]  # a Removed
        assert not heard & held and (not engine.spec.hears_removals or heard >= set(gone) - held), "all that is gone"
        self.heard[engine.attachment] = len(self.harness.retracted)
        for promise in self.promises.values():
            if promise.holder == ("engine", int(engine.attachment)) and promise.until > now:
                promise.until = now + LEASE

    # -- directory and peers ----

    @precondition(lambda self: self.harness.resolves)
    @rule(which=any_index, found=st.lists(runs, max_size=3), complete=st.booleans())
    def resolve(self, which: int, found: list[HolderRun], complete: bool) -> None:
        """Any lookup of this boot, also one that was answered before."""
        wanted = self.harness.resolves[-1 - which % min(4, len(self.harness.resolves))]
        self.harness.resolved(wanted.op, *found, complete=complete)

    @somebody_attached
    @rule(
        one=engines,
        which=any_index,
        holders=helpful,
        far=st.sampled_from([3, 4, 2, 1]),
        told=results,
        timeout=st.sampled_from([20.0, 0.5]),
    )
    def fetch(
        self, one: int, which: int, holders: tuple[Holder, ...], far: int, told: list[PullResult], timeout: float
    ) -> None:
        """A whole chain is asked for, and the world answers well for a while."""
        engine = self._attached(one)
        self.acquire(self.engines.index(engine), which % len(engine.chains) + 7 * 4, 0, timeout, 0.0, NO_HINTS)
        asked, pulls = len(self.harness.locates), set(self.pulls)
        for wanted in [one.op for one in self.harness.resolves if one.op in self.asked]:
            self.harness.resolved(wanted, run_of(0, 9, *holders))
        for number in range(asked, len(self.harness.locates)) if far > 1 else ():
            self._locate(self.harness.locates[number], [""], LEASE)
        for job in sorted(set(self.pulls) - pulls) if far > 2 else ():
            self._pulled(job, [PullResult.OK] * 5 if far == 3 else told)

    @precondition(lambda self: self.harness.locates)
    @rule(
        which=any_index,
        damage=st.lists(st.sampled_from(["", "", "", "missing", "key", "length"]), min_size=5),
        silent=st.integers(0, 5),
        lease=st.sampled_from([10.0, 0.0, 1e9]),
    )
    def locate(self, which: int, damage: list[str], silent: int, lease: float) -> None:
        """Any question to a peer of this boot, also one that was answered before."""
        wanted = self.harness.locates[-1 - which % min(4, len(self.harness.locates))]
        if silent:
            self._locate(wanted, damage, lease)
        else:
            self.harness.located(wanted, None)

    def _locate(self, wanted: act.Locate, damage: list[str], lease: float) -> None:
        size = SIZES["a" if any(wanted.keys[0] in chain for chain in CHAINS["a"]) else "b"]
        handles: list[BlockHandle | None] = []
        for slot, key in enumerate(wanted.keys):
            kind = damage[slot % len(damage)]
            handle = make_handle(BlockKey(b"x" * 16) if kind == "key" else key, slot, length=size + (kind == "length"))
            handles.append(None if kind == "missing" else handle)
        if damage[-1]:
            handles.append(make_handle(wanted.keys[0], 9, length=size))
        before = len(self.harness.pulls)
        self.harness.located(wanted, LocateResult(BootEpoch(1), LeaseId(5), lease, tuple(handles)))
        for pull in self.harness.pulls[before:]:
            assert pull.job not in self.pulls
            self.pulls[pull.job] = [
                Write(slot, size, handle.key, self.harness.headers[slot].generation) for handle, slot in pull.items
            ]

    @precondition(lambda self: self.pulls or self.stuck)
    @rule(which=any_index, good=st.booleans())
    def transfer_writes(self, which: int, good: bool) -> None:
        """Bytes of a transfer that has not ended land whenever they like."""
        open_writes = [write for writes in [*self.pulls.values(), *self.stuck.values()] for write in writes]
        if open_writes:
            write = open_writes[which % len(open_writes)]
            self._write(write, content_of(write.key) if good else GARBAGE)

    @precondition(lambda self: self.pulls)
    @rule(which=any_index, found=results, all_good=st.booleans())
    def pulled(self, which: int, found: list[PullResult], all_good: bool) -> None:
        job = sorted(self.pulls)[which % len(self.pulls)]
        self._pulled(job, [PullResult.OK] * 5 if all_good else found)

    def _pulled(self, job: int, told: list[PullResult]) -> None:
        writes = self.pulls.pop(job)
        late = []
        for place, write in enumerate(writes):
            result = told[place] if place < len(told) else PullResult.STUCK
            self._write(write, content_of(write.key) if result is PullResult.OK else GARBAGE)
            if result is PullResult.STUCK:
                late.append(write)
        if late:
            self.stuck[job] = late
        self.reported.append(ev.Pulled(job, tuple(told)))
        self.harness.send(self.reported[-1])

    @precondition(lambda self: self.reported)
    @rule(which=any_index)
    def pulled_again(self, which: int) -> None:
        self.harness.send(self.reported[which % len(self.reported)])

    @precondition(lambda self: self.stuck)
    @rule(which=any_index, twice=st.booleans())
    def end_writes(self, which: int, twice: bool) -> None:
        job = sorted(self.stuck)[which % len(self.stuck)]
        del self.stuck[job]
        for _ in range(1 + twice):
            self.harness.send(ev.WritesEnded(job))

    @rule(
        which=any_index, reader=st.sampled_from(["peer", "other"]), stale=st.integers(0, 4), model=st.sampled_from("ab")
    )
    def peer_locates(self, which: int, reader: str, stale: int, model: str) -> None:
        keys = CHAINS[model][which % len(CHAINS[model])]
        keys = keys + keys[:1]
        epoch = BootEpoch(self.harness.state.epoch - (stale == 0))
        op = self.harness.next_op()
        asked = Asked(self.harness.now, ("peer", reader), keys)
        self._ask(ev.PeerLocate(op, NodeId(reader), epoch, keys), asked)
        if stale == 0:
            answer = self.harness.answers[op]
            assert isinstance(answer, act.Refuse) and isinstance(answer.error, StaleEpoch)

    @promised
    @rule(which=any_index, reader=st.sampled_from(["peer", "other"]))
    def peer_releases(self, which: int, reader: str) -> None:
        lease_id = sorted(self.promises)[which % len(self.promises)]
        if self.promises[lease_id].holder == ("peer", reader):
            del self.promises[lease_id]
        event = ev.PeerRelease(self.harness.next_op(), NodeId(reader), self.harness.state.epoch, lease_id)
        self._ask(event, Asked(self.harness.now, ("peer", reader)))

    # -- the shard itself ----

    @lived_long
    @rule()
    def drain(self) -> None:
        self.harness.send(ev.Drain())

    @precondition(lambda self: self.harness.state.draining)
    @rule()
    def drain_no_more(self) -> None:
        self.harness.send(ev.Drain(undo=True))

    @rule(one=engines, which=any_index, pin=st.sampled_from(["", "", "system"]), timeout=st.sampled_from([0.5, 8.0]))
    def warm(self, one: int, which: int, pin: str, timeout: float) -> None:
        spec = SPECS[one]
        chains = CHAINS[spec.model]
        self.harness.warm(chains[which % len(chains)], hold=5.0, timeout=timeout, pin=pin, spec=spec)

    @rule()
    def unpin(self) -> None:
        self.harness.send(ev.Unpin(self.harness.next_op(), "", "system"))

    @lived_long
    @rule(model=st.sampled_from(["a", "b", ""]), which=any_index)
    def clear(self, model: str, which: int) -> None:
        if model:
            self.harness.clear(MarkKind.MODEL, model)
        else:
            chains = [*CHAINS["a"], *CHAINS["b"]]
            self.harness.clear(MarkKind.PROMPT, keys=chains[which % len(chains)])
        self.harness.now += 0.01  # what is reserved at the moment of a clear counts as reserved before it

    @rule(seconds=st.sampled_from([0.0, 0.3, 2.0, 6.0, 11.0, 61.0]), tick=st.booleans())
    def time_passes(self, seconds: float, tick: bool) -> None:
        self.harness.now += seconds
        if tick:
            self.tick()

    def tick(self) -> None:
        for _ in range(1 + bool(self.harness.turns)):  # for what goes on after the first one, the timer fires again
            self.harness.send(ev.Tick())
        for op, asked in self.asked.items():
            late = op not in self.harness.answers and asked.deadline is not None and asked.deadline <= self.harness.now
            assert not late, f"call {op} was not answered in time"
        assert (self.harness.state.next_deadline() or float("inf")) > self.harness.now, "a Tick leaves what is due"

    @lived_long
    @rule(rot=st.integers(0, 30))
    def restart(self, rot: int) -> None:
        """The process ends in the middle of everything; its transfers and digests end with it, the engines do not."""
        sealed = sorted(block.slot.index for block in self.harness.state.blocks())
        if rot < len(sealed):
            self.harness.contents[sealed[rot]] = GARBAGE
        for engine in self.engines:
            engine.attachment, engine.void = None, []  # calls of an earlier epoch do not get past the wire
        self.harness.restart()
        self._forget_boot()
        self.harness.watched += sorted(self.harness.state.watch_list())
        if rot < len(sealed):
            assert sealed[rot] not in {block.slot.index for block in self.harness.state.blocks()}

    # -- what must hold ----

    def _write(self, write: Write, content: bytes) -> None:
        slab = slab_of(write.slot)
        if self.harness.slabs.get(slab) == write.payload_bytes:
            self.harness.contents[write.slot] = content
        else:  # the slab was cut anew under the writer: whatever lies there now is hit
            for slot in [slot for slot in self.harness.contents if slab_of(slot) == slab]:
                self.harness.contents[slot] = GARBAGE

    def _ended(self, attachment: AttachmentId) -> None:
        """What an attachment held and asked ends with it."""
        holder = ("engine", int(attachment))
        self.promises = {number: one for number, one in self.promises.items() if one.holder != holder}
        for op, asked in self.asked.items():
            assert asked.holder != holder or op in self.harness.answers, "a call outlives its attachment"

    @invariant()
    def answers_are_taken(self) -> None:
        self.steps += 1
        for op in [op for op in self.asked if op in self.harness.answers]:
            asked, answer = self.asked.pop(op), self.harness.answers[op]
            if isinstance(answer, act.Refuse):
                assert isinstance(answer.error, KVServiceError)
                continue
            value = answer.value
            if isinstance(value, AcquireResult):
                assert len(value.blocks) <= len(asked.keys)
                assert bool(value.blocks) == bool(value.lease_id)
                first = max(value.tail_index - 1, 0)  # of the names of a tail, the one that was chosen
                self._promise(value.lease_id, asked, list(zip(value.blocks, asked.keys[first:], strict=False)))
            elif isinstance(value, LocateResult):
                assert len(value.handles) == len(asked.keys)
                pairs = [(h, k) for h, k in zip(value.handles, asked.keys, strict=True) if h is not None]
                assert all(handle.key == key for handle, key in pairs)
                self._promise(value.lease_id, asked, [(BlockRef(h.slot, h.generation), k) for h, k in pairs])
            elif isinstance(value, TakeOverResult):
                assert len(value.kept) == len(asked.keys)
            elif isinstance(value, list) and value and isinstance(value[0], SealStatus):
                assert None not in value

    def _promise(self, lease_id: LeaseId, asked: Asked, blocks: list[tuple[BlockRef, BlockKey]]) -> None:
        for ref, key in blocks:
            assert self.harness.contents[ref.slot] == content_of(key), "a promise on wrong bytes"
        # An engine that is gone when its answer is made gets none; what it holds counts from when it asked.
        if blocks and (asked.holder[0] == "peer" or any(e.attachment == asked.holder[1] for e in self.engines)):
            self.promises[lease_id] = Promise(asked.holder, blocks, asked.at + LEASE)

    @invariant()
    def every_block_has_its_bytes(self) -> None:
        for block in self.harness.state.blocks():
            header, content = (held.get(block.slot.index) for held in (self.harness.headers, self.harness.contents))
            assert header.is_stable and header.key == block.key and header.epoch == self.harness.state.epoch
            assert content == content_of(block.key), "a sealed block has wrong bytes"

    @invariant()
    def what_may_be_written_belongs_to_its_writer(self) -> None:
        engines = (engine.writes for engine in self.engines)
        for write in chain(*self.pulls.values(), *self.stuck.values(), *engines):
            header = self.harness.headers.get(write.slot)
            assert header is not None and header.generation == write.generation, f"{write} is taken from its writer"

    @invariant()
    def promises_are_kept(self) -> None:
        self.promises = {number: one for number, one in self.promises.items() if one.until > self.harness.now}
        for promise in self.promises.values():
            for ref, key in promise.blocks:
                assert self.harness.state._store.table[ref.slot].pins > 0, "a promise that protects nothing"
                header = self.harness.headers[ref.slot]
                assert (header.generation, header.key) == (ref.generation, key), "a promised slot was given away"
                assert self.harness.contents[ref.slot] == content_of(key)

    @invariant()
    def the_directory_was_told_what_is_here(self) -> None:
        assert {key: 1 for key in self.harness.keys_held()} == dict(+self.harness.announced)
        assert all(count >= 0 for count in self.harness.announced.values())

    def teardown(self) -> None:
        """Everybody goes, everything ends: every slot must be usable again."""
        harness = self.harness
        for one in range(len(SPECS)):
            self.lose(one, dies=True)
            self.report_gone(one)
        while harness.digests:
            self.digest(0, 1)
        for _ in range(4):
            for job in sorted(self.pulls):
                self.pulls.pop(job)
                harness.send(ev.Pulled(job, (PullResult.FAILED,) * 5))
            harness.now += 100.0
            self.tick()
        for job in self.stuck:
            harness.send(ev.WritesEnded(job))
        self.unpin()  # only now: what was being fetched for a pin is pinned when it has come
        self.answers_are_taken()
        assert not self.asked, "a call was never answered"
        counts = harness.state.slot_counts()
        assert counts["free"] + counts["sealed"] == harness.state.capacity, counts
        assert harness.state.lease_count == 0 and harness.state.attachment_count == 0
        for locate in harness.locates:  # a take-over waits for this answer, however late
            harness.send(ev.Located(locate.fetch, None, harness.now))
        assert harness.state._acquisitions.is_idle and harness.state._pulls.is_idle
        progress = harness.state.progress(harness.now)
        assert progress.phase in (DrainPhase.SERVING, DrainPhase.CLOSED, DrainPhase.GONE), "it never leaves"
        assert 0 <= progress.blocks_lost <= progress.blocks_total
        if progress.phase is DrainPhase.GONE:
            harness.restart()
        harness.send(ev.Drain(undo=True))
        attachment = harness.attach(SPECS[0])
        assert len(harness.reserve(attachment, 100)) == SLABS * 3, "a slot is lost for ever"


TestShard = ShardMachine.TestCase
TestShard.settings = settings(
    max_examples=200,
    stateful_step_count=50,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
