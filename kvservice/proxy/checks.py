"""Checks the servers: asks each for its health at intervals, and asks prefill servers which node they are on.

Runs on the proxy's event loop, each check in a task of its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import aiohttp

from kvservice.aio import begun, end_tasks, is_set_within
from kvservice.proxy import bodies, upstream
from kvservice.proxy.relay import new_handoff_id
from kvservice.proxy.servers import Role, Server, ServerFault, ServerPool
from kvservice.proxy.settings import ProxySettings
from kvservice.proxy.upstream import AnswerKind, UpstreamAnswer, UpstreamFault

log = logging.getLogger("kvservice.proxy")

# For an answer of /health, which a healthy server gives in milliseconds. Two late answers make it sick
# (SLOW_CHECKS_MAX).
CHECK_SECONDS = 3.0
# For a completion of one token. It is long because the server may have a queue. A late answer is logged, and asked
# again.
PROBE_SECONDS = 60.0


class ServerChecks:
    """Runs the checks. Call `run` in a task and cancel it to stop. `soon` wakes it to check failed servers before the
    interval ends.

    `on_sick` is called at every failed check that finds or leaves a server sick: a failed request may have made it sick
    first, and others may still wait at it.
    """

    def __init__(
        self,
        settings: ProxySettings,
        pool: ServerPool,
        session: aiohttp.ClientSession,
        on_sick: Callable[[Server], None],
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._session = session
        self._on_sick = on_sick
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._probing: set[str] = set()
        self._told: dict[str, str] = {}  # by prefill URL: the last event logged about its probes

    def soon(self) -> None:
        self._wake.set()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                self._wake.clear()
                for server in self._pool.due(loop.time()):
                    begun(self._check(server), self._tasks)
                await is_set_within(self._pool.seconds_to_next_check(loop.time()), self._wake)
        finally:
            await end_tasks(self._tasks)

    async def _check(self, server: Server) -> None:
        was_healthy, slow, reason = server.healthy, False, ""
        try:
            answer = await self._get(server, "/health", CHECK_SECONDS)
            if upstream.kind_of(answer.status) is not AnswerKind.GOOD:
                reason = f"/health answered {answer.status}"
        except UpstreamFault as error:
            if error.fault is ServerFault.BUSY:
                self._pool.check_impossible(server, str(error), asyncio.get_running_loop().time())
                log.warning("check_impossible", extra={"server": server.url, "detail": str(error)})
                return
            slow, reason = error.fault is ServerFault.TIMEOUT, str(error)
        except Exception as error:  # a server whose check never ended would never be checked again
            log.exception("check_failed", extra={"server": server.url})
            reason = f"{type(error).__name__}: {error}"
        now = asyncio.get_running_loop().time()
        if reason:
            self._pool.check_failed(server, reason, now, slow=slow)
        else:
            self._pool.check_passed(server, now)
        if server.next_check_at <= now:
            self.soon()
        if server.healthy != was_healthy:
            event = "server_healthy" if server.healthy else "server_unhealthy"
            log.info(event, extra={"role": server.role.value, "server": server.url, "reason": server.reason})
        if reason and not server.healthy:
            self._on_sick(server)
        if server.healthy and server.role is Role.PREFILL and server.node is None and server.url not in self._probing:
            await self._probe(server)

    async def _probe(self, server: Server) -> None:
        self._probing.add(server.url)
        try:
            node = await self._ask_node(server)
        except UpstreamFault as error:
            self._tell(server, "prefill_probe_failed", str(error))
            return
        finally:
            self._probing.discard(server.url)
        if not server.healthy or server.node is not None:
            return  # the server failed meanwhile, or a request's answer has named the node
        self._pool.learnt(server, node)
        if node is None:
            hint = (
                "its answers name no node, so nothing is handed off: it has no KVServiceConnector, is a kv_consumer, "
                "or has no pool now"
            )
            self._tell(server, "prefill_server_hands_nothing_off", hint)
        else:
            self._tell(server, "prefill_node_known", node)

    async def _ask_node(self, server: Server) -> str | None:
        models = await self._get(server, "/v1/models", CHECK_SECONDS)
        model = bodies.model_of(models.body) if models.status == 200 else None
        if model is None:
            raise UpstreamFault(ServerFault.ERROR, f"/v1/models answered {models.status} and names no model")
        body = bodies.probe_body(model, new_handoff_id())
        answer = await self._get(server, "/v1/completions", PROBE_SECONDS, body)
        if upstream.kind_of(answer.status) is not AnswerKind.GOOD:
            raise UpstreamFault(ServerFault.ERROR, f"/v1/completions answered {answer.status}: {answer.body[:200]!r}")
        return bodies.node_of(answer.body)

    async def _get(self, server: Server, path: str, seconds: float, body: bytes | None = None) -> UpstreamAnswer:
        key = self._settings.api_key
        async with upstream.asked(
            self._session,
            server,
            path,
            connect_seconds=min(self._settings.connect_seconds, seconds),
            total_seconds=seconds,
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
            body=body,
        ) as response:
            return await upstream.whole(response)

    def _tell(self, server: Server, event: str, detail: str) -> None:
        """Log an event once, until another event is logged for this server."""
        if self._told.get(server.url) != event:
            self._told[server.url] = event
            level = logging.INFO if event == "prefill_node_known" else logging.WARNING
            log.log(level, event, extra={"server": server.url, "detail": detail})
