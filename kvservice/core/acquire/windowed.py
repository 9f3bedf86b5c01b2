"""Acquisitions of models with window groups: a prefix of group 0, and the blocks that each window group needs. Pure.

They consist of plain acquisitions, one after the other: first the chain of group 0, then each window group's blocks
before the end of the hit. A gap there makes the hit shorter, and the blocks that the shorter hit lacks are looked for,
also on other nodes. After SHORTER_HITS_MAX such steps, the longest prefix that is complete on this node counts. States
are stored at some positions only, so they are looked for at more. The pinned blocks that belong to the result are
leased together, the others unpinned.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

from kvservice.core.acquire.acquisition import Acquisition, OnAnswer
from kvservice.core.acquire.acquisitions import Acquisitions
from kvservice.core.acquire.answers import Answers
from kvservice.core.block.keys import SPAN_BLOCKS
from kvservice.core.block.window_groups import WINDOW_BIT, group_key, longest_whole
from kvservice.core.context import ShardContext
from kvservice.core.messages import AcquireRequest, EngineSpec, MissReason
from kvservice.core.store.slots import Slot
from kvservice.core.transitions import step
from kvservice.units import AttachmentId, SlotIndex

SHORTER_HITS_MAX = 2  # hits that are tried on other nodes after a gap; each costs a lookup and a fetch
# The same for a state, for which a gap is the rule: an engine keeps one at the end of a step, so steps of 16,384 tokens
# in blocks of 512 leave one at every 32nd position. Each costs a lookup, and at most one of them a fetch.
STATES_TRIED_MAX = 32


class HitState(Enum):
    FULL = "full"  # the chain of group 0 is being acquired
    WINDOWS = "windows"  # the blocks that window groups need at its end are looked for, also on other nodes
    LOCAL = "local"  # enough was tried: the longest prefix that is complete on this node counts
    DETACHED = "detached"  # its engine is gone: nothing is promised
    OVER = "over"


class HitEvent(Enum):
    FOUND = "found"  # the acquisition of group 0 has ended
    SETTLE = "settle"  # there were too many gaps, or the deadline has passed
    DETACH = "detach"
    ANSWER = "answer"
    CANCEL = "cancel"  # nobody waits for the answer any more


TRANSITIONS: dict[tuple[HitState, HitEvent], HitState] = {
    (HitState.FULL, HitEvent.FOUND): HitState.WINDOWS,
    (HitState.FULL, HitEvent.DETACH): HitState.DETACHED,
    (HitState.FULL, HitEvent.CANCEL): HitState.OVER,
    (HitState.WINDOWS, HitEvent.SETTLE): HitState.LOCAL,
    (HitState.WINDOWS, HitEvent.DETACH): HitState.DETACHED,
    (HitState.WINDOWS, HitEvent.ANSWER): HitState.OVER,
    (HitState.WINDOWS, HitEvent.CANCEL): HitState.OVER,
    (HitState.LOCAL, HitEvent.ANSWER): HitState.OVER,
    (HitState.DETACHED, HitEvent.ANSWER): HitState.OVER,
}


@dataclass(slots=True)
class _Hit:
    op: int
    attachment: AttachmentId
    account: str
    request: AcquireRequest
    spec: EngineSpec
    deadline: float
    end: int  # of the prefix that can still be promised
    state: HitState = HitState.FULL
    part: int = 0  # number of the plain acquisition under way
    full: list[Slot] = field(default_factory=list)  # pinned slots of group 0, from `skip` on
    windows: list[dict[int, Slot]] = field(default_factory=list)  # pinned slots of each window group, by position
    fetched: int = 0
    shortened: int = 0  # by gaps in windows
    states_tried: int = 0  # positions that had no state
    reason: MissReason = MissReason.NONE
    chain: Acquisition | None = None  # of group 0, once it has ended


@dataclass(frozen=True, slots=True)
class _Missing:
    """Blocks of one window group that a hit needs, from `start` up to `end`."""

    group: int  # index among the engine's window groups
    start: int
    end: int


class WindowedAcquisitions:
    """Uses `Acquisitions` for its parts."""

    def __init__(
        self,
        shard: ShardContext,
        acquisitions: Acquisitions,
        answers: Answers,
    ) -> None:
        self._shard = shard
        self._store = shard.store
        self._counters = shard.counters
        self._acquisitions = acquisitions
        self._answers = answers
        self._open: dict[int, _Hit] = {}

    def start(
        self, op: int, attachment: AttachmentId, account: str, request: AcquireRequest, spec: EngineSpec, now: float
    ) -> None:
        windows: list[dict[int, Slot]] = [{} for _ in spec.window_groups]
        deadline = now + request.timeout_seconds
        hit = _Hit(op, attachment, account, request, spec, deadline, len(request.keys), windows=windows)
        self._open[op] = hit
        self._begin(hit, request, spec.layout.payload_bytes, 0, partial(self._full_done, hit), now)

    def cancel(self, op: int) -> int:
        """Nobody waits for this hit any more. Returns the number of the part under way; 0 when there is none."""
        hit = self._open.get(op)
        if hit is None:
            return 0
        self._move(hit, HitEvent.CANCEL)
        self._acquisitions.cancel(hit.part)
        self._shard.records.cancelled(op)
        self._let_go(hit, 0)
        return hit.part

    def drop_attachment(self, attachment: AttachmentId) -> None:
        """Call it before `Acquisitions` hears of the loss and ends the parts."""
        for hit in self._open.values():
            if hit.attachment == attachment:
                self._move(hit, HitEvent.DETACH)

    def pinned(self) -> Counter[SlotIndex]:
        """Slots pinned here, for the shard's check of pin counts."""
        return Counter(
            slot.index
            for hit in self._open.values()
            for slots in (hit.full, *(held.values() for held in hit.windows))
            for slot in slots
        )

    # -- inside ----

    def _move(self, hit: _Hit, event: HitEvent) -> None:
        hit.state = step(TRANSITIONS, hit.state, event, f"hit {hit.op}")
        if hit.state is HitState.OVER:
            del self._open[hit.op]

    def _begin(
        self,
        hit: _Hit,
        request: AcquireRequest,
        payload_bytes: int,
        base: int,
        on_answer: OnAnswer,
        now: float,
    ) -> None:
        part = hit.part = self._acquisitions.next_part()
        self._acquisitions.start(
            part, hit.attachment, hit.account, request, payload_bytes, now, base=base, on_answer=on_answer
        )

    def _full_done(self, hit: _Hit, part: Acquisition, pinned: list[Slot], fetched: int, now: float) -> None:
        hit.full, hit.fetched, hit.reason, hit.chain = pinned, fetched, part.reason, part
        hit.end = hit.request.skip + len(pinned)
        if hit.state is HitState.FULL:
            self._move(hit, HitEvent.FOUND)
        self._go_on(hit, now)

    def _window_done(
        self, hit: _Hit, missing: _Missing, part: Acquisition, pinned: list[Slot], fetched: int, now: float
    ) -> None:
        for position, slot in enumerate(pinned, missing.start):
            hit.windows[missing.group][position] = slot
        self._counters["window_hit_local_blocks"] += len(pinned) - fetched
        self._counters["window_hit_remote_blocks"] += fetched
        gap = missing.start + len(pinned)
        if gap < missing.end:
            self._counters[f"window_acquires_cut_{part.reason.value}"] += 1
            hit.reason = MissReason.WINDOW
            if hit.spec.window_groups[missing.group].window.is_state:
                hit.states_tried += 1
            else:
                hit.shortened += 1
            self._cut(hit, gap)
        self._go_on(hit, now)

    def _go_on(self, hit: _Hit, now: float) -> None:
        """Ask for the next missing blocks, or answer."""
        if hit.state is HitState.DETACHED:
            hit.reason = MissReason.DETACHED
            self._cut(hit, hit.request.skip)
        elif hit.state is HitState.WINDOWS and (self._tried_enough(hit) or now >= hit.deadline):
            self._move(hit, HitEvent.SETTLE)
        if hit.state is HitState.LOCAL:
            self._settle_for_local(hit)
        missing = self._first_missing(hit)
        if missing is None:
            self._answer(hit, now)
            return
        base = missing.start - missing.start % SPAN_BLOCKS
        keys = tuple(group_key(key, missing.group + 1) for key in hit.request.keys[base : missing.end])
        # The wait for the hand-off is over when the chain ended short.
        handoff = hit.request.handoff if hit.reason is MissReason.NONE else None
        left, hold = max(hit.deadline - now, 0.0), hit.request.hold_seconds
        request = AcquireRequest(keys, missing.start - base, left, 0.0, handoff, hold_seconds=hold)
        on_answer = partial(self._window_done, hit, missing)
        payload_bytes = hit.spec.window_groups[missing.group].layout.payload_bytes
        self._begin(hit, request, payload_bytes, WINDOW_BIT | base, on_answer, now)

    def _tried_enough(self, hit: _Hit) -> bool:
        return hit.shortened > SHORTER_HITS_MAX or hit.states_tried > STATES_TRIED_MAX

    def _first_missing(self, hit: _Hit) -> _Missing | None:
        """The first run of blocks that is needed and not pinned. Blocks after it may be pinned if an earlier, longer
        end needed them; they are unpinned."""
        if hit.end <= hit.request.skip:
            return None
        for index, held in enumerate(hit.windows):
            first = self._first(hit, index, hit.end)
            start = next((i for i in range(first, hit.end) if i not in held), None)
            if start is not None:
                self._store.unpin([held.pop(position) for position in [i for i in held if i > start]])
                return _Missing(index, start, hit.end)
        return None

    def _first(self, hit: _Hit, index: int, end: int) -> int:
        return hit.spec.window_groups[index].window.first_block(end, hit.spec.layout.block_tokens)

    def _settle_for_local(self, hit: _Hit) -> None:
        def is_here(index: int, position: int) -> bool:
            if position in hit.windows[index]:
                return True
            key, layout = group_key(hit.request.keys[position], index + 1), hit.spec.window_groups[index].layout
            return self._store.slot_of(key, layout.payload_bytes) is not None

        indices = range(len(hit.windows))
        firsts = [partial(self._first, hit, index) for index in indices]
        end = longest_whole(hit.end, firsts, [partial(is_here, index) for index in indices])
        if end < hit.end:
            hit.reason = MissReason.WINDOW
            self._cut(hit, end)

    def _cut(self, hit: _Hit, end: int) -> None:
        """Shorten the hit to the blocks before `end`."""
        hit.end = max(min(hit.end, end), hit.request.skip)
        self._store.unpin(hit.full[hit.end - hit.request.skip :])
        del hit.full[hit.end - hit.request.skip :]
        for held in hit.windows:
            self._store.unpin([held.pop(position) for position in [i for i in held if i >= hit.end]])

    def _let_go(self, hit: _Hit, end: int) -> None:
        hit.end = hit.request.skip + len(hit.full)
        self._cut(hit, end)
        for held in hit.windows:
            self._store.unpin(held.values())
            held.clear()

    def _answer(self, hit: _Hit, now: float) -> None:
        self._move(hit, HitEvent.ANSWER)
        assert hit.chain is not None
        if hit.end <= hit.request.skip:
            self._let_go(hit, 0)
        windows: list[list[Slot]] = []
        for index, held in enumerate(hit.windows):
            # Nothing before `first` is pinned: an end only becomes smaller, and so does the beginning of its window.
            first = self._first(hit, index, hit.end)
            windows.append([held[position] for position in range(first, hit.end)] if hit.full else [])
        self._answers.answer(hit.op, hit.chain, hit.full, min(hit.fetched, len(hit.full)), hit.reason, now, windows)

    def check_invariants(self) -> None:
        for op, hit in self._open.items():
            assert hit.op == op
            assert hit.state in (HitState.FULL, HitState.WINDOWS), "a hit that decides by itself waits for something"
            assert (hit.chain is None) == (hit.state is HitState.FULL), "a window is looked for beyond no prefix"
            assert self._acquisitions.is_open(hit.part), "a hit waits for an acquisition that is over"
            assert len(hit.full) == (0 if hit.chain is None else hit.end - hit.request.skip), "pins and end differ"
