"""The pool of a program: one, however many models attach at once."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvservice
from kvservice.aio import in_thread, is_set_within
from kvservice.api import program
from kvservice.api.layout import Layout
from kvservice.api.loop import LoopThread
from kvservice.api.mapped import MappedPool
from kvservice.api.pool_thread import PoolThread
from kvservice.api.program import AttachedProgram
from kvservice.core.messages import AcquireRequest, AcquireResult, Attachment, RequestReport
from kvservice.errors import InvalidRequest
from kvservice.pool.runtime import PoolRuntime
from kvservice.session import session
from kvservice.session.options import Mode, PoolOptions
from kvservice.session.session import Session
from kvservice.testing.eventually import eventually
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


def test_programs_leave_a_silent_shard_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them waits for the shard for seconds: not one after the other."""
    thread, layout, leaving = (
        PoolThread(PoolOptions(mode=Mode.EMBEDDED, memory=8 * MiB)),
        Layout(16, (4096,), "uint8"),
        0,
    )
    close, all_leave = AttachedProgram.close, asyncio.Event()

    async def closed(self: AttachedProgram) -> None:
        nonlocal leaving
        leaving += 1
        if leaving == 3:
            all_leave.set()
        assert await is_set_within(10, all_leave), "the others have to wait"
        await close(self)

    for name in ("a", "b", "c"):
        thread.loop.wait(thread.attach_program(name, layout, {"model": name}, name))
    monkeypatch.setattr(AttachedProgram, "close", closed)
    thread.end()
    assert leaving == 3 and not thread.attached


def test_a_silent_shard_holds_up_a_close_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for the last reports, and then for the detach."""
    thread = PoolThread(PoolOptions(mode=Mode.EMBEDDED, memory=8 * MiB))
    made = thread.loop.wait(thread.attach_program("a", Layout(16, (4096,), "uint8"), {"model": "a"}, "a"))
    hangs = 10.0

    async def silent(self: PoolRuntime, *_: object) -> None:
        await asyncio.sleep(hangs)

    monkeypatch.setattr(session, "CLOSE_SECONDS", 0.2)
    monkeypatch.setattr(PoolRuntime, "renew", silent)
    monkeypatch.setattr(PoolRuntime, "detach", silent)
    made.session.report(RequestReport("r", 1, 0, 0, 1))
    began = time.monotonic()
    thread.end()
    assert time.monotonic() - began < hangs / 2


async def test_work_that_is_given_up_ends_before_its_caller_goes_on() -> None:
    thread, began, ended = LoopThread(), threading.Event(), list[str]()

    async def hold() -> None:
        try:
            began.set()
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.2)
            ended.append("let go")

    waiting = asyncio.create_task(thread.wait_async(hold()))
    await asyncio.to_thread(began.wait, 10)
    waiting.cancel()
    await asyncio.sleep(0.05)
    waiting.cancel()  # also who is told so twice
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ended == ["let go"]
    thread.stop()


async def test_a_busy_program_cancels_and_closes_at_once() -> None:
    """Each needed a thread of the program's own, which may wait for the very task that is cancelled."""
    loop, free, began = asyncio.get_running_loop(), threading.Event(), threading.Event()
    busy = [loop.run_in_executor(None, free.wait, 60) for _ in range(64)]
    try:
        pool = await kvservice.connect_async("embedded", memory="8MiB")

        async def hold() -> None:
            began.set()
            await asyncio.sleep(60)

        waiting = asyncio.create_task(pool._thread.loop.wait_async(hold()))
        while not began.is_set():
            await asyncio.sleep(0.01)
        waiting.cancel()
        closing = asyncio.create_task(pool.close())
        await asyncio.wait([waiting, closing], timeout=20)
        assert waiting.cancelled() and closing.done()
    finally:
        free.set()
        await asyncio.wait(busy)


@pytest.mark.parametrize("layout", [None, (16, 4096)])
def test_what_is_no_layout_is_told_as_such(layout: Any) -> None:
    with kvservice.connect(mode="embedded", memory="8MiB") as pool, pytest.raises(InvalidRequest, match="Layout"):
        pool.attach("m", layout)


