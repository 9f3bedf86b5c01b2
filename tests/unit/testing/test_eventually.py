"""Waits of tests return what they waited for, and say what it was when it does not come."""

from __future__ import annotations

import asyncio
import itertools
import time

import pytest

from kvservice.testing.eventually import PATIENCE_VARIABLE, NotInTime, eventually, eventually_async


def test_the_first_true_result_is_returned() -> None:
    numbers = itertools.count()
    assert eventually(lambda: next(numbers) // 3, "the fourth look") == 1
    assert next(numbers) == 4


async def test_a_coroutine_may_be_awaited_for_its_result() -> None:
    numbers = itertools.count()

    async def read() -> int:
        await asyncio.sleep(0)
        return next(numbers) // 3

    assert await eventually_async(read, "the fourth look") == 1
    assert await eventually_async(lambda: next(numbers), "a plain function") == 4


async def test_other_tasks_run_while_a_coroutine_waits() -> None:
    came = asyncio.Event()
    asyncio.get_running_loop().call_later(0.01, came.set)
    await eventually_async(came.is_set, "the event")


def test_a_wait_in_vain_names_what_was_awaited() -> None:
    with pytest.raises(NotInTime, match=r"not within 0\.01 s: the end of time\n\{'left': 3\}"):
        eventually(lambda: None, "the end of time", 0.01, detail=lambda: {"left": 3})


async def test_a_coroutine_that_waits_in_vain_names_it_too() -> None:
    with pytest.raises(NotInTime, match="the end of time"):
        await eventually_async(lambda: False, "the end of time", 0.01)


def test_the_last_look_comes_after_the_deadline() -> None:
    """A condition that came true while the machine was busy with something else has come true."""
    begun = time.monotonic()
    assert eventually(lambda: time.monotonic() - begun > 0.05, "the deadline to pass", 0.05)


def test_patience_makes_every_wait_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PATIENCE_VARIABLE, "20")
    begun = time.monotonic()
    assert eventually(lambda: time.monotonic() - begun > 0.03, "30 ms, of 100", 0.005)


def test_what_is_raised_while_looking_ends_the_wait() -> None:
    with pytest.raises(ZeroDivisionError):
        eventually(lambda: 1 / 0, "nothing", 60.0)
