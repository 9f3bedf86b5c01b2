"""Runs one node's shard as a process of its own until SIGTERM, Ctrl-C or a closed terminal, for `kvservice shard`.

It ends with a drain of at most `grace_seconds`: the shard takes no new work, "ready" answers no, hot blocks go to other
nodes unless they stay for the next start, readers finish, the directory is told, and only then the listeners close. A
shard that an operator told to leave ends in the same way. A second signal ends the waiting and leaves HURRY_SECONDS for
the rest. Whatever has not ended by then ends with the process. No file is left behind in any case.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from kvservice.aio import end_tasks
from kvservice.core.messages import Holder
from kvservice.descriptors import raise_file_limit, say_when_short
from kvservice.garbage import keep_tables
from kvservice.observe import tracing
from kvservice.observe.endpoint import CertificateCollector, on_loop, serve_endpoint
from kvservice.observe.logs import exit_at_once, say
from kvservice.observe.lookup_metrics import LookupCollector
from kvservice.observe.metrics import ShardCollector
from kvservice.shard.server import ShardServer
from kvservice.shard.server_config import ShardServerConfig
from kvservice.signals import EndSignals, end_signals

log = logging.getLogger("kvservice.shard")

POLL_SECONDS = 0.1  # for a stop that is given up to remove its files: they are few
HURRY_SECONDS = 3.0  # for an orderly stop after a second signal: listeners give their calls a second each


async def serve(config: ShardServerConfig, *, keep_segment: bool = False, grace_seconds: float = 0.0) -> None:
    """Serve until a signal, and return after a clean stop. Raises what ShardServer.start raises.

    The stop leaves no file, or with `keep_segment` only the segment and what was cleared.
    """
    tracing.start(config.settings.traces, "kvservice-shard", node=config.node_id, service=config.settings.service)
    try:
        await serve_until_asked(
            config,
            EndSignals(),
            lambda holder: say(f"shard {holder.node_id} serves peers at {holder.peer_address}, epoch {holder.epoch}"),
            keep_segment=keep_segment,
            grace_seconds=grace_seconds,
        )
    finally:
        await asyncio.to_thread(tracing.stop)


async def serve_until_asked(
    config: ShardServerConfig,
    asked: EndSignals,
    tell: Callable[[Holder], None],
    lookups: Iterable[LookupCollector] = (),
    *,
    keep_segment: bool = False,
    grace_seconds: float = 0.0,
) -> None:
    """`serve`, in a process that has more to do. `tell` is called when it serves, and `lookups` are metrics beside
    those of the shard."""
    raise_file_limit()
    say_when_short(log)
    server, settings = ShardServer(config), config.settings
    holder = await started(server, asked)
    if holder is None:
        log.info("ended_before_start", extra={"node": config.node_id})
        return
    keep_tables()
    end_metrics: Callable[[], None] = lambda: None  # noqa: E731
    try:
        if settings.metrics_port:
            loop = asyncio.get_running_loop()
            of_shard = ShardCollector(settings.service, on_loop(loop, server.stats), server.timings)
            condition = on_loop(loop, server.condition)
            certificate = CertificateCollector(settings.service, server.certificate_valid)
            collectors = [of_shard, *lookups, certificate]
            end_metrics = serve_endpoint(collectors, condition, settings.metrics_port, config.peer_host)
        tell(holder)
        await first_of(asked.to_end.wait(), server.left.wait())
        if not server.left.is_set() and grace_seconds > 0:  # what is kept for the next start is handed to nobody
            await first_of(server.drain(grace_seconds, handover=not keep_segment), asked.to_hurry.wait())
    finally:
        await end_process(server, asked, keep_segment=keep_segment)
        await asyncio.to_thread(end_metrics)
        for number in end_signals():
            signal.signal(number, signal.SIG_IGN)


async def started(server: ShardServer, asked: EndSignals) -> Holder | None:
    """Start the server. None if its end is asked for first: nothing is left behind then, although a large pool takes
    minutes to reserve, and whoever asks may kill the process before that. Raises what ShardServer.start raises."""
    start = asyncio.ensure_future(server.start())
    ask = asyncio.ensure_future(asked.to_end.wait())
    try:
        await asyncio.wait([start, ask], return_when=asyncio.FIRST_COMPLETED)
        return start.result() if start.done() else None
    finally:
        await end_tasks([start, ask])


async def end_process(server: ShardServer, asked: EndSignals, *, keep_segment: bool) -> None:
    """Stop the server in order.

    Ends the process with status 1, without its files, when a part of the server does not end, or not within
    HURRY_SECONDS after a signal to hurry.
    """
    stopping = asyncio.ensure_future(server.stop(leaving=True, keep_segment=keep_segment))
    hurry = asyncio.ensure_future(asked.to_hurry.wait())
    await asyncio.wait([stopping, hurry], return_when=asyncio.FIRST_COMPLETED)
    await asyncio.wait([stopping], timeout=HURRY_SECONDS)
    hurry.cancel()
    if stopping.done() and stopping.result():
        return
    stopping.cancel()
    await asyncio.wait([stopping], timeout=POLL_SECONDS)  # it removes the files
    log.error("ended_by_force")
    exit_at_once(1)  # a hanging thread or task would keep the interpreter from ending


async def first_of(*works: Coroutine[Any, Any, object]) -> None:
    """Wait until one of these is done, and cancel the others. Raises what the first one raised."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        await end_tasks(tasks)
