"""Weights of an SGLang engine that are changed in place: what is found by whom, and from when on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvservice.api.pool_thread import PoolThread
from kvservice.connector.sglang.clears import ClearTerms
from kvservice.connector.sglang.pages import Ranks
from kvservice.connector.sglang.storage import KV, PageStorage
from kvservice.testing.eventually import eventually
from tests.unit.connector.sglang.host_memory import (
    PROMPT,
    HostMemory,
    LatentMemory,
    page_hashes,
    places,
    storage,
    wanted,
)

PAGES = page_hashes(PROMPT)
NUMBERS = [0, 1, 2, 3, 4, 5]


class Engine:
    """The notes of an engine, and its threads, which a flush starts anew."""

    def __init__(self) -> None:
        self.changes = 0
        self.clears = ClearTerms(b"an engine", lambda: self.changes)
        self._threads = ThreadPoolExecutor(1)

    def flush(self) -> None:
        self._threads.shutdown()
        self._threads = ThreadPoolExecutor(1)

    def store(self, made: PageStorage) -> list[bool]:
        return self._threads.submit(made.store, [], wanted(PAGES, NUMBERS)).result()

    def find(self, made: PageStorage) -> int:
        return self._threads.submit(made.find, [], PAGES).result()


def test_changed_weights_find_nothing_of_the_earlier_ones(thread: PoolThread) -> None:
    engine = Engine()
    made = storage(HostMemory(), thread=thread, clears=engine.clears)
    assert engine.store(made) == [True] * 6 and engine.find(made) == 6
    engine.changes += 1
    engine.flush()
    assert engine.find(made) == 0
    assert engine.store(made) == [True] * 6 and engine.find(made) == 6


def test_a_thread_from_before_a_change_neither_finds_nor_stores(thread: PoolThread) -> None:
    """Until the engine is flushed its memories may hold pages of the earlier weights."""
    engine = Engine()
    made = storage(HostMemory(), thread=thread, clears=engine.clears)
    made.register("mamba", LatentMemory(), places([0]))
    assert engine.store(made) == [True] * 6 and engine.find(made) == 6
    engine.changes += 1
    assert engine.store(made) == [False] * 6 and engine.find(made) == 0
    engine.flush()
    assert engine.find(made) == 0, "nothing was stored"


def test_a_thread_that_never_called_is_as_old_as_the_others(thread: PoolThread) -> None:
    """With write_back the thread that stores is first asked when pages are evicted, which may be of earlier weights."""
    engine = Engine()
    made = storage(HostMemory(), thread=thread, clears=engine.clears)
    assert engine.find(made) == 0
    with ThreadPoolExecutor(1) as storing:
        engine.changes += 1
        assert storing.submit(made.store, [], wanted(PAGES, NUMBERS)).result() == [False] * 6
    engine.flush()
    assert engine.store(made) == [True] * 6 and engine.find(made) == 6


def test_a_clear_behind_a_change_does_as_a_flush(thread: PoolThread) -> None:
    engine = Engine()
    made = storage(HostMemory(), thread=thread, clears=engine.clears)
    assert engine.store(made) == [True] * 6
    engine.changes += 1
    made.clear()
    assert engine.find(made) == 0
    assert engine.store(made) == [True] * 6 and engine.find(made) == 6


def test_a_storage_attached_behind_a_change_finds_nothing(thread: PoolThread) -> None:
    engine = Engine()
    assert engine.store(storage(HostMemory(), thread=thread, clears=engine.clears)) == [True] * 6
    engine.changes += 1
    again = storage(HostMemory(), thread=thread, clears=engine.clears)
    assert engine.find(again) == 0
    assert engine.store(again) == [True] * 6 and engine.find(again) == 6


def test_a_change_ends_what_was_promised(thread: PoolThread) -> None:
    engine = Engine()
    made = storage(HostMemory(), thread=thread, clears=engine.clears)
    assert engine.store(made) == [True] * 6 and engine.find(made) == 6
    engine.changes += 1
    engine.flush()
    assert made.load([], wanted(PAGES, [8, 9, 10, 11, 12, 13])) == [False] * 6


@pytest.mark.parametrize("count", [1, 2])
def test_ranks_find_what_one_stores_after_a_change(thread: PoolThread, count: int) -> None:
    engines = [Engine(), Engine()]
    ranks = [
        storage(LatentMemory(), ranks=Ranks(number, 2, replicated=True), thread=thread, clears=engine.clears)
        for number, engine in enumerate(engines)
    ]
    for engine in engines:
        engine.changes += count
    assert engines[0].store(ranks[0]) == [True] * 6
    assert [engine.find(rank) for engine, rank in zip(engines, ranks, strict=True)] == [6, 6]


def test_pages_that_wait_at_a_change_keep_their_names(thread: PoolThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait for the pool, are of the earlier weights, and were stored as pages of the new ones."""
    engine, may_go = Engine(), threading.Event()
    made = storage(HostMemory(), thread=thread, clears=engine.clears)
    pool = made._pools[KV]
    memory, waiting = pool._pool, list[int]()

    async def slow_memory() -> object:
        waiting.append(1)
        await asyncio.to_thread(may_go.wait, 30)
        return await memory()

    monkeypatch.setattr(pool, "_pool", slow_memory)
    with ThreadPoolExecutor(2) as others:
        storing = others.submit(made.store, [], wanted(PAGES, NUMBERS))
        eventually(lambda: waiting, "the wait for the pool")
        engine.changes += 1
        finding = others.submit(made.find, [], PAGES)
        eventually(lambda: pool._term == engine.clears.term, "the names of the new weights")
        may_go.set()
        assert storing.result() == [True] * 6 and finding.result() == 0
    assert engine.find(made) == 0


class MeanwhileMemory(HostMemory):
    """Something happens once while SGLang says where its pages lie."""

    def __init__(self) -> None:
        super().__init__()
        self.meanwhile: Callable[[], None] = lambda: None

    def get_page_buffer_meta(self, indices: Sequence[int]) -> tuple[list[int], list[int]]:
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()
        return super().get_page_buffer_meta(indices)


def test_a_change_amid_a_store_gives_its_pages_no_new_names(thread: PoolThread) -> None:
    """Its thread was asked for pages of the earlier weights. Where they lie takes a moment, in which another thread
    sees the change."""
    engine, memory = Engine(), MeanwhileMemory()
    made = storage(memory, thread=thread, clears=engine.clears)

    def change() -> None:
        engine.changes += 1
        with ThreadPoolExecutor(1) as other:
            assert other.submit(made.find, [], PAGES).result() == 0

    memory.meanwhile = change
    assert engine.store(made) == [True] * 6 and engine.changes == 1
    engine.flush()
    assert engine.find(made) == 0
