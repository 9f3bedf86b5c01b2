"""Acquisitions: make a prefix local and promise it, fetching from peers what is missing.

One acquisition per Acquire call, one fetch per (peer, run of blocks), one arrival per block however many acquisitions
wait for it (single flight). An acquisition only ever promises blocks that are sealed here, which means verified; it
answers when its prefix is complete, when the first gap is certain, or at its deadline, whichever is first. Fetches go
on after a deadline: the blocks are there for the next request.

With a hand-off, the acquisition first follows the writer: blocks are fetched as they are sealed over there. What is
still missing when the hand-off is over is looked for in the directory, as always.

    acquisition   (following ->) resolving -> waiting -> answered
    fetch         locating -> pulling -> over        (another holder of the same blocks is tried once each)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from kvservice.core.acquire.acquisition import Acquisition, Fetch, FetchState, Then, holders_by_index, longest_run
from kvservice.core.acquire.answers import Answers
from kvservice.core.acquire.estimate import FetchEstimates
from kvservice.core.acquire.handoff import APPEAR_SECONDS
from kvservice.core.actions import Follow, Locate, Pull, ReleaseRemote, Resolve
from kvservice.core.block.keys import span_route
from kvservice.core.context import ShardContext
from kvservice.core.events import Followed, PullResult
from kvservice.core.messages import (
    AcquireRequest,
    HandoffState,
    Holder,
    HolderRun,
    LocateResult,
    MissReason,
    PeerSpeed,
)
from kvservice.core.segment.refs import BlockHandle
from kvservice.core.store.blocks import NO_KEY, Want
from kvservice.core.store.slots import Slot, SlotState
from kvservice.units import AttachmentId, BlockKey, LeaseId, NodeId, SlotIndex

LOOKUP_SECONDS_MAX = 0.25  # an absent directory may not use up the engine's deadline
LOCATE_SECONDS_MAX = 1.0
PULL_BLOCKS_MAX = 512  # of one fetch: bounds remote leases and the headers in flight
LOCATE_GIVE_UP_SECONDS = 3.0  # connecting and asking each have LOCATE_SECONDS_MAX; then nobody is answering any more
FOLLOW_WAIT_SECONDS = 1.0  # a writer's node that dies is noticed after one unanswered question at the latest
PULL_SECONDS_MAX = 60.0  # whatever lease a peer claims to give
PULL_GRACE_SECONDS = 5.0  # a pull is reported by its deadline; this long after it, waiting for it is pointless
LEASE_MARGIN_SECONDS = 1.0  # reading stops this long before the peer's lease ends
SUSPECT_SECONDS = 60.0  # a slot whose bytes failed verification rests this long


class Acquisitions:
    def __init__(self, shard: ShardContext, answers: Answers) -> None:
        self._shard = shard
        self._store = shard.store
        self._emit = shard.emit
        self._counters = shard.counters
        self._answers = answers
        self._open: dict[int, Acquisition] = {}
        self._fetches: dict[int, Fetch] = {}
        self._arriving: dict[BlockKey, int] = {}  # key -> fetch id, or 0 while its digest is being computed here
        self._waiters: dict[BlockKey, list[tuple[int, int]]] = {}  # key -> (op, index)
        self._stuck: dict[int, list[SlotIndex]] = {}  # job -> quarantined slots a transfer may still write
        self._suspects: list[tuple[float, SlotIndex]] = []  # (free again at, slot)
        self._estimates = FetchEstimates()
        self._next_id = 1

    # -- calls ----

    def start(
        self, op: int, attachment: AttachmentId, account: str, request: AcquireRequest, payload_bytes: int, now: float,
        *, base: int = 0, then: Then | None = None,
    ) -> None:  # fmt: skip
        """`account`: the tenant that is charged for what is fetched. `base`: position of the first key. `then` gets the
        outcome, pinned, instead of the caller of `op`."""
        count, deadline = len(request.keys), now + request.timeout_seconds
        acquisition = Acquisition(
            op, attachment, account, request, payload_bytes, deadline, now, count, base=base, then=then
        )
        self._open[op] = acquisition
        self._store.policy.touch(request.keys[request.skip :] if base else request.keys, now)
        first_missing = self._take_local(acquisition, range(request.skip, count))
        if first_missing is not None:
            if self._shard.is_draining():
                acquisition.end(first_missing, MissReason.DRAINING)
            elif request.handoff is not None:
                self._begin_following(acquisition, now)
            elif not self._shard.has_directory:
                acquisition.end(first_missing, MissReason.NEVER_STORED)
            else:
                acquisition.resolving = True
                timeout = min(request.timeout_seconds, LOOKUP_SECONDS_MAX)
                self._emit(Resolve(op, request.keys, first_missing, timeout))
        self._settle(acquisition, now)

    def drop_attachment(self, attachment: AttachmentId, now: float) -> None:
        for acquisition in [a for a in self._open.values() if a.attachment == attachment]:
            acquisition.end(acquisition.request.skip, MissReason.DETACHED)
            self._answer(acquisition, now)

    def cancel(self, op: int) -> bool:
        """Nobody waits for this one any more. Its fetches go on."""
        acquisition = self._open.pop(op, None)
        if acquisition is None:
            return False
        for slot in acquisition.held.values():
            self._store.unpin(slot)
        self._shard.records.cancelled(op)
        self._forget_waits(acquisition)
        self._counters["acquires_cancelled"] += 1
        return True

    # -- what the performer reports ----

    def followed(self, event: Followed, now: float) -> None:
        acquisition = self._open.get(event.op)
        located = None if event.result is None else event.result.located
        if acquisition is None or acquisition.follow != event.follow or event.result is None or event.holder is None:
            if located is not None and located.lease_id and event.holder is not None:
                self._emit(ReleaseRemote(event.holder, located.epoch, located.lease_id))
            if acquisition is not None and acquisition.follow == event.follow:
                self._counters["follows_failed"] += 1
                self._end_following(acquisition, now)
            return
        assert located is not None
        before = self._next_followed(acquisition)
        self._fetch_followed(acquisition, event.holder, located, event.sent_at, now)
        if event.op not in self._open:
            return
        start = self._next_followed(acquisition)
        state = event.result.state
        late = state is HandoffState.UNKNOWN and now >= acquisition.started + APPEAR_SECONDS
        over = start == before and (late or state is HandoffState.CLOSED)
        if start is None or over:
            self._end_following(acquisition, now)
        else:
            self._ask_writer(acquisition, start)

    def handoff_over(self, op: int, now: float) -> None:
        """The writer on this node seals nothing more for this acquisition."""
        acquisition = self._open.get(op)
        if acquisition is not None and acquisition.follow:
            self._end_following(acquisition, now)

    def resolved(self, op: int, runs: Sequence[HolderRun], complete: bool, now: float) -> None:
        acquisition = self._open.get(op)
        if acquisition is None or not acquisition.resolving:
            return  # answered at its deadline already
        acquisition.resolving = False
        holders = holders_by_index(runs, acquisition.break_at, self._shard.node_id)
        wanted: list[int] = []
        for index in range(acquisition.request.skip, acquisition.break_at):
            if index in acquisition.held or index in acquisition.pending:
                continue
            if self._take_local(acquisition, range(index, index + 1)) is None:
                continue
            if index not in holders:
                acquisition.end(index, MissReason.NEVER_STORED if complete else MissReason.LOOKUP_FAILED)
                break
            wanted.append(index)
            acquisition.sought = index + 1
        if wanted and self._shard.is_draining():
            acquisition.end(wanted[0], MissReason.DRAINING)
        else:
            self._fetch_worthwhile(acquisition, wanted, holders, now)
        self._settle(acquisition, now)

    def located(self, fetch_id: int, result: LocateResult | None, sent_at: float, now: float) -> None:
        fetch = self._fetches.get(fetch_id)
        if fetch is None or fetch.state is not FetchState.LOCATING:
            return
        if result is None:
            self._end_fetch(fetch, 0, MissReason.PEER_FAILED, now)
            return
        self._estimates.of(fetch.holder).observe_overhead(now - sent_at)
        self._pull(fetch, result, sent_at, now)

    def _pull(self, fetch: Fetch, result: LocateResult, sent_at: float, now: float) -> None:
        """Read what the peer has leased; as far as it matches what was asked, and there is room for it."""
        fetch.epoch, fetch.lease_id = result.epoch, result.lease_id
        for index, handle in zip(fetch.indices, result.handles, strict=False):
            if handle is None or handle.key != fetch.chain[index] or handle.length != fetch.payload_bytes:
                break
            fetch.handles.append(handle)
        usable = len(fetch.handles)
        reserved = self._store.reserve(usable, NO_KEY, Want(fetch.payload_bytes, now, fetch.account))
        fetch.slots = list(reserved.slots)
        reason = reserved.short_because if len(fetch.slots) < usable else MissReason.STALE
        del fetch.handles[len(fetch.slots) :]
        kept = len(fetch.slots)
        if kept == 0:
            self._release_remote(fetch)
            self._end_fetch(fetch, 0, reason, now)
            return
        rest = fetch.indices[kept:]
        del fetch.indices[kept:]
        lost = self._ask_next if reason is MissReason.STALE else self._fail_indices
        lost(fetch, rest, reason, now)
        fetch.state, fetch.started = FetchState.PULLING, now
        items = tuple((handle, slot.index) for handle, slot in zip(fetch.handles, fetch.slots, strict=True))
        deadline = sent_at + min(result.lease_seconds, PULL_SECONDS_MAX) - LEASE_MARGIN_SECONDS
        fetch.give_up_at = max(deadline, now) + PULL_GRACE_SECONDS
        self._emit(Pull(fetch.fetch, fetch.holder, fetch.epoch, fetch.payload_bytes, items, deadline))

    def pulled(self, job: int, results: Sequence[PullResult], now: float) -> None:
        fetch = self._fetches.get(job)
        if fetch is None or fetch.state is not FetchState.PULLING:
            return
        good = 0
        first_bad: tuple[int, MissReason] | None = None
        for position, (handle, slot) in enumerate(zip(fetch.handles, fetch.slots, strict=True)):
            result = results[position] if position < len(results) else PullResult.STUCK
            self._counters[f"pull_{result.value}"] += 1
            if result is PullResult.OK:
                good += 1
                self._keep(fetch, fetch.indices[position], handle, slot, now)
            else:
                reason = self._discard(job, slot, result, now)
                first_bad = first_bad or (position, reason)
        if good:
            self._estimates.of(fetch.holder).observe_pull(good * fetch.payload_bytes, now - fetch.started)
            self._counters["fetched_blocks"] += good
            self._counters["fetched_bytes"] += good * fetch.payload_bytes
        if job not in self._stuck:
            self._release_remote(fetch)
        fetch.slots = []
        if first_bad is None:
            del self._fetches[job]
        else:
            self._end_fetch(fetch, first_bad[0], first_bad[1], now)

    def writes_ended(self, job: int) -> None:
        for index in self._stuck.pop(job, []):
            self._store.end_quarantine(self._store.table[index])

    # -- blocks written on this node ----

    def sealing(self, key: BlockKey) -> None:
        """A written block's digest is being computed: acquisitions may wait for it."""
        self._arriving.setdefault(key, 0)

    def is_sealing(self, key: BlockKey) -> bool:
        return self._arriving.get(key) == 0

    def sealed(self, key: BlockKey, now: float) -> None:
        if self._arriving.get(key) == 0:
            del self._arriving[key]
        self._arrived(key, origin=None, now=now)

    def seal_failed(self, key: BlockKey, now: float) -> None:
        if self._arriving.get(key) == 0:
            del self._arriving[key]
            self._fail_key(key, MissReason.CORRUPT, now)

    # -- time ----

    def tick(self, now: float) -> None:
        for acquisition in [a for a in self._open.values() if a.deadline <= now]:
            gap = next(
                i for i in range(acquisition.request.skip, acquisition.break_at + 1) if i not in acquisition.held
            )
            acquisition.end(gap, MissReason.DEADLINE)
            self._answer(acquisition, now)
        for fetch in [f for f in self._fetches.values() if f.give_up_at <= now]:
            self._give_up(fetch, now)
        resting = [(until, index) for until, index in self._suspects if until > now]
        for until, index in self._suspects:
            if until <= now:
                self._store.end_quarantine(self._store.table[index])
        self._suspects = resting

    def next_deadline(self) -> float | None:
        times = [a.deadline for a in self._open.values()] + [until for until, _ in self._suspects]
        times += [f.give_up_at for f in self._fetches.values() if f.give_up_at < math.inf]
        return min(times, default=None)

    def is_following(self, op: int) -> bool:
        acquisition = self._open.get(op)
        return acquisition is not None and acquisition.follow != 0

    # -- inside ----

    def _take_local(self, acquisition: Acquisition, indices: range) -> int | None:
        """Pin what is here, wait for what is coming. The first index that is neither, or None."""
        first_missing: int | None = None
        for index in indices:
            key = acquisition.request.keys[index]
            block = self._store.get(key)
            if block is not None and block.payload_bytes == acquisition.payload_bytes:
                self._store.pin(block)
                acquisition.held[index] = block.slot
            elif key in self._arriving:
                self._await(acquisition, index)
            elif first_missing is None:
                first_missing = index
        return first_missing

    # -- hand-offs ----

    def _begin_following(self, acquisition: Acquisition, now: float) -> None:
        """Wait for all that is missing, whoever brings it; ask the writer's node for it."""
        for index in range(acquisition.request.skip, len(acquisition.request.keys)):
            if index not in acquisition.held and index not in acquisition.pending:
                self._await(acquisition, index)
        handoff = acquisition.request.handoff
        assert handoff is not None
        acquisition.follow = -1
        start = acquisition.handed_from = self._next_followed(acquisition)
        if handoff.node_id != self._shard.node_id and start is not None:
            self._ask_writer(acquisition, start)

    def _ask_writer(self, acquisition: Acquisition, start: int) -> None:
        handoff = acquisition.request.handoff
        assert handoff is not None
        acquisition.follow = self._next_id
        self._next_id += 1
        keys = acquisition.request.keys[start : start + PULL_BLOCKS_MAX]
        self._emit(Follow(acquisition.follow, acquisition.op, handoff, keys, FOLLOW_WAIT_SECONDS))

    def _next_followed(self, acquisition: Acquisition) -> int | None:
        """The first block that is awaited and not on its way."""
        keys = acquisition.request.keys
        return min((i for i in acquisition.pending if keys[i] not in self._arriving), default=None)

    def _fetch_followed(
        self, acquisition: Acquisition, holder: Holder, located: LocateResult, sent_at: float, now: float
    ) -> None:
        """Fetch the leased blocks that are still wanted."""
        chain = acquisition.request.keys
        wanted = {chain[i]: i for i in acquisition.pending if chain[i] not in self._arriving}
        handles = {handle.key: handle for handle in located.handles if handle is not None and handle.key in wanted}
        indices = [wanted[key] for key in handles]
        if not indices:
            if located.lease_id:
                self._emit(ReleaseRemote(holder, located.epoch, located.lease_id))
            return
        fetch = self._new_fetch(acquisition, holder, [], indices)
        self._pull(fetch, replace(located, handles=tuple(handles.values())), sent_at, now)

    def _end_following(self, acquisition: Acquisition, now: float) -> None:
        acquisition.follow = 0
        start = self._next_followed(acquisition)
        if start is not None:
            self._counters["handoffs_ended_short"] += 1
            self._forget_waits(acquisition)
            left = acquisition.deadline - now
            draining = self._shard.is_draining()
            if self._shard.has_directory and not draining and left > 0:
                acquisition.resolving = True
                timeout = min(left, LOOKUP_SECONDS_MAX)
                self._emit(Resolve(acquisition.op, acquisition.request.keys, start, timeout))
            else:
                acquisition.end(start, MissReason.DRAINING if draining else MissReason.NEVER_STORED)
        self._settle(acquisition, now)

    def _forget_waits(self, acquisition: Acquisition) -> None:
        """Stop waiting for blocks that are not on their way; nobody would ever report them."""
        for index in [i for i in acquisition.pending if acquisition.request.keys[i] not in self._arriving]:
            acquisition.pending.discard(index)
            key = acquisition.request.keys[index]
            waiters = [pair for pair in self._waiters.get(key, ()) if pair != (acquisition.op, index)]
            if waiters:
                self._waiters[key] = waiters
            else:
                self._waiters.pop(key, None)

    def _await(self, acquisition: Acquisition, index: int) -> None:
        acquisition.pending.add(index)
        self._waiters.setdefault(acquisition.request.keys[index], []).append((acquisition.op, index))

    def _fetch_worthwhile(
        self, acquisition: Acquisition, wanted: list[int], holders: dict[int, tuple[Holder, ...]], now: float
    ) -> None:
        if not wanted:
            return
        estimate = self._estimates.of(holders[wanted[0]][0])
        remaining = acquisition.deadline - now
        recompute = acquisition.request.recompute_seconds_per_block
        count = estimate.worthwhile(len(wanted), acquisition.payload_bytes, recompute, remaining)
        if count < len(wanted):
            acquisition.end(wanted[count], MissReason.SLOWER_THAN_RECOMPUTE)
            self._counters["fetch_not_worthwhile"] += len(wanted) - count
        start = 0
        while start < count:
            holder, end = longest_run(wanted, start, min(count, start + PULL_BLOCKS_MAX), holders)
            indices = wanted[start:end]
            alternates = [h for h in holders[indices[0]] if h != holder and all(h in holders[i] for i in indices)]
            self._start_fetch(acquisition, holder, alternates, indices, now)
            start = end

    def _start_fetch(
        self, acquisition: Acquisition, holder: Holder, alternates: list[Holder], indices: list[int], now: float
    ) -> None:
        fetch = self._new_fetch(acquisition, holder, alternates, indices)
        for index in indices:
            self._await(acquisition, index)
        self._locate(fetch, now)

    def _new_fetch(
        self, acquisition: Acquisition, holder: Holder, alternates: list[Holder], indices: list[int]
    ) -> Fetch:
        chain = acquisition.request.keys
        fetch = Fetch(
            self._next_id, holder, alternates, chain, indices, acquisition.payload_bytes, acquisition.base,
            acquisition.account,
        )  # fmt: skip
        self._register(fetch)
        self._counters["fetches_started"] += 1
        return fetch

    def _register(self, fetch: Fetch) -> None:
        self._next_id += 1
        self._fetches[fetch.fetch] = fetch
        for index in fetch.indices:
            self._arriving[fetch.chain[index]] = fetch.fetch

    def _locate(self, fetch: Fetch, now: float) -> None:
        fetch.state, fetch.give_up_at = FetchState.LOCATING, now + LOCATE_GIVE_UP_SECONDS
        keys = tuple(fetch.chain[index] for index in fetch.indices)
        self._emit(Locate(fetch.fetch, fetch.holder, keys, LOCATE_SECONDS_MAX))

    def _keep(self, fetch: Fetch, index: int, handle: BlockHandle, slot: Slot, now: float) -> None:
        key = handle.key
        if key in self._store:  # an engine of this node sealed the same block meanwhile
            self._store.abort(slot)
        else:
            parent = fetch.chain[index - 1] if index else None
            route = span_route(fetch.chain, index)
            self._store.seal(slot, key, parent, fetch.base + index, route, handle.digest, now, is_secondary=True)
        if self._arriving.get(key) == fetch.fetch:
            del self._arriving[key]
        self._arrived(key, origin=fetch.holder.node_id, now=now)

    def _discard(self, job: int, slot: Slot, result: PullResult, now: float) -> MissReason:
        if result is PullResult.STUCK:
            self._store.quarantine(slot)
            self._stuck.setdefault(job, []).append(slot.index)
            return MissReason.DEADLINE
        if result is PullResult.CORRUPT:
            self._store.quarantine(slot)
            self._suspects.append((now + SUSPECT_SECONDS, slot.index))
            return MissReason.CORRUPT
        self._store.abort(slot)
        return MissReason.STALE if result is PullResult.STALE else MissReason.PEER_FAILED

    def _end_fetch(self, fetch: Fetch, from_position: int, reason: MissReason, now: float) -> None:
        """The blocks from this position on did not come: ask the next holder, or fail their waiters.

        Blocks that did come are not arriving any more and are skipped by both ways.
        """
        left = [i for i in fetch.indices[from_position:] if self._arriving.get(fetch.chain[i]) == fetch.fetch]
        self._counters["fetches_failed"] += 1
        del self._fetches[fetch.fetch]
        self._ask_next(fetch, left, reason, now)

    def _ask_next(self, fetch: Fetch, left: list[int], reason: MissReason, now: float) -> None:
        """What this holder did not give is fetched from the next one, or does not come."""
        if not left or not fetch.alternates:
            self._fail_indices(fetch, left, reason, now)
            return
        holder, *others = fetch.alternates
        # An id names one Pull: a late WritesEnded of the old one must not touch the new one's slots.
        again = Fetch(self._next_id, holder, others, fetch.chain, left, fetch.payload_bytes, fetch.base, fetch.account)
        self._register(again)
        self._locate(again, now)

    def _give_up(self, fetch: Fetch, now: float) -> None:
        """Its performer owes an answer that does not come: the blocks may be fetched anew, by whoever wants them."""
        self._counters["fetches_overdue"] += 1
        if fetch.state is FetchState.LOCATING:
            self._end_fetch(fetch, 0, MissReason.PEER_FAILED, now)
            return
        fetch.give_up_at = math.inf  # its slots stay reserved until Pulled: the transport may still write them
        self._fail_indices(fetch, fetch.indices, MissReason.DEADLINE, now)

    def _fail_indices(self, fetch: Fetch, indices: Sequence[int], reason: MissReason, now: float) -> None:
        for index in indices:
            key = fetch.chain[index]
            if self._arriving.get(key) == fetch.fetch:
                del self._arriving[key]
                self._fail_key(key, reason, now, fetch.holder.node_id)

    def _take_waiters(self, key: BlockKey) -> list[tuple[Acquisition, int]]:
        found: list[tuple[Acquisition, int]] = []
        for op, index in self._waiters.pop(key, []):
            acquisition = self._open.get(op)
            # An op id may be used again after its answer: the key tells whether this is still the call that waited.
            if acquisition is not None and index in acquisition.pending and acquisition.request.keys[index] == key:
                found.append((acquisition, index))
        return found

    def _arrived(self, key: BlockKey, *, origin: NodeId | None, now: float) -> None:
        block = self._store.get(key)
        for acquisition, index in self._take_waiters(key):
            acquisition.pending.discard(index)
            if block is None or block.payload_bytes != acquisition.payload_bytes:
                acquisition.end(index, MissReason.STALE)
            else:
                self._store.pin(block)
                acquisition.held[index] = block.slot
                if origin is not None:
                    acquisition.fetched.add(index)
                    acquisition.origins[index] = origin
            self._settle(acquisition, now)

    def _fail_key(self, key: BlockKey, reason: MissReason, now: float, blamed: str = "") -> None:
        for acquisition, index in self._take_waiters(key):
            acquisition.pending.discard(index)
            acquisition.end(index, reason, blamed)
            self._settle(acquisition, now)

    def _settle(self, acquisition: Acquisition, now: float) -> None:
        if acquisition.op not in self._open:
            return
        if acquisition.resolving or any(index < acquisition.break_at for index in acquisition.pending):
            return
        self._answer(acquisition, now)

    def _answer(self, acquisition: Acquisition, now: float) -> None:
        del self._open[acquisition.op]
        self._forget_waits(acquisition)
        skip = acquisition.request.skip
        end = skip
        while end < acquisition.break_at and end in acquisition.held:
            end += 1
        promised = [acquisition.held.pop(index) for index in range(skip, end)]
        for index in acquisition.held.values():
            self._store.unpin(index)
        fetched = sum(1 for index in acquisition.fetched if index < end)
        if acquisition.then is not None:
            acquisition.then(acquisition, promised, fetched, now)
            return
        self._answers.answer(acquisition.op, acquisition, promised, fetched, acquisition.reason, now)

    def _release_remote(self, fetch: Fetch) -> None:
        if fetch.lease_id:
            self._emit(ReleaseRemote(fetch.holder, fetch.epoch, fetch.lease_id))
            fetch.lease_id = LeaseId(0)

    def peer_speeds(self) -> tuple[PeerSpeed, ...]:
        return self._estimates.speeds()

    def pinned(self) -> Counter[SlotIndex]:
        """Slots pinned by open acquisitions, for the pin count check of the shard."""
        return Counter(index for acquisition in self._open.values() for index in acquisition.held.values())

    def check_invariants(self) -> None:
        waited = {(op, index) for pairs in self._waiters.values() for op, index in pairs}
        for op, acquisition in self._open.items():
            for index in acquisition.pending:
                key = acquisition.request.keys[index]
                assert (op, index) in waited, "an acquisition waits for a block nobody would report"
                on_its_way = key in self._arriving or acquisition.follow
                assert on_its_way, "an acquisition waits for a block that is not on its way"
        for key, fetch_id in self._arriving.items():
            assert fetch_id == 0 or fetch_id in self._fetches, f"{key.hex()} arrives by a fetch that is over"
        for fetch in self._fetches.values():
            for slot in fetch.slots:
                assert slot.state is SlotState.WRITING, "a pull writes a slot that is not reserved for it"
