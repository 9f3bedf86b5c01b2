"""LMCache's level 1 above our adapter, cleared by force while a shard that hangs holds up the store of its objects.

python -m tests.integration.lmcache_level_1     prints a line of JSON
"""

from __future__ import annotations

import json
import signal

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.config import EvictionConfig, L1ManagerConfig, L1MemoryManagerConfig, StorageManagerConfig
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import L2AdaptersConfig
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.distributed.storage_manager import StorageManager

from kvservice.testing.cluster import LocalCluster
from kvservice.testing.eventually import eventually
from kvservice.units import MiB
from tests.integration.lmcache_adapter import KEYS, SHAPE, ask

LATER = [ObjectKey(bytes([number]) * 32, "org/model", 0x01000100) for number in range(100, 100 + len(KEYS))]
LAYOUT = MemoryLayoutDesc([SHAPE], [torch.bfloat16])
ROOM_BYTES = 8 * MiB  # for the four objects and no second four


def write(manager: StorageManager, keys: list[ObjectKey], fill: int) -> None:
    lent = manager.reserve_write(keys, LAYOUT)
    assert len(lent) == len(keys), "level 1 has no room"
    for one in lent.values():
        one.raw_data.view(torch.uint8).fill_(fill)
    manager.finish_write(keys)


def main() -> None:
    with LocalCluster(nodes=1, pool_bytes=64 * MiB) as cluster:
        params = {"weights_version": "v1", "socket": cluster.socket("n0")}
        config = PluginL2AdapterConfig("kvservice.connector.lmcache", "KVServiceL2Adapter", params)
        memory = L1ManagerConfig(L1MemoryManagerConfig(ROOM_BYTES, use_lazy=False, init_size_in_bytes=ROOM_BYTES))
        manager = StorageManager(StorageManagerConfig(memory, EvictionConfig("noop"), L2AdaptersConfig([config])))
        _, adapter = manager.l2_adapters()[0]
        reader = create_l2_adapter(config)
        assert ask(reader, torch.bfloat16)[0] == 0
        cluster.kill("n0", signal.SIGSTOP)
        write(manager, KEYS, 1)
        eventually(lambda: bool(adapter._tasks), "the objects are being stored")
        manager.clear(force=True)
        write(manager, LATER, 2)
        cluster.kill("n0", signal.SIGCONT)
        eventually(lambda: not adapter._tasks, "the stores have ended", 30)
        status = adapter.report_status()
        found, loaded, there = ask(reader, torch.bfloat16)
        reader.close()
        manager.close()
    print(json.dumps({"status": status, "found": found, "loaded": loaded, "there": sorted(there)}), flush=True)


if __name__ == "__main__":
    main()
