"""Runs one lookup shard as a process of its own until SIGTERM or Ctrl-C. `kvservice lookup` and
`python -m kvservice.lookup` are this."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

from kvservice.lookup.server import LookupServer
from kvservice.observe.lookup_metrics import LookupNumbers, serve_lookup_metrics

SIGNALS = (signal.SIGTERM, signal.SIGINT)
READ_SECONDS = 5.0


async def serve(
    server: LookupServer, where: str, *, service: str = "default", host: str = "", metrics_port: int = 0
) -> None:
    """Returns after a clean stop. `where` names the listener in the one line that is printed when it serves; metrics
    are answered on `host` too. Raises ConfigError when the address cannot be bound."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, stopped.set)

    def read() -> LookupNumbers | None:  # on a thread of the metrics server
        try:
            return asyncio.run_coroutine_threadsafe(numbers(), loop).result(READ_SECONDS)
        except (TimeoutError, RuntimeError):  # busy, or ending
            return None

    async def numbers() -> LookupNumbers:
        return server.numbers()

    end_metrics: Callable[[], None] = lambda: None  # noqa: E731
    port = await server.start()
    try:
        if metrics_port:
            end_metrics = serve_lookup_metrics(service, read, metrics_port, host)
        print(f"{where}:{port}", flush=True)
        await stopped.wait()
        for number in SIGNALS:
            loop.remove_signal_handler(number)  # a second signal ends the process: it has no files
    finally:
        await asyncio.to_thread(end_metrics)
        await server.stop()
