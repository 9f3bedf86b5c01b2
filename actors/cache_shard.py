"""CacheShard: one per node. Ray restarts it when its process dies; the new process adopts the blocks of the old one."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from kvservice.actors.hosting import HostedServer
from kvservice.actors.leftovers import remove_leftovers
from kvservice.observe import tracing
from kvservice.observe.endpoint import serve_endpoint
from kvservice.observe.metrics import ShardCollector
from kvservice.shard.server import ShardServer, ShardServerConfig
from kvservice.units import NodeId


class CacheShard:
    """A cache shard as a Ray actor; actors.supervisor makes it one. A method blocks only the thread that runs it."""

    def __init__(self, config: ShardServerConfig, alive: list[NodeId], metrics_port: int) -> None:
        """`alive` names all nodes of the cluster; files that other nodes left on this machine are removed.
        `metrics_port` 0 means that no metrics are served."""
        service, root = config.settings.service, config.settings.runtime_root
        remove_leftovers(service, [*alive, config.node_id], root)
        tracing.start(config.settings.traces, "kvservice-shard", node=config.node_id, service=service)
        self._config = config
        self._server = ShardServer(config)
        self._identity: dict[str, Any] = {}
        self._left = False
        self._hosted = HostedServer(self._start)
        self._end_metrics: Callable[[], None] = lambda: None
        if metrics_port:
            collector = ShardCollector(service, self._hosted.reader(self._server.stats), self._server.timings)
            self._end_metrics = serve_endpoint([collector], self._hosted.reader(self._server.condition), metrics_port)

    def ready(self) -> dict[str, Any]:
        """Address, node and process of this shard. Raises the KVServiceError that keeps it from starting."""
        if self._left:
            return {**self._identity, "left": True}
        self._hosted.ensure_started()
        self._identity = {**asdict(self._server.holder()), "pid": os.getpid(), "left": False}
        return self._identity

    def leave(self, timeout_seconds: float, handover: bool = True) -> None:
        """Begin to leave: hand blocks over, then end. Returns at once; `ready` says when the shard has left."""

        async def begin() -> None:
            self._server.leave(timeout_seconds, handover, exit=True)

        self._hosted.call(begin())

    async def _start(self) -> None:
        await self._server.start()
        self._leaver = asyncio.get_running_loop().create_task(self._end_when_left())

    async def _end_when_left(self) -> None:
        await self._server.left.wait()
        try:
            await self._server.stop(leaving=True)
        finally:  # the supervisor ends the process then, even if something could not be closed
            self._left = True

    def set_lookup_addresses(self, addresses: list[str]) -> None:
        async def apply() -> None:
            self._server.set_lookup_addresses(addresses)

        self._hosted.call(apply())

    def stop(self, keep_blocks: bool = False) -> int:
        """Leave the directory, finish the calls under way, and remove every file, also those of nodes of this machine
        that are gone; with `keep_blocks` not those of the disk tier. Returns the id of this process, which is about to
        end."""
        self._end_metrics()
        self._hosted.close(self._server.stop(leaving=True, forget_disk=not keep_blocks))
        tracing.stop()
        settings = self._config.settings
        remove_leftovers(settings.service, [], settings.runtime_root)
        return os.getpid()
