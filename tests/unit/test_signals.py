"""Which signals end a process of the service, and which of them ask it to hurry."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from kvservice.signals import EndSignals, FirstSignal, end_signals

ALL = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in ALL}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


async def sent(*numbers: signal.Signals) -> tuple[bool, bool]:
    asked = EndSignals()
    for number in numbers:
        os.kill(os.getpid(), number)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    return asked.to_end.is_set(), asked.to_hurry.is_set()


@pytest.mark.parametrize("number", ALL)
async def test_the_first_signal_asks_to_end(number: signal.Signals) -> None:
    assert await sent(number) == (True, False)


async def test_the_second_one_asks_to_hurry() -> None:
    assert await sent(signal.SIGHUP, signal.SIGINT) == (True, True)


async def test_a_terminal_that_closes_twice_is_not_in_a_hurry() -> None:
    assert await sent(signal.SIGHUP, signal.SIGHUP) == (True, False)


def test_a_closed_terminal_is_ignored_where_nohup_says_so() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert signal.SIGHUP not in end_signals()


async def test_only_the_first_signal_is_waited_for() -> None:
    asked = FirstSignal(*ALL)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(asked.wait(), 10)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL, "a terminal that closes causes two"
