"""Performs the actions of one exchange: sends its requests, turns results into events, and answers the client.

Runs on the proxy's event loop. `run` runs in the task of the client's request; each request to a server has a task of
its own. Only `run` touches the Exchange, the other tasks post events. The decode task writes to the client once it is
told to.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import aiohttp
from aiohttp import HttpVersion11, web
from multidict import CIMultiDict

from kvservice.aio import end_tasks, within
from kvservice.observe import tracing
from kvservice.proxy import bodies, upstream
from kvservice.proxy.bodies import ClientBody
from kvservice.proxy.metrics import ProxyMetrics
from kvservice.proxy.plan import (
    LOST,
    NO_CONNECTION,
    TIMED_OUT,
    Begin,
    Break,
    CancelAttempt,
    ClientLeft,
    DecodeEnded,
    DecodeFailed,
    DecodeRefused,
    DecodeStarted,
    Exchange,
    Finish,
    PassOn,
    PrefillAnswered,
    PrefillFailed,
    PrefillRefused,
    Problem,
    ProxyAction,
    ProxyEvent,
    RefuseClient,
    Relay,
    SendDecode,
    SendPrefill,
    Stopped,
)
from kvservice.proxy.servers import Role, Server, ServerFault, ServerPool
from kvservice.proxy.settings import ProxySettings
from kvservice.proxy.upstream import AnswerKind, UpstreamAnswer, UpstreamFault

log = logging.getLogger("kvservice.proxy")

# For writing the end of a stream. A client that takes longer is not reading, and its connection is closed.
LAST_WRITE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What all exchanges of one proxy share."""

    settings: ProxySettings
    pool: ServerPool
    session: aiohttp.ClientSession
    metrics: ProxyMetrics
    # called when a server failed, so that its health is checked before the next interval
    check_soon: Callable[[], None]


class ClientGone(Exception):
    """The client's connection broke while its answer was being written."""


def new_handoff_id() -> str:
    """A new id: 32 lower-case hex digits from the system's random source, so that ids never repeat."""
    return secrets.token_hex(16)


def problem_response(problem: Problem) -> web.Response:
    headers = {} if problem.retry_after is None else {"Retry-After": str(problem.retry_after)}
    return web.Response(
        status=problem.status, body=bodies.error_body(problem), content_type="application/json", headers=headers
    )


def answer_response(answer: UpstreamAnswer) -> web.Response:
    return web.Response(status=answer.status, body=answer.body, headers=answer.headers)


