"""An OpenAI server on loopback whose every step the test decides: holds, errors, deaths in the middle, its node.

It does what vLLM does as far as a proxy can see: hands-off parameters in and out, server-sent events, and it notices
when a request is given up. Runs on the test's event loop.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

TOKENS = ("Once", " upon", " a", " time")


@dataclass
class Seen:
    """One request as the server saw it."""

    path: str
    body: dict[str, Any]
    raw: bytes
    headers: Mapping[str, str]
    answered: bool = False
    cancelled: bool = False

    @property
    def params(self) -> dict[str, Any] | None:
        params: dict[str, Any] | None = self.body.get("kv_transfer_params")
        return params

    @property
    def handoff(self) -> str:
        assert self.params is not None, "the request came without hand-off parameters"
        return str(self.params["kvservice"]["handoff"])


@dataclass
class FakeServer:
    """`hold`: completions wait for `release`, `hold_health`: answers of /health do. `die_after`: the connection breaks
    after so many events. `dies_of`: a prompt with this text ends the server, as a killed process."""

    node: str | None = "node-a"
    api_key: str | None = None
    port: int = 0
    healthy: bool = True
    status: int = 200
    hold: bool = False
    hold_health: bool = False
    die_after: int | None = None
    dies_of: str | None = None
    tokens: tuple[str, ...] = TOKENS
    seen: list[Seen] = field(default_factory=list)
    probes: list[Seen] = field(default_factory=list)
    checks_held: int = 0
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _released: asyncio.Event = field(default_factory=asyncio.Event)
    _runner: web.AppRunner | None = None
    _site: web.TCPSite | None = None
    _dying: asyncio.Task[None] | None = None

    @property
    def is_alive(self) -> bool:
        return self._runner is not None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> FakeServer:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._complete)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        self._site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await self._site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def stop(self) -> None:
        """As a killed process: connections break."""
        if self._runner is not None:
            runner, self._runner = self._runner, None
            assert runner.server is not None
            for connection in list(runner.server.connections):
                if connection.transport is not None:
                    connection.transport.abort()
            await runner.cleanup()

    async def stop_listening(self) -> None:
        """New connections are refused; those that are open stay as they are."""
        assert self._site is not None
        await self._site.stop()

    async def __aenter__(self) -> FakeServer:
        return await self.start()

    async def __aexit__(self, *error: object) -> None:
        self.release()
        await self.stop()

    def release(self) -> None:
        """Those that wait go on."""
        self._released.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until it is true of what was seen. Fails after twenty seconds."""
        async with asyncio.timeout(20):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def _health(self, request: web.Request) -> web.Response:
        status = 200 if self.healthy else 503  # as of now, however long the answer takes
        if self.hold_health:
            self.checks_held += 1
            await self._released.wait()
        return web.Response(status=status)

    async def _models(self, request: web.Request) -> web.Response:
        if refused := self._refused(request):
            return refused
        if self.status != 200:
            return web.Response(status=self.status)
        return web.json_response({"object": "list", "data": [{"id": "model-x", "object": "model", "port": self.port}]})

    def _refused(self, request: web.Request) -> web.Response | None:
        if self.api_key is None or request.headers.get("Authorization") == f"Bearer {self.api_key}":
            return None
        return web.json_response({"error": "Unauthorized"}, status=401)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        seen = Seen(request.path, json.loads(raw), raw, request.headers)
        if refused := self._refused(request):
            return refused
        probe = seen.body.get("prompt") == "Hello"
        (self.probes if probe else self.seen).append(seen)
        self._changed.set()
        try:
            return await self._answer(request, seen, probe)
        except asyncio.CancelledError:
            seen.cancelled = True
            raise
        finally:
            seen.answered = not seen.cancelled
            self._changed.set()

    async def _answer(self, request: web.Request, seen: Seen, probe: bool) -> web.StreamResponse:
        if self.dies_of is not None and self.dies_of in seen.raw.decode():
            self._dying = asyncio.create_task(self.stop())  # which ends this task as well
            await asyncio.Event().wait()
        if self.hold and not probe:
            await self._released.wait()
        if self.status != 200:
            error = {"message": f"made up {self.status}", "type": "Made Up", "param": None, "code": self.status}
            return web.json_response({"error": error}, status=self.status, headers={"X-Server": "fake"})
        if seen.body.get("stream"):
            return await self._stream(request)
        if self.die_after is not None:
            abort(request)
        return web.Response(
            body=json.dumps(self.whole(seen)).encode(), content_type="application/json", headers={"X-Server": "fake"}
        )

    def whole(self, seen: Seen) -> dict[str, Any]:
        text = "".join(self.tokens[: seen.body.get("max_tokens", 99)])
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop", "text": text}
        if "chat" in seen.path:
            choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
        return {
            "id": "cmpl-1",
            "object": "chat.completion" if "chat" in seen.path else "text_completion",
            "created": 1,
            "model": "model-x",
            "choices": [choice],
            "kv_transfer_params": self._params(seen),
        }

    def _params(self, seen: Seen) -> dict[str, Any] | None:
        asked = seen.params
        if self.node is None or asked is None or asked["kvservice"]["role"] != "prefill":
            return None
        own = {"version": 1, "role": "decode", "handoff": seen.handoff, "node": self.node}
        return {"kvservice": own, "do_remote_prefill": True, "do_remote_decode": False}

    def events(self, path: str) -> list[bytes]:
        """What a complete stream consists of."""
        made = []
        for token in self.tokens:
            choice: dict[str, Any] = {"index": 0, "text": token, "finish_reason": None}
            if "chat" in path:
                choice = {"index": 0, "delta": {"content": token}, "finish_reason": None}
            kind = "chat.completion.chunk" if "chat" in path else "text_completion"
            event = {"id": "cmpl-1", "object": kind, "created": 1, "model": "model-x", "choices": [choice]}
            made.append(b"data: " + json.dumps(event).encode() + b"\n\n")
        return [*made, b"data: [DONE]\n\n"]

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8", "X-Server": "fake"})
        await response.prepare(request)
        for index, event in enumerate(self.events(request.path)):
            if self.die_after == index:
                await response.write(event[:10])  # in the middle of an event
                await asyncio.sleep(0.02)
                abort(request)
            await response.write(event)
            await asyncio.sleep(0.01)
        return response


def abort(request: web.Request) -> None:
    """Reset the connection, as the kernel does for a process that died."""
    assert request.transport is not None
    request.transport.abort()
    raise asyncio.CancelledError
