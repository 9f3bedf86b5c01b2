"""Warm: a prompt is brought to this node before an engine asks for it, and held for a while. Pure.

A Warm is two things after each other: its missing blocks are fetched a few at a time, and then it is an Acquire of what
is here, whose blocks are held instead of leased. Only one Warm is under way, and only WARM_STEP_BLOCKS of it, so that
any number of them keep at most one small pull between an engine's request and its blocks. The others wait.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from kvservice.core import events as ev
from kvservice.core.acquire.acquisition import Acquisition, OnAnswer
from kvservice.core.acquire.acquisitions import Acquisitions
from kvservice.core.acquire.attached import EngineAttachment
from kvservice.core.acquire.holds import HOLD_SECONDS_MAX, Holds, check_pin_name
from kvservice.core.acquire.windowed import WindowedAcquisitions
from kvservice.core.actions import Refuse, Reply
from kvservice.core.block.keys import check_chain
from kvservice.core.context import ShardContext
from kvservice.core.messages import AcquireRequest, MissReason, WarmResult
from kvservice.core.store.slots import Slot
from kvservice.errors import Exhausted, InvalidRequest, KVServiceError, NotAttached, Unavailable
from kvservice.units import NodeId

WARM_STEP_BLOCKS = 64  # fetched at a time: a fifth of a second at 500 MB/s with blocks of 1.5 MiB
WARMS_MAX = 64  # that wait or are under way; more are refused with Exhausted, because they would come too late
WARMS_OF_TENANT_MAX = 32  # so that no tenant uses up all of them; more are refused with Exhausted
WARM_SECONDS_MAX = 600.0  # that a Warm may take; a longer timeout is a mistake and refused


@dataclass(slots=True)
class _Warm:
    op: int
    event: ev.Warm
    engine: EngineAttachment
    deadline: float
    part: int = 0  # number of the acquisition under way; 0 while it waits
    done: int = 0  # leading blocks that are here
    local: int = 0  # of those
    origins: Counter[NodeId] = field(default_factory=Counter)  # of the others
    reason: MissReason = MissReason.NONE


class Warming:
    """Every Warm that is not answered. The first one is under way."""

    def __init__(
        self,
        shard: ShardContext,
        acquisitions: Acquisitions,
        windowed: WindowedAcquisitions,
        holds: Holds,
        engines: Callable[[], Iterable[EngineAttachment]],
    ) -> None:
        self._shard = shard
        self._acquisitions = acquisitions
        self._windowed = windowed
        self._holds = holds
        self._engines = engines
        self._open: deque[_Warm] = deque()
        self._is_going_on = False

    def start(self, event: ev.Warm, now: float) -> None:
        request = event.request
        check_chain(request.keys)
        if not 0 < request.timeout_seconds <= WARM_SECONDS_MAX:
            most = f"{WARM_SECONDS_MAX:.0f} s, not {request.timeout_seconds}"
            raise InvalidRequest(f"a warm has a timeout of more than 0 and at most {most}")
        if request.pin:
            check_pin_name(request.pin)
        elif not 0 < request.hold_seconds <= HOLD_SECONDS_MAX:
            most = f"{HOLD_SECONDS_MAX:.0f} s, not {request.hold_seconds}"
            raise InvalidRequest(f"blocks are held for more than 0 and at most {most}")
        if self._shard.is_draining():
            raise Unavailable(f"shard {self._shard.node_id} is draining: warm the prompt on another node")
        engine = next((e for e in self._engines() if _is_for(e, event)), None)
        if engine is None:
            raise NotAttached(f"no engine with this fingerprint is attached to shard {self._shard.node_id}")
        of_tenant = sum(warm.event.account == event.account for warm in self._open)
        if len(self._open) >= WARMS_MAX or (event.account and of_tenant >= WARMS_OF_TENANT_MAX):
            self._shard.counters["warms_refused"] += 1
            raise Exhausted(
                f"{len(self._open)} prompts wait to be warmed on shard {self._shard.node_id} already, {of_tenant} of "
                "this tenant"
            )
        self._shard.counters["warms"] += 1
        self._open.append(_Warm(event.op, event, engine, now + request.timeout_seconds))
        self._go_on(now)

    def cancel(self, op: int, now: float) -> None:
        """Nobody waits for this one any more. A fetch that is under way continues."""
        warm = next((warm for warm in self._open if warm.op == op), None)
        if warm is None:
            return
        if warm.part:
            self._acquisitions.cancel(warm.part)
        self._open.remove(warm)
        self._go_on(now)

    def held(self, op: int, slots: list[Slot], chain: int, reason: MissReason, now: float) -> None:
        """The Acquire at the end of a Warm: these pinned slots are here, the first `chain` of them of its chain."""
        warm = self._open[0]
        assert warm.op == op, "somebody else's blocks"
        if any(slot.block is None for slot in slots):  # given up since they were pinned: nobody reads the prompt now
            self._shard.store.unpin(slots)
            slots, chain, reason = [], 0, MissReason.NEVER_STORED
        request, account = warm.event.request, warm.event.account
        if chain < warm.done:
            warm.reason = reason
        kept = chain
        try:
            if self._shard.is_draining():
                self._shard.store.unpin(slots)
                raise Unavailable(f"shard {self._shard.node_id} began to drain")
            if request.pin:
                self._holds.pin(account, request.pin, warm.engine.spec.model, slots, now)
            else:
                kept = min(self._holds.warm(account, slots, request.hold_seconds, now), chain)
        except KVServiceError as error:
            self._shard.emit(Refuse(op, error))
        else:
            self._answer(warm, kept)
        self._open.popleft()
        self._go_on(now)

    def tick(self, now: float) -> None:
        for warm in [warm for warm in self._open if not warm.part and warm.deadline <= now]:
            warm.reason = MissReason.DEADLINE
            self._answer(warm, 0)
            self._open.remove(warm)

    def next_deadline(self) -> float | None:
        return min((warm.deadline for warm in self._open if not warm.part), default=None)

    # -- inside ----

    def _go_on(self, now: float) -> None:
        """Begin the next step of the first Warm, until one waits for something. Steps end at once when everything is
        here: then this is called from within itself, and the outer call goes on."""
        if self._is_going_on:
            return
        self._is_going_on = True
        while self._open and not self._open[0].part:
            self._begin_step(self._open[0], now)
        self._is_going_on = False

    def _begin_step(self, warm: _Warm, now: float) -> None:
        """Fetch the next missing blocks, or hold what is here."""
        keys = warm.event.request.keys
        if warm.reason is MissReason.NONE and now >= warm.deadline:
            warm.reason = MissReason.DEADLINE
        if warm.reason is MissReason.NONE:
            while warm.done < len(keys) and keys[warm.done] in self._shard.store:
                warm.done += 1
                warm.local += 1
            if warm.done < len(keys):
                end = min(warm.done + WARM_STEP_BLOCKS, len(keys))
                warm.part = self._acquisitions.next_part()
                self._acquire(warm, end, warm.done, partial(self._step_done, warm, end), now)
                return
        warm.part = warm.op
        # Some may have been evicted since they came. What is here is answered at once, also at the deadline.
        warm.done = next((i for i in range(warm.done) if keys[i] not in self._shard.store), warm.done)
        if warm.done == 0:
            self.held(warm.op, [], 0, warm.reason, now)
        elif warm.engine.spec.window_groups:
            request, engine = self._request(warm, warm.done, 0, now), warm.engine
            self._windowed.start(warm.op, engine.attachment, warm.event.account, request, engine.spec, now)
        else:
            self._acquire(warm, warm.done, 0, None, now)

    def _acquire(self, warm: _Warm, end: int, skip: int, on_answer: OnAnswer | None, now: float) -> None:
        request, engine, account = self._request(warm, end, skip, now), warm.engine, warm.event.account
        size = engine.spec.layout.payload_bytes
        self._acquisitions.start(warm.part, engine.attachment, account, request, size, now, on_answer=on_answer)

    def _request(self, warm: _Warm, end: int, skip: int, now: float) -> AcquireRequest:
        asked = warm.event.request
        left = max(warm.deadline - now, 0.0)
        return AcquireRequest(asked.keys[:end], skip, left, hold_seconds=asked.hold_seconds or HOLD_SECONDS_MAX)

    def _step_done(self, warm: _Warm, end: int, part: Acquisition, slots: list[Slot], _: int, now: float) -> None:
        self._shard.store.unpin(slots)
        until = warm.done + len(slots)
        origins = [part.origins[index] for index in range(warm.done, until) if index in part.origins]
        warm.origins.update(origins)
        warm.local += len(slots) - len(origins)
        warm.done, warm.part = until, 0
        if until < end:
            warm.reason = part.reason
        self._go_on(now)

    def _answer(self, warm: _Warm, held: int) -> None:
        request = warm.event.request
        seconds = 0.0 if request.pin else request.hold_seconds
        self._shard.counters["warm_local_blocks"] += warm.local
        self._shard.counters["warm_fetched_blocks"] += warm.origins.total()
        fetched = tuple(sorted(warm.origins.items()))
        self._shard.emit(Reply(warm.op, WarmResult(len(request.keys), warm.local, fetched, held, seconds, warm.reason)))

    def check_invariants(self) -> None:
        assert len(self._open) <= WARMS_MAX
        for place, warm in enumerate(self._open):
            assert bool(warm.part) == (place == 0), "two prompts are warmed at once, or none"


def _is_for(engine: EngineAttachment, event: ev.Warm) -> bool:
    return engine.account == event.account and engine.spec.fingerprint.digest == event.request.fingerprint
