"""Runs one lookup shard as a process of its own until SIGTERM or Ctrl-C. `kvservice lookup` and
`python -m kvservice.lookup` are this."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

from kvservice.lookup.server import LookupServer
from kvservice.observe.logs import say
from kvservice.observe.lookup_metrics import serve_lookup_metrics
from kvservice.observe.metrics import read_on

SIGNALS = (signal.SIGTERM, signal.SIGINT)


async def serve(
    server: LookupServer, where: str, *, service: str = "default", host: str = "", metrics_port: int = 0
) -> None:
    """Returns after a clean stop. `where` names the listener in the one line that is printed when it serves; metrics
    are answered on `host` too. Raises ConfigError when the address cannot be bound."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, stopped.set)

    end_metrics: Callable[[], None] = lambda: None  # noqa: E731
    port = await server.start()
    try:
        if metrics_port:
            end_metrics = serve_lookup_metrics(service, read_on(loop, server.numbers), metrics_port, host)
        say(f"{where}:{port}")
        await stopped.wait()
        for number in SIGNALS:
            loop.remove_signal_handler(number)  # a second signal ends the process: it has no files
    finally:
        await asyncio.to_thread(end_metrics)
        await server.stop()
