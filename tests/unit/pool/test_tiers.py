"""PoolTiers: tiers open beside the pool, their failures are misses, and a hung one delays and unmaps nothing."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest

from kvservice.core import actions as act
from kvservice.core import events as ev
from kvservice.core.block.marks import Mark
from kvservice.core.segment.blockfile import BlockFileHeader, pack_file_header
from kvservice.core.segment.digest import digest_payload
from kvservice.core.segment.geometry import plan_geometry, slot_index
from kvservice.core.tier.tier_block import TierBlock
from kvservice.memory.segment import Segment
from kvservice.observe.timings import Timings
from kvservice.pool import tiers as pool_tiers
from kvservice.pool.runtime import PoolRuntime
from kvservice.pool.runtime_ports import PoolConfig
from kvservice.pool.tiers import FOUND_BLOCKS, PoolTiers, TierPhase
from kvservice.testing.builders import make_chain, make_spec
from kvservice.testing.eventually import eventually_async
from kvservice.testing.fake_tier import FakeTier
from kvservice.tier.base import ProbeCallback, ReadCallback, Tier, TierRead
from kvservice.units import BlockKey, KiB, MiB, NodeId, SlotIndex, SpanRoute

SIZE = 64 * KiB
CHAIN = make_chain(4)
SLOTS = [SlotIndex(slot_index(0, index)) for index in range(4)]


class Bench:
    """PoolTiers over a real segment, with what it reports."""

    def __init__(self, *tiers: FakeTier) -> None:
        self.heard: list[ev.Event] = []
        self.memory = Segment.nameless(Path("/dev/shm"), plan_geometry(8 * MiB), "n")
        self.loop = asyncio.get_running_loop()
        self.work: list[asyncio.Task[None]] = []
        made = {tier.name: self._maker(tier) for tier in tiers}
        self.tiers = PoolTiers(made, self.memory, time.monotonic, Timings(), self._hear, self._take, {}, self._join)

    @staticmethod
    def _maker(tier: FakeTier) -> Callable[[], Tier]:
        return lambda: tier

    async def _take(self, marks: Sequence[Mark]) -> Sequence[Mark]:
        return marks

    async def _join(self, tier: str) -> None:
        """Nothing is to be done."""

    def _hear(self, event: ev.Event, context: contextvars.Context | None) -> None:
        self.loop.call_soon_threadsafe(self.heard.append, event)

    async def open(self) -> None:
        self.work = [asyncio.ensure_future(work) for work in self.tiers.opening()]
        await asyncio.gather(*self.work)
        await asyncio.sleep(0)
        self.heard.clear()

    async def answer(self, action: act.TierWork) -> ev.Event:
        self.heard.clear()
        self.tiers.perform(action)
        await eventually_async(lambda: self.heard, "an answer")
        return self.heard[0]

    def fill(self, slot: SlotIndex, key: BlockKey, byte: int) -> TierBlock:
        payload = self.memory.payload(slot, SIZE)
        payload[:] = bytes([byte]) * SIZE
        return TierBlock(key, SIZE, digest_payload(payload, key), 0, SpanRoute(1))


@pytest.fixture
async def tier() -> FakeTier:
    return FakeTier()


@pytest.fixture
async def bench(tier: FakeTier) -> AsyncIterator[Bench]:
    made = Bench(tier)
    await made.open()
    yield made
    tier.go_on()
    await made.tiers.close()
    made.memory.close()


async def test_a_block_goes_down_and_comes_back_into_another_slot(bench: Bench) -> None:
    block = bench.fill(SLOTS[0], CHAIN[0], 7)
    assert await bench.answer(act.WriteDown(1, "fake", ((block, SLOTS[0]),))) == ev.WrittenDown(1, (True,))
    brought = await bench.answer(act.BringBack(2, "fake", ((block, SLOTS[1]),), time.monotonic() + 5))
    assert isinstance(brought, ev.BroughtBack)
    assert brought == ev.BroughtBack(2, (ev.BroughtBlock(ev.PullResult.OK, block.digest, block.stored_at),))
    assert bytes(bench.memory.payload(SLOTS[1], SIZE)) == bytes([7]) * SIZE
    bench.tiers.perform(act.Erase("fake", (CHAIN[0],)))
    gone = await bench.answer(act.BringBack(3, "fake", ((block, SLOTS[2]),), time.monotonic() + 5))
    assert isinstance(gone, ev.BroughtBack)
    assert gone.blocks == (ev.BroughtBlock(ev.PullResult.STALE),)
    assert bench.tiers.counters()["tier_fake_reads"] == 2


async def test_a_full_tier_says_so(bench: Bench, tier: FakeTier) -> None:
    block = bench.fill(SLOTS[0], CHAIN[0], 7)
    tier.is_full = True
    assert await bench.answer(act.WriteDown(1, "fake", ((block, SLOTS[0]),))) == ev.WrittenDown(1, (False,), True)


async def test_a_tier_that_is_not_there_has_nothing(bench: Bench) -> None:
    block = bench.fill(SLOTS[0], CHAIN[0], 7)
    items = ((block, SLOTS[0]),)
    assert await bench.answer(act.WriteDown(1, "other", items)) == ev.WrittenDown(1, (False,))
    brought = await bench.answer(act.BringBack(2, "other", items, time.monotonic() + 5))
    assert isinstance(brought, ev.BroughtBack)
    assert brought.blocks == (ev.BroughtBlock(ev.PullResult.FAILED),)
    assert await bench.answer(act.Probe(3, "other", CHAIN, 0, 1.0)) == ev.Probed(3, "other", 0)
    bench.tiers.perform(act.Erase("other", CHAIN))
    assert bench.tiers.counters()["tier_other_refused"] == 4


async def test_a_probe_counts_from_where_it_starts(bench: Bench, tier: FakeTier) -> None:
    for key in CHAIN[1:3]:
        tier.files[key] = b""
    assert await bench.answer(act.Probe(1, "fake", CHAIN, 1, 5.0)) == ev.Probed(1, "fake", 2, is_end=True)


async def test_a_probe_is_answered_once_and_in_time(
    bench: Bench, tier: FakeTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    late: list[ProbeCallback] = []
    monkeypatch.setattr(tier, "probe", lambda keys, deadline, on_done: late.append(on_done))
    assert await bench.answer(act.Probe(1, "fake", CHAIN, 0, 0.01)) == ev.Probed(1, "fake", 0)
    late[0](3)
    await asyncio.sleep(0.01)
    assert len(bench.heard) == 1


async def test_what_a_tier_raises_is_a_counted_miss(
    bench: Bench, tier: FakeTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("a bug of a tier")

    block = bench.fill(SLOTS[0], CHAIN[0], 7)
    for name in ("write", "read", "probe", "erase", "counters"):
        monkeypatch.setattr(tier, name, broken)
    items = ((block, SLOTS[0]),)
    assert await bench.answer(act.WriteDown(1, "fake", items)) == ev.WrittenDown(1, (False,))
    brought = await bench.answer(act.BringBack(2, "fake", items, time.monotonic() + 5))
    assert isinstance(brought, ev.BroughtBack)
    assert brought.blocks == (ev.BroughtBlock(ev.PullResult.FAILED),)
    assert await bench.answer(act.Probe(3, "fake", CHAIN, 0, 1.0)) == ev.Probed(3, "fake", 0)
    bench.tiers.perform(act.Erase("fake", CHAIN))
    assert bench.tiers.counters()["tier_fake_errors"] == 4
    assert bench.tiers.counters()["tier_fake_errors"] == 5, "asking for its counters failed as well"


async def test_too_few_answers_are_failures(bench: Bench, tier: FakeTier, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(job: TierRead, on_done: ReadCallback) -> None:
        on_done(job.job_id, (ev.BroughtBlock(ev.PullResult.OK, 1),))

    monkeypatch.setattr(tier, "read", read)
    blocks = tuple((bench.fill(slot, key, 7), slot) for slot, key in zip(SLOTS[:2], CHAIN[:2], strict=True))
    brought = await bench.answer(act.BringBack(1, "fake", blocks, time.monotonic() + 5))
    assert isinstance(brought, ev.BroughtBack)
    assert brought.blocks == (ev.BroughtBlock(ev.PullResult.FAILED),) * 2
    assert bench.tiers.counters()["tier_fake_errors"] == 1


async def test_an_answered_slot_cannot_be_written_any_more(
    bench: Bench, tier: FakeTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[memoryview] = []

    def read(job: TierRead, on_done: ReadCallback) -> None:
        kept.extend(target for _, target in job.items)
        on_done(job.job_id, (ev.BroughtBlock(ev.PullResult.OK, 1),))

    monkeypatch.setattr(tier, "read", read)
    block = bench.fill(SLOTS[0], CHAIN[0], 7)
    await bench.answer(act.BringBack(1, "fake", ((block, SLOTS[0]),), time.monotonic() + 5))
    with pytest.raises(ValueError, match="released"):
        kept[0][0] = 1


async def test_found_blocks_come_in_pieces() -> None:
    keys = [BlockKey(number.to_bytes(16, "big")) for number in range(2 * FOUND_BLOCKS + 1)]
    headers = (BlockFileHeader(TierBlock(key, SIZE, 1, 0, SpanRoute(1)), SIZE) for key in keys)
    tier = FakeTier(files=dict(zip(keys, map(pack_file_header, headers), strict=True)))
    bench = Bench(tier)
    await asyncio.gather(*bench.tiers.opening())
    await asyncio.sleep(0)
    found = [event for event in bench.heard if isinstance(event, ev.TierFound)]
    assert [len(event.blocks) for event in found] == [FOUND_BLOCKS, FOUND_BLOCKS, 1]
    assert [block.key for event in found for block in event.blocks] == keys
    await bench.tiers.close()
    bench.memory.close()


async def test_a_tier_that_cannot_start_leaves_the_others_open() -> None:
    broken, good = FakeTier("broken"), FakeTier("good")
    broken.start_error = "the file system is read-only: mount it for writing"
    bench = Bench(broken, good)
    await bench.open()
    states = {state.name: state for state in bench.tiers.states()}
    assert states["good"].phase is TierPhase.OPEN
    assert (states["broken"].phase, states["broken"].detail) == (TierPhase.FAILED, broken.start_error)
    assert bench.tiers.counters()["tier_broken_start_failed"] == 1
    await bench.tiers.close()
    assert {state.phase for state in bench.tiers.states()} == {TierPhase.CLOSED}
    bench.memory.close()


class TroubledTier(FakeTier):
    said = ""

    def trouble(self) -> str:
        if self.said == "raise":
            raise RuntimeError(self.said)
        return self.said


async def test_an_open_tier_in_trouble_is_told_as_failed() -> None:
    tier = TroubledTier()
    bench = Bench(tier)
    await bench.open()
    seen = []
    for tier.said in ("", "the store is down", "raise", ""):
        (state,) = bench.tiers.states()
        seen.append((state.phase, state.detail))
    well = (TierPhase.OPEN, "")
    assert seen == [well, (TierPhase.FAILED, "the store is down"), well, well]
    assert bench.tiers.counters()["tier_fake_errors"] == 1
    await bench.tiers.close()
    bench.memory.close()


class FullTier(FakeTier):
    def write_trouble(self) -> str:
        return "no space"


async def test_a_tier_that_only_takes_nothing_stays_open_and_says_why() -> None:
    bench = Bench(FullTier())
    await bench.open()
    (state,) = bench.tiers.states()
    assert (state.phase, state.detail) == (TierPhase.OPEN, "no space")
    await bench.tiers.close()
    bench.memory.close()


async def test_a_tier_that_is_down_for_the_moment_is_opened_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_tiers, "REOPEN_SECONDS_MIN", 0.01)
    down, wrong = FakeTier("down"), FakeTier("wrong")
    down.start_error = wrong.start_error = "it does not answer"
    down.start_is_transient = True
    bench = Bench(down, wrong)
    opening = [asyncio.ensure_future(work) for work in bench.tiers.opening()]
    await eventually_async(lambda: bench.tiers.counters().get("tier_down_start_failed", 0) >= 2, "two tries")
    assert [state.phase for state in bench.tiers.states()] == [TierPhase.FAILED, TierPhase.FAILED]
    down.start_error = wrong.start_error = ""
    await asyncio.gather(*opening)
    assert [state.phase for state in bench.tiers.states()] == [TierPhase.OPEN, TierPhase.FAILED]
    assert bench.tiers.counters()["tier_wrong_start_failed"] == 1
    item = (bench.fill(SLOTS[0], CHAIN[0], 7), SLOTS[0])
    assert await bench.answer(act.WriteDown(1, "down", (item,))) == ev.WrittenDown(1, (True,))
    await bench.tiers.close()
    bench.memory.close()


async def test_a_pool_serves_while_a_tier_hangs_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_tiers, "CLOSE_SECONDS", 0.1)
    tier = FakeTier("disk")
    tier.hang_at_start()
    config = PoolConfig(NodeId("n"), None, plan_geometry(8 * MiB))
    pool = await PoolRuntime.open(config, tiers={"disk": lambda: tier})
    engine = (await pool.attach(make_spec(), lambda reason: None)).attachment_id
    assert await pool.reserve(engine, 1)
    await eventually_async(lambda: _threads_of(["kvservice-start-disk"]), "the tier to be started")
    assert [state.phase for state in pool.tier_states()] == [TierPhase.OPENING]
    await pool.close()
    tier.go_on()
    await eventually_async(lambda: not _threads_of(["kvservice-start-disk"]), "the late tier to be closed")
    assert not _threads_of([f"kvservice-tier-{tier.name}"]), "it started after the pool was closed, and was not ended"


@pytest.mark.parametrize("reads", [True, False])
async def test_a_hung_tier_keeps_the_memory_that_it_uses(reads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_tiers, "CLOSE_SECONDS", 0.1)
    tier = FakeTier()
    bench = Bench(tier)
    await bench.open()
    block = bench.fill(SLOTS[0], CHAIN[0], 7)
    tier.hang()
    items = ((block, SLOTS[0]),)
    bench.tiers.perform(
        act.BringBack(1, "fake", items, time.monotonic() + 5) if reads else act.WriteDown(1, "fake", items)
    )
    await eventually_async(lambda: tier.in_use, "the tier to use the slot")
    began = time.monotonic()
    await bench.tiers.close()
    bench.memory.close()
    assert time.monotonic() - began < 2
    assert bench.tiers.counters()["tier_fake_close_hung"] == 1
    assert not bench.heard, "it was answered while the slot was in use"
    tier.in_use[0][:8] = bytes(8)  # unmapped memory would kill this process
    assert bytes(tier.in_use[0][:16]) == bytes(8) + bytes([7]) * 8
    tier.go_on()
    await eventually_async(lambda: bench.heard, "the answer")
    await eventually_async(lambda: not _threads_of(["kvservice-tier-fake"]), "its thread to end")


def _threads_of(names: Sequence[str]) -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name in names]
