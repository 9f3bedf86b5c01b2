"""L2 adapters of LMCache used as its server does, without a server: a program, since LMCache is not in the environment.

python -m tests.integration.lmcache_adapter SOCKET FOLDER     prints a line of JSON
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2AdapterConfig
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

from kvservice.testing.eventually import eventually

SHAPE = torch.Size([1, 30, 64, 384])
KEYS = [ObjectKey(bytes([number]) * 32, "org/model", 0x01000100) for number in range(4)]


def objects(dtype: torch.dtype, fill: int) -> list[Any]:
    made: list[Any] = []
    for number in range(len(KEYS)):
        memory = torch.full((SHAPE.numel() * dtype.itemsize,), fill + number, dtype=torch.uint8)
        about = MemoryObjMetadata(
            SHAPE, dtype, 0, memory.numel(), 1, fmt=MemoryFormat.KV_2LTD, shapes=[SHAPE], dtypes=[dtype]
        )
        made.append(TensorMemoryObj(memory, about, None))
    return made


def wait(event: int) -> None:
    poller = select.poll()
    poller.register(event, select.POLLIN)
    assert poller.poll(30_000), "no result in half a minute"
    os.eventfd_read(event)


def store(adapter: Any, dtype: torch.dtype, fill: int) -> bool:
    task = adapter.submit_store_task(KEYS, objects(dtype, fill))
    wait(adapter.get_store_event_fd())
    return bool(adapter.pop_completed_store_tasks()[task].is_successful())


def ask(adapter: Any, dtype: torch.dtype) -> tuple[int, int, set[int]]:
    """(objects found, objects loaded, bytes in them), in the layout of an engine with this type."""
    task = adapter.submit_lookup_and_lock_task(KEYS, {0: MemoryLayoutDesc([SHAPE], [dtype])})
    wait(adapter.get_lookup_and_lock_event_fd())
    found = adapter.query_lookup_and_lock_result(task).popcount()
    memory = objects(dtype, 200)
    task = adapter.submit_load_task(KEYS, memory)
    wait(adapter.get_load_event_fd())
    loaded = adapter.query_load_result(task).popcount()
    adapter.submit_unlock(KEYS)
    return found, loaded, {int(value) for one in memory for value in torch.unique(one.raw_data)}


def exchange(adapter: Any) -> dict[str, Any]:
    """A bfloat16 engine stores; then it and a float16 engine ask."""
    said = {"stored": store(adapter, torch.bfloat16, 1)}
    return said | {str(kind): [*map(list_of, ask(adapter, kind))] for kind in (torch.bfloat16, torch.float16)}


def list_of(value: int | set[int]) -> int | list[int]:
    return sorted(value) if isinstance(value, set) else value


def held() -> list[str]:
    """Threads, and what descriptors are open."""
    found = [thread.name for thread in threading.enumerate()]
    for path in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            found.append(str(path.readlink()))
    return sorted(found)


def main() -> None:
    params = {"weights_version": "v1", "socket": sys.argv[1], "verify_load": "full"}
    config = PluginL2AdapterConfig("kvservice.connector.lmcache", "KVServiceL2Adapter", params)
    result: dict[str, Any] = {}
    before = held()
    for _ in range(2):
        ours = create_l2_adapter(config)
        result["ours"] = exchange(ours)
        result["status"] = ours.report_status()
        for _ in range(4):  # LMCache may close in the middle of all this, and may still ask afterwards
            ours.submit_lookup_and_lock_task(KEYS, {0: MemoryLayoutDesc([SHAPE], [torch.bfloat16])})
            ours.submit_store_task(KEYS, objects(torch.bfloat16, 1))
            ours.submit_load_task(KEYS, objects(torch.bfloat16, 200))
        ours.close()
        ours.close()
        late = ours.submit_load_task(KEYS, objects(torch.bfloat16, 200))
        ours.submit_unlock(KEYS)
        result["late"] = ours.query_load_result(late)
        # gRPC closes its sockets a moment later.
        eventually(lambda: held() == before, "closing leaves no thread and no descriptor", 20, detail=held)
    theirs = create_l2_adapter(FSL2AdapterConfig(sys.argv[2]))
    result["theirs"] = exchange(theirs)
    theirs.close()
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
