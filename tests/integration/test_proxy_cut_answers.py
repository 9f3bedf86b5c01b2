"""Answers of servers behind the proxy that end before they are complete, without a sign in HTTP."""

from __future__ import annotations

import asyncio
import json
import re
from types import SimpleNamespace

import pytest

from tests.integration.proxy_lab import Lab


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