def test_a_call_that_a_close_finds_under_way_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody answers it any more, so its thread would wait for ever."""
    pool = kvservice.connect(mode="embedded", memory="8MiB")
    cache, asked, said = pool.attach("m", Layout(4, (3,))), threading.Event(), list[str]()

    async def never(self: Any, attachment: int, request: AcquireRequest) -> AcquireResult:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    def get() -> None:
        try:
            cache.get(range(8))
        except InvalidRequest as error:
            said.append(error.message)

    monkeypatch.setattr(PoolRuntime, "acquire", never)
    thread = threading.Thread(target=get, daemon=True)
    thread.start()
    assert asked.wait(10)
    pool.close()
    thread.join(10)
    assert not thread.is_alive() and said == ["this pool is closed: connect() again"]


def test_threads_that_close_one_pool_all_return() -> None:
    for _ in range(10):
        pool = kvservice.connect(mode="embedded", memory="8MiB")
        cache = pool.attach("m", Layout(4, (3,)))
        calls: list[Callable[[], object]] = [pool.close, cache.close, pool.close, cache.close]
        threads = [threading.Thread(target=call, daemon=True) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_signal_handler_may_close_amid_a_call(monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """It runs on the thread that it interrupts, wherever that is."""
    begin = asyncio.run_coroutine_threadsafe

    async def forever() -> None:
        await asyncio.sleep(60)

    def interrupted(work: Any, loop: asyncio.AbstractEventLoop) -> Any:
        if moment == "before":
            signal.raise_signal(signal.SIGUSR1)
        future = begin(work, loop)
        if moment == "after":
            signal.raise_signal(signal.SIGUSR1)
        return future

    thread = LoopThread()
    before = signal.signal(signal.SIGUSR1, lambda *_: thread.stop())
    try:
        with monkeypatch.context() as patched, pytest.raises(InvalidRequest, match="closed"):
            patched.setattr(asyncio, "run_coroutine_threadsafe", interrupted)
            thread.wait(forever())
    finally:
        signal.signal(signal.SIGUSR1, before)
    thread.stop()
    assert not thread._thread.is_alive()


def test_a_signal_handler_may_close_amid_a_close(monkeypatch: pytest.MonkeyPatch) -> None:
    thread = LoopThread()
    begin = thread._loop.call_soon_threadsafe

    def interrupted(work: Callable[..., object]) -> object:
        monkeypatch.undo()
        signal.raise_signal(signal.SIGUSR1)
        return begin(work)

    monkeypatch.setattr(thread._loop, "call_soon_threadsafe", interrupted)
    before = signal.signal(signal.SIGUSR1, lambda *_: thread.stop())
    try:
        thread.stop()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not thread._thread.is_alive()


@pytest.mark.parametrize("what", ["cache", "pool"])
def test_a_finalizer_on_the_pools_thread_may_close(what: str) -> None:
    """The garbage collector runs on the thread that allocates, and ends a program's objects there."""
    pool = kvservice.connect("embedded", memory="8MiB")
    cache, thread = pool.attach("m", Layout(4, (3,))), pool._thread.loop

    async def collect() -> None:
        with pytest.raises(InvalidRequest, match="the pool's own thread"):
            cache.get(range(8))
        (cache if what == "cache" else pool).close()

    try:
        thread.submit(collect()).result(10)
        eventually(lambda: not cache.is_attached, "the cache to detach")
        assert what == "pool" or cache.get(range(8)).miss == "unavailable"
    finally:
        pool.close()
    assert not thread._thread.is_alive()


def test_a_hit_that_ends_amid_a_put_holds_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector ends hits wherever something is allocated, also while the session is locked."""
    with kvservice.connect("embedded", memory="8MiB") as pool:
        cache, blocks = pool.attach("m", Layout(4, (3,))), np.ones((1, 3), np.float32)
        cache.put(range(4), blocks)
        session, kept = cache._attached._program.session, [cache.get(range(4))]
        give_back = session._ledger.give_back

        def collected(refs: Any) -> None:
            kept.clear()
            give_back(refs)

        monkeypatch.setattr(session._ledger, "give_back", collected)
        storing = pool._thread.loop.submit(cache._attached.put(range(4, 8), blocks, 0, ""))
        assert storing.result(10).stored == 1 and not kept
        eventually(lambda: not session._leases, "the lease of the hit to end")


async def test_a_get_cancelled_at_first_use_leaves_no_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mapping holds the lock that keeps the shard from taking slots back."""
    made: list[MappedPool] = []
    began = threading.Event()

    def slow(*arguments: Any) -> MappedPool:
        began.set()
        time.sleep(0.05)
        made.append(MappedPool(*arguments))
        return made[-1]

    monkeypatch.setattr(program, "MappedPool", slow)
    async with await kvservice.connect_async("embedded", memory="8MiB") as pool:
        cache = await pool.attach("m", Layout(4, (3,)))
        get = asyncio.create_task(cache.get(range(8)))
        await asyncio.to_thread(began.wait, 10)
        get.cancel()
        await asyncio.wait([get])
        await cache.close()
        assert [mapped._closed for mapped in made] == [True]


