"""Runs one lookup partition as a process of its own until SIGTERM, Ctrl-C or a closed terminal, for `kvservice
lookup`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvservice.descriptors import raise_file_limit
from kvservice.garbage import keep_tables
from kvservice.lookup.server import LookupServer
from kvservice.observe import tracing
from kvservice.observe.endpoint import CertificateCollector, on_loop, serve_endpoint
from kvservice.observe.logs import say
from kvservice.observe.lookup_metrics import LookupCollector
from kvservice.signals import FirstSignal, end_signals


async def serve(
    server: LookupServer,
    what: str,
    *,
    hint: str = "",
    service: str = "default",
    host: str = "",
    metrics_port: int = 0,
    traces: str = "off",
) -> None:
    """Serve until a signal, and return after a clean stop.

    `what` is what serves; it is printed in one line with the address, and `hint` below it. Metrics are served on
    `host`. Raises ConfigError when the address cannot be bound.
    """
    tracing.start(traces, "kvservice-lookup", service=service)
    raise_file_limit()
    asked = FirstSignal(*end_signals())

    end_metrics: Callable[[], None] = lambda: None  # noqa: E731
    address = await server.start()
    keep_tables()
    try:
        if metrics_port:
            loop = asyncio.get_running_loop()
            figures = LookupCollector(service, on_loop(loop, server.numbers))
            certificate = CertificateCollector(service, server.certificate_valid)
            end_metrics = serve_endpoint([figures, certificate], on_loop(loop, server.condition), metrics_port, host)
        say(f"{what} serves {address}")
        if hint:
            say(hint)
        await asked.wait()  # a second signal kills the process; the next start replaces its socket
    finally:
        await asyncio.to_thread(end_metrics)
        await server.stop()
        await asyncio.to_thread(tracing.stop)