class ClientExchange:
    """One request of a client to one of the two completion endpoints."""

    def __init__(self, around: Surroundings, request: web.Request, body: ClientBody) -> None:
        self._around = around
        self._request = request
        self._body = body
        self._headers = upstream.forwarded_headers(request.headers)
        # both engines then log the request under the same name
        self.request_id: str = self._headers.setdefault("X-Request-Id", secrets.token_hex(16))
        self._exchange = Exchange(around.pool, new_handoff_id, tries=around.settings.tries)
        self._events: asyncio.Queue[ProxyEvent] = asyncio.Queue()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._servers: dict[int, Server] = {}
        self._go_ahead: dict[int, asyncio.Event] = {}  # by decode attempt: set when it may write to the client
        self._refusals: dict[int, UpstreamAnswer] = {}
        self._busy: UpstreamAnswer | None = None  # what the last decode server said that has no room
        self._streamed: web.StreamResponse | None = None
        self._answer: web.StreamResponse | None = None
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()

    async def run(self) -> web.StreamResponse:
        """Run the exchange. Returns the client's complete answer. Cancelling it ends the requests to the servers."""
        settings, path = self._around.settings, self._request.path
        worth_it = self._body.single and self._body.prompt_chars >= settings.min_prefill_chars
        deadline = self._loop.call_later(settings.request_seconds, self.stop, TIMED_OUT)
        status = "left"
        try:
            self._events.put_nowait(Begin(hand_off=worth_it))
            while self._answer is None:
                event = await self._events.get()
                for action in self._exchange.handle(event, self._loop.time()):
                    await self._perform(action)
                if isinstance(event, PrefillFailed | DecodeFailed):
                    self._around.check_soon()
                if isinstance(event, ClientLeft):
                    return web.Response(status=499) if self._streamed is None else self._streamed  # nobody reads it
            status = str(self._answer.status)
            return self._answer
        finally:
            deadline.cancel()
            for action in self._exchange.handle(ClientLeft(), self._loop.time()):  # empty if the exchange is done
                if isinstance(action, CancelAttempt):
                    self._around.metrics.cancelled(self._servers[action.attempt])
            self._around.metrics.request_ended(path, status, self._loop.time() - self._began)
            await end_tasks(self._tasks.values())

    def stop(self, problem: Problem) -> None:
        """End the exchange soon. The client gets this error."""
        self._events.put_nowait(Stopped(problem))

    def server_fell_sick(self, server: Server) -> None:
        """Fail the requests to a sick server whose answer has not begun. Otherwise they could wait for ever: a dead
        host does not even break its connections."""
        for attempt, asked in self._servers.items():
            begun = self._streamed is not None and attempt in self._go_ahead
            if asked is server and not begun and not self._tasks[attempt].done():
                self._tasks[attempt].cancel()
                self._failed(attempt, server, ServerFault.BROKEN, "its health check failed meanwhile")

    async def _perform(self, action: ProxyAction) -> None:
        if isinstance(action, SendPrefill):
            self._start(action.attempt, action.server, partial(self._prefill, action), handoff=True)
        elif isinstance(action, SendDecode):
            self._go_ahead[action.attempt] = asyncio.Event()
            work = partial(self._decode, action)
            self._start(action.attempt, action.server, work, handoff=action.handoff is not None)
        elif isinstance(action, CancelAttempt):
            self._around.metrics.cancelled(self._servers[action.attempt])
            self._tasks[action.attempt].cancel()
        elif isinstance(action, Relay):
            self._go_ahead[action.attempt].set()
        elif isinstance(action, PassOn):
            self._answer = answer_response(self._refusals[action.attempt])
        elif isinstance(action, RefuseClient):
            if action.problem is LOST:
                self._around.metrics.given_up()
                servers = sorted({server.url for server in self._servers.values()})
                log.warning("request_given_up", extra={"path": self._request.path, "servers": servers})
            busy = self._busy if action.problem is NO_CONNECTION else None
            self._answer = problem_response(action.problem) if busy is None else answer_response(busy)
        elif isinstance(action, Break):
            self._around.metrics.broken_stream()
            await self._break(action.problem)
        elif isinstance(action, Finish):
            assert self._streamed is not None, "the exchange ended without an answer"
            await self._last_write(self._streamed.write_eof())
            self._answer = self._streamed

    def _start(self, attempt: int, server: Server, work: Callable[[], Awaitable[None]], *, handoff: bool) -> None:
        self._around.metrics.sent(server, handoff=handoff)
        self._servers[attempt] = server
        self._tasks[attempt] = asyncio.create_task(self._guarded(attempt, server, work))

    async def _guarded(self, attempt: int, server: Server, work: Callable[[], Awaitable[None]]) -> None:
        """Run the work of a task and turn any exception into an event, so that no client waits for ever."""
        try:
            await work()
            return
        except ClientGone:
            self._events.put_nowait(ClientLeft())
            return
        except UpstreamFault as error:
            fault, detail = error.fault, str(error)
        except Exception as error:  # a bug in one task must not hang a request
            log.exception("exchange_task_failed", extra={"server": server.url})
            fault, detail = ServerFault.ERROR, f"{type(error).__name__}: {error}"
        self._failed(attempt, server, fault, detail)

    def _failed(self, attempt: int, server: Server, fault: ServerFault, detail: str) -> None:
        self._around.metrics.failed(server, fault)
        fields = {"role": server.role.value, "server": server.url, "fault": fault.value, "detail": detail[:300]}
        log.warning("request_to_server_failed", extra=fields)
        failed = PrefillFailed if server.role is Role.PREFILL else DecodeFailed
        self._events.put_nowait(failed(attempt, fault))

    async def _prefill(self, action: SendPrefill) -> None:
        settings = self._around.settings
        with tracing.span("proxy.prefill", server=action.server.url, attempt=action.attempt):
            async with upstream.asked(
                self._around.session,
                action.server,
                self._request.path,
                connect_seconds=settings.connect_seconds,
                total_seconds=settings.prefill_seconds,
                headers=self._traced_headers(),
                body=bodies.prefill_body(self._body, action.handoff_id, tracing.traceparent()),
            ) as response:
                answer = await upstream.whole(response)
        kind = upstream.kind_of(answer.status)
        if kind is AnswerKind.GOOD:
            self._events.put_nowait(PrefillAnswered(action.attempt, bodies.node_of(answer.body)))
        elif kind is AnswerKind.REFUSED:
            self._refusals[action.attempt] = answer
            self._events.put_nowait(PrefillRefused(action.attempt))
        else:
            raise UpstreamFault(
                ServerFault.BUSY if kind is AnswerKind.BUSY else ServerFault.ERROR, f"status {answer.status}"
            )

    def _traced_headers(self) -> CIMultiDict[str]:
        """The headers for a server, with the current span in place of the client's."""
        headers: CIMultiDict[str] = self._headers.copy()
        headers.update(tracing.metadata())
        return headers

    async def _decode(self, action: SendDecode) -> None:
        with tracing.span("proxy.decode", server=action.server.url, attempt=action.attempt):
            await self._decoded(action)

    async def _decoded(self, action: SendDecode) -> None:
        attempt = action.attempt
        async with upstream.asked(
            self._around.session,
            action.server,
            self._request.path,
            connect_seconds=self._around.settings.connect_seconds,
            total_seconds=None,  # the deadline of the whole exchange applies
            headers=self._traced_headers(),
            body=bodies.decode_body(self._body, action.handoff, tracing.traceparent()),
        ) as response:
            kind = upstream.kind_of(response.status)
            if kind is AnswerKind.FAULTY:
                raise UpstreamFault(ServerFault.ERROR, f"status {response.status}")
            if kind is AnswerKind.BUSY:
                self._busy = await upstream.whole(response)
                raise UpstreamFault(ServerFault.BUSY, f"status {response.status}")
            if kind is AnswerKind.REFUSED:
                self._refusals[attempt] = await upstream.whole(response)
                self._events.put_nowait(DecodeRefused(attempt))
                return
            async for piece in upstream.pieces(response):
                if self._streamed is None:
                    await self._begin_answer(attempt, response, len(piece))
                await self._write(piece)
            if self._streamed is None:
                await self._begin_answer(attempt, response, 0)
        self._events.put_nowait(DecodeEnded(attempt))

    async def _begin_answer(self, attempt: int, response: aiohttp.ClientResponse, first_bytes: int) -> None:
        """Begin the client's answer with this attempt. From here on the client sees it."""
        self._events.put_nowait(DecodeStarted(attempt))
        await self._go_ahead[attempt].wait()
        headers: CIMultiDict[str] = upstream.returned_headers(response.headers)
        streamed = web.StreamResponse(status=response.status, headers=headers)
        if not upstream.is_event_stream(response):
            streamed.content_length = first_bytes  # the whole answer is there
        elif self._request.version < HttpVersion11:
            streamed.force_close()  # nothing else tells a client without chunks where the stream ends
        self._streamed = streamed
        self._around.metrics.first_byte(self._request.path, self._loop.time() - self._began)
        try:
            await streamed.prepare(self._request)
        except ConnectionError as error:
            raise ClientGone from error

    async def _write(self, piece: bytes) -> None:
        assert self._streamed is not None, "bytes for the client before the answer began"
        try:
            await self._streamed.write(piece)
        except ConnectionError as error:
            raise ClientGone from error

    async def _break(self, problem: Problem) -> None:
        """End an answer that cannot be completed in a way that the client notices."""
        streamed = self._streamed
        if streamed is None or not streamed.prepared:
            self._answer = problem_response(problem)  # the answer was prepared, but no byte of it has left yet
            return
        self._answer = streamed
        if streamed.content_type == "text/event-stream":
            await self._last_write(streamed.write(bodies.error_event(problem)))
            await self._last_write(streamed.write_eof())
        elif self._request.transport is not None:
            self._request.transport.abort()  # an answer that was cut short must not look complete

    async def _last_write(self, writing: Coroutine[Any, Any, None]) -> None:
        with suppress(ConnectionError):
            try:
                await within(LAST_WRITE_SECONDS, writing)
            except asyncio.TimeoutError:
                if self._request.transport is not None:
                    self._request.transport.abort()
