"""Acquisitions: make a prefix local and promise it, fetching missing blocks from other nodes and from tiers. Pure.

There is one acquisition per Acquire call, one fetch per (holder, run of blocks), and one arrival per block, however
many acquisitions wait for it. An acquisition promises only blocks that are sealed here, and so verified. It answers
when its prefix is complete, when its first gap is certain, or at its deadline. Fetches continue after the deadline, for
the next request.

With a hand-off, the acquisition first follows the writer, and blocks are fetched as they are sealed on the writer's
node. When the hand-off has ended, the directory is asked for what is still missing.

Shared tiers are asked beside the directory. What is missing and lies in a tier of this node needs neither.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from kvservice.core.acquire.acquisition import (
    DIRECTORY,
    FOLLOWING,
    TRANSITIONS,
    Acquisition,
    AcquisitionEvent,
    AcquisitionState,
    OnAnswer,
    holders_by_index,
)
from kvservice.core.acquire.answers import Answers
from kvservice.core.acquire.arrivals import DIGESTING, Arrivals
from kvservice.core.acquire.fetches import Fetches
from kvservice.core.acquire.handoff import APPEAR_SECONDS, WAIT_SECONDS_MAX
from kvservice.core.acquire.hinted import expectation
from kvservice.core.acquire.pulls import PULL_BLOCKS_MAX, Pulls
from kvservice.core.acquire.sources import choose, nodes_are_faster
from kvservice.core.actions import Follow, Probe, ReleaseRemote, Resolve
from kvservice.core.context import ShardContext
from kvservice.core.events import Followed, Probed
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
from kvservice.core.slices import Work
from kvservice.core.tier.rules import is_tier, tier_holder
from kvservice.core.tier.tiers import Tiers
from kvservice.core.transitions import step
from kvservice.units import AttachmentId, BlockKey, HandoffId, NodeId, SlotIndex

LOOKUP_SECONDS_MAX = 0.25  # a directory that does not answer must not use up the engine's deadline
FOLLOW_WAIT_SECONDS = 1.0  # for one question to a writer's node: its death is noticed after one without an answer
_STARTING = AcquisitionState.STARTING
PROBE_SECONDS_MAX = 0.5  # a shared tier takes a few times its latency, and is then known not to have more
assert FOLLOW_WAIT_SECONDS <= WAIT_SECONDS_MAX, "the writer's node would answer earlier than asked"

# Called for an acquisition that follows a writer on this node, so that it hears when that hand-off is over.
OnWatch = Callable[[int, HandoffId, float], None]


class Acquisitions:
    """All open acquisitions. Results go out as actions, and as answers through `answers`."""

    def __init__(self, shard: ShardContext, pulls: Pulls, tiers: Tiers, answers: Answers, watch: OnWatch) -> None:
        self._shard = shard
        self._watch = watch
        self._store = shard.store
        self._emit = shard.emit
        self._counters = shard.counters
        self._tiers = tiers
        self._answers = answers
        self._open: dict[int, Acquisition] = {}
        self._arrivals = Arrivals()
        self._fetches = Fetches(shard, pulls, tiers, self._arrivals, self)
        self._estimates = self._fetches.estimates
        self._directory_answers = True  # the last time that it was asked
        self._last_question = 0
        self._last_part = 0  # parts are numbered downwards, calls upwards

    # -- calls ----

    def next_part(self) -> int:
        """A number for an acquisition that is a part of something and that nobody called for."""
        self._last_part -= 1
        return self._last_part

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
        is_for_here: bool = False,
    ) -> None:
        """Begin one. `account` is charged for fetched blocks; `base` is the position of the first key. If there is an
        `on_answer`, it gets the outcome, with the blocks pinned, instead of the caller of `op`. With `is_for_here`,
        only blocks that are here or in a tier of this node count."""
        count, deadline = len(request.keys), now + request.timeout_seconds
        acquisition = Acquisition(
            op, attachment, account, request, payload_bytes, deadline, now, count, base=base, on_answer=on_answer
        )
        acquisition.is_for_here = is_for_here
        self._open[op] = acquisition
        self._shard.slices.begin(op, self._begin(acquisition, now))

    def _begin(self, acquisition: Acquisition, now: float) -> Work:
        """Pin what is here, and look for the rest elsewhere."""
        request, count = acquisition.request, len(acquisition.request.keys)
        is_long = count - request.skip > self._shard.slices.sizes.blocks
        missing: list[int] = []
        for start in range(request.skip, count, self._shard.slices.sizes.blocks):
            if start > request.skip:
                now = yield
            end = min(start + self._shard.slices.sizes.blocks, count)
            if acquisition.run_end == start:
                acquisition.run += self._store.take(request.keys[start:end], acquisition.payload_bytes)
                start = acquisition.run_end
            if start < end:
                missing += self._take_local(acquisition, range(start, end))
        if is_long:
            now = yield
        if not request.hold_seconds:  # to hold a block for somebody is no use of it
            used = request.keys[request.skip :] if acquisition.base else request.keys
            self._store.touch(used, now, expectation(request.hints))
        if is_long:
            now = yield
            missing = self._take_local(acquisition, missing)  # some may have come meanwhile
        if not missing:
            self._move(acquisition, AcquisitionEvent.WAIT)
        elif request.handoff is None or self._shard.is_draining():
            self._look_elsewhere(acquisition, missing[0], now)
        else:
            self._begin_following(acquisition, request.handoff)
        self._settle(acquisition, now)
        if acquisition.state is AcquisitionState.WATCHING and request.handoff is not None:
            self._watch(acquisition.op, request.handoff.handoff_id, now)

    def drop_attachment(self, attachment: AttachmentId, now: float) -> None:
        for acquisition in [a for a in self._open.values() if a.attachment == attachment]:
            acquisition.end(acquisition.request.skip, MissReason.DETACHED)
            self._answer(acquisition, now)

    def cancel(self, op: int) -> None:
        """Nobody waits for this acquisition any more. Its fetches continue."""
        acquisition = self._open.get(op)
        if acquisition is None:
            return
        self._move(acquisition, AcquisitionEvent.CANCEL)
        self._store.unpin((*acquisition.run, *acquisition.held.values()))
        self._shard.records.cancelled(op)
        self._forget_waits(acquisition)
        self._counters["acquires_cancelled"] += 1

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
        """The directory has answered."""
        self._directory_answers = complete
        acquisition = self._open.get(op)
        if acquisition is None or DIRECTORY not in acquisition.awaits:
            return  # it was answered at its deadline, or did not need the directory after all
        acquisition.awaits.discard(DIRECTORY)
        acquisition.runs, acquisition.is_complete = tuple(runs), complete
        self._use_answers(acquisition, now)

    def probed(self, event: Probed, now: float) -> None:
        """A shared tier has answered."""
        acquisition = self._open.get(event.op)
        if acquisition is None or event.tier not in acquisition.awaits:
            return
        acquisition.awaits.discard(event.tier)
        acquisition.probed[event.tier] = acquisition.probes_from + event.count
        estimate, start = self._estimates.of(tier_holder(event.tier)), acquisition.probes_from
        estimate.observe_overhead(now - acquisition.asked_at)
        end = start + event.count
        if event.is_end:
            self._tiers.lacks_shared(event.tier, acquisition.request.keys[end:])
        else:  # it may have more, and could not say so in time
            acquisition.not_asked = tier_holder(event.tier).node_id
        if event.count:
            self._tiers.has_shared(event.tier, acquisition.request.keys[start:end])
        else:
            estimate.refusals = 0
        self._use_answers(acquisition, now)

    def _use_answers(self, acquisition: Acquisition, now: float) -> None:
        """Fetch what is missing, as soon as a holder of everything is known or nobody else is asked."""
        end = acquisition.break_at
        holders = holders_by_index(acquisition.runs, end, self._shard.node_id)
        missing = self._missing(acquisition, acquisition.request.skip)
        for index, tiers in self._in_tiers(acquisition, missing, now).items():
            holders[index] = (*holders.get(index, ()), *tiers)
        for name, until in acquisition.probed.items():
            for index in range(acquisition.probes_from, min(until, end)):
                holders[index] = (*holders.get(index, ()), tier_holder(name))
        if acquisition.awaits and any(index not in holders for index in missing):
            return
        acquisition.awaits.clear()
        self._move(acquisition, AcquisitionEvent.WAIT)
        self._fetch(acquisition, holders, now)
        self._settle(acquisition, now)

    def _in_tiers(self, acquisition: Acquisition, indices: Sequence[int], now: float) -> dict[int, tuple[Holder, ...]]:
        """The tiers of this node that can give each of these blocks now."""
        if not self._tiers.has_own:
            return {}
        return self._tiers.holders(acquisition.request.keys, indices, acquisition.payload_bytes, now)

    def _missing(self, acquisition: Acquisition, start: int) -> list[int]:
        """Blocks that are neither here nor on their way."""
        keys, others = acquisition.request.keys, acquisition.unfilled(start, acquisition.break_at)
        if self._are_unknown([keys[i] for i in others]):
            return list(others)
        return [i for i in others if not self._is_coming(acquisition, keys[i])]

    def _are_unknown(self, keys: Sequence[BlockKey]) -> bool:
        """Whether none of these is here or on its way. A miss names hundreds, so they are compared as sets."""
        return self._store.has_none(keys) and self._arrivals.keys.isdisjoint(keys)

    def _is_coming(self, acquisition: Acquisition, key: BlockKey) -> bool:
        return self._store.slot_of(key, acquisition.payload_bytes) is not None or key in self._arrivals

    def _fetch(self, acquisition: Acquisition, holders: Mapping[int, tuple[Holder, ...]], now: float) -> None:
        """Fetch the missing blocks up to the first one without a holder."""
        wanted: list[int] = []
        for index in acquisition.unfilled(acquisition.run_end, acquisition.break_at):
            if not self._take_local(acquisition, (index,)):
                continue
            if index not in holders:
                self._end_unknown(acquisition, index)
                break
            wanted.append(index)
            acquisition.found_until = index + 1
        if wanted and self._shard.is_draining():
            acquisition.end(wanted[0], MissReason.DRAINING)
        else:
            self._fetch_worthwhile(acquisition, wanted, holders, now)

    def _end_unknown(self, acquisition: Acquisition, index: int) -> None:
        """End at a block of which no holder is known."""
        if not acquisition.is_complete:
            acquisition.end(index, MissReason.LOOKUP_FAILED)
        elif (tier := self._tiers.not_open()) is not None:
            acquisition.end(index, MissReason.TIER_NOT_OPEN, tier.node_id)
        elif left_out := acquisition.not_asked or self._tiers.not_read(acquisition.request.keys[index]):
            acquisition.end(index, MissReason.TIER_NOT_ASKED, left_out)
        else:
            acquisition.end(index, MissReason.NEVER_STORED)

    # -- what fetches report ----

    def came(self, key: BlockKey, origin: NodeId, now: float) -> None:
        self._take_arrived(key, origin=origin, now=now)

    def failed(self, key: BlockKey, reason: MissReason, now: float, miss_node: str = "") -> None:
        """A block does not come."""
        for acquisition, index in self._take_waiters(key):
            acquisition.pending.discard(index)
            acquisition.end(index, reason, miss_node)
            self._settle(acquisition, now)

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
            self.failed(key, MissReason.CORRUPT, now)

    # -- time ----

    def tick(self, now: float) -> None:
        for acquisition in [a for a in self._open.values() if a.deadline <= now and a.state is not _STARTING]:
            acquisition.grow_run()
            acquisition.end(acquisition.run_end, MissReason.DEADLINE)
            self._answer(acquisition, now)
        self._fetches.tick(now)

    def next_deadline(self) -> float | None:
        times = [a.deadline for a in self._open.values() if a.state is not _STARTING]
        due = self._fetches.next_deadline()
        return min([*times, *([] if due is None else [due])], default=None)

    def is_open(self, op: int) -> bool:
        return op in self._open

    # -- inside ----

    def _move(self, acquisition: Acquisition, event: AcquisitionEvent) -> None:
        acquisition.state = step(TRANSITIONS, acquisition.state, event, f"acquisition {acquisition.op}")
        if acquisition.state is not AcquisitionState.ASKING:
            acquisition.question = 0
        if acquisition.state is AcquisitionState.OVER:
            del self._open[acquisition.op]
            self._shard.slices.drop(acquisition.op)

    def _look_elsewhere(self, acquisition: Acquisition, start: int, now: float) -> None:
        """Fetch the blocks from `start` on, if those may be fetched at all: from tiers of this node, if these have all
        of them; else the directory and shared tiers are asked who has them."""
        if self._shard.is_draining():
            acquisition.end(start, MissReason.DRAINING)
            self._move(acquisition, AcquisitionEvent.WAIT)
            return
        keys = acquisition.request.keys
        left = acquisition.request.timeout_seconds - (now - acquisition.started)
        missing = self._missing(acquisition, start)
        tiers = self._in_tiers(acquisition, missing, now)
        asked = (
            ()
            if acquisition.is_for_here or self._need_nobody(acquisition, missing, tiers)
            else self._whom(acquisition, missing, now)
        )
        if not asked:
            self._move(acquisition, AcquisitionEvent.WAIT)
            self._fetch(acquisition, tiers, now)
            return
        self._move(acquisition, AcquisitionEvent.RESOLVE)
        acquisition.awaits, acquisition.probes_from, acquisition.asked_at = set(asked), start, now
        for source in asked:
            if source == DIRECTORY:
                self._emit(Resolve(acquisition.op, keys, start, min(left, LOOKUP_SECONDS_MAX)))
            else:
                self._emit(Probe(acquisition.op, source, keys, start, min(left, PROBE_SECONDS_MAX)))

    def _need_nobody(
        self, acquisition: Acquisition, missing: list[int], tiers: Mapping[int, tuple[Holder, ...]]
    ) -> bool:
        """Whether tiers of this node have everything, and no other node was measured to be faster. A directory that
        does not answer is not waited for."""
        if len(tiers) < len(missing):
            return False
        if not (missing and self._shard.has_directory and self._directory_answers):
            return True
        return not nodes_are_faster(self._estimates, tiers[missing[0]], len(missing), acquisition.payload_bytes)

    def _whom(self, acquisition: Acquisition, missing: list[int], now: float) -> tuple[str, ...]:
        """The directory, and the shared tiers that may give the missing blocks sooner than they are computed."""
        count, size, request = len(missing), acquisition.payload_bytes, acquisition.request
        shared = [
            name
            for name in self._tiers.shared
            if self._tiers.may_probe(name, size, now)
            and self._estimates.of(tier_holder(name)).asks(count, size, request.recompute_seconds_per_block)
        ]
        left_out = [tier_holder(name).node_id for name in self._tiers.shared if name not in shared]
        acquisition.not_asked = left_out[0] if left_out else ""
        return (*([DIRECTORY] if self._shard.has_directory else []), *shared)

    def _take_local(self, acquisition: Acquisition, indices: Sequence[int]) -> list[int]:
        """Pin blocks that are here, and wait for blocks on their way. Returns the indices of the others."""
        if self._are_unknown([acquisition.request.keys[index] for index in indices]):
            return list(indices)
        missing: list[int] = []
        for index in indices:
            key = acquisition.request.keys[index]
            slot = self._store.slot_of(key, acquisition.payload_bytes)
            if slot is not None:
                self._store.pin((slot,))
                acquisition.held[index] = slot
            elif key in self._arrivals:
                self._await(acquisition, index)
            else:
                missing.append(index)
        return missing

    # -- hand-offs ----

    def _begin_following(self, acquisition: Acquisition, handoff: Handoff) -> None:
        """Wait for every missing block, whoever brings it, and ask the writer's node for them."""
        for index in acquisition.unfilled(acquisition.run_end, len(acquisition.request.keys)):
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
        leased = replace(located, handles=tuple(handles.values()))
        self._fetches.start_leased(acquisition, holder, [wanted[key] for key in handles], leased, sent_at, now)

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
            if acquisition.deadline > now or self._shard.is_draining():
                self._look_elsewhere(acquisition, start, now)
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
        self, acquisition: Acquisition, wanted: list[int], holders: Mapping[int, tuple[Holder, ...]], now: float
    ) -> None:
        choice = choose(
            wanted,
            holders,
            self._estimates,
            acquisition.payload_bytes,
            acquisition.request.recompute_seconds_per_block,
            acquisition.deadline - now,
            PULL_BLOCKS_MAX,
        )
        if choice.refused is not None:
            reason = MissReason.SLOWER_THAN_RECOMPUTE
            acquisition.end(wanted[choice.count], reason, choice.refused.node_id)
            self._counters["fetch_not_worthwhile"] += len(wanted) - choice.count
        for run in choice.runs:
            for index in run.indices:
                self._await(acquisition, index)
            self._fetches.start(acquisition, run.holder, run.alternates, run.indices, now)

    def _take_waiters(self, key: BlockKey) -> list[tuple[Acquisition, int]]:
        found: list[tuple[Acquisition, int]] = []
        for op, index in self._arrivals.take_waiters(key):
            acquisition = self._open.get(op)
            # An op id may be used again after its answer. The key shows whether this is still the call that waited.
            if acquisition is not None and index in acquisition.pending and acquisition.request.keys[index] == key:
                found.append((acquisition, index))
        return found

    def _take_arrived(self, key: BlockKey, *, origin: NodeId | None, now: float) -> None:
        for acquisition, index in self._take_waiters(key):
            acquisition.pending.discard(index)
            slot = self._store.slot_of(key, acquisition.payload_bytes)
            if slot is None:
                acquisition.end(index, MissReason.STALE, origin or "")
            else:
                self._store.pin((slot,))
                acquisition.held[index] = slot
                if origin is not None:
                    acquisition.origins[index] = origin
            self._settle(acquisition, now)

    def _settle(self, acquisition: Acquisition, now: float) -> None:
        if acquisition.state in (_STARTING, AcquisitionState.OVER, AcquisitionState.RESOLVING):
            return
        if acquisition.pending and min(acquisition.pending) < acquisition.break_at:
            return
        self._answer(acquisition, now)

    def _answer(self, acquisition: Acquisition, now: float) -> None:
        self._move(acquisition, AcquisitionEvent.ANSWER)
        self._forget_waits(acquisition)
        acquisition.grow_run()
        end = min(acquisition.run_end, acquisition.break_at)
        promised = acquisition.run
        beyond = promised[end - acquisition.request.skip :]
        del promised[end - acquisition.request.skip :]
        if beyond or acquisition.held:
            self._store.unpin((*beyond, *acquisition.held.values()))
        origins = acquisition.origins.items() if acquisition.origins else ()
        fetched = sum(1 for index, origin in origins if index < end and not is_tier(origin))
        if acquisition.on_answer is not None:
            acquisition.on_answer(acquisition, promised, fetched, now)
            return
        self._answers.answer(acquisition.op, acquisition, promised, fetched, acquisition.reason, now)

    def peer_speeds(self) -> tuple[PeerSpeed, ...]:
        return self._estimates.speeds()

    def pinned(self) -> Counter[SlotIndex]:
        """Slots pinned by open acquisitions, for the shard's check of pin counts."""
        return Counter(
            slot.index for acquisition in self._open.values() for slot in (*acquisition.run, *acquisition.held.values())
        )

    @property
    def is_idle(self) -> bool:
        """Whether nobody waits and nothing is on its way."""
        return not self._open and self._fetches.is_idle and self._arrivals.is_idle

    def check_invariants(self) -> None:
        waiters = self._arrivals.waiters()
        for op, acquisition in self._open.items():
            assert acquisition.op == op
            asks = acquisition.state is AcquisitionState.ASKING
            assert acquisition.state is not AcquisitionState.OVER, "an acquisition that is over is kept"
            has_slices = op in self._shard.slices
            assert has_slices == (acquisition.state is _STARTING), "nobody goes on with an acquisition, or for nothing"
            assert bool(acquisition.question) == asks, "a question is out and nobody asks"
            resolves = acquisition.state is AcquisitionState.RESOLVING
            assert bool(acquisition.awaits) == resolves, "an acquisition awaits nobody, or answers that it does not use"
            for index in acquisition.pending:
                assert (op, index) in waiters, "an acquisition waits for a block nobody would report"
                on_its_way = acquisition.request.keys[index] in self._arrivals or acquisition.state in FOLLOWING
                assert on_its_way, "an acquisition waits for a block that is not on its way"
        bringers = self._arrivals.bringers() - {DIGESTING}
        assert bringers <= self._fetches.numbers(), "a block arrives by a fetch that is over"
        self._fetches.check_invariants()
