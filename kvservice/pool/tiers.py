"""Performs what the core asks of the tiers below the pool. It opens them beside the pool's start, hands them slots, and
reports the ends as events.

Everything here runs on the pool's loop, but for a tier's start and close, which block and have threads of their own,
and for its answers, which come on the tier's threads. No call waits for a tier, so a slow one delays nobody.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import logging
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any

from kvservice.aio import DaemonThreads, in_thread, is_set_within
from kvservice.core import actions as act
from kvservice.core import events as ev
from kvservice.core.block.marks import Mark
from kvservice.core.tier.tier_block import TierBlock
from kvservice.errors import KVServiceError, TierError
from kvservice.observe import tracing
from kvservice.observe.timings import Timings
from kvservice.pool.runtime_ports import MemoryPort, Report
from kvservice.tier.base import KeepsMarks, TellsTrouble, TellsWriteTrouble, Tier, TierRead, TierWrite, WriteResult
from kvservice.units import SlotIndex

log = logging.getLogger("kvservice.pool")

# For a tier to end what runs. One that hangs keeps its threads, and the memory that they use stays mapped.
CLOSE_SECONDS = 5.0
FOUND_BLOCKS = 256  # of one event: the core takes some milliseconds for them, and a tier may have found a million
# Between two questions what was cleared elsewhere: one listing of a folder that is nearly empty. Nodes that share only
# the tier obey a clear that much later.
MARKS_EVERY_SECONDS = 60.0
# Until a tier that was down for the moment is opened again; twice as long after each time, up to the second one.
REOPEN_SECONDS_MIN, REOPEN_SECONDS_MAX = 5.0, 300.0
PROBE_SLACK_SECONDS = 0.02  # for an answer that comes at the deadline to arrive


class TierPhase(Enum):
    OPENING = "opening"
    OPEN = "open"
    FAILED = "failed"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class TierStatus:
    """What `status` tells of one tier."""

    name: str
    phase: TierPhase
    detail: str = ""  # why it failed, or does not take every block while it is open


class PoolTiers:
    """`makers` make the tiers by name, on a thread each: that may import much. `report` takes the answers."""

    def __init__(
        self,
        makers: Mapping[str, Callable[[], Tier]],
        memory: MemoryPort,
        clock: Callable[[], float],
        timings: Timings,
        report: Report,
        take_marks: Callable[[Sequence[Mark]], Awaitable[Sequence[Mark]]],
        late: Mapping[str, str],
        join: Callable[[str], Awaitable[None]],
    ) -> None:
        """`take_marks` applies the marks of clears that a tier has kept, and returns all that are known here. It raises
        KVServiceError for those that it cannot apply now. `late` are tiers that did not answer before, and why; `join`
        does what has to be done before such a tier is used. It raises KVServiceError when it may not be."""
        self._makers = makers
        self._memory = memory
        self._clock = clock
        self._timings = timings
        self._report = report
        self._take_marks = take_marks
        self._late = late
        self._join = join
        self._starting = {name: asyncio.Event() for name in makers}  # set when the marks that it keeps are known
        self._states = {name: TierStatus(name, TierPhase.OPENING) for name in makers}
        self._open: dict[str, Tier] = {}
        self._heard: dict[str, frozenset[Mark]] = {}  # the marks that each tier had when it was last asked
        self._counters: Counter[str] = Counter()
        self._lock = threading.Lock()  # over _open and _is_closing, which the threads that start tiers use too
        self._is_closing = False

    # -- life ----

    def opening(self) -> Iterator[Coroutine[Any, Any, None]]:
        """One coroutine for each tier. It ends when the core has heard of every block that was found, or when the tier
        cannot be used at all. A tier that is down for the moment is opened again and again."""
        for name in self._makers:
            yield self._start(name)

    async def _start(self, name: str) -> None:
        wait = REOPEN_SECONDS_MIN
        if name in self._late:
            self._fail(name, self._late[name])
        while await self._try_start(name):
            await asyncio.sleep(wait)
            wait = min(2 * wait, REOPEN_SECONDS_MAX)

    async def _try_start(self, name: str) -> bool:
        """Returns whether to try again later."""
        began = self._clock()
        try:
            found = await in_thread(partial(self._started, name), DaemonThreads(f"kvservice-start-{name}"))
            await self._catch_up(name)
        except Exception as error:  # noqa: BLE001  a tier is code of others too, and the pool serves without it
            reason = error.message if isinstance(error, KVServiceError) else f"{type(error).__name__}: {error}"
            self._fail(name, reason)
            return isinstance(error, KVServiceError) and error.attributes.get("transient") is True
        finally:
            self._starting[name].set()
        self._states[name] = TierStatus(name, TierPhase.OPEN)
        seconds = self._clock() - began
        log.info("tier_open", extra={"tier": name, "blocks": len(found), "seconds": round(seconds, 3)})
        for first in range(0, max(len(found), 1), FOUND_BLOCKS):
            end = first + FOUND_BLOCKS
            self._report(ev.TierFound(name, tuple(found[first:end]), more=end < len(found)), None)
            await asyncio.sleep(0)
        return False

    def _started(self, name: str) -> list[TierBlock]:
        """Runs on its own thread, for as long as the tier needs, maybe for ever."""
        tier = self._makers[name]()
        found = tier.start()
        with self._lock:
            is_late = self._is_closing
            if not is_late:
                self._open[name] = tier
        if is_late:
            tier.close()
            raise TierError(f"the pool closed before the tier {name} was open")
        return found

    async def _catch_up(self, name: str) -> None:
        """Learn from the tier what was cleared while this node was away, and tell it what it does not know, before the
        core hears that it is open. Without its marks a tier is not used: it may have what was cleared."""
        keeper: object = self._open.get(name)
        try:
            await self._join(name)
            if not isinstance(keeper, KeepsMarks):
                return
            kept = await in_thread(keeper.load_marks)
            known = await self._take_marks(kept)
            self._heard[name] = frozenset(kept)
            if missing := [mark for mark in known if mark not in set(kept)]:
                await in_thread(partial(keeper.keep_marks, missing))
        except Exception:
            tier = self._open.pop(name, None)
            if tier is not None:
                await in_thread(tier.close, DaemonThreads(f"kvservice-close-{name}"))
            raise

    async def follow_marks(self, name: str) -> None:
        """Ask the tier now and then what was cleared elsewhere, for ever. Each mark is taken once."""
        while True:
            await asyncio.sleep(MARKS_EVERY_SECONDS)
            keeper: object = self._open.get(name)
            if name not in self._heard or not isinstance(keeper, KeepsMarks):
                continue
            try:
                kept = await in_thread(keeper.load_marks)
            except Exception as error:  # noqa: BLE001  a tier is code of others too, and is asked again
                self._count_error(name, "marks_failed", error)
                continue
            new = [mark for mark in kept if mark not in self._heard[name]]
            try:
                await self._take_marks(new)
            except KVServiceError as error:  # all of them are taken again in the next round
                self._count_error(name, "marks_failed", error)
                continue
            self._heard[name] = frozenset(kept)
            if new:
                log.info("marks_taken", extra={"tier": name, "count": len(new)})

    async def marks_known(self, names: Iterable[str], seconds: float) -> bool:
        """Wait until these tiers have told what was cleared, or cannot be used, for so long. False: some have not."""
        until = self._clock() + seconds
        known = [await is_set_within(max(until - self._clock(), 0.0), self._starting[name]) for name in names]
        return all(known)

    async def keep_marks(self, marks: Sequence[Mark]) -> None:
        """Keep the marks of a clear in every open tier that can; others are told when they open. Raises TierError."""
        keepers: dict[str, object] = dict(self._open)
        problems: list[str] = []
        for name, keeper in keepers.items():
            if isinstance(keeper, KeepsMarks):
                try:
                    await in_thread(partial(keeper.keep_marks, marks))
                except Exception as error:  # noqa: BLE001  a tier is code of others too, and the next one is told as well
                    self._count_error(name, "marks_failed", error)
                    problems.append(error.message if isinstance(error, KVServiceError) else f"{name}: {error!r}")
        if problems:
            raise TierError("; ".join(problems))

    def _fail(self, name: str, reason: str) -> None:
        self._states[name] = TierStatus(name, TierPhase.FAILED, reason)
        self._counters[f"tier_{name}_start_failed"] += 1
        log.error("tier_unusable", extra={"tier": name, "reason": reason})

    async def close(self) -> None:
        """Close every tier, within CLOSE_SECONDS. One that does not end in time is left to its threads."""
        with self._lock:
            self._is_closing = True
            closing, self._open = self._open, {}
        work = {
            asyncio.ensure_future(in_thread(tier.close, DaemonThreads(f"kvservice-close-{name}"))): name
            for name, tier in closing.items()
        }
        for name in self._states:
            self._states[name] = TierStatus(name, TierPhase.CLOSED)
        if not work:
            return
        ended, hanging = await asyncio.wait(work, timeout=CLOSE_SECONDS)
        for future in ended:
            if (error := future.exception()) is not None:
                self._count_error(work[future], "close_failed", error)
        for future in hanging:
            future.cancel()
            self._counters[f"tier_{work[future]}_close_hung"] += 1
            log.error("tier_does_not_close", extra={"tier": work[future], "seconds": CLOSE_SECONDS})

    # -- for status and metrics ----

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._makers)

    def states(self) -> tuple[TierStatus, ...]:
        """An open tier that gives and takes nothing for the moment counts as failed. One that only does not
        take every block is open, and its detail says why."""
        return tuple(map(self._now, self._states.values()))

    def _now(self, state: TierStatus) -> TierStatus:
        tier: object = self._open.get(state.name)
        if state.phase is not TierPhase.OPEN:
            return state
        try:
            trouble = tier.trouble() if isinstance(tier, TellsTrouble) else ""
            of_writes = tier.write_trouble() if isinstance(tier, TellsWriteTrouble) else ""
        except Exception as error:  # noqa: BLE001  a tier is code of others too
            self._count_error(state.name, "errors", error)
            return state
        return TierStatus(state.name, TierPhase.FAILED, trouble) if trouble else replace(state, detail=of_writes)

    def counters(self) -> dict[str, int]:
        """All counters of the tiers, as tier_<name>_<what>."""
        found = dict(self._counters)
        for name, tier in self._open.items():
            try:
                found.update({f"tier_{name}_{what}": count for what, count in tier.counters().items()})
            except Exception as error:  # noqa: BLE001  a tier is code of others too
                self._count_error(name, "errors", error)
        return found

    # -- work ----

    def perform(self, action: act.TierWork) -> None:
        """Begin the work. A tier that is not open has no blocks and takes none."""
        tier = self._open.get(action.tier)
        if tier is None:
            self._counters[f"tier_{action.tier}_refused"] += 1
            self._refuse(action)
            return
        try:
            match action:
                case act.WriteDown():
                    self._write(tier, action)
                case act.BringBack():
                    self._read(tier, action)
                case act.Probe():
                    self._probe(tier, action)
                case act.Erase():
                    tier.erase(action.keys)
        except Exception as error:  # noqa: BLE001  a tier is code of others too: its errors are misses
            self._count_error(action.tier, "errors", error)
            self._refuse(action)

    def _refuse(self, action: act.TierWork) -> None:
        context = contextvars.copy_context()
        match action:
            case act.WriteDown():
                self._report(ev.WrittenDown(action.job, (False,) * len(action.items)), None)
            case act.BringBack():
                self._report(ev.BroughtBack(action.job, _none_of(action)), context)
            case act.Probe():
                self._report(ev.Probed(action.op, action.tier, 0), context)
            case act.Erase():
                pass

    def _write(self, tier: Tier, action: act.WriteDown) -> None:
        items = self._payloads(action.items)
        tier.write(TierWrite(action.job, items), partial(self._on_written, action, self._clock(), items))

    def _on_written(
        self,
        action: act.WriteDown,
        began: float,
        items: _Items,
        job: int,
        results: tuple[WriteResult, ...],
        stored_bytes: tuple[int, ...] = (),
    ) -> None:
        _let_go(items)
        self._timings.add("write_down_seconds", self._clock() - began, action.tier)
        written = tuple(result is WriteResult.OK for result in results)
        if len(written) != len(items):
            written = (False,) * len(items)
            self._counters[f"tier_{action.tier}_errors"] += 1
        self._report(ev.WrittenDown(action.job, written, WriteResult.FULL in results, stored_bytes), None)

    def _read(self, tier: Tier, action: act.BringBack) -> None:
        items = self._payloads(action.items)
        size = sum(block.payload_bytes for block, _ in items)
        span = tracing.begin("fetch", node=f"~{action.tier}", blocks=len(items), bytes=size)
        came = partial(self._on_read, action, self._clock(), items, span, contextvars.copy_context())
        tier.read(TierRead(action.job, items, action.deadline, action.urgent), came)

    def _on_read(
        self,
        action: act.BringBack,
        began: float,
        items: _Items,
        span: tracing.Span,
        context: contextvars.Context,
        job: int,
        blocks: tuple[ev.BroughtBlock, ...],
    ) -> None:
        _let_go(items)
        if len(blocks) != len(items):
            blocks = _none_of(action)
            self._counters[f"tier_{action.tier}_errors"] += 1
        span.end(verified=sum(block.result is ev.PullResult.OK for block in blocks))
        context.run(self._timings.add, "fetch_seconds", self._clock() - began, action.tier)
        self._report(ev.BroughtBack(action.job, blocks), context)

    def _probe(self, tier: Tier, action: act.Probe) -> None:
        keys = action.chain[action.start :]
        context, answers = contextvars.copy_context(), itertools.count()

        def answer(count: int, is_end: bool = False) -> None:
            if next(answers) == 0:  # the tier and the timer may both answer
                self._report(ev.Probed(action.op, action.tier, min(max(count, 0), len(keys)), is_end), context)

        asyncio.get_running_loop().call_later(action.timeout_seconds + PROBE_SLACK_SECONDS, answer, 0)
        tier.probe(keys, self._clock() + action.timeout_seconds, answer)

    def _payloads(self, items: tuple[tuple[TierBlock, SlotIndex], ...]) -> _Items:
        return tuple((block, self._memory.payload(slot, block.payload_bytes)) for block, slot in items)

    def _count_error(self, name: str, what: str, error: BaseException) -> None:
        self._counters[f"tier_{name}_{what}"] += 1
        log.warning(f"tier_{what}", extra={"tier": name, "error": f"{type(error).__name__}: {error}"})


_Items = tuple[tuple[TierBlock, memoryview], ...]


def _none_of(action: act.BringBack) -> tuple[ev.BroughtBlock, ...]:
    return (ev.BroughtBlock(ev.PullResult.FAILED),) * len(action.items)


def _let_go(items: _Items) -> None:
    """After the answer the slots may become others'. A tier that still used them would raise instead of writing."""
    for _, payload in items:
        try:
            payload.release()
        except BufferError:  # the tier looks at it through another object, which keeps the memory mapped
            continue
