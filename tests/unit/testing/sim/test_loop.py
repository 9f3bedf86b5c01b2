"""Asyncio code of simulated processes: one order, virtual time, and nothing of who is paused or dead."""

from __future__ import annotations

import asyncio
import random

import pytest

from kvservice.aio import end_tasks, is_set_within, within
from kvservice.testing.sim.loop import ProcessLoop
from kvservice.testing.sim.world import Process, Violation, World


@pytest.fixture
def world() -> World:
    return World(random.Random(1))


def play(world: World, seconds: float) -> None:
    end = world.now + seconds
    while world.step(end):
        pass


def test_timers_of_two_processes_run_in_virtual_time(world: World) -> None:
    told: list[tuple[str, float]] = []

    async def tick(name: str, seconds: float) -> None:
        for _ in range(2):
            await asyncio.sleep(seconds)
            told.append((name, round(world.now, 6)))

    for name, seconds in (("slow", 1000.0), ("fast", 300.0)):
        ProcessLoop(Process(world, name, name)).start(tick(name, seconds))
    play(world, 3000.0)
    assert told == [("fast", 300.0), ("fast", 600.0), ("slow", 1000.0), ("slow", 2000.0)]


def test_a_paused_process_goes_on_where_it_was(world: World) -> None:
    """A dead one never does."""
    told: list[tuple[str, float]] = []
    paused, dead = (Process(world, name, name) for name in ("paused", "dead"))

    async def wait(process: Process) -> None:
        await asyncio.sleep(1.0)
        told.append((process.name, round(world.now, 6)))

    for process in (paused, dead):
        ProcessLoop(process).start(wait(process))
    play(world, 0.5)
    paused.pause(10.0)
    dead.die()
    play(world, 20.0)
    assert told == [("paused", 10.5)]
    world.end()


def test_deadlines_and_threads_work_as_on_a_real_loop(world: World) -> None:
    """Cancellations do as well."""
    process = Process(world, "one", "one")
    loop = ProcessLoop(process)
    seen: list[object] = []

    async def story() -> None:
        event = asyncio.Event()
        seen.append(await is_set_within(5.0, event))
        loop.call_later(1.0, event.set)
        seen.append(await is_set_within(5.0, event))
        with pytest.raises(asyncio.TimeoutError):
            await within(2.0, asyncio.sleep(60))
        seen.append(await asyncio.to_thread(lambda: "from a thread"))
        sleeper = asyncio.ensure_future(asyncio.sleep(60))
        await end_tasks([sleeper])
        seen.append(sleeper.cancelled())
        seen.append(round(world.now))

    task = loop.start(story())
    play(world, 30.0)
    assert task.done() and task.exception() is None
    assert seen == [False, True, "from a thread", True, 8]


def test_a_task_that_fails_is_a_violation(world: World) -> None:
    async def fail() -> None:
        await asyncio.sleep(1.0)
        raise ZeroDivisionError

    ProcessLoop(Process(world, "one", "one")).start(fail())
    with pytest.raises(Violation, match="ZeroDivisionError"):
        play(world, 2.0)


def test_what_is_sent_to_a_process_that_has_died_says_so(world: World) -> None:
    process = Process(world, "one", "one")
    loop = ProcessLoop(process)
    process.die()
    with pytest.raises(RuntimeError, match="closed"):
        loop.call_soon_threadsafe(print)
