"""Answers of servers behind the proxy that end before they are complete, without a sign in HTTP."""

from __future__ import annotations

import asyncio
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
