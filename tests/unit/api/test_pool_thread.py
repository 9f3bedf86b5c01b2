"""The pool of a program: one, however many models attach at once."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

import kvservice
from kvservice.api.layout import Layout
from kvservice.api.loop import LoopThread
from kvservice.api.pool_thread import PoolThread
from kvservice.errors import InvalidRequest
from kvservice.pool.runtime import PoolRuntime
from kvservice.session.options import Mode, PoolOptions
from kvservice.units import MiB


def test_programs_that_attach_at_once_share_one_pool() -> None:
    thread = PoolThread(PoolOptions(mode=Mode.EMBEDDED, memory=8 * MiB))
    opened: list[PoolRuntime] = []
    open_one = thread._open_embedded
    assert open_one is not None

    async def counted() -> PoolRuntime:
        await asyncio.sleep(0)  # the other one has its turn
        opened.append(await open_one())
        return opened[-1]

    async def attach_both() -> None:
        layout = Layout(16, (4096,), "uint8")
        await asyncio.gather(*(thread.attach_program(name, layout, {"model": name}, name) for name in ("a", "b")))

    thread._open_embedded = counted
    try:
        thread.loop.wait(attach_both())
        assert len(opened) == 1 and len(thread.attached) == 2
    finally:
        thread.end()


async def test_work_that_is_given_up_ends_before_its_caller_goes_on() -> None:
    thread, began, ended = LoopThread(), threading.Event(), list[str]()

    async def hold() -> None:
        try:
            began.set()
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            ended.append("let go")

    waiting = asyncio.create_task(thread.wait_async(hold()))
    await asyncio.to_thread(began.wait, 10)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ended == ["let go"]
    thread.stop()


@pytest.mark.parametrize("layout", [None, (16, 4096)])
def test_what_is_no_layout_is_told_as_such(layout: Any) -> None:
    with kvservice.connect(mode="embedded", memory="8MiB") as pool, pytest.raises(InvalidRequest, match="Layout"):
        pool.attach("m", layout)
