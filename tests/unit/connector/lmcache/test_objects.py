"""Objects of LMCache in a pool of this process: what is stored, found, locked and loaded, and what is a miss."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

from kvservice.api.layout import Array
from kvservice.api.pool_thread import PoolThread
from kvservice.connector.lmcache.lent import LentMemory
from kvservice.connector.lmcache.names import ObjectLayout
from kvservice.connector.lmcache.objects import PooledObjects
from kvservice.connector.lmcache.options import AdapterOptions
from kvservice.testing.eventually import eventually
from tests.unit.connector.lmcache.test_names import Key

T = TypeVar("T")
SHAPE = (2, 3, 64, 8)
BFLOAT16 = ObjectLayout.of([SHAPE], [torch.bfloat16], "KV_2LTD")
FLOAT16 = ObjectLayout.of([SHAPE], [torch.float16], "KV_2LTD")
EMBEDDED: Mapping[str, object] = {"weights_version": "v1", "mode": "embedded", "memory": "8MiB"}


@pytest.fixture(scope="module")
def thread() -> Iterator[PoolThread]:
    made = PoolThread(AdapterOptions.parse(EMBEDDED))
    made.loop.wait(made.open())
    yield made
    made.end()


def lent(arrays: Sequence[Array], is_lent: Callable[[], bool] = lambda: True) -> list[LentMemory]:
    return [LentMemory(array, is_lent) for array in arrays]


class Server:
    """What the adapter of one server does."""

    def __init__(self, thread: PoolThread, packing: str = "x86", **options: object) -> None:
        self.objects = PooledObjects(AdapterOptions.parse({**EMBEDDED, **options}), thread, packing)
        self.thread = thread

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        return self.thread.loop.wait(work)

    def store(self, keys: Sequence[Key], arrays: Sequence[Array], layout: ObjectLayout = BFLOAT16) -> list[bool]:
        return self.wait(self.objects.store(keys, [layout] * len(keys), lent(arrays)))

    def lock(self, keys: Sequence[Key], layout: ObjectLayout | None = BFLOAT16) -> list[bool]:
        return self.wait(self.objects.lock(keys, {0: layout}))

    def load(self, keys: Sequence[Key], layout: ObjectLayout = BFLOAT16) -> list[Array | None]:
        arrays = [np.zeros(layout.size_bytes, np.uint8) for _ in keys]
        loaded = self.wait(self.objects.load(keys, [layout] * len(keys), lent(arrays)))
        return [array if one else None for array, one in zip(arrays, loaded, strict=True)]

    def unlock(self, keys: Sequence[Key]) -> None:
        self.wait(self.objects.unlock(keys))

    def leases(self) -> int:
        runtime = self.thread._runtime
        assert runtime is not None
        return runtime.state.lease_count


@pytest.fixture
def server(thread: PoolThread) -> Server:
    return Server(thread, verify_load="full")


def chunks(count: int, **parts: Any) -> list[Key]:
    """A prompt that nobody else has."""
    prompt = os.urandom(8)
    return [Key(prompt + bytes([number]), **parts) for number in range(count)]


def some(count: int, layout: ObjectLayout = BFLOAT16) -> list[Array]:
    return [np.frombuffer(os.urandom(layout.size_bytes), np.uint8) for _ in range(count)]


def test_what_is_stored_is_found_locked_and_loaded(server: Server) -> None:
    keys, arrays = chunks(3), some(3)
    assert server.lock(keys) == [False] * 3
    assert server.store(keys, arrays) == [True] * 3 and server.store(keys[:1], arrays[:1]) == [True]
    assert server.lock([*keys, *chunks(1)]) == [True, True, True, False]
    assert (server.objects.lock_count, server.leases()) == (3, 1)
    for array, loaded in zip(arrays, server.load(keys), strict=True):
        assert loaded is not None and np.array_equal(array, loaded)
    server.unlock(keys[:2])
    assert server.objects.lock_count == 1 and server.leases() == 1
    server.unlock(keys)  # two of them once more
    eventually(lambda: server.leases() == 0, "the lease ends with the last lock")
    assert server.objects.counters["unlocked_twice"] == 2
    assert server.objects.counters["objects_duplicate"] == 1


def test_a_float16_asker_misses_what_a_bfloat16_engine_stored(server: Server) -> None:
    """Same model, same chunk, same size: LMCache itself serves it, and the engine writes garbage."""
    keys, arrays = chunks(2), some(2)
    server.store(keys, arrays)
    assert server.lock(keys, FLOAT16) == [False, False] and server.load(keys, FLOAT16) == [None, None]
    others = some(2, FLOAT16)
    assert server.store(keys, others, FLOAT16) == [True, True]
    assert server.lock(keys, FLOAT16) == server.lock(keys) == [True, True]
    for layout, stored in ((BFLOAT16, arrays), (FLOAT16, others)):
        loaded = server.load(keys, layout)
        assert all(one is not None and np.array_equal(one, want) for one, want in zip(loaded, stored, strict=True))
    server.unlock(keys * 2)
    eventually(lambda: server.leases() == 0, "no lease is left")


def test_servers_with_other_weights_or_packing_share_nothing(thread: PoolThread, server: Server) -> None:
    keys = chunks(1, model_name="shared")
    server.store(keys, some(1))
    same, other = Server(thread), Server(thread, namespace="other", weights_version="v2")
    packed = Server(thread, "x86 amx", namespace="third")
    assert [one.lock(keys) for one in (same, other, packed)] == [[True], [False], [False]]
    same.unlock(keys)
    refused = Server(thread, weights_version="v2")
    assert refused.store(keys, some(1)) == refused.lock(keys) == [False]
    assert refused.objects.counters["miss_unavailable"] == 1 and not refused.objects.is_attached


def test_a_row_is_found_up_to_its_first_gap(server: Server) -> None:
    keys = chunks(4)
    server.store([keys[0], keys[1], keys[3]], some(3))
    ranks = chunks(2, kv_rank=7)
    server.store(ranks, some(2))
    mixed = [keys[0], ranks[0], keys[1], ranks[1], keys[2], keys[3]]
    assert server.lock(mixed) == [True, True, True, True, False, False]
    assert server.objects.counters["miss_never_stored"] == 2
    server.unlock(mixed)
    eventually(lambda: server.leases() == 0, "no lease is left")


def test_a_stored_object_has_the_place_that_lookups_named(server: Server) -> None:
    """So that a prompt's end is evicted before its beginning, and other nodes ask the right partition."""
    keys = chunks(3)
    server.lock(keys)
    server.store(keys, some(3))
    pool = server.wait(server.objects._pool_of("m", BFLOAT16))
    assert pool is not None
    named = pool.keys_of(keys)
    runtime = server.thread._runtime
    assert runtime is not None
    blocks = [runtime.state._store.get(key) for key in named]
    assert all(block is not None for block in blocks)
    assert [block.position for block in blocks if block] == [0, 1, 2]
    assert [runtime.state._store.parent_of(block) for block in blocks if block] == [None, named[0], named[1]]


