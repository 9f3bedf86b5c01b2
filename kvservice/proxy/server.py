"""The proxy as an HTTP server: its routes, its limits, its start and its orderly end.

Runs on one event loop, which it owns when started by `run`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
from collections.abc import Awaitable, Callable

import aiohttp
from aiohttp import web

from kvservice.aio import end_tasks, is_set_within, within
from kvservice.descriptors import raise_file_limit, say_when_short
from kvservice.errors import ConfigError, InvalidRequest
from kvservice.garbage import keep_tables
from kvservice.observe import logs, tracing
from kvservice.proxy import bodies, upstream
from kvservice.proxy.checks import ServerChecks
from kvservice.proxy.listener import Listener
from kvservice.proxy.metrics import PATHS, ProxyMetrics
from kvservice.proxy.plan import BUSY, DECODE_FAILED, NO_CONNECTION, NO_DECODE, STOPPING, Problem
from kvservice.proxy.relay import ClientExchange, Surroundings, answer_response, problem_response
from kvservice.proxy.servers import Role, Server, ServerFault, ServerPool
from kvservice.proxy.settings import ProxySettings
from kvservice.proxy.upstream import AnswerKind, UpstreamFault
from kvservice.signals import FirstSignal

log = logging.getLogger("kvservice.proxy")

# Connections that wait for accept. More than a burst of clients opens at once; beyond it the kernel refuses them.
BACKLOG = 512
# For a client's connection without a request. Each holds a file descriptor. It is longer than the 60 s for which load
# balancers keep theirs, so that the client closes first and sends no request into a connection that is being closed.
IDLE_SECONDS = 75.0
# For one server's answer to /v1/models. It needs no GPU: a server that takes longer is not well, and the next one is
# asked.
MODELS_SECONDS = 10.0
ENDING_SECONDS = 3.0  # For exchanges that were told to stop, and for connections to close. Then they are cut.
SLOW_BODY = Problem(408, "timeout", "the request body did not arrive in time")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Proxy:
    """One proxy. Call `start`, then `stop`, both on the loop that serves. `port` is the port that was bound."""

    def __init__(self, settings: ProxySettings) -> None:
        self.settings = settings
        self.port = 0
        self.pool = ServerPool(
            settings.prefill,
            settings.decode,
            in_flight_max=settings.in_flight_max,
            check_seconds=settings.check_seconds,
        )
        self.metrics = ProxyMetrics(self.pool)
        self._exchanges: set[ClientExchange] = set()
        self._has_exchange: set[int] = set()  # ids of request objects, which have no hash
        self._idle = asyncio.Event()
        self._idle.set()
        self._stopping = False
        self._session: aiohttp.ClientSession | None = None
        self._around: Surroundings | None = None
        self._checking: asyncio.Task[None] | None = None
        self._listener: Listener | None = None

    async def start(self) -> None:
        """Listen and begin to check the servers. Raises ConfigError if the address cannot be bound."""
        settings = self.settings
        self._session = upstream.new_session()
        checks = ServerChecks(settings, self.pool, self._session, self._server_fell_sick)
        self._around = Surroundings(settings, self.pool, self._session, self.metrics, checks.soon)
        self._listener = Listener(self._app(), log, idle_seconds=IDLE_SECONDS)
        try:
            self.port = await self._listener.start(settings.host, settings.port, backlog=BACKLOG)
        except ConfigError:
            await self._session.close()
            raise
        self._checking = asyncio.create_task(checks.run())
        log.info("proxy_listening", extra={"host": settings.host, "port": self.port})

    async def stop(self) -> None:
        """Accept nothing more, let exchanges finish within the grace period, end the others with an error, then
        close."""
        assert self._listener is not None and self._session is not None
        self._stopping = True
        await self._listener.refuse()
        log.info("proxy_stopping", extra={"in_flight": len(self._exchanges)})
        if not await is_set_within(self.settings.grace_seconds, self._idle):
            for exchange in list(self._exchanges):
                exchange.stop(STOPPING)
            await is_set_within(ENDING_SECONDS, self._idle)
        if self._checking is not None:
            await end_tasks([self._checking])
        await self._listener.stop()
        await self._session.close()

    def _server_fell_sick(self, server: Server) -> None:
        for exchange in list(self._exchanges):
            exchange.server_fell_sick(server)

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=self.settings.body_bytes_max, middlewares=[self._counted, openai_errors])
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        return app

    @web.middleware
    async def _counted(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Middleware: count requests for completions that get no exchange. An exchange counts its own."""
        if request.path not in PATHS:
            return await handler(request)
        loop = asyncio.get_running_loop()
        began, status = loop.time(), "left"
        try:
            answer = await handler(request)
            status = str(answer.status)
            return answer
        except Exception:  # a bug: aiohttp logs it and answers so
            status = "500"
            raise
        finally:
            if id(request) in self._has_exchange:
                self._has_exchange.discard(id(request))
            else:
                self.metrics.request_ended(request.path, status, loop.time() - began)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        assert self._around is not None
        try:
            raw = await within(self.settings.request_seconds, request.read())
        except asyncio.TimeoutError:
            return problem_response(STOPPING if self._stopping else SLOW_BODY)
        # the body is not compressed as its header says, or its client has left
        except web.RequestPayloadError as error:
            raise InvalidRequest(f"the request body cannot be read: {str(error)[:200]}") from error
        body = bodies.read_body(raw)
        if self._stopping:
            return problem_response(STOPPING)
        exchange = ClientExchange(self._around, request, body)
        self._has_exchange.add(id(request))
        self._exchanges.add(exchange)
        self._idle.clear()
        parent = tracing.parent_in(request.headers)
        try:
            with (
                logs.about(exchange.request_id),
                tracing.request_span("proxy", parent, path=request.path, request_id=exchange.request_id) as span,
            ):
                answer = await exchange.run()
                span.set(status=answer.status)
                return answer
        finally:
            self._exchanges.discard(exchange)
            if not self._exchanges:
                self._idle.set()

    async def _models(self, request: web.Request) -> web.StreamResponse:
        """The answer of a decode server; of the next one if it fails."""
        tried: set[str] = set()
        while (server := self.pool.choose(Role.DECODE, exclude=tried)) is not None:
            tried.add(server.url)
            response = await self._forward_get(request, server)
            if response is not None:
                return response
        if tried:
            return problem_response(DECODE_FAILED)
        return problem_response(BUSY if self.pool.healthy(Role.DECODE) else NO_DECODE)

    async def _forward_get(self, request: web.Request, server: Server) -> web.Response | None:
        assert self._session is not None
        self.pool.acquire(server)
        try:
            async with upstream.asked(
                self._session,
                server,
                request.path_qs,
                connect_seconds=self.settings.connect_seconds,
                total_seconds=MODELS_SECONDS,
                headers=upstream.forwarded_headers(request.headers),
            ) as response:
                answer = await upstream.whole(response)
        except UpstreamFault as error:
            self.pool.failed(server, error.fault, asyncio.get_running_loop().time())
            return problem_response(NO_CONNECTION) if error.fault is ServerFault.BUSY else None
        finally:
            self.pool.release(server)
        return None if upstream.kind_of(answer.status) is AnswerKind.FAULTY else answer_response(answer)

    async def _health(self, request: web.Request) -> web.StreamResponse:
        well = self.pool.healthy(Role.DECODE) and not self._stopping
        state = "stopping" if self._stopping else "ok" if well else "no healthy decode server"
        body = {"status": state, "servers": [describe(server) for server in self.pool]}
        return web.Response(
            status=200 if well else 503, body=json.dumps(body).encode(), content_type="application/json"
        )

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=self.metrics.text(), headers={"Content-Type": "text/plain; version=0.0.4"})


