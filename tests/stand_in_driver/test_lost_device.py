"""A context that died ends its worker, with a status of its own; an engine that leaves waits for nobody, and kills none
that is healthy."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvservice.copying.cuda.driver import Driver
from kvservice.copying.message import CopyRow
from kvservice.copying.process import STATUS_DEVICE_LOST
from kvservice.core.segment.geometry import slot_index
from kvservice.discovery import find_copy_workers
from kvservice.testing.eventually import eventually
from kvservice.units import Generation
from tests.gpu.slots import KEY, same, segment
from tests.stand_in_driver.engine import WEDGE_SECONDS, Cache, cache_of, linked, worker
from tests.stand_in_driver.test_worker import Bench, bench

UNPIN_MS = 60_000


def check_worker_whose_context_died_ends(driver: Driver, plant: str = "", seconds: float = 20.0) -> None:
    with bench(driver, plant=plant, FAULTS_AT=1) as it:
        assert not it.store(0, 0).succeeded()
        eventually(lambda: it.process.poll() is not None, "the end of the worker", seconds)
        assert it.process.returncode == STATUS_DEVICE_LOST
        eventually(lambda: not it.link.is_ready, "the engine to see that it is gone")


def check_engine_that_leaves_does_not_kill_its_worker(
    driver: Driver, plant: str = "", seconds: float = WEDGE_SECONDS
) -> None:
    with bench(driver, plant=plant, wedge_seconds=seconds, UNPIN_MS=UNPIN_MS) as it:
        assert it.store(0, 0).succeeded()
        lend_something(it)  # so that it waits for the worker's last word
        started = time.monotonic()
        it.link.close()
        assert time.monotonic() - started < seconds
        assert it.process.poll() is None, "the engine killed it"
        with linked(it.cache, it.directory, it.made) as (link, mark):  # and the next engine is served meanwhile
            again = Bench(it.cache, it.made, link, mark, it.directory, it.process)
            assert again.store(1, 1).succeeded()
            assert same(again.slot(1), it.cache.block(1))


def test_worker_whose_context_died_ends_with_a_status_of_its_own(driver: Driver) -> None:
    check_worker_whose_context_died_ends(driver)


def test_engine_leaves_a_worker_with_a_dead_context_at_once(driver: Driver) -> None:
    with bench(driver, FAULTS_AT=1) as it:
        assert not it.store(0, 0).succeeded()
        lend_something(it)
        started = time.monotonic()
        it.link.close()
        assert time.monotonic() - started < WEDGE_SECONDS
        assert it.link.take_counters().get("copy_worker_wedged", 0) == 0


def test_engine_that_leaves_does_not_wait_for_the_unpinning(driver: Driver) -> None:
    """Nor does it kill its worker. To unpin a large pool takes longer than an engine's patience."""
    check_engine_that_leaves_does_not_kill_its_worker(driver)


@pytest.mark.parametrize(
    ("mistake", "check"),
    [
        ("final_errors_are_forgotten", check_worker_whose_context_died_ends),
        ("unpinning_is_awaited", check_engine_that_leaves_does_not_kill_its_worker),
    ],
)
def test_planted_mistake_around_copies_is_noticed(driver: Driver, mistake: str, check: Callable[..., None]) -> None:
    with pytest.raises(AssertionError):
        check(driver, mistake, seconds=3.0)


def test_memory_of_a_gone_engine_is_closed_before_unpinning(driver: Driver) -> None:
    """While it is open in the worker, the GPU does not have it for the engine's successor."""
    with worker(UNPIN_MS=UNPIN_MS) as (process, directory), segment() as made:
        with cache_of(driver) as cache, linked(cache, directory, made):
            assert has_opened(process.pid, cache)
        eventually(lambda: not has_opened(process.pid, cache), "the worker to close it", UNPIN_MS / 2000)
        assert find_copy_workers(directory), "the worker goes on"


def lend_something(it: Bench) -> None:
    row = CopyRow(3, slot_index(0, 0), Generation(0), KEY)
    assert it.link.lend([row], it.mark()) is not None


def has_opened(pid: int, cache: Cache) -> bool:
    """A mapping of the stand-in as large as this cache is in that process."""
    sizes = set()
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if "memfd:stand-in" in line:
            start, _, end = line.split()[0].partition("-")
            sizes.add(int(end, 16) - int(start, 16))
    return any(size > cache.layout.region_bytes for size in sizes)
