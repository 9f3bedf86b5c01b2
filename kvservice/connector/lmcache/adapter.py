"""The L2 adapter of `lmcache server`: LMCache's tasks, event descriptors and bitmaps on top of PooledObjects.

LMCache calls it on two threads, which never wait here: a task runs on the pool's thread, its result is kept until
LMCache takes it, and a descriptor says that there is one. LMCache does not say what is evicted: the pool does.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from importlib.metadata import version
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.platform import create_event_notifier

from kvservice.api.pool_thread import PoolThread
from kvservice.connector.cpu_packing import cpu_packing
from kvservice.connector.lmcache.lent import LentMemory
from kvservice.connector.lmcache.names import KV_FORMAT, ObjectLayout
from kvservice.connector.lmcache.objects import PooledObjects
from kvservice.connector.lmcache.options import AdapterOptions
from kvservice.errors import KVServiceError
from kvservice.session.options import Mode

log = logging.getLogger("kvservice.lmcache")
T = TypeVar("T")


class TaskResults(Generic[T]):
    """Results of tasks that LMCache has not taken yet. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._results: dict[int, T] = {}
        self._event = create_event_notifier()
        self._is_closed = False

    def put(self, task: int, result: T) -> None:
        with self._lock:
            if self._is_closed:  # nobody takes it, and its descriptor may be another file's
                return
            self._results[task] = result
            self._event.notify()

    def take(self, task: int) -> T | None:
        with self._lock:
            return self._results.pop(task, None)

    def take_all(self) -> dict[int, T]:
        with self._lock:
            found, self._results = self._results, {}
            return found

    def fileno(self) -> int:
        """The descriptor that is readable when there is a result."""
        return int(self._event.fileno())

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._event.close()


class KVServiceL2Adapter(L2AdapterInterface):
    """`params` are AdapterOptions. Raises ConfigError for wrong ones; a shard that is away costs misses only."""

    def __init__(self, params: Mapping[str, object], l1_memory_desc: object = None) -> None:
        super().__init__()
        options = AdapterOptions.parse(params)
        packing = options.packing if options.packing is not None else _packing()
        self._thread = PoolThread(options)
        try:
            if self._thread.mode is Mode.EMBEDDED:
                self._thread.loop.wait(self._thread.open())
        except BaseException:
            self._thread.end()
            raise
        self._objects = PooledObjects(options, self._thread, f"lmcache {version('lmcache')} {packing}")
        self._stored: TaskResults[L2StoreResult] = TaskResults()
        self._found: TaskResults[Bitmap] = TaskResults()
        self._loaded: TaskResults[Bitmap] = TaskResults()
        self._numbers = itertools.count(1)  # the next one is taken at once, on whatever thread
        self._tasks: set[asyncio.Task[Any]] = set()  # used on the loop only
        self._is_closed = False

    # -- LMCache's calls ----

    def get_store_event_fd(self) -> int:
        return self._stored.fileno()

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._found.fileno()

    def get_load_event_fd(self) -> int:
        return self._loaded.fileno()

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        async def work() -> L2StoreResult:
            layouts, lent = _memory_of(objects)
            stored = await self._objects.store(keys, layouts, lent)
            size = sum(one.array.nbytes for one, there in zip(lent, stored, strict=True) if there)
            return L2StoreResult(all(stored), size)

        return self._submit(self._stored, work, lambda: L2StoreResult(False, 0))

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        return self._stored.take_all()

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        async def work() -> Bitmap:
            layouts = {group: _layout_asked(desc) for group, desc in group_layout_descs.items()}
            return _bitmap(await self._objects.lock(keys, layouts))

        return self._submit(self._found, work, lambda: Bitmap(len(keys)))

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        return self._found.take(task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        with contextlib.suppress(KVServiceError):  # closed: then nothing is locked any more
            self._thread.loop.submit(self._objects.unlock(keys))

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        async def work() -> Bitmap:
            loaded = await self._objects.load(keys, *_memory_of(objects))
            self._notify_keys_accessed([key for key, one in zip(keys, loaded, strict=True) if one])
            return _bitmap(loaded)

        return self._submit(self._loaded, work, lambda: Bitmap(len(keys)))

    def query_load_result(self, task_id: int) -> Bitmap | None:
        return self._loaded.take(task_id)

    def report_status(self) -> dict[str, object]:
        """For LMCache's /status. Without a shard the adapter is well, and everything is a miss."""
        counters = {name: count for name, count in sorted(self._objects.counters.items()) if count}
        return {
            "is_healthy": not self._is_closed,
            "type": type(self).__name__,
            "is_attached": self._objects.is_attached,
            "locked_objects": self._objects.lock_count,
            **counters,
        }

    def close(self) -> None:
        """Wait for what is being copied, take back all locks, leave the pool. Blocks for seconds at most. Idempotent.

        What LMCache lent for loading is not touched afterwards. Tasks that have not begun fail.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if self._thread.loop.is_usable:
            self._thread.loop.wait(self._leave())
            self._thread.loop.stop()
        for results in (self._stored, self._found, self._loaded):
            results.close()

    # -- inside ----

    def _submit(
        self, results: TaskResults[T], work: Callable[[], Coroutine[Any, Any, T]], failed: Callable[[], T]
    ) -> int:
        """Run `work`. Returns its number, under which `results` will have what it returns, or what `failed` makes."""
        number = next(self._numbers)

        async def run() -> None:
            task = asyncio.current_task()
            assert task is not None
            self._tasks.add(task)
            result: T | None = None
            try:
                if not self._is_closed:
                    result = await work()
            except Exception:  # thread boundary: LMCache computes what it does not get
                self._objects.counters["task_failed"] += 1
                log.exception("task_failed")
            finally:
                self._tasks.discard(task)
                results.put(number, failed() if result is None else result)

        try:
            self._thread.loop.submit(run())
        except KVServiceError:  # closed
            results.put(number, failed())
        return number

    async def _leave(self) -> None:
        if self._tasks:
            await asyncio.wait(set(self._tasks))
        await self._objects.close()
        await self._thread.close()


def _packing() -> str:
    """How engines on this machine order what LMCache copies as it is."""
    return "gpu" if torch.cuda.is_available() else cpu_packing()


def _layout_asked(desc: MemoryLayoutDesc) -> ObjectLayout | None:
    return ObjectLayout.of(desc.shapes, desc.dtypes, KV_FORMAT) if desc.shapes else None


def _memory_of(objects: Sequence[MemoryObj]) -> tuple[list[ObjectLayout], list[LentMemory]]:
    """What the objects are, and their bytes without a copy."""
    layouts: list[ObjectLayout] = []
    for one in objects:
        meta = one.metadata
        shapes, dtypes = (meta.shapes, meta.dtypes) if meta.shapes and meta.dtypes else ([meta.shape], [meta.dtype])
        layouts.append(ObjectLayout.of(shapes, dtypes, meta.fmt.name))
    # LMCache says that an object is not valid any more before it gives its memory to another one.
    return layouts, [LentMemory(np.frombuffer(one.byte_array, np.uint8), one.is_valid) for one in objects]


def _bitmap(bits: Sequence[bool]) -> Bitmap:
    made = Bitmap(len(bits))
    for index, bit in enumerate(bits):
        if bit:
            made.set(index)
    return made
