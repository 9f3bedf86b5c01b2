"""Partial tails: of several names for the beginning of one block, the first that somebody has is acquired. Pure.

The names stand in one question, the longest tail first. What is on this node comes first, in memory or in a tier of it;
then the directory says which names other nodes hold. What is chosen is one plain acquisition of one block. Shared tiers
are not asked for all lengths: they answer for prefixes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from kvservice.core.acquire.acquisition import Acquisition, holders_by_index
from kvservice.core.acquire.acquisitions import LOOKUP_SECONDS_MAX, Acquisitions
from kvservice.core.acquire.answers import Answers
from kvservice.core.acquire.attached import EngineAttachment
from kvservice.core.actions import Resolve
from kvservice.core.block.keys import KEYS_PER_REQUEST_MAX
from kvservice.core.block.tails import TAIL_NAMES_MAX, tail_step
from kvservice.core.context import ShardContext
from kvservice.core.events import Resolved
from kvservice.core.messages import AcquireRequest, MissReason
from kvservice.core.store.slots import Slot
from kvservice.core.tier.tiers import Tiers
from kvservice.errors import InvalidRequest
from kvservice.units import AttachmentId


@dataclass(slots=True)
class _TailAsk:
    op: int
    engine: EngineAttachment
    request: AcquireRequest
    deadline: float
    part: int = 0  # number of the acquisition of the chosen block; 0 while the directory is asked
    index: int = 0  # of the chosen name


class Tails:
    """Every question for a tail that is not answered."""

    def __init__(self, shard: ShardContext, acquisitions: Acquisitions, tiers: Tiers, answers: Answers) -> None:
        self._shard = shard
        self._acquisitions = acquisitions
        self._tiers = tiers
        self._answers = answers
        self._open: dict[int, _TailAsk] = {}

    def start(self, op: int, engine: EngineAttachment, request: AcquireRequest, now: float) -> None:
        """Raises InvalidRequest for a question that no engine may ask."""
        count = len(request.keys) - 1
        if engine.spec.window_groups or request.skip != 1 or request.handoff is not None:
            raise InvalidRequest("a tail is asked for alone, by an engine with one KV cache group, behind one head")
        if not 0 < count <= TAIL_NAMES_MAX or not 0 <= (request.tail_at or 0) < KEYS_PER_REQUEST_MAX:
            raise InvalidRequest(
                f"{count} names of a tail at {request.tail_at}: 1 to {TAIL_NAMES_MAX}, within a prompt"
            )
        ask = self._open[op] = _TailAsk(op, engine, request, now + request.timeout_seconds)
        self._shard.counters["tails_asked"] += 1
        index = self._here(ask, now)
        if index:
            self._take(ask, index, now)
        elif self._shard.has_directory and not self._shard.is_draining():
            timeout = min(request.timeout_seconds, LOOKUP_SECONDS_MAX)
            self._shard.emit(Resolve(op, request.keys, 1, timeout))
        else:
            self._miss(ask, MissReason.NEVER_STORED, now)

    def resolved(self, event: Resolved, now: float) -> None:
        """The directory has answered, perhaps another question than one of these."""
        ask = self._open.get(event.op)
        if ask is None or ask.part:
            return
        holders = holders_by_index(event.runs, len(ask.request.keys), self._shard.node_id)
        index = min((index for index in holders if index), default=0)
        if index:
            self._take(ask, index, now)
        else:
            self._miss(ask, MissReason.NEVER_STORED if event.complete else MissReason.LOOKUP_FAILED, now)

    def cancel(self, op: int) -> None:
        """Nobody waits for this tail any more."""
        ask = self._open.pop(op, None)
        if ask is not None and ask.part:
            self._acquisitions.cancel(ask.part)

    def drop_attachment(self, attachment: AttachmentId, now: float) -> None:
        """Call it before `Acquisitions` hears of the loss and ends the parts."""
        for ask in [a for a in self._open.values() if a.engine.attachment == attachment and not a.part]:
            self._miss(ask, MissReason.DETACHED, now)

    def tick(self, now: float) -> None:
        for ask in [a for a in self._open.values() if not a.part and a.deadline <= now]:
            self._miss(ask, MissReason.DEADLINE, now)

    def next_deadline(self) -> float | None:
        return min((ask.deadline for ask in self._open.values() if not ask.part), default=None)

    # -- inside ----

    def _here(self, ask: _TailAsk, now: float) -> int:
        """The index of the first name that this node has; 0 for none."""
        keys, size = ask.request.keys, ask.engine.spec.layout.payload_bytes
        in_tiers = self._tiers.holders(keys, range(1, len(keys)), size, now) if self._tiers.has_own else {}
        for index in range(1, len(keys)):
            if self._shard.store.slot_of(keys[index], size) is not None or index in in_tiers:
                return index
        return 0

    def _take(self, ask: _TailAsk, index: int, now: float) -> None:
        """Acquire the block of this name. It is worth a part of a block's time."""
        asked, layout = ask.request, ask.engine.spec.layout
        ask.index, ask.part = index, self._acquisitions.next_part()
        tokens = (len(asked.keys) - index) * tail_step(layout.block_tokens)
        seconds = asked.recompute_seconds_per_block * tokens / layout.block_tokens
        assert asked.tail_at is not None
        self._acquisitions.start(
            ask.part,
            ask.engine.attachment,
            ask.engine.account,
            AcquireRequest((asked.keys[0], asked.keys[index]), 1, max(ask.deadline - now, 0.0), seconds),
            layout.payload_bytes,
            now,
            base=asked.tail_at - 1,
            on_answer=partial(self._taken, ask),
        )

    def _taken(self, ask: _TailAsk, part: Acquisition, slots: list[Slot], fetched: int, now: float) -> None:
        del self._open[ask.op]
        self._answers.answer_tail(ask.op, part, slots, fetched, ask.index, now)

    def _miss(self, ask: _TailAsk, reason: MissReason, now: float) -> None:
        del self._open[ask.op]
        self._answers.no_tail(ask.op, reason)

    def check_invariants(self) -> None:
        for op, ask in self._open.items():
            assert ask.op == op
            assert not ask.part or self._acquisitions.is_open(ask.part), "a tail waits for an acquisition that is over"
            assert bool(ask.part) == bool(ask.index), "a tail is acquired that was not chosen"
