"""Whose call is begun next, when several tenants have calls waiting."""

from __future__ import annotations

import asyncio

from kvservice.shard.turns import Turns


class Record:
    def __init__(self) -> None:
        self.turns = Turns()
        self.begun: list[str] = []

    async def call(self, tenant: str, work: float = 0.0) -> None:
        async with self.turns.turn(tenant):
            self.begun.append(tenant)
            await asyncio.sleep(work)


async def test_each_tenant_gets_its_turn_however_many_calls_another_has_waiting() -> None:
    record = Record()
    loud = [asyncio.ensure_future(record.call("loud")) for _ in range(20)]
    await asyncio.sleep(0)  # all of them are there, and the first has begun
    await asyncio.gather(*loud, record.call("quiet"), record.call("third"), record.call("quiet"))
    assert sorted(record.begun[:8]) == ["loud"] * 5 + ["quiet"] * 2 + ["third"]
    assert record.begun[8:] == ["loud"] * 15


async def test_calls_are_done_one_after_the_other() -> None:
    turns, at_once = Turns(), 0

    async def call() -> None:
        nonlocal at_once
        async with turns.turn("one"):
            at_once += 1
            assert at_once == 1
            await asyncio.sleep(0)
            at_once -= 1

    await asyncio.gather(*[call() for _ in range(10)])


async def test_a_call_that_waits_for_something_holds_up_nobody() -> None:
    record = Record()
    slow = asyncio.ensure_future(record.call("slow", 60.0))
    await asyncio.sleep(0)
    await asyncio.wait_for(record.call("slow"), 5)
    await asyncio.wait_for(record.call("quick"), 5)
    slow.cancel()
    await asyncio.gather(slow, return_exceptions=True)
    await asyncio.wait_for(record.call("quick"), 5)
    assert record.begun == ["slow", "slow", "quick", "quick"]


async def test_a_call_that_gives_up_before_its_turn_leaves_no_gap() -> None:
    record = Record()
    calls = [asyncio.ensure_future(record.call(name, 0.001)) for name in ("a", "b", "c", "b")]
    await asyncio.sleep(0)
    calls[1].cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    assert record.begun == ["a", "c", "b"]
    await asyncio.wait_for(record.call("d"), 5)


async def test_a_call_that_fails_ends_its_turn() -> None:
    turns = Turns()
    try:
        async with turns.turn("one"):
            raise ValueError
    except ValueError:
        pass
    async with turns.turn("two"):
        return