def test_other_sizes_are_neither_stored_nor_loaded(server: Server) -> None:
    keys = chunks(1)
    short = [np.zeros(BFLOAT16.size_bytes - 1, np.uint8)]
    assert server.store(keys, short) == [False]
    server.store(keys, some(1))
    assert server.wait(server.objects.load(keys, [BFLOAT16], lent(short))) == [False] and not short[0].any()
    assert (server.objects.counters["dropped_size"], server.objects.counters["miss_size"]) == (1, 1)


def test_memory_that_was_taken_back_is_not_stored(server: Server) -> None:
    keys, answers = chunks(3), iter([True, False])
    memory = lent(some(3), lambda: next(answers, False))
    assert server.wait(server.objects.store(keys, [BFLOAT16] * 3, memory)) == [False] * 3
    assert server.objects.counters["dropped_taken_back"] == 3
    arrays = some(3)
    assert server.store(keys, arrays) == [True] * 3
    for want, found in zip(arrays, server.load(keys), strict=True):
        assert found is not None and np.array_equal(want, found)


def test_memory_that_was_taken_back_is_not_written(server: Server) -> None:
    keys, others = chunks(2), [np.zeros(BFLOAT16.size_bytes, np.uint8) for _ in range(2)]
    server.store(keys, some(2))
    work = server.objects.load(keys, [BFLOAT16] * 2, lent(others, lambda: False))
    assert server.wait(work) == [False, False] and not any(map(np.any, others))
    assert server.objects.counters["miss_taken_back"] == 2
    eventually(lambda: server.leases() == 0, "no lease is left")


