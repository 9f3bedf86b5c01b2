"""The console as an HTTP server: its files, its events, its answers; all of them only read.

Files are for everybody. Data is for who shows the token, under a name of ours. Runs on one event loop, which it owns
when started by `run`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from aiohttp import web

from kvservice.aio import end_tasks, within
from kvservice.console.access import HEADERS, is_our_name, shows_token
from kvservice.console.feed import PageFeed
from kvservice.console.questions import Questions
from kvservice.console.settings import Certificate, ConsoleSettings
from kvservice.console.source import Json, Source
from kvservice.descriptors import say_when_short
from kvservice.errors import Exhausted, InvalidRequest, KVServiceError
from kvservice.proxy.listener import Listener
from kvservice.signals import FirstSignal

log = logging.getLogger("kvservice.console")

STATIC = Path(__file__).parent / "static"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
LISTENER_SECONDS = 20.0  # for a page to take one event; a page that takes longer is gone, and its connection is cut
QUESTION_SECONDS = 30.0  # for one answer; the RPCs behind it take 3 s each, and few follow each other
EVERYWHERE = ("0.0.0.0", "::")
QUERY_CHARS_MAX = 512  # of one value in a query; ids and filters are shorter
KEEP_ALIVE_SECONDS = 15.0  # an idle connection is closed after this
HEADER_BYTES_MAX = 4096  # of one header line: a browser's are shorter
CERTIFICATE_SECONDS = 5.0  # a replaced certificate is used within this time

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Console:
    """One console. Call `start`, then `stop`, both on the loop that serves. `port` is the port that was bound."""

    def __init__(self, settings: ConsoleSettings, source: Source) -> None:
        self.settings = settings
        self.port = 0
        self.feed = PageFeed(source, settings.interval_seconds)
        self._source = source
        self._questions = Questions()
        self._files = read_files()
        self._certificate = (
            None
            if settings.certificate is None or settings.key is None
            else Certificate(settings.certificate, settings.key)
        )
        self._listener: Listener | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Listen, and begin to ask the service. Raises ConfigError if the address cannot be bound."""
        settings = self.settings
        self._listener = Listener(
            self._app(),
            log,
            idle_seconds=KEEP_ALIVE_SECONDS,
            max_line_size=HEADER_BYTES_MAX,
            max_field_size=HEADER_BYTES_MAX,
        )
        context = None if self._certificate is None else self._certificate.context
        self.port = await self._listener.start(settings.host, settings.port, ssl=context)
        self._tasks = [asyncio.create_task(self.feed.run())]
        if self._certificate is not None:
            self._tasks.append(asyncio.create_task(self._renew(self._certificate)))
        if context is None and settings.allow_plaintext:
            log.warning("console_plaintext", extra={"host": settings.host, "port": self.port})

    async def stop(self) -> None:
        """End open pages and answers, then close. Safe after a start that failed."""
        await end_tasks([*self._tasks, *self._questions.under_way])
        if self._listener is not None:
            await self._listener.stop()
        await self._source.close()

    @property
    def url(self) -> str:
        """The address of the page, with the token if it may be printed."""
        host = socket.gethostname() if self.settings.host in EVERYWHERE else self.settings.host
        host = f"[{host}]" if ":" in host else host
        token = f"#token={self.settings.token}" if self.settings.printed_token else ""
        return f"{self.settings.scheme}://{host}:{self.port}/{token}"

    def _app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/api/events", self._events)
        app.router.add_get("/api/blocks", self._blocks)
        app.router.add_get("/api/explain", self._explain)
        app.router.add_get("/{path:.*}", self._file)
        app.on_response_prepare.append(_add_headers)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuses names that are not ours, and data without the token. Errors become JSON with a sentence."""
        if not is_our_name(request.headers.get("Host"), self.settings.names):
            return _problem(421, "this console is not served under this name; give it with --name")
        if request.path.startswith("/api/") and not shows_token(
            request.headers.get("Authorization"), self.settings.token
        ):
            return _problem(401, "the token is missing or wrong: open the URL that `kvservice console` printed")
        try:
            return await handler(request)
        except web.HTTPException as error:
            return _problem(error.status, error.reason)
        except InvalidRequest as error:
            return _problem(400, error.message)
        except Exhausted as error:
            return _problem(503, error.message)
        except asyncio.TimeoutError:
            return _problem(504, "the service did not answer in time")
        except KVServiceError as error:
            return _problem(502, error.message)

    async def _file(self, request: web.Request) -> web.StreamResponse:
        found = self._files.get(request.match_info["path"] or "index.html")
        if found is None:
            return _problem(404, "there is no such page; the console is at /")
        body, kind = found
        return web.Response(body=body, content_type=kind, charset="utf-8")

    async def _events(self, request: web.Request) -> web.StreamResponse:
        async with contextlib.aclosing(self.feed.listen()) as events:
            first = await anext(events)  # before the response begins: it may be refused
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"})
            await response.prepare(request)
            with contextlib.suppress(ConnectionError, asyncio.TimeoutError):
                await within(LISTENER_SECONDS, response.write(first))
                async for event in events:
                    await within(LISTENER_SECONDS, response.write(event))
        return response

    async def _blocks(self, request: web.Request) -> web.StreamResponse:
        wanted = query_of(request.query)
        return await self._ask(f"blocks {sorted(wanted.items())}", lambda: self._source.blocks(wanted))

    async def _explain(self, request: web.Request) -> web.StreamResponse:
        request_id = query_of(request.query).get("request", "").strip()
        if not request_id:
            raise InvalidRequest("name a request by its id, or by the beginning of it")
        return await self._ask(f"explain {request_id}", lambda: self._source.explain(request_id))

    async def _ask(self, name: str, question: Callable[[], Awaitable[Json]]) -> web.StreamResponse:
        answer = await within(QUESTION_SECONDS, self._questions.ask(name, question))
        return web.json_response(body=json.dumps(answer).encode())

    async def _renew(self, certificate: Certificate) -> None:
        while True:
            await asyncio.sleep(CERTIFICATE_SECONDS)
            if certificate.renew():
                log.info("console_certificate_taken")


def read_files() -> dict[str, tuple[bytes, str]]:
    """Path below / → the bytes of a file of the page and its media type. Blocks."""
    found = [path for path in STATIC.rglob("*") if path.suffix in TYPES]
    return {path.relative_to(STATIC).as_posix(): (path.read_bytes(), TYPES[path.suffix]) for path in found}


def query_of(query: Mapping[str, str]) -> dict[str, str]:
    """The values of a query. Raises InvalidRequest for one that is too long."""
    for name, value in query.items():
        if len(value) > QUERY_CHARS_MAX or len(name) > QUERY_CHARS_MAX:
            raise InvalidRequest(f"{name[:32]!r} has more than {QUERY_CHARS_MAX} characters")
    return {name: value for name, value in query.items() if value}


async def _add_headers(request: web.BaseRequest, response: web.StreamResponse) -> None:
    response.headers.update(HEADERS)


def _problem(status: int, text: str) -> web.Response:
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    return web.json_response({"error": text}, status=status, headers=headers)


async def serve(settings: ConsoleSettings, source: Source, say: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM, and `say` where. A second signal ends the process at once."""
    say_when_short(log)
    console = Console(settings, source)
    try:
        await console.start()
        asked = FirstSignal(signal.SIGINT, signal.SIGTERM)
        say(console.url)
        await asked.wait()
    finally:
        await console.stop()
