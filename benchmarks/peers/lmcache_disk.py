"""LMCache's disk back end for `benchmarks.tier_disk`: its L2 adapter `fs_native`, whose threads are in C++.

Installed by `make .venv-lmcache/.installed`. One file an object, with O_DIRECT, as many threads as the others have; it
writes a temporary file and renames it, and keeps no digest.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.report import ROOT

if TYPE_CHECKING:
    from benchmarks.tier_disk import Blocks, Transfer

SITE = ROOT / ".venv-lmcache" / "site"
IN_FLIGHT = 32  # tasks of one object, as many as the tier is given blocks at once
WAIT_MS = 60_000  # for one task: more means that it hangs


def is_installed() -> bool:
    return SITE.is_dir()


def _adapter(folder: Path, threads: int) -> Any:
    os.environ.update(LMCACHE_DISABLE_BANNER="1", LMCACHE_TRACK_USAGE="false", LMCACHE_LOG_LEVEL="WARNING")
    if str(SITE) not in sys.path:
        sys.path.append(str(SITE))
    from lmcache.v1.distributed.l2_adapters import create_l2_adapter
    from lmcache.v1.distributed.l2_adapters.fs_native_l2_adapter import FSNativeL2AdapterConfig

    return create_l2_adapter(FSNativeL2AdapterConfig(str(folder), num_workers=threads, use_odirect=True))


def _objects(blocks: Blocks) -> tuple[list[Any], list[Any]]:
    """The blocks as LMCache's keys and objects, on the same memory."""
    import torch
    from lmcache.v1.distributed.api import ObjectKey
    from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

    keys = [ObjectKey(bytes(block.key), "benchmark", 0) for block, _ in blocks]
    objects: list[Any] = []
    for _, payload in blocks:
        size = len(payload)
        about = MemoryObjMetadata(torch.Size([size]), torch.uint8, 0, size, 1, fmt=MemoryFormat.KV_2LTD)
        objects.append(TensorMemoryObj(torch.frombuffer(payload, dtype=torch.uint8), about, None))
    return keys, objects


@contextmanager
def lmcache_disk(folder: Path, threads: int) -> Iterator[Transfer]:
    adapter = _adapter(folder, threads)

    def stored() -> list[bool]:
        return [result.is_successful() for result in adapter.pop_completed_store_tasks().values()]

    def transfer(blocks: Blocks, writes: bool) -> None:
        keys, objects = _objects(blocks)
        under_way: list[int] = []

        def loaded() -> list[bool]:
            results = [(task, adapter.query_load_result(task)) for task in under_way]
            under_way[:] = [task for task, bitmap in results if bitmap is None]
            return [bitmap.popcount() == 1 for _, bitmap in results if bitmap is not None]

        submit = adapter.submit_store_task if writes else adapter.submit_load_task
        event = adapter.get_store_event_fd() if writes else adapter.get_load_event_fd()
        _run(keys, objects, lambda *item: under_way.append(submit(*item)), stored if writes else loaded, event)

    try:
        yield transfer
    finally:
        adapter.close()


def _run(
    keys: Sequence[Any],
    objects: Sequence[Any],
    submit: Callable[[list[Any], list[Any]], None],
    ended: Callable[[], list[bool]],
    event: int,
) -> None:
    """One task an object, IN_FLIGHT at a time. Each must succeed."""
    poller = select.poll()
    poller.register(event, select.POLLIN)
    given = done = 0
    while done < len(keys):
        while given < len(keys) and given - done < IN_FLIGHT:
            submit([keys[given]], [objects[given]])
            given += 1
        assert poller.poll(WAIT_MS), "LMCache's back end hangs"
        os.eventfd_read(event)
        results = ended()
        assert all(results), "LMCache's back end failed"
        done += len(results)
