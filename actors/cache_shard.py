"""CacheShard: one per node. Ray restarts it when its process dies; the new process adopts the blocks of the old one.

What a shard is made of is imported where it runs: the processes that only place shards start sooner without.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import ray

from kvservice.shard.server_config import ShardServerConfig
from kvservice.units import NodeId, endpoint_of

LOOKUPS_SECONDS = 10.0  # for lookup partitions that start at the same time; then the shard starts without them
LOOK_SECONDS = 0.05  # between two looks whether they listen; one look is a connection


class CacheShard:
    """A cache shard as a Ray actor; actors.supervisor makes it one. A method blocks only the thread that runs it."""

    def __init__(self, config: ShardServerConfig, alive: list[NodeId], metrics_port: int) -> None:
        """`alive` names all nodes of the cluster; files that other nodes left on this machine are removed.
        `metrics_port` 0 means that no metrics are served."""
        from kvservice.actors.hosting import HostedServer
        from kvservice.actors.leftovers import remove_leftovers
        from kvservice.observe import tracing
        from kvservice.observe.endpoint import serve_endpoint
        from kvservice.observe.metrics import ShardCollector
        from kvservice.shard.server import ShardServer

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
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ray says so of its own use of itself
            is_first = not ray.get_runtime_context().was_current_actor_reconstructed
        if is_first:
            await _listening(self._config.lookup_addresses)
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
        from kvservice.actors.leftovers import remove_leftovers
        from kvservice.observe import tracing

        self._end_metrics()
        self._hosted.close(self._server.stop(leaving=True, forget_disk=not keep_blocks))
        tracing.stop()
        settings = self._config.settings
        remove_leftovers(settings.service, [], settings.runtime_root)
        return os.getpid()


async def _listening(addresses: Sequence[str]) -> None:
    """Wait until all of these listen: a shard asks them at its start what was cleared while its node was away."""
    from kvservice.aio import within

    async def look(address: str) -> None:
        while True:
            try:
                if address.startswith("unix:"):
                    _, writer = await asyncio.open_unix_connection(address.removeprefix("unix:"))
                else:
                    endpoint = endpoint_of(address.removeprefix("dns:///"))
                    assert endpoint is not None, "the supervisor has made it of a host and a port"
                    _, writer = await asyncio.open_connection(*endpoint)
            except OSError:
                await asyncio.sleep(LOOK_SECONDS)
            else:
                writer.close()
                return

    async def look_at_all() -> None:
        await asyncio.gather(*map(look, addresses))

    with contextlib.suppress(asyncio.TimeoutError):
        await within(LOOKUPS_SECONDS, look_at_all())
