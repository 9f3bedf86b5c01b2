"""CacheShard: one a node. Ray restarts it when its process dies; the new one adopts the blocks of the old."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from kvservice.actors.hosting import HostedServer
from kvservice.actors.leftovers import remove_leftovers
from kvservice.core.messages import PoolStats
from kvservice.errors import Unavailable
from kvservice.observe.metrics import serve_metrics
from kvservice.shard.server import ShardServer, ShardServerConfig
from kvservice.units import NodeId


class CacheShard:
    """Made into a Ray actor by actors.supervisor. Methods block their own thread only."""

    def __init__(self, config: ShardServerConfig, alive: list[NodeId], metrics_port: int) -> None:
        """`alive`: all nodes of the cluster; what others left on this machine is removed. `metrics_port` 0 = none."""
        remove_leftovers(config.service, [*alive, config.node_id], config.runtime_root)
        self._config = config
        self._server = ShardServer(config)
        self._hosted = HostedServer(self._server.start)
        self._end_metrics: Callable[[], None] = lambda: None
        if metrics_port:
            self._end_metrics = serve_metrics(config.service, self._numbers, metrics_port)

    def ready(self) -> dict[str, Any]:
        """Who this shard is. Raises the KVServiceError that keeps it from starting."""
        self._hosted.ensure_started()
        return {**asdict(self._server.holder()), "pid": os.getpid()}

    def set_lookup_addresses(self, addresses: list[str]) -> None:
        async def apply() -> None:
            self._server.set_lookup_addresses(addresses)

        self._hosted.call(apply())

    def stop(self) -> int:
        """Leave the directory, finish calls, remove every file, also those of nodes of this machine that are gone.
        Returns the process id, which is about to end."""
        self._end_metrics()
        self._hosted.close(self._server.stop(leaving=True))
        remove_leftovers(self._config.service, [], self._config.runtime_root)
        return os.getpid()

    def _numbers(self) -> PoolStats | None:
        async def read() -> PoolStats:  # on the loop that changes them
            return self._server.stats()

        try:
            return self._hosted.call(read())
        except Unavailable:
            return None
