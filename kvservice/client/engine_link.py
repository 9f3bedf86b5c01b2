"""One connection of an engine to its shard: calls with deadlines over frames, and the end of the connection.

Everything runs on the loop that connects. Nothing blocks, and nothing raises into the loop.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable
from typing import cast

from kvservice.errors import DeadlineExceeded, Forbidden, InvalidRequest, KVServiceError, Unavailable
from kvservice.observe import tracing
from kvservice.private_files import peer_uid
from kvservice.wire.frames import (
    NO_CALL,
    READ_BYTES,
    REFUSED,
    REPLY_BYTES_MAX,
    FrameKind,
    FrameReader,
    decode_failure,
    pack_frame,
)

SILENCE_SECONDS = 15.0  # the shard sends a heartbeat every 2 s; after this silence it counts as stopped
LOOKS = 5  # at the silence, in this time
UNSENT_BYTES_MAX = 4 << 20  # of questions that the shard does not read; with more, a call fails at once


class EngineLink(asyncio.BufferedProtocol):
    """Make one with `connect`. `on_end(reason)` is called once, when it ends without `close`."""

    def __init__(self, path: str, on_end: Callable[[str], None]) -> None:
        self.greeted_as: object = None  # the token that the shard was told last, for who greets
        self._path = path
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._ended: KVServiceError | None = None  # why there is no connection any more
        self._frames = FrameReader(REPLY_BYTES_MAX)
        self._received = memoryview(bytearray(READ_BYTES))
        self._numbers = itertools.count(1)
        self._open: dict[int, asyncio.Future[bytes]] = {}
        self._out: list[bytes] = []
        self._looks = 0  # since anything was heard
        self._look_timer: asyncio.TimerHandle | None = None

    @classmethod
    async def connect(cls, path: str, on_end: Callable[[str], None]) -> EngineLink:
        """Raises Unavailable when nobody listens there, Forbidden when it is another user's process."""
        link = cls(path, on_end)
        try:
            await link._loop.create_unix_connection(lambda: link, path)
        except (OSError, ValueError) as error:  # ValueError: the text is no path
            raise Unavailable(f"nobody answers at {path}: {error}") from error
        link.check_open()
        return link

    def check_open(self) -> None:
        """Raises why the connection ended, if it did."""
        if self._ended is not None:
            raise type(self._ended)(self._ended.message)

    async def ask(self, kind: FrameKind, body: bytes, seconds: float) -> bytes:
        """The body of the answer.

        Raises what the shard refuses with, DeadlineExceeded after `seconds`, Unavailable when the connection ends or
        the shard does not read. A call that is cancelled or too late is given up at the shard as well.
        """
        transport = self._transport
        if transport is None or self._ended is not None:
            raise Unavailable(f"{_name(kind)} at {self._path}: {self._ended or 'not connected'}")
        if transport.get_write_buffer_size() > UNSENT_BYTES_MAX:
            raise Unavailable(f"{_name(kind)} at {self._path}: the shard does not read what it is asked")
        call = next(self._numbers)
        future: asyncio.Future[bytes] = self._loop.create_future()
        self._open[call] = future
        self._send(pack_frame(kind, call, body, trace=tracing.traceparent().encode()))
        timer = self._loop.call_later(seconds, self._too_late, call, kind, seconds)
        try:
            return await future
        except asyncio.CancelledError:
            self._give_up(call)
            raise
        finally:
            timer.cancel()

    def close(self) -> None:
        """End the connection now, without `on_end`."""
        self._on_end = lambda reason: None
        self._end(Unavailable("this side closed the connection"))

    # -- asyncio.BufferedProtocol ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's, as in Ray's workers, has another base
        uid = peer_uid(self._transport.get_extra_info("socket"))
        if uid != os.geteuid():
            self._end(Forbidden(f"user {uid} serves {self._path}, and this process is of user {os.geteuid()}"))
            return
        self._look_timer = self._loop.call_later(SILENCE_SECONDS / LOOKS, self._look)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._received

    def buffer_updated(self, nbytes: int) -> None:
        self._looks = 0
        try:
            for frame in self._frames.feed(self._received[:nbytes]):
                if frame.kind == FrameKind.HEARTBEAT:
                    self._send(pack_frame(FrameKind.HEARTBEAT, NO_CALL))
                elif frame.kind == FrameKind.GOODBYE:
                    self._end(decode_failure(frame.body))
                elif (future := self._open.pop(frame.call, None)) is not None and not future.done():
                    if frame.status == REFUSED:
                        future.set_exception(decode_failure(frame.body))
                    else:
                        future.set_result(frame.body)
        except InvalidRequest as error:
            self._end(Unavailable(f"the shard sent what cannot be read: {error.message}"))

    def connection_lost(self, error: Exception | None) -> None:
        self._end(Unavailable("the shard closed the connection"))

    # -- inside ----

    def _send(self, frame: bytes) -> None:
        """What is sent in one turn of the loop goes out in one write, but for a call that nobody else waits beside: it
        would wait for others that do not come."""
        if not self._out:
            if len(self._open) <= 1 and self._transport is not None:
                self._transport.write(frame)
                return
            self._loop.call_soon(self._flush)
        self._out.append(frame)

    def _flush(self) -> None:
        if self._out and self._transport is not None:
            self._transport.write(b"".join(self._out))
        self._out.clear()

    def _give_up(self, call: int) -> None:
        if self._open.pop(call, None) is not None:
            self._send(pack_frame(FrameKind.CANCEL, call))

    def _too_late(self, call: int, kind: FrameKind, seconds: float) -> None:
        future = self._open.get(call)
        if future is not None and not future.done():
            self._give_up(call)
            future.set_exception(DeadlineExceeded(f"{_name(kind)} at {self._path}: no answer within {seconds:.1f} s"))

    def _look(self) -> None:
        self._looks += 1
        if self._looks > LOOKS:
            self._end(Unavailable(f"no heartbeat from the shard for {SILENCE_SECONDS} s"))
        else:
            self._look_timer = self._loop.call_later(SILENCE_SECONDS / LOOKS, self._look)

    def _end(self, error: KVServiceError) -> None:
        if self._ended is not None:
            return
        self._ended = error
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()
        if self._look_timer is not None:
            self._look_timer.cancel()
        calls, self._open = self._open, {}
        for future in calls.values():
            if not future.done():
                future.set_exception(type(error)(error.message))  # one for each: whoever raises it writes into it
        self._on_end(error.message)


def _name(kind: FrameKind) -> str:
    return kind.name.title().replace("_", "")