def describe(server: Server) -> dict[str, object]:
    """One server as it is shown in the answer of /health."""
    state: dict[str, object] = {
        "role": server.role.value,
        "url": server.url,
        "healthy": server.healthy,
        "in_flight": server.in_flight,
    }
    if not server.healthy:
        state["reason"] = server.reason
    if server.role is Role.PREFILL:
        state |= {"node": server.node, "hands_off": server.healthy and not server.plain}
    return state


@web.middleware
async def openai_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Middleware: every error of the proxy's own in OpenAI's form."""
    try:
        return await handler(request)
    except InvalidRequest as error:
        return problem_response(Problem(400, "invalid_request_error", error.message))
    except web.HTTPException as error:
        if error.status < 400:
            raise
        response = problem_response(Problem(error.status, "invalid_request_error", error.text or error.reason))
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
        return response


async def serve(settings: ProxySettings) -> None:
    """Serve until SIGINT or SIGTERM. A second signal ends the process at once."""
    say_when_short(log)
    proxy = Proxy(settings)
    tracing.start(settings.traces, "kvservice-proxy")
    await proxy.start()
    keep_tables()
    asked = FirstSignal(signal.SIGINT, signal.SIGTERM)
    try:
        await asked.wait()
    finally:
        await proxy.stop()
        await asyncio.to_thread(tracing.stop)


def run(settings: ProxySettings) -> None:
    """Serve; blocks until the proxy has ended. Raises ConfigError if it cannot listen."""
    raise_file_limit()
    asyncio.run(serve(settings))
