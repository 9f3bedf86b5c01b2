"""Stands in front of an S3 server and spoils what passes: late, refused, cut, changed or never answered.

    with S3Server() as s3, FaultyStore(s3.address) as front:
        os.environ.update(s3.environment(front.address))
        front.faults = StoreFaults(late_seconds=0.05)

It speaks enough HTTP/1.1 to know where requests and answers end, with one connection to the server for each request.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections import Counter
from dataclasses import dataclass
from types import TracebackType

from kvservice.aio import begun, end_tasks

_SLOW_DOWN = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Please reduce your rate.</Message></Error>"


@dataclass(frozen=True, slots=True)
class StoreFaults:
    """What happens to each request. Shares are probabilities between 0 and 1, drawn from the seed of the front."""

    late_seconds: float = 0.0  # before a request is passed on: the way there and back
    hang: float = 0.0  # it is taken and never answered
    error: float = 0.0  # 500 InternalError
    throttle: float = 0.0  # 503 SlowDown
    reset: float = 0.0  # the connection ends before the answer
    cut: float = 0.0  # the connection ends in the middle of the answer's body
    flip: float = 0.0  # one byte of the answer's body is changed
    methods: tuple[str, ...] = ("GET", "HEAD", "PUT", "POST", "DELETE")  # others pass unspoilt


class FaultyStore:
    """One front on a port of its own, on a thread of its own. `faults` may be replaced at any time, by any thread."""

    def __init__(self, server: str, faults: StoreFaults | None = None, seed: int = 0) -> None:
        """`server` is the host:port behind it."""
        self.faults = faults or StoreFaults()
        self.counts: Counter[str] = Counter()  # requests by method, and spoilt ones by fault
        self.most_at_once = 0  # requests under way together, since this was last set to 0
        self._server = server
        self._random = random.Random(seed)
        self._at_once = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="faulty-store", daemon=True)
        self._thread.start()
        listening = asyncio.run_coroutine_threadsafe(asyncio.start_server(self._accept, "127.0.0.1", 0), self._loop)
        self._listener = listening.result()
        self.address = f"127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"

    def __enter__(self) -> FaultyStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections and end the thread. Blocks; idempotent."""
        if self._loop.is_closed():
            return

        async def end() -> None:
            self._listener.close()
            await end_tasks(list(self._tasks))

        asyncio.run_coroutine_threadsafe(end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        begun(self._serve(reader, writer), self._tasks)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (request := await _message(reader)) is not None:
                self._at_once += 1
                self.most_at_once = max(self.most_at_once, self._at_once)
                try:
                    if not await self._answer(request, writer):
                        break
                finally:
                    self._at_once -= 1
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # one of both sides went away
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _answer(self, request: _Message, writer: asyncio.StreamWriter) -> bool:
        """Returns whether the connection lives on."""
        method = request.head.split(b" ", 1)[0].decode()
        faults = self.faults if method in self.faults.methods else StoreFaults()
        self.counts[method] += 1
        await asyncio.sleep(faults.late_seconds)
        fault = self._draw(faults)
        if fault:
            self.counts[fault] += 1
        if fault == "hang":
            await asyncio.Event().wait()
        if fault == "reset":
            return False
        if fault in ("error", "throttle"):
            status = b"503 Slow Down" if fault == "throttle" else b"500 Internal Server Error"
            writer.write(_plain(status, b"" if method == "HEAD" else _SLOW_DOWN))
            await writer.drain()
            return True
        answer = await self._pass_on(request, method == "HEAD")
        body = answer.body
        if fault == "flip" and body:
            place = self._random.randrange(len(body))
            body = body[:place] + bytes([body[place] ^ 1]) + body[place + 1 :]
        if fault == "cut" and body:
            writer.write(answer.head + body[: len(body) // 2])
            await writer.drain()
            return False
        writer.write(answer.head + body)
        await writer.drain()
        return True

    def _draw(self, faults: StoreFaults) -> str:
        for name in ("hang", "error", "throttle", "reset", "cut", "flip"):
            share: float = getattr(faults, name)
            if share and self._random.random() < share:
                return name
        return ""

    async def _pass_on(self, request: _Message, is_head: bool) -> _Message:
        host, _, port = self._server.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(_with_header(request.head, b"Connection", b"close") + request.body)
            head = await reader.readuntil(b"\r\n\r\n")
            body = b"" if is_head else await reader.read()
        finally:
            writer.close()
        # The whole body is known now, so the client's connection can stay open whatever the server said about its own.
        if not is_head:
            head = _with_header(head, b"Content-Length", b"%d" % len(body))
        head = _with_header(_with_header(head, b"Transfer-Encoding", b""), b"Connection", b"")
        return _Message(head.replace(b"HTTP/1.0", b"HTTP/1.1", 1), body)


@dataclass(frozen=True, slots=True)
class _Message:
    head: bytes  # with the empty line at its end
    body: bytes


async def _message(reader: asyncio.StreamReader) -> _Message | None:
    """The next request, None when there is no further one."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    length = next((value for name, value in _headers(head) if name == b"content-length"), b"0")
    return _Message(head, await reader.readexactly(int(length)))


def _headers(head: bytes) -> list[tuple[bytes, bytes]]:
    lines = head.split(b"\r\n")[1:-2]
    return [(name.strip().lower(), value.strip()) for name, _, value in (line.partition(b":") for line in lines)]


def _with_header(head: bytes, name: bytes, value: bytes) -> bytes:
    """The head with this header set; with an empty value it is left out."""
    lines = head.split(b"\r\n")[:-2]
    kept = [lines[0]] + [line for line in lines[1:] if line.partition(b":")[0].strip().lower() != name.lower()]
    return b"\r\n".join([*kept, *([name + b": " + value] if value else []), b"", b""])


def _plain(status: bytes, body: bytes) -> bytes:
    return b"HTTP/1.1 %s\r\nContent-Type: application/xml\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)
