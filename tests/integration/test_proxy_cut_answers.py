"""Answers of servers behind the proxy that end before they are complete, or tell of a failure, without a sign in HTTP.

What a vLLM says whose engine ends under a request was taken from vLLM 0.32.
"""

from __future__ import annotations

import asyncio
import json
import re
from types import SimpleNamespace

import pytest
from aiohttp import web

from tests.integration.proxy_lab import COMPLETIONS, Lab, Running

TOKEN = b'data: {"choices":[{"index":0,"text":"Once","finish_reason":null}]}\n\n'
LAST = b'data: {"choices":[{"index":0,"text":"","finish_reason":"abort"}]}\n\n'
DEAD = b'data: {"error": {"message": "EngineCore encountered an issue.", "param": null, "code": 500}}\n\n'
END = b"data: [DONE]\n\n"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("whole", [True, False])
async def test_an_answer_that_ends_with_its_connection_is_checked(lab: Lab, stream: bool, whole: bool) -> None:
    """As of HTTP/1.0, which some proxies speak: the end of a dead server looks like that of an answer."""
    kind = "text/event-stream" if stream else "application/json"
    answer = 'data: {"a": 1}\n\ndata: [DONE]\n\n' if stream else '{"choices": []}'
    cut = answer if whole else answer[:-14]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        checks = b"/health" in head
        if not checks:
            await reader.readuntil(b"}")
        sent = answer if checks else cut
        writer.write(f"HTTP/1.0 200 OK\r\nContent-Type: {kind}\r\n\r\n{sent}".encode())
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listening:
        url = "http://{}:{}".format(*listening.sockets[0].getsockname())
        proxy = await lab.proxy([], [SimpleNamespace(url=url)])  # type: ignore[list-item]
        await proxy.settled(nodes=False)
        status, body = await proxy.post({"prompt": "x", "stream": stream})
        if whole:
            assert (status, body.decode()) == (200, answer)
        elif stream:
            assert body.startswith(b'data: {"a": 1}\n\n') and b"middle of its answer" in body
        else:
            assert status == 502


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_of_http_1_0_sees_where_an_answer_ends(lab: Lab, stream: bool) -> None:
    """It knows no chunks, so a stream ends with its connection, also if it asks for one that stays open."""
    proxy = await lab.proxy([], [await lab.server()])
    body = json.dumps({"prompt": "x", "stream": stream}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.proxy.port)
    writer.write(b"POST /v1/completions HTTP/1.0\r\nConnection: keep-alive\r\n")
    writer.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
    async with asyncio.timeout(5):
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"Content-Length: (\d+)", head)
        assert stream == (length is None)
        answer = await (reader.read() if length is None else reader.readexactly(int(length[1])))
    assert answer.endswith(b"data: [DONE]\n\n") if stream else json.loads(answer)["choices"]
    writer.close()


async def answering(lab: Lab, answer: bytes, *others: object, stream: bool) -> tuple[Running, web.AppRunner]:
    """A proxy whose first decode server answers with these bytes and status 200, complete as HTTP sees it."""

    async def complete(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.content_type = "text/event-stream" if stream else "application/json"
        await response.prepare(request)
        await response.write(answer)
        return response

    async def well(request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_get("/health", well)
    app.router.add_post(COMPLETIONS, complete)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    first = SimpleNamespace(url=f"http://127.0.0.1:{runner.addresses[0][1]}")
    proxy = await lab.proxy([], [first, *others])  # type: ignore[list-item]
    await proxy.settled(nodes=False)
    return proxy, runner


@pytest.mark.parametrize(
    ("answer", "stream"),
    [
        (DEAD + END, True),
        (LAST + END, True),
        (END, True),
        (b"", True),
        (b'{"choices":[{"index":0,"text":"","finish_reason":"abort"}]}', False),
    ],
    ids=["error", "abort", "empty", "nothing", "whole abort"],
)
async def test_an_engine_that_ends_before_a_token_is_replaced(lab: Lab, answer: bytes, stream: bool) -> None:
    other = await lab.server()
    proxy, runner = await answering(lab, answer, other, stream=stream)
    body = b""
    for _ in range(2):  # each server is the first choice once
        status, body = await proxy.post({"prompt": "x", "stream": stream})
        assert status == 200
        assert body == b"".join(other.events(COMPLETIONS)) if stream else json.loads(body)["choices"][0]["text"]
    assert len(other.seen) == 2
    await runner.cleanup()


@pytest.mark.parametrize("failure", [DEAD + END, LAST + END, b""], ids=["error", "abort", "no end"])
async def test_an_engine_that_ends_in_its_stream_is_an_error(lab: Lab, failure: bytes) -> None:
    proxy, runner = await answering(lab, TOKEN + failure, stream=True)
    _, body = await proxy.post({"prompt": "x", "stream": True})
    assert body.startswith(TOKEN) and b"middle of its answer" in body and body.count(END) == 1
    _, metrics = await proxy.get("/metrics")
    assert b"kvservice_proxy_broken_streams_total 1.0" in metrics
    await runner.cleanup()


async def test_an_error_that_blames_the_request_passes_in_a_stream(lab: Lab) -> None:
    said = b'data: {"error": {"message": "what the \\"error\\" is", "code": 400}}\n\n' + END
    proxy, runner = await answering(lab, said, stream=True)
    assert await proxy.post({"prompt": "x", "stream": True}) == (200, said)
    await runner.cleanup()