async def test_an_attach_that_is_cancelled_leaves_nothing_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    attach, began = PoolRuntime.attach, threading.Event()

    async def slow(self: PoolRuntime, *arguments: Any) -> Attachment:
        began.set()
        await asyncio.sleep(0.05)
        return await attach(self, *arguments)

    async with await kvservice.connect_async("embedded", memory="8MiB") as pool:
        monkeypatch.setattr(PoolRuntime, "attach", slow)
        attaching = asyncio.create_task(pool.attach("m", Layout(4, (3,))))
        await asyncio.to_thread(began.wait, 10)
        attaching.cancel()
        await asyncio.wait([attaching])
        monkeypatch.undo()
        async with await pool.attach("m", Layout(4, (5,))) as other:  # the model is nobody's
            assert other.is_attached


async def test_an_attach_to_a_shard_that_hangs_is_cancelled_at_once(tmp_path: Path) -> None:
    """It went on for the ten seconds in which the shard may answer."""
    with socket.socket(socket.AF_UNIX) as shard, contextlib.ExitStack() as callers:
        shard.bind(str(tmp_path / "shard.sock"))
        shard.listen()
        shard.setblocking(False)
        loop, heard = asyncio.get_running_loop(), b""
        async with await kvservice.connect_async("service", socket=tmp_path / "shard.sock") as pool:
            attaching = asyncio.create_task(pool.attach("m", Layout(4, (3,))))
            while not heard:  # others only look whether somebody listens
                caller = callers.enter_context((await loop.sock_accept(shard))[0])
                heard = await loop.sock_recv(caller, 1)
            attaching.cancel()
            await asyncio.wait([attaching], timeout=5)
            assert attaching.cancelled()


async def test_an_attach_that_is_cancelled_as_it_ends_leaves_nothing() -> None:
    async with await kvservice.connect_async("embedded", memory="8MiB") as pool:
        attaching = asyncio.create_task(pool.attach("m", Layout(4, (3,))))
        await asyncio.sleep(0)
        eventually(lambda: pool._thread.attached, "an attachment, of which this loop has not heard")
        attaching.cancel()
        await asyncio.wait([attaching])
        assert attaching.cancelled()
        await asyncio.to_thread(eventually, lambda: not pool._thread.attached, "nothing attached")


def test_an_attach_that_is_interrupted_as_it_ends_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = LoopThread.wait

    def interrupted(self: LoopThread, work: Any) -> None:
        wait(self, work)
        raise KeyboardInterrupt

    with kvservice.connect("embedded", memory="8MiB") as pool:
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(LoopThread, "wait", interrupted)
            pool.attach("m", Layout(4, (3,)))
        eventually(lambda: not pool._thread.attached, "nothing attached")


def pool_threads() -> int:
    return sum(thread.name == "kvservice-pool" for thread in threading.enumerate())


