"""Acquisitions: make a prefix local and promise it, fetching missing blocks from peers. Pure.

There is one acquisition per Acquire call, one fetch per (peer, run of blocks), and one arrival per block, however many
acquisitions wait for it. An acquisition promises only blocks that are sealed here, and so verified. It answers when its
prefix is complete, when its first gap is certain, or at its deadline. Fetches continue after the deadline, for the next
request.

With a hand-off, the acquisition first follows the writer, and blocks are fetched as they are sealed on the writer's
node. When the hand-off has ended, the directory is asked for what is still missing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from kvservice.core.acquire.acquisition import (
    FOLLOWING,
    TRANSITIONS,
    Acquisition,
    AcquisitionEvent,
    AcquisitionState,
    Fetch,
    OnAnswer,
    holders_by_index,
    longest_run,
)
from kvservice.core.acquire.answers import Answers
from kvservice.core.acquire.arrivals import DIGESTING, Arrivals
from kvservice.core.acquire.estimate import FetchEstimates
from kvservice.core.acquire.handoff import APPEAR_SECONDS, WAIT_SECONDS_MAX
from kvservice.core.acquire.pulls import LOCATE_GIVE_UP_SECONDS, PULL_BLOCKS_MAX, Pulls
from kvservice.core.actions import Follow, ReleaseRemote, Resolve
from kvservice.core.block.keys import span_route
from kvservice.core.context import ShardContext
from kvservice.core.events import Followed, PullResult
from kvservice.core.messages import (
    AcquireRequest,
    FollowResult,
    Handoff,
    HandoffState,
    Holder,
    HolderRun,
    LocateResult,
    MissReason,
    PeerSpeed,
)
from kvservice.core.segment.refs import BlockHandle
from kvservice.core.store.blocks import NO_KEY, Want
from kvservice.core.store.slots import Slot
from kvservice.core.transitions import step
from kvservice.units import AttachmentId, BlockKey, NodeId, SlotIndex

LOOKUP_SECONDS_MAX = 0.25  # a directory that does not answer must not use up the engine's deadline
FOLLOW_WAIT_SECONDS = 1.0  # for one question to a writer's node: its death is noticed after one without an answer
PULL_GRACE_SECONDS = 5.0  # a pull is reported by its deadline; this long after it, its blocks are given up
assert FOLLOW_WAIT_SECONDS <= WAIT_SECONDS_MAX, "the writer's node would answer earlier than asked"
MISS_OF = {
    PullResult.STALE: MissReason.STALE,
    PullResult.CORRUPT: MissReason.CORRUPT,
    PullResult.FAILED: MissReason.PEER_FAILED,
    PullResult.STUCK: MissReason.DEADLINE,
}


class Acquisitions:
    """All open acquisitions and their fetches. Results go out as actions, and as answers through `answers`."""

    def __init__(self, shard: ShardContext, pulls: Pulls, answers: Answers) -> None:
        self._shard = shard
        self._store = shard.store
        self._emit = shard.emit
        self._counters = shard.counters
        self._pulls = pulls
        self._answers = answers
        self._open: dict[int, Acquisition] = {}
        self._fetches: dict[int, Fetch] = {}  # by the number of the pull
        self._arrivals = Arrivals()
        self._estimates = FetchEstimates()
        self._last_question = 0

    # -- calls ----

    def start(
        self,
        op: int,
        attachment: AttachmentId,
        account: str,
        request: AcquireRequest,
        payload_bytes: int,
        now: float,
        *,
        base: int = 0,
        on_answer: OnAnswer | None = None,
    ) -> None:
        """Begin one. `account` is charged for fetched blocks; `base` is the position of the first key. If there is an
        `on_answer`, it gets the outcome, with the blocks pinned, instead of the caller of `op`."""
        count, deadline = len(request.keys), now + request.timeout_seconds
        acquisition = Acquisition(
            op, attachment, account, request, payload_bytes, deadline, now, count, base=base, on_answer=on_answer
        )
        self._open[op] = acquisition
        if not request.hold_seconds:  # to hold a block for somebody is no use of it
            self._store.policy.touch(request.keys[request.skip :] if base else request.keys, now)
        first_missing = self._take_local(acquisition, range(request.skip, count))
        if first_missing is None:
            self._move(acquisition, AcquisitionEvent.WAIT)
        elif request.handoff is None or self._shard.is_draining():
            self._look_elsewhere(acquisition, first_missing, request.timeout_seconds)
        else:
            self._begin_following(acquisition, request.handoff)
        self._settle(acquisition, now)

    def drop_attachment(self, attachment: AttachmentId, now: float) -> None:
        for acquisition in [a for a in self._open.values() if a.attachment == attachment]:
            acquisition.end(acquisition.request.skip, MissReason.DETACHED)
            self._answer(acquisition, now)

    def cancel(self, op: int) -> bool:
        """Nobody waits for this acquisition any more. Its fetches continue."""
        acquisition = self._open.get(op)
        if acquisition is None:
            return False
        self._move(acquisition, AcquisitionEvent.CANCEL)
        for slot in acquisition.held.values():
            self._store.unpin(slot)
        self._shard.records.cancelled(op)
        self._forget_waits(acquisition)
        self._counters["acquires_cancelled"] += 1
        return True

    # -- what the performer reports ----

    def followed(self, event: Followed, now: float) -> None:
        """The writer's node has answered the open question."""
        acquisition = self._open.get(event.op)
        if acquisition is None or acquisition.question != event.follow:
            if event.holder is not None and event.result is not None:
                self._release(event.holder, event.result.located)
        elif event.holder is None or event.result is None:
            self._counters["follows_failed"] += 1
            self._end_following(acquisition, now)
        else:
            self._follow_on(acquisition, event.holder, event.result, event.sent_at, now)

    def _follow_on(
        self, acquisition: Acquisition, holder: Holder, result: FollowResult, sent_at: float, now: float
    ) -> None:
        """Fetch the blocks that are sealed on the writer's node, and ask for the next ones."""
        before = self._next_followed(acquisition)
        self._fetch_followed(acquisition, holder, result.located, sent_at, now)
        if acquisition.state is AcquisitionState.OVER:
            return
        start = self._next_followed(acquisition)
        late = result.state is HandoffState.UNKNOWN and now >= acquisition.started + APPEAR_SECONDS
        over = start == before and (late or result.state is HandoffState.CLOSED)
        if start is None or over:
            self._end_following(acquisition, now)
        else:
            self._ask_writer(acquisition, start)

    def handoff_over(self, op: int, now: float) -> None:
        """The writer on this node will seal nothing more for this acquisition."""
        acquisition = self._open.get(op)
        if acquisition is not None and acquisition.state in FOLLOWING:
            self._end_following(acquisition, now)

    def resolved(self, op: int, runs: Sequence[HolderRun], complete: bool, now: float) -> None:
        acquisition = self._open.get(op)
        if acquisition is None or acquisition.state is not AcquisitionState.RESOLVING:
            return  # it was answered at its deadline
        self._move(acquisition, AcquisitionEvent.WAIT)
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
            acquisition.found_until = index + 1
        if wanted and self._shard.is_draining():
            acquisition.end(wanted[0], MissReason.DRAINING)
        else:
            self._fetch_worthwhile(acquisition, wanted, holders, now)
        self._settle(acquisition, now)

    # -- what pulls report ----

    def located(self, number: int, result: LocateResult | None, sent_at: float, now: float) -> None:
        fetch = self._fetches[number]
        if result is None:
            self._pulls.drop(number)
            self._end_fetch(fetch, 0, MissReason.PEER_FAILED, now)
            return
        self._estimates.of(fetch.holder).observe_overhead(now - sent_at)
        self._pull(fetch, result, sent_at, now)

    def _pull(self, fetch: Fetch, result: LocateResult, sent_at: float, now: float) -> None:
        """Read the blocks that the peer leased, if they are what was requested and there is room for them."""
        handles: list[BlockHandle] = []
        for index, handle in zip(fetch.indices, result.handles, strict=False):
            if handle is None or handle.key != fetch.chain[index] or handle.length != fetch.payload_bytes:
                break
            handles.append(handle)
        reserved = self._store.reserve(len(handles), NO_KEY, Want(fetch.payload_bytes, now, fetch.account))
        kept = len(reserved.slots)
        reason = reserved.short_because if kept < len(handles) else MissReason.STALE
        if kept == 0:
            self._pulls.drop(fetch.number, result)
            self._end_fetch(fetch, 0, reason, now)
            return
        rest = fetch.indices[kept:]
        del fetch.indices[kept:]
        lost = self._ask_next if reason is MissReason.STALE else self._fail_indices
        lost(fetch, rest, reason, now)
        deadline = self._pulls.begin(fetch.number, result, handles[:kept], reserved.slots, sent_at)
        fetch.started, fetch.give_up_at = now, max(deadline, now) + PULL_GRACE_SECONDS

    def arrived(self, number: int, position: int, handle: BlockHandle, slot: Slot, now: float) -> None:
        fetch, key = self._fetches[number], handle.key
        index = fetch.indices[position]
        if key in self._store:  # an engine of this node sealed the same block meanwhile
            self._store.abort(slot)
        else:
            parent = fetch.chain[index - 1] if index else None
            route = span_route(fetch.chain, index)
            place = fetch.base + index
            self._store.seal(slot, key, parent, place, route, handle.digest, now, is_secondary=True, model=fetch.model)
        self._arrivals.end(key, number)
        self._take_arrived(key, origin=fetch.holder.node_id, now=now)

    def pulled(self, number: int, results: tuple[PullResult, ...], now: float) -> None:
        fetch = self._fetches[number]
        for result in results:
            self._counters[f"pull_{result.value}"] += 1
        good = results.count(PullResult.OK)
        if good:
            self._estimates.of(fetch.holder).observe_pull(good * fetch.payload_bytes, now - fetch.started)
            self._counters["fetched_blocks"] += good
            self._counters["fetched_bytes"] += good * fetch.payload_bytes
        bad = next((position for position, result in enumerate(results) if result is not PullResult.OK), None)
        if bad is None:
            del self._fetches[number]
        else:
            self._end_fetch(fetch, bad, MISS_OF[results[bad]], now)

    # -- blocks written on this node ----

    def sealing(self, key: BlockKey) -> None:
        """The digest of a written block is being computed: acquisitions may wait for it."""
        if key not in self._arrivals:
            self._arrivals.expect(key, DIGESTING)

    def is_sealing(self, key: BlockKey) -> bool:
        return self._arrivals.is_brought_by(key, DIGESTING)

    def sealed(self, key: BlockKey, now: float) -> None:
        self._arrivals.end(key, DIGESTING)
        self._take_arrived(key, origin=None, now=now)

    def seal_failed(self, key: BlockKey, now: float) -> None:
        if self._arrivals.end(key, DIGESTING):
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

    def next_deadline(self) -> float | None:
        times = [a.deadline for a in self._open.values()]
        times += [f.give_up_at for f in self._fetches.values() if f.give_up_at < math.inf]
        return min(times, default=None)

    def is_open(self, op: int) -> bool:
        return op in self._open

    def is_following(self, op: int) -> bool:
        acquisition = self._open.get(op)
        return acquisition is not None and acquisition.state in FOLLOWING

    # -- inside ----

    def _move(self, acquisition: Acquisition, event: AcquisitionEvent) -> None:
        acquisition.state = step(TRANSITIONS, acquisition.state, event, f"acquisition {acquisition.op}")
        if acquisition.state is not AcquisitionState.ASKING:
            acquisition.question = 0
        if acquisition.state is AcquisitionState.OVER:
            del self._open[acquisition.op]

    def _look_elsewhere(self, acquisition: Acquisition, start: int, seconds: float) -> None:
        """Ask the directory for holders of the blocks from `start` on, if those may be fetched at all."""
        if self._shard.is_draining():
            acquisition.end(start, MissReason.DRAINING)
        elif not self._shard.has_directory:
            acquisition.end(start, MissReason.NEVER_STORED)
        else:
            self._move(acquisition, AcquisitionEvent.RESOLVE)
            timeout = min(seconds, LOOKUP_SECONDS_MAX)
            self._emit(Resolve(acquisition.op, acquisition.request.keys, start, timeout))
            return
        self._move(acquisition, AcquisitionEvent.WAIT)

    def _take_local(self, acquisition: Acquisition, indices: range) -> int | None:
        """Pin blocks that are here, and wait for blocks on their way. The first index that is neither, or None."""
        first_missing: int | None = None
        for index in indices:
            key = acquisition.request.keys[index]
            block = self._store.get(key)
            if block is not None and block.payload_bytes == acquisition.payload_bytes:
                self._store.pin(block)
                acquisition.held[index] = block.slot
            elif key in self._arrivals:
                self._await(acquisition, index)
            elif first_missing is None:
                first_missing = index
        return first_missing

    # -- hand-offs ----

    def _begin_following(self, acquisition: Acquisition, handoff: Handoff) -> None:
        """Wait for every missing block, whoever brings it, and ask the writer's node for them."""
        for index in range(acquisition.request.skip, len(acquisition.request.keys)):
            if index not in acquisition.held and index not in acquisition.pending:
                self._await(acquisition, index)
        start = acquisition.handed_from = self._next_followed(acquisition)
        assert start is not None, "the caller saw a block that is neither here nor on its way"
        if handoff.node_id == self._shard.node_id:
            self._move(acquisition, AcquisitionEvent.WATCH)
        else:
            self._ask_writer(acquisition, start)

    def _ask_writer(self, acquisition: Acquisition, start: int) -> None:
        handoff = acquisition.request.handoff
        assert handoff is not None
        self._move(acquisition, AcquisitionEvent.ASK)
        self._last_question += 1
        acquisition.question = self._last_question
        keys = acquisition.request.keys[start : start + PULL_BLOCKS_MAX]
        self._emit(Follow(acquisition.question, acquisition.op, handoff, keys, FOLLOW_WAIT_SECONDS))

    def _next_followed(self, acquisition: Acquisition) -> int | None:
        """The index of the first block that is awaited and not on its way."""
        keys = acquisition.request.keys
        return min((i for i in acquisition.pending if keys[i] not in self._arrivals), default=None)

    def _fetch_followed(
        self, acquisition: Acquisition, holder: Holder, located: LocateResult, sent_at: float, now: float
    ) -> None:
        """Fetch the leased blocks that are still wanted."""
        chain = acquisition.request.keys
        wanted = {chain[i]: i for i in acquisition.pending if chain[i] not in self._arrivals}
        handles = {handle.key: handle for handle in located.handles if handle is not None and handle.key in wanted}
        if not handles:
            self._release(holder, located)
            return
        fetch = self._new_fetch(acquisition, holder, [], [wanted[key] for key in handles])
        self._pull(fetch, replace(located, handles=tuple(handles.values())), sent_at, now)

    def _release(self, holder: Holder, located: LocateResult) -> None:
        if located.lease_id:
            self._emit(ReleaseRemote(holder, located.epoch, located.lease_id))

    def _end_following(self, acquisition: Acquisition, now: float) -> None:
        start = self._next_followed(acquisition)
        if start is None:
            self._move(acquisition, AcquisitionEvent.WAIT)
        else:
            self._counters["handoffs_ended_short"] += 1
            self._forget_waits(acquisition)
            left = acquisition.deadline - now
            if left > 0 or self._shard.is_draining():
                self._look_elsewhere(acquisition, start, left)
            else:
                acquisition.end(start, MissReason.NEVER_STORED)
                self._move(acquisition, AcquisitionEvent.WAIT)
        self._settle(acquisition, now)

    def _forget_waits(self, acquisition: Acquisition) -> None:
        """Stop waiting for blocks that are not on their way, because nothing would ever report them."""
        for index in [i for i in acquisition.pending if acquisition.request.keys[i] not in self._arrivals]:
            acquisition.pending.discard(index)
            self._arrivals.forget(acquisition.request.keys[index], acquisition.op, index)

    def _await(self, acquisition: Acquisition, index: int) -> None:
        acquisition.pending.add(index)
        self._arrivals.wait(acquisition.request.keys[index], acquisition.op, index)

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
        number = self._pulls.open(self, holder, acquisition.payload_bytes)
        fetch = Fetch(
            number,
            holder,
            alternates,
            acquisition.request.keys,
            indices,
            acquisition.payload_bytes,
            acquisition.base,
            acquisition.account,
            self._shard.model_of(acquisition.attachment),
        )
        self._register(fetch)
        self._counters["fetches_started"] += 1
        return fetch

    def _register(self, fetch: Fetch) -> None:
        self._fetches[fetch.number] = fetch
        for index in fetch.indices:
            self._arrivals.expect(fetch.chain[index], fetch.number)

    def _locate(self, fetch: Fetch, now: float) -> None:
        fetch.give_up_at = now + LOCATE_GIVE_UP_SECONDS
        self._pulls.locate(fetch.number, tuple(fetch.chain[index] for index in fetch.indices))

    def _end_fetch(self, fetch: Fetch, from_position: int, reason: MissReason, now: float) -> None:
        """The blocks from this position on did not come: ask the next holder, or fail their waiters.

        Blocks that did come are not expected any more, so both ways skip them.
        """
        left = [i for i in fetch.indices[from_position:] if self._arrivals.is_brought_by(fetch.chain[i], fetch.number)]
        self._counters["fetches_failed"] += 1
        del self._fetches[fetch.number]
        self._ask_next(fetch, left, reason, now)

    def _ask_next(self, fetch: Fetch, left: list[int], reason: MissReason, now: float) -> None:
        """Fetch from the next holder what this one did not give; without a next holder it does not come."""
        if not left or not fetch.alternates:
            self._fail_indices(fetch, left, reason, now)
            return
        holder, *others = fetch.alternates
        # An id names one pull: a late WritesEnded of the old pull must not touch the slots of the new one.
        number = self._pulls.open(self, holder, fetch.payload_bytes)
        again = replace(fetch, number=number, holder=holder, alternates=others, indices=left, started=0.0)
        self._register(again)
        self._locate(again, now)

    def _give_up(self, fetch: Fetch, now: float) -> None:
        """The performer's answer does not come: whoever wants the blocks may fetch them again."""
        self._counters["fetches_overdue"] += 1
        if self._pulls.is_locating(fetch.number):
            self._pulls.drop(fetch.number)
            self._end_fetch(fetch, 0, MissReason.PEER_FAILED, now)
            return
        fetch.give_up_at = math.inf  # its slots stay reserved until Pulled, because the transport may still write them
        self._fail_indices(fetch, fetch.indices, MissReason.DEADLINE, now)

    def _fail_indices(self, fetch: Fetch, indices: Sequence[int], reason: MissReason, now: float) -> None:
        """These blocks, which the fetch still brings, do not come."""
        for index in indices:
            key = fetch.chain[index]
            self._arrivals.end(key, fetch.number)
            self._fail_key(key, reason, now, fetch.holder.node_id)

    def _take_waiters(self, key: BlockKey) -> list[tuple[Acquisition, int]]:
        found: list[tuple[Acquisition, int]] = []
        for op, index in self._arrivals.take_waiters(key):
            acquisition = self._open.get(op)
            # An op id may be used again after its answer. The key shows whether this is still the call that waited.
            if acquisition is not None and index in acquisition.pending and acquisition.request.keys[index] == key:
                found.append((acquisition, index))
        return found

    def _take_arrived(self, key: BlockKey, *, origin: NodeId | None, now: float) -> None:
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

    def _fail_key(self, key: BlockKey, reason: MissReason, now: float, miss_node: str = "") -> None:
        for acquisition, index in self._take_waiters(key):
            acquisition.pending.discard(index)
            acquisition.end(index, reason, miss_node)
            self._settle(acquisition, now)

    def _settle(self, acquisition: Acquisition, now: float) -> None:
        if acquisition.state in (AcquisitionState.OVER, AcquisitionState.RESOLVING):
            return
        if any(index < acquisition.break_at for index in acquisition.pending):
            return
        self._answer(acquisition, now)

    def _answer(self, acquisition: Acquisition, now: float) -> None:
        self._move(acquisition, AcquisitionEvent.ANSWER)
        self._forget_waits(acquisition)
        skip = acquisition.request.skip
        end = skip
        while end < acquisition.break_at and end in acquisition.held:
            end += 1
        promised = [acquisition.held.pop(index) for index in range(skip, end)]
        for index in acquisition.held.values():
            self._store.unpin(index)
        fetched = sum(1 for index in acquisition.fetched if index < end)
        if acquisition.on_answer is not None:
            acquisition.on_answer(acquisition, promised, fetched, now)
            return
        self._answers.answer(acquisition.op, acquisition, promised, fetched, acquisition.reason, now)

    def peer_speeds(self) -> tuple[PeerSpeed, ...]:
        return self._estimates.speeds()

    def pinned(self) -> Counter[SlotIndex]:
        """Slots pinned by open acquisitions, for the shard's check of pin counts."""
        return Counter(index for acquisition in self._open.values() for index in acquisition.held.values())

    @property
    def is_idle(self) -> bool:
        """Whether nobody waits and nothing is on its way."""
        return not (self._open or self._fetches) and self._arrivals.is_idle

    def check_invariants(self) -> None:
        waiters = self._arrivals.waiters()
        for op, acquisition in self._open.items():
            assert acquisition.op == op
            asks = acquisition.state is AcquisitionState.ASKING
            assert acquisition.state not in (AcquisitionState.STARTING, AcquisitionState.OVER), "it is not under way"
            assert bool(acquisition.question) == asks, "a question is out and nobody asks"
            for index in acquisition.pending:
                assert (op, index) in waiters, "an acquisition waits for a block nobody would report"
                on_its_way = acquisition.request.keys[index] in self._arrivals or acquisition.state in FOLLOWING
                assert on_its_way, "an acquisition waits for a block that is not on its way"
        bringers = self._arrivals.bringers() - {DIGESTING}
        assert bringers <= self._fetches.keys(), "a block arrives by a fetch that is over"
        assert self._fetches.keys() == self._pulls.owned_by(self), "a fetch without a pull, or a pull without a fetch"
