"""`kvservice proxy` as a process: what it says, how it ends."""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from kvservice.testing.eventually import eventually_async
from tests.integration.openai_server import FakeServer

COMPLETIONS = "/v1/completions"
LONG = "a long prompt " * 100
COMMAND = (sys.executable, "-m", "kvservice", "proxy")


class Process:
    """The proxy as a user starts it, and an HTTP client."""

    def __init__(self, process: asyncio.subprocess.Process, session: aiohttp.ClientSession) -> None:
        self.process = process
        self.session = session
        self.url = ""

    async def listening(self) -> None:
        assert self.process.stderr is not None
        while line := await self.process.stderr.readline():
            event = json.loads(line)
            if event["event"] == "proxy_listening":
                self.url = f"http://127.0.0.1:{event['port']}"
                return
        pytest.fail("the proxy ended before it listened")

    async def healthy(self) -> None:
        async def is_healthy() -> bool:
            async with self.session.get(f"{self.url}/health") as response:
                return response.status == 200

        await eventually_async(is_healthy, "a healthy proxy")


@asynccontextmanager
async def proxy_process(*arguments: str) -> AsyncIterator[Process]:
    options = ("--port", "0", "--json-logs", "--check-interval", "0.1", *arguments)
    process = await asyncio.create_subprocess_exec(*COMMAND, *options, stderr=asyncio.subprocess.PIPE)
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(20)) as session:
            running = Process(process, session)
            async with asyncio.timeout(20):
                await running.listening()
                await running.healthy()
            yield running
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_the_process_after_the_stream_under_way(number: signal.Signals) -> None:
    async with (
        FakeServer() as prefill,
        FakeServer(tokens=("tick",) * 30) as decode,
        proxy_process("--prefill", prefill.url, "--decode", decode.url) as proxy,
    ):
        body = {"prompt": LONG, "stream": True}
        async with proxy.session.post(proxy.url + COMPLETIONS, json=body) as response:
            first = await response.content.readline()
            proxy.process.send_signal(number)
            rest = await response.read()
        assert first + rest == b"".join(decode.events(COMPLETIONS))
        assert await asyncio.wait_for(proxy.process.wait(), 10) == 0


async def test_a_second_signal_ends_the_process_at_once() -> None:
    async with FakeServer(hold=True) as decode, proxy_process("--decode", decode.url) as proxy:
        asking = asyncio.create_task(proxy.session.post(proxy.url + COMPLETIONS, json={"prompt": "x"}))
        await decode.until(lambda: len(decode.seen) == 1)
        proxy.process.send_signal(signal.SIGTERM)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(proxy.process.wait(), 0.3)
        proxy.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(proxy.process.wait(), 5) == -signal.SIGTERM
        with pytest.raises(aiohttp.ClientError):
            await asking
        await decode.until(lambda: decode.seen[0].cancelled)


async def test_it_may_open_as_many_files_as_the_system_allows() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))  # which the process inherits
    try:
        async with FakeServer() as decode, proxy_process("--decode", decode.url) as proxy:
            assert resource.prlimit(proxy.process.pid, resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_taken_port_and_a_wrong_address_are_said_plainly() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for arguments, code, text in (
            (["--decode", "http://127.0.0.1:9", "--port", str(taken.getsockname()[1])], 2, b"cannot listen on"),
            (["--decode", "nonsense"], 2, b"write it like http://host:8000"),
        ):
            process = await asyncio.create_subprocess_exec(*COMMAND, *arguments, stderr=asyncio.subprocess.PIPE)
            _, error = await process.communicate()
            assert process.returncode == code and text in error
            assert error.count(b"\n") == 1, "and nothing else: no traceback, no session that was left open"


async def test_without_aiohttp_it_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['aiohttp'] = None\n"
        "from kvservice.cli.main import app; app(['proxy', '--decode', 'http://127.0.0.1:9'])"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stderr=asyncio.subprocess.PIPE)
    _, error = await process.communicate()
    assert process.returncode == 2 and b"pip install 'aiohttp" in error and b"Traceback" not in error