@pytest.mark.parametrize("what", ["pool", "cache"])
async def test_a_close_that_is_cancelled_goes_on(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """The caller was told that it was cancelled, and does not come again."""
    close, began = PoolRuntime.close if what == "pool" else AttachedProgram.close, threading.Event()

    async def slow(self: Any) -> None:
        began.set()
        await asyncio.sleep(0.05)
        await close(self)

    before = pool_threads()
    pool = await kvservice.connect_async("embedded", memory="8MiB")
    cache = await pool.attach("m", Layout(4, (3,)))
    monkeypatch.setattr(PoolRuntime if what == "pool" else AttachedProgram, "close", slow)
    closing = asyncio.create_task(pool.close() if what == "pool" else cache.close())
    await asyncio.to_thread(began.wait, 10)
    closing.cancel()
    await asyncio.wait([closing])
    assert closing.cancelled()
    await asyncio.to_thread(eventually, lambda: not pool._thread.attached, "nothing attached")
    if what == "cache":
        await pool.close()
    await asyncio.to_thread(eventually, lambda: pool_threads() == before, "no thread of the pool")
    assert pool._thread._runtime is None


async def test_a_close_does_not_hold_up_the_programs_loop() -> None:
    """A node that hangs keeps an explain of the pool for seconds, on a thread that nobody can end."""
    pool, began, over = await kvservice.connect_async("embedded", memory="8MiB"), threading.Event(), threading.Event()

    def work() -> bool:
        began.set()
        return over.wait(10)

    working = pool._thread.loop.submit(in_thread(work))
    await asyncio.to_thread(began.wait, 10)
    closing = asyncio.create_task(pool.close())
    await asyncio.to_thread(eventually, lambda: pool._thread._runtime is None, "the pool is closed")
    await asyncio.sleep(0.05)
    over.set()  # on a loop that stands still nobody does
    await closing
    assert working.result()


def test_a_connect_interrupted_as_it_begins_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    start, before = threading.Thread.start, pool_threads()

    def interrupted(self: threading.Thread) -> None:
        start(self)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(threading.Thread, "start", interrupted)
        kvservice.connect("embedded", memory="8MiB")
    eventually(lambda: pool_threads() == before, "no thread of the pool")


async def test_a_connect_cancelled_as_it_ends_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    opened, closed, close = threading.Event(), list[PoolRuntime](), PoolRuntime.close
    open_here = PoolThread.open

    async def told(self: PoolThread) -> None:
        await open_here(self)
        asyncio.get_running_loop().call_later(0.01, opened.set)  # when the result is on its way to the program's loop

    async def counted(self: PoolRuntime) -> None:
        await close(self)
        closed.append(self)

    monkeypatch.setattr(PoolThread, "open", told)
    monkeypatch.setattr(PoolRuntime, "close", counted)
    connecting = asyncio.create_task(kvservice.connect_async("embedded", memory="8MiB"))
    await asyncio.sleep(0)
    assert opened.wait(10)  # holds up this loop, which has not heard of the pool then
    connecting.cancel()
    await asyncio.wait([connecting])
    assert connecting.cancelled() and len(closed) == 1


async def test_work_that_its_caller_cancels_ends_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    """Also while the thread ends."""
    thread, began = LoopThread(), threading.Event()

    async def hold() -> None:
        began.set()
        await asyncio.sleep(60)

    work = thread.submit(hold())
    await asyncio.to_thread(began.wait, 10)
    thread._stopped = True
    work.cancel()
    thread.stop()
    del work
    gc.collect()
    assert not caplog.records


def test_work_whose_caller_is_interrupted_as_it_submits_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller has no future of it yet, and goes on as if nothing were done for him."""
    thread, submit, ended = LoopThread(), asyncio.run_coroutine_threadsafe, list[str]()

    async def hold() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("let go")

    def interrupted(*arguments: Any) -> None:
        submit(*arguments)
        time.sleep(0.05)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(asyncio, "run_coroutine_threadsafe", interrupted)
        thread.wait(hold())
    assert ended == ["let go"]
    thread.stop()


@pytest.mark.parametrize("how", ["interrupted", "cancelled"])
async def test_a_put_reads_no_array_after_its_end(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Its caller may fill the array with something else then."""
    write, began, ended = MappedPool.write, threading.Event(), list[int]()

    def slow(self: MappedPool, *arguments: Any) -> int:
        if how == "interrupted":
            os.kill(os.getpid(), signal.SIGINT)
        began.set()
        time.sleep(0.2)
        ended.append(write(self, *arguments))
        return ended[-1]

    monkeypatch.setattr(MappedPool, "write", slow)
    if how == "interrupted":
        with kvservice.connect("embedded", memory="8MiB") as pool, pool.attach("m", Layout(4, (3,))) as cache:
            earlier = signal.signal(signal.SIGINT, signal.default_int_handler)
            try:
                with pytest.raises(KeyboardInterrupt):
                    cache.put(range(8), np.ones((2, 3), "float32"))
                assert ended == [2]
            finally:
                signal.signal(signal.SIGINT, earlier)
        return
    async with await kvservice.connect_async("embedded", memory="8MiB") as apool:
        acache = await apool.attach("m", Layout(4, (3,)))
        putting = asyncio.create_task(acache.put(range(8), np.ones((2, 3), "float32")))
        await asyncio.to_thread(began.wait, 10)
        putting.cancel()
        await asyncio.wait([putting])
        assert putting.cancelled() and ended == [2]


async def test_a_put_cancelled_as_its_slots_come_gives_them_back(monkeypatch: pytest.MonkeyPatch) -> None:
    reserve = Session.reserve
    async with await kvservice.connect_async("embedded", memory="8MiB") as pool:
        cache = await pool.attach("m", Layout(4, (3,)))
        program = cache._attached._program

        async def late(self: Session, *arguments: Any) -> Any:
            refs = await reserve(self, *arguments)
            assert refs
            for putting in program._writes:
                putting.cancel()
            return refs

        await cache.put(range(4), np.ones((1, 3), "float32"))
        monkeypatch.setattr(Session, "reserve", late)
        with pytest.raises((asyncio.CancelledError, asyncio.TimeoutError)):
            await cache.put(range(8), np.ones((2, 3), "float32"))
        assert not program.session.held


async def test_what_a_cancelled_caller_was_given_is_let_go() -> None:
    """Also while somebody keeps the error: a hit in it would keep its blocks."""
    thread, done = LoopThread(), threading.Event()

    class Given:
        pass

    made: list[weakref.ref[Given]] = []

    async def give() -> Given:
        given = Given()
        made.append(weakref.ref(given))
        asyncio.get_running_loop().call_later(0.01, done.set)
        return given

    waiting = asyncio.create_task(thread.wait_async(give()))
    await asyncio.sleep(0)
    assert done.wait(10)  # holds up this loop, which has not heard of the result then
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError) as kept:
        await waiting
    del waiting
    await asyncio.sleep(0.05)
    gc.collect()
    assert made[0]() is None, kept
    thread.stop()
