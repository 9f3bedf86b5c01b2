"""Metrics and probes of a pool in this process, at a port of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from kvservice.aio import in_thread
from kvservice.observe.condition import Condition

if TYPE_CHECKING:
    from kvservice.pool.runtime import PoolRuntime

SERVICE = "embedded"  # the label `service` of its metrics


def watched(pool: PoolRuntime, port: int) -> PoolRuntime:
    """The same pool, with /metrics, /livez and /readyz at this port until it is closed. Call it on the pool's loop.
    A taken port costs a warning and the metrics, nothing else."""
    from kvservice.observe.endpoint import on_loop, serve_endpoint  # prometheus_client takes a tenth of a second
    from kvservice.observe.metrics import ShardCollector

    loop = asyncio.get_running_loop()
    collector = ShardCollector(SERVICE, on_loop(loop, pool.stats), lambda: pool.timings)
    end = serve_endpoint([collector], on_loop(loop, lambda: Condition(dead=pool.fenced or "")), port)
    return cast("PoolRuntime", _WatchedPool(pool, end))


class _WatchedPool:
    """A pool whose metrics end with it."""

    def __init__(self, pool: PoolRuntime, end: Callable[[], None]) -> None:
        self._pool = pool
        self._end = end

    def __getattr__(self, name: str) -> object:
        return getattr(self._pool, name)

    async def close(self) -> None:
        await in_thread(self._end)  # a request under way waits for this loop
        await self._pool.close()