def test_forgotten_locks_end_without_another_lookup(thread: PoolThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """LMCache gave up a request, and nobody asks its server anything any more."""
    monkeypatch.setattr("kvservice.connector.lmcache.locks.LOCK_SECONDS_MAX", 0.05)
    server, keys = Server(thread), chunks(2)
    server.store(keys, some(2))
    for _ in range(2):
        assert server.lock(keys) == [True, True]
        eventually(lambda: server.leases() == 0, "the lease ends with the locks")
    assert server.objects.lock_count == 0 and server.objects.counters["locks_expired"] == 4


def test_an_object_is_loaded_without_a_lock_too(server: Server) -> None:
    keys, arrays = chunks(2), some(2)
    server.store(keys[:1], arrays[:1])
    loaded = server.load(keys)
    assert loaded[0] is not None and np.array_equal(loaded[0], arrays[0]) and loaded[1] is None
    eventually(lambda: server.leases() == 0, "its lease ends with the load")


def test_an_asker_without_a_layout_means_what_was_stored_last(thread: PoolThread) -> None:
    server, keys = Server(thread), chunks(1)
    assert server.lock(keys, None) == [False] and server.objects.counters["miss_no_layout"] == 1
    server.store(keys, some(1))
    assert server.lock(keys, None) == [True] and server.load(keys, FLOAT16) == [None]
    server.unlock(keys)


def test_a_damaged_object_is_not_loaded(server: Server) -> None:
    keys = chunks(2)
    server.store(keys, some(2))
    server.lock(keys)
    held = server.objects._locks.find(keys[1], BFLOAT16)
    assert held is not None
    held.mapped._segment.payload(held.ref.slot, BFLOAT16.size_bytes)[5] ^= 1
    loaded = server.load(keys)
    assert loaded[0] is not None and loaded[1] is None
    assert server.objects.counters["miss_broken_promise"] == 1
    server.unlock(keys)

    def is_gone() -> bool:
        found = server.lock(keys)
        server.unlock(keys)
        return found == [True, False]

    eventually(is_gone, "the pool gives the damaged object up")
    server.store(keys, some(2))
    server.lock(keys)
    assert all(loaded is not None for loaded in server.load(keys))
    server.unlock(keys)


def test_a_full_pool_stores_the_first_objects(server: Server) -> None:
    large = ObjectLayout.of([(1 << 18,)], [torch.uint8], "KV_2LTD")
    keys = chunks(60)
    stored = server.store(keys, some(60, large), large)
    server.lock(keys, large)
    more = server.store(chunks(20), some(20, large), large)
    assert stored.count(True) == stored.index(False) and not more[-1]
    assert server.objects.counters["dropped_full"] == stored.count(False) + more.count(False)
    server.unlock(keys)


def test_the_layout_used_longest_ago_makes_room(thread: PoolThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvservice.connector.lmcache.objects.LAYOUTS_MAX", 1)
    attached = len(thread.attached)
    server, keys, arrays = Server(thread), chunks(1), some(1)
    assert server.store(keys, arrays) == server.lock(keys) == [True]
    assert server.store(keys, some(1, FLOAT16), FLOAT16) == [True]
    server.wait(server.objects.close())
    assert len(thread.attached) == attached + 1 and server.leases() == 0
    loaded = server.load(keys)
    assert (
        loaded[0] is not None and np.array_equal(loaded[0], arrays[0]) and server.objects.counters["layout_left"] == 2
    )


def test_a_layout_without_bytes_is_refused(server: Server) -> None:
    nothing = ObjectLayout.of([(0,)], [torch.uint8], "KV_2LTD")
    assert server.lock(chunks(1), nothing) == [False] and server.objects.counters["layout_refused"] == 1


def test_without_a_shard_everything_is_a_miss_at_once(tmp_path: Any) -> None:
    options = AdapterOptions.parse({"weights_version": "v1", "socket": str(tmp_path / "none")})
    thread = PoolThread(options)
    server, keys = Server(thread), chunks(2)
    server.objects = PooledObjects(options, thread, "")
    started = time.monotonic()
    assert server.store(keys, some(2)) == server.lock(keys) == [False] * 2 and server.load(keys) == [None] * 2
    assert time.monotonic() - started < options.fetch_timeout_seconds and not server.objects.is_attached
    thread.loop.wait(server.objects.close())
    thread.end()
