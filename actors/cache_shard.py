"""CacheShard: one a node. Ray restarts it when its process dies; the new one adopts the blocks of the old."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

from kvservice.actors.hosting import HostedServer
from kvservice.actors.leftovers import remove_leftovers
from kvservice.shard.server import ShardServer, ShardServerConfig
from kvservice.units import NodeId


class CacheShard:
    """Made into a Ray actor by actors.supervisor. Methods block their own thread only."""

    def __init__(self, config: ShardServerConfig, alive: list[NodeId]) -> None:
        """`alive`: all nodes of the cluster; what others left on this machine is removed."""
        remove_leftovers(config.service, [*alive, config.node_id], config.runtime_root)
        self._server = ShardServer(config)
        self._hosted = HostedServer(self._server.start)

    def ready(self) -> dict[str, Any]:
        """Who this shard is. Raises the KVServiceError that keeps it from starting."""
        self._hosted.ensure_started()
        return {**asdict(self._server.holder()), "pid": os.getpid()}

    def set_lookup_addresses(self, addresses: list[str]) -> None:
        async def apply() -> None:
            self._server.set_lookup_addresses(addresses)

        self._hosted.call(apply())

    def stop(self) -> int:
        """Leave the directory, finish calls, remove every file. Returns the process id, which is about to end."""
        self._hosted.close(self._server.stop(leaving=True))
        return os.getpid()
