"""Attacks on the proxy: a request that ends every server it meets, and clients that are gone before their answer."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import statistics
import struct

import pytest

from kvservice.proxy.client_log import LINE_SECONDS, ClientLog
from tests.faults.rounds import rounds
from tests.integration.openai_server import FakeServer
from tests.integration.proxy_lab import COMPLETIONS, Lab, Running

pytestmark = pytest.mark.faults

LONG = "a long prompt " * 100
POISON = "poison"
CANCELLED_SECONDS_MAX = 1.0
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close answers with a reset


# ---- a request that ends its engines


@pytest.mark.parametrize("with_prefill", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_kills_engines_ends_at_most_two(lab: Lab, with_prefill: bool, stream: bool) -> None:
    decode = [await lab.server(dies_of=POISON) for _ in range(6)]
    prefill = [await lab.server(dies_of=POISON) for _ in range(3 * with_prefill)]
    proxy = await lab.proxy(prefill, decode)
    status, body = await proxy.post({"prompt": LONG + POISON, "stream": stream})
    error = json.loads(body)["error"]
    assert status == 502 and error["type"] == "upstream_error" and "--tries" in error["message"]
    assert sum(not server.is_alive for server in prefill + decode) == 2
    assert (await proxy.post({"prompt": LONG}))[0] == 200
    assert b"kvservice_proxy_given_up_total 1.0" in (await proxy.get("/metrics"))[1]


async def test_tries_say_how_many_engines_one_request_may_end(lab: Lab) -> None:
    decode = [await lab.server(dies_of=POISON) for _ in range(6)]
    proxy = await lab.proxy([], decode, tries=4)
    assert (await proxy.post({"prompt": POISON}))[0] == 502
    assert sum(not server.is_alive for server in decode) == 4


async def test_a_server_that_is_well_serves_after_a_failed_request(lab: Lab) -> None:
    decode = await lab.server(die_after=0)
    proxy = await lab.proxy([], [decode], check_seconds=60)
    assert (await proxy.post({"prompt": "x"}))[0] == 502
    decode.die_after = None
    assert (await proxy.post({"prompt": "x"}))[0] == 200


# ---- clients that leave


class Client:
    """A client on a bare socket, whose every byte the test decides."""

    def __init__(self, proxy: Running, *, stream: bool = False) -> None:
        body = json.dumps({"prompt": LONG, "model": "m", "stream": stream}).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        self.head, self.body = f"{head}Content-Length: {len(body)}\r\n\r\n".encode(), body
        self._socket = socket.create_connection(("127.0.0.1", proxy.proxy.port))
        self._socket.setblocking(False)
        self._loop = asyncio.get_running_loop()

    async def send(self, data: bytes) -> None:
        await self._loop.sock_sendall(self._socket, data)

    async def read(self) -> bytes:
        return await self._loop.sock_recv(self._socket, 1 << 16)

    def leave(self, *, reset: bool) -> None:
        if reset:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self._socket.close()


async def ended(servers: list[FakeServer]) -> float:
    """Seconds until no server works on anything any more."""
    began = asyncio.get_running_loop().time()
    for server in servers:
        await server.until(lambda s=server: all(seen.cancelled for seen in s.seen))
    return asyncio.get_running_loop().time() - began


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("stage", ["prefill first", "prefill and decode", "decode", "stream"])
async def test_a_client_that_leaves_ends_the_work_of_every_engine(lab: Lab, stage: str, reset: bool) -> None:
    """The work ends within a second."""
    streaming = stage == "stream"
    prefill = [await lab.server(hold=True)] * (stage != "decode")
    decode = await lab.server(hold=not streaming, tokens=("tick",) * 5000)
    proxy = await lab.proxy(prefill, [decode])
    took: list[float] = []
    for _ in range(rounds(3, failed_before=0.3)):
        if stage == "prefill first":  # its node is not known
            next(iter(proxy.proxy.pool)).node = None
        client = Client(proxy, stream=streaming)
        await client.send(client.head + client.body)
        for server in [*prefill, *([decode] if stage != "prefill first" else [])]:
            await server.until(lambda s=server: bool(s.seen) and not s.seen[-1].cancelled)
        if streaming:
            await client.read()
        client.leave(reset=reset)
        took.append(await ended([*prefill, decode]))
        for server in (*prefill, decode):
            server.seen.clear()
        await proxy.idle()
    assert statistics.median(took) < CANCELLED_SECONDS_MAX


@pytest.mark.parametrize("reset", [False, True])
async def test_nobody_computes_for_a_client_that_left_while_sending(lab: Lab, reset: bool) -> None:
    prefill, decode = await lab.server(node="n", hold=True), await lab.server(hold=True)
    proxy = await lab.proxy([prefill], [decode])
    for _ in range(rounds(50, failed_before=4 / 30, campaign=300)):
        client = Client(proxy)
        await client.send(client.head)
        for _ in range(5):
            await asyncio.sleep(0)  # its head is read, and its body is waited for
        await client.send(client.body)
        client.leave(reset=reset)
    await proxy.idle()
    await ended([prefill, decode])
    assert not any(seen.answered for server in (prefill, decode) for seen in server.seen)


async def test_clients_that_reset_in_a_body_are_one_line_in_the_log(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    decode = await lab.server()
    proxy = await lab.proxy([], [decode])
    caplog.clear()
    for _ in range(20):
        client = Client(proxy)
        await client.send(client.head + client.body[:50])
        await asyncio.sleep(0.01)
        client.leave(reset=True)
    for _ in range(20):
        client = Client(proxy)
        await client.send(b"no HTTP at all\r\n\r\n")
        await client.read()
        client.leave(reset=False)
    assert (await proxy.post({"prompt": "x"}))[0] == 200
    assert len(caplog.records) <= 1 and all(record.exc_info is None for record in caplog.records)
    assert len(decode.seen) == 1


def test_faults_of_clients_are_logged_at_intervals(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A line says how often they happened. What is our own fault is logged each time."""
    now = 0.0
    clients = ClientLog(logging.getLogger("kvservice.proxy"), lambda: now)
    for _ in range(5):
        clients.exception("said by the HTTP server", exc_info=ConnectionResetError("gone"))
    now += LINE_SECONDS
    clients.exception("said by the HTTP server", exc_info=ConnectionResetError("gone"))
    assert [record.__dict__["times"] for record in caplog.records] == [1, 5]
    for _ in range(2):
        clients.exception("a bug", exc_info=KeyError("ours"))
    assert [record.getMessage() for record in caplog.records[2:]] == ["a bug", "a bug"]
    assert all(record.exc_info for record in caplog.records[2:])
