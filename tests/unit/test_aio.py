"""A cancellation is never lost, whatever comes together with it."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest

from kvservice.aio import ask_each, end_tasks, in_thread_to_its_end, is_set_within, within

TURNS = range(8)  # of the loop, between two things that meet


async def turn(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("turns", TURNS)
async def test_a_cancellation_that_meets_the_event_ends_the_waiter(turns: int) -> None:
    event, rounds = asyncio.Event(), 0

    async def wait_forever() -> None:
        nonlocal rounds
        while True:
            rounds += 1
            event.clear()
            await is_set_within(60.0, event)

    waiter = asyncio.create_task(wait_forever())
    await turn(3)
    event.set()
    await turn(turns)
    waiter.cancel()
    done, _ = await asyncio.wait([waiter], timeout=5)
    assert done and waiter.cancelled()
    assert rounds <= 2


@pytest.mark.parametrize("turns", TURNS)
async def test_a_cancellation_that_meets_the_result_ends_the_caller(turns: int) -> None:
    answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def call() -> None:
        await within(60.0, answer)
        await asyncio.sleep(60)

    caller = asyncio.create_task(call())
    await turn(3)
    answer.set_result(1)
    await turn(turns)
    caller.cancel()
    done, _ = await asyncio.wait([caller], timeout=5)
    assert done and caller.cancelled()


async def test_results_errors_and_deadlines_reach_the_caller() -> None:
    ended = asyncio.Event()

    async def answer(seconds: float) -> int:
        try:
            await asyncio.sleep(seconds)
        finally:
            ended.set()
        return 7

    async def fail() -> None:
        raise ValueError("as it was")

    assert await within(5.0, answer(0)) == 7
    with pytest.raises(ValueError, match="as it was"):
        await within(5.0, fail())
    ended.clear()
    with pytest.raises(asyncio.TimeoutError):
        await within(0.01, answer(60))
    assert ended.is_set(), "what ran out of time has ended when its caller goes on"


async def test_a_cancelled_caller_leaves_nothing_running() -> None:
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await turn(2)
            ended.set()

    caller = asyncio.create_task(within(60.0, work()))
    await turn(3)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert ended.is_set()


async def test_an_event_is_told_from_a_deadline() -> None:
    event = asyncio.Event()
    assert not await is_set_within(0.01, event)
    asyncio.get_running_loop().call_later(0.01, event.set)
    assert await is_set_within(5.0, event)
    assert await is_set_within(0.0, event)


async def test_a_task_that_swallows_its_cancellation_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It swallows the first one only."""
    monkeypatch.setattr("kvservice.aio.CANCEL_AGAIN_SECONDS", 0.01)
    cancelled = 0

    async def deaf() -> None:
        nonlocal cancelled
        while cancelled < 3:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled += 1
        raise RuntimeError("nobody wants to know")

    task = asyncio.create_task(deaf())
    await turn(2)
    await end_tasks([task])
    assert task.done()
    assert cancelled == 3


async def test_who_waits_for_a_task_that_never_ends_can_be_cancelled() -> None:
    release = asyncio.Event()

    async def deaf() -> None:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    task = asyncio.create_task(deaf())
    await turn(2)
    ending = asyncio.create_task(end_tasks([task]))
    await turn(2)
    ending.cancel()
    done, _ = await asyncio.wait([ending], timeout=5)
    assert done and ending.cancelled()
    release.set()
    await task


async def test_who_is_cancelled_hears_of_it_behind_the_threads_work() -> None:
    """Also when the work fails: asyncio has nothing to report of an error that nobody can hear of."""
    begun, go_on, ended, reports = threading.Event(), threading.Event(), threading.Event(), list[str]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reports.append(context["message"]))

    def work() -> None:
        begun.set()
        go_on.wait(10)
        ended.set()
        raise ValueError

    caller = asyncio.create_task(in_thread_to_its_end(work))
    await asyncio.to_thread(begun.wait, 10)
    for _ in range(2):
        caller.cancel()
        await turn(3)
        assert not caller.done()
    go_on.set()
    await asyncio.wait([caller], timeout=10)
    assert caller.cancelled() and ended.is_set()
    del caller
    gc.collect()
    await turn(3)
    assert not reports


async def test_one_that_fails_ends_what_was_asked_beside_it() -> None:
    """Reads of an object store went on when its tier had closed, and each wrote a traceback."""
    under_way = 0

    async def ask(number: int) -> None:
        nonlocal under_way
        if number == 2:
            await turn(3)
            raise ValueError(number)
        under_way += 1
        try:
            await asyncio.sleep(60)
        finally:
            await turn(3)
            under_way -= 1

    with pytest.raises(ValueError, match="2"):
        await ask_each(ask, range(8), 4)
    assert under_way == 0
