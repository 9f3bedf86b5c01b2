"""Runs one node's shard as a process of its own until SIGTERM or Ctrl-C. `kvservice shard` and
`python -m kvservice.shard` are this.

The end is a drain of `grace_seconds` at most: no new work, "ready" answers no, hot blocks go to other nodes unless they
stay for the next start, readers finish, the directory is told, and only then the listeners close. A second signal ends
the waiting. A shard that was told to leave from outside ends as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Coroutine
from typing import Any

from kvservice.core.messages import PoolStats
from kvservice.observe.metrics import serve_metrics
from kvservice.shard.server import ShardServer, ShardServerConfig

log = logging.getLogger("kvservice.shard")

SIGNALS = (signal.SIGTERM, signal.SIGINT)
READ_SECONDS = 5.0
POLL_SECONDS = 0.1


async def serve(
    config: ShardServerConfig, *, keep_segment: bool = False, grace_seconds: float = 0.0, metrics_port: int = 0
) -> None:
    """Returns after a clean stop, which leaves no file, or only the segment with `keep_segment`. Raises what
    ShardServer.start raises."""
    server = ShardServer(config)
    asked: asyncio.Queue[None] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def ask(*_: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(asked.put_nowait, None)

    # Not the loop's own handlers: they end with it, and a signal that comes then would be the exit status.
    for number in SIGNALS:
        signal.signal(number, ask)

    def read() -> PoolStats | None:  # on a thread of the metrics server
        try:
            return asyncio.run_coroutine_threadsafe(numbers(), loop).result(READ_SECONDS)
        except (TimeoutError, RuntimeError):  # busy, or ending
            return None

    async def numbers() -> PoolStats:
        return server.stats()

    end_metrics: Callable[[], None] = lambda: None  # noqa: E731
    holder = await server.start()
    try:
        if metrics_port:
            end_metrics = serve_metrics(config.service, read, metrics_port, config.peer_host.strip("[]"))
        print(f"shard {holder.node_id} serves peers at {holder.peer_address}, epoch {holder.epoch}", flush=True)
        await first_of(asked.get(), server.left.wait())
        if keep_segment:
            await wait_for_readers(server, asked, grace_seconds)
        elif not server.left.is_set() and grace_seconds > 0:
            await first_of(server.drain(grace_seconds), asked.get())
    finally:
        await asyncio.to_thread(end_metrics)
        await server.stop(leaving=True, keep_segment=keep_segment)
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)


async def first_of(*works: Coroutine[Any, Any, object]) -> None:
    """Until one of them is done; the others are cancelled. Raises what the first one raised."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()


async def wait_for_readers(server: ShardServer, asked: asyncio.Queue[None], grace_seconds: float) -> None:
    """The blocks stay for the next start: take no new work and wait until no lease is out, a signal comes again, or
    the time is over."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + grace_seconds
    server.pool.drain()
    log.info("shard_draining", extra={"leases": server.pool.lease_count, "grace_seconds": grace_seconds})
    while server.pool.lease_count and loop.time() < deadline and asked.empty():  # noqa: ASYNC110  nobody tells
        await asyncio.sleep(POLL_SECONDS)
