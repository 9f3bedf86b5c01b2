"""What the proxy's tests start: fake servers and proxies between them and a client, on the test's event loop."""

from __future__ import annotations

from typing import Any

import aiohttp

from kvservice.proxy.server import Proxy
from kvservice.proxy.servers import Role, Server
from kvservice.proxy.settings import ProxySettings
from kvservice.testing.eventually import eventually_async
from tests.integration.openai_server import FakeServer

COMPLETIONS = "/v1/completions"


class Running:
    """A proxy and a client of it."""

    def __init__(self, proxy: Proxy, session: aiohttp.ClientSession) -> None:
        self.proxy = proxy
        self.session = session
        self.url = f"http://127.0.0.1:{proxy.port}"

    async def post(self, body: dict[str, Any], path: str = COMPLETIONS, **headers: str) -> tuple[int, bytes]:
        async with self.session.post(self.url + path, json=body, headers=headers) as response:
            return response.status, await response.read()

    async def get(self, path: str) -> tuple[int, bytes]:
        async with self.session.get(self.url + path) as response:
            return response.status, await response.read()

    async def settled(self, *, nodes: bool = True) -> None:
        """Every server was checked, and the nodes of healthy prefill servers are known."""

        def is_known(server: Server) -> bool:
            lacks_node = nodes and server.role is Role.PREFILL and server.healthy and server.node is None
            return server.reason != "not checked yet" and not lacks_node

        await eventually_async(lambda: all(map(is_known, self.proxy.pool)), "every server checked, with its node")

    async def idle(self) -> None:
        """Nothing is under way to any server."""
        await eventually_async(
            lambda: not any(server.in_flight for server in self.proxy.pool), "nothing under way to any server"
        )


class Lab:
    """Starts servers and proxies, and ends them with the test."""

    def __init__(self) -> None:
        self._servers: list[FakeServer] = []
        self._proxies: list[Running] = []

    async def server(self, **options: Any) -> FakeServer:
        self._servers.append(FakeServer(**options))
        return await self._servers[-1].start()

    async def proxy(self, prefill: list[FakeServer], decode: list[FakeServer], **options: Any) -> Running:
        fast = {"port": 0, "check_seconds": 0.1, "grace_seconds": 1.0, "connect_seconds": 1.0, **options}
        addresses = tuple(server.url for server in prefill), tuple(server.url for server in decode)
        proxy = Proxy(ProxySettings(*addresses, **fast))
        await proxy.start()
        self._proxies.append(Running(proxy, aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(10))))
        if not options.get("api_key") and all(server.node for server in prefill):
            await self._proxies[-1].settled()
        return self._proxies[-1]

    async def end(self) -> None:
        for running in self._proxies:
            await running.session.close()
            if not running.proxy._stopping:
                await running.proxy.stop()
        for server in self._servers:
            server.release()
            await server.stop()
