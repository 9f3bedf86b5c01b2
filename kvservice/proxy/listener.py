"""An HTTP server on one address: what the proxy and the console share. Runs on the event loop that starts it."""

from __future__ import annotations

import logging
from ssl import SSLContext
from typing import Any

from aiohttp import web

from kvservice.descriptors import cannot_listen
from kvservice.errors import ConfigError
from kvservice.proxy.client_log import ClientLog


class Listener:
    """Call `start`, then `refuse` if requests under way are to finish first, then `stop`. All on one loop."""

    def __init__(self, app: web.Application, log: logging.Logger, *, idle_seconds: float, **limits: Any) -> None:
        """`idle_seconds` is how long a connection without a request stays open. `limits` are those of aiohttp's request
        parser."""
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,  # or a client that disconnects would be noticed only at the next write to it
            access_log=None,
            logger=ClientLog(log),
            shutdown_timeout=1.0,
            keepalive_timeout=idle_seconds,
            **limits,
        )
        self._site: web.TCPSite | None = None

    async def start(self, host: str, port: int, *, ssl: SSLContext | None = None, backlog: int = 128) -> int:
        """Listen. Returns the port that was bound. Raises ConfigError if the address cannot be bound."""
        await self._runner.setup()
        self._site = web.TCPSite(self._runner, host, port, ssl_context=ssl, backlog=backlog)
        try:
            await self._site.start()
        except (OSError, UnicodeError) as error:
            await self._runner.cleanup()
            raise ConfigError(cannot_listen(f"{host}:{port}", error)) from error
        return int(self._runner.addresses[0][1])

    async def refuse(self) -> None:
        """Accept no more connections."""
        assert self._site is not None, "it was not started"
        await self._site.stop()

    async def stop(self) -> None:
        """Close all connections. Safe after a start that failed."""
        await self._runner.cleanup()
