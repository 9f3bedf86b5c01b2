"""Serves the engines of this node on a Unix socket: one connection for each, whose end is the end of its attachment.

Frames of a connection wait in a queue of its own; shard.turns says whose is served next. A connection whose queue is
full, or that does not read its answers, is not read from any more. The kernel says which user and process is at the
other end. Both sides send heartbeats, so that a stopped process is noticed. Runs on the shard's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import partial
from typing import Any, cast

from kvservice.aio import begun, end_tasks, is_set_within
from kvservice.auth.authenticator import Authenticator, account_of
from kvservice.auth.tenants import METADATA_KEY
from kvservice.client.engine_link import SILENCE_SECONDS
from kvservice.core.attachments import ATTACHMENTS_MAX
from kvservice.errors import (
    ConfigError,
    Exhausted,
    Forbidden,
    InvalidRequest,
    KVServiceError,
    NotAttached,
    Unauthenticated,
    Unavailable,
)
from kvservice.observe import tracing
from kvservice.pool.open_calls import Later
from kvservice.pool.runtime import PoolRuntime
from kvservice.private_files import check_socket_path, peer_credentials
from kvservice.shard import engine_calls
from kvservice.shard.turns import Queuer, Turns
from kvservice.units import AttachmentId
from kvservice.wire import codec
from kvservice.wire.frames import (
    GOOD,
    KINDS,
    NO_CALL,
    READ_BYTES,
    REFUSED,
    REQUEST_BYTES_MAX,
    Frame,
    FrameKind,
    FrameReader,
    encode_failure,
    pack_frame,
)
from kvservice.wire.holding import decode_warm, encode_warmed
from kvservice.wire.parsing import parse
from kvservice.wire.v1 import shard_pb2
from kvservice.wire.versions import check_version

log = logging.getLogger("kvservice.shard")

HEARTBEAT_SECONDS = 2.0  # an engine that hears nothing for several of them gives the shard up
# Heartbeats that an engine leaves unanswered before it counts as stopped: 30 s. Its loop is in Python, and may have to
# wait for long on a machine without a free core. Its leases end by themselves before.
SILENT_BEATS_MAX = 15
QUEUED_FRAMES_MAX = 256  # of one connection; with more it is not read from, and the rest stays in the kernel
QUEUED_BYTES_MAX = 4 << 20  # of the same: six of the largest Seals
OPEN_CALLS_MAX = 2048  # of one connection: an engine has one for each request that waits. Further ones are refused
CONNECTIONS_MAX = ATTACHMENTS_MAX + 64  # each engine has one, and some are just coming
UNREAD_BYTES_MAX = 1 << 20  # of answers in our memory; with more the connection is not served until it reads
# Answers of a connection with more to do that go out in one write, which costs as much as a short call. Its engine
# works on those of one write while the next ones are made.
ANSWERS_TOGETHER = 8
KEEP_SECONDS = 0.0008  # that an answer waits for others
TURN_SECONDS = 0.0002  # of frames served before the loop looks at its sockets again; most frames take less
SHARED_TURN_SECONDS = 0.00005  # the same where another engine may ask meanwhile; the looking takes a tenth of the time
BACKLOG = 256  # connections that wait to be accepted, as many as engines may attach
assert 3 * HEARTBEAT_SECONDS < SILENCE_SECONDS, "an engine must miss several heartbeats before it gives up"


class EngineSocket:
    """`listen`, and `stop` in the end."""

    def __init__(self, pool: PoolRuntime, authenticator: Authenticator) -> None:
        self.pool = pool
        self.authenticator = authenticator
        self.turns: Turns[_Connection] = Turns()
        self.received = memoryview(bytearray(READ_BYTES))  # of all connections: the loop hands it over at once
        self._loop = asyncio.get_running_loop()
        self._server: asyncio.AbstractServer | None = None
        self._connections: dict[_Connection, None] = {}
        self._unsent: dict[_Connection, None] = {}  # connections with answers that are not written yet
        self._is_turning = False
        self._is_flushing = False
        self._heart: asyncio.TimerHandle | None = None
        self.is_stopping = False
        self._idle = asyncio.Event()  # once it stops: nothing is under way

    async def listen(self, path: str) -> None:
        """Serve at this path, which is open to this user only. Called again, it replaces a socket whose file is gone;
        open connections stay. Raises ConfigError when the path cannot be bound."""
        check_socket_path(path)
        if self._server is not None:
            self._server.close()
        previous = os.umask(0o177)  # the socket must be owner-only from the moment it exists
        try:
            self._server = await self._loop.create_unix_server(lambda: _Connection(self), path, backlog=BACKLOG)
        except OSError as error:
            raise ConfigError(f"cannot listen on {path}: {error.strerror}") from error
        finally:
            os.umask(previous)
        if self._heart is None:
            self._heart = self._loop.call_later(HEARTBEAT_SECONDS, self._beat)

    async def stop(self, grace_seconds: float) -> None:
        """Take no more calls, let those under way end within `grace_seconds`, and end all connections."""
        self.is_stopping = True
        if self._server is not None:
            self._server.close()
        if any(each.calls or each.queue for each in self._connections):
            await is_set_within(grace_seconds, self._idle)
        if self._heart is not None:
            self._heart.cancel()
        connections = list(self._connections)
        self._flush()
        for connection in connections:
            connection.end(Unavailable("the shard ended"))
        await asyncio.sleep(0)
        for connection in connections:
            connection.abort()
        await end_tasks([task for connection in connections for task in connection.tasks])
        await asyncio.sleep(0)  # aborted connections are closed one turn later

    def pids(self) -> Mapping[AttachmentId, int]:
        """The process of each attached engine; 0 for one in another pid namespace."""
        return {each.attachment: each.pid for each in self._connections if each.attachment is not None}

    # -- for connections ----

    def joins(self, connection: _Connection) -> None:
        """Raises Exhausted when there are too many."""
        if len(self._connections) >= CONNECTIONS_MAX:
            raise Exhausted(f"{CONNECTIONS_MAX} processes are connected to this shard already")
        self._connections[connection] = None

    def leaves(self, connection: _Connection) -> None:
        self._connections.pop(connection, None)
        self._unsent.pop(connection, None)

    def has_frames(self, line: Queuer[_Connection]) -> None:
        self.turns.wait(line)
        if not self._is_turning:
            self._is_turning = True
            self._loop.call_soon(self._turn)

    def has_read(self, line: Queuer[_Connection]) -> None:
        """Like `has_frames`, but with a turn at once if nobody waits. A turn of the event loop costs as much as serving
        a release."""
        self.turns.wait(line)
        if not self._is_turning:
            self._is_turning = True
            self._turn()

    def has_answers(self, connection: _Connection) -> None:
        """Answers are written together, after the pool has performed everything that they stand for."""
        self._unsent[connection] = None
        if not (self._is_flushing or self._is_turning):
            self._is_flushing = True
            self._loop.call_soon(self._flush)

    def _turn(self) -> None:
        now = time.perf_counter()
        end = now + (SHARED_TURN_SECONDS if len(self._connections) > 1 else TURN_SECONDS)
        while now < end and (line := self.turns.next()) is not None:
            connection = line.who
            connection.serve_next()
            before, now = now, time.perf_counter()
            more = connection.may_go_on
            self.turns.spent(line, now - before, more=more and connection.line is line)
            if more and connection.line is not line:  # it is another tenant's now
                self.turns.wait(connection.line)
            if not more and connection in self._unsent:  # it has asked nothing else, so its answers go out now
                del self._unsent[connection]
                connection.flush()
        self._is_turning = bool(self.turns)
        if self._is_turning:
            self._loop.call_soon(self._turn)
        self._flush()

    def _flush(self) -> None:
        """Write the answers, except those that wait for a next turn to go out with others."""
        self._is_flushing = False
        unsent, self._unsent = self._unsent, {}
        now = time.perf_counter()
        for connection in unsent:
            if self._is_turning and connection.keeps_answers(now):
                self._unsent[connection] = None
            else:
                connection.flush()
        if self.is_stopping and not any(each.calls or each.queue for each in self._connections):
            self._idle.set()

    def _beat(self) -> None:
        self._heart = self._loop.call_later(HEARTBEAT_SECONDS, self._beat)
        for connection in list(self._connections):
            connection.beat()


class _Connection(asyncio.BufferedProtocol):
    """One engine. It is also the `auth.identity.Connection` of its calls."""

    def __init__(self, socket: EngineSocket) -> None:
        self._socket = socket
        self._pool = socket.pool
        self._transport: asyncio.Transport | None = None  # None: not connected any more
        self._frames = FrameReader(REQUEST_BYTES_MAX)
        self._out: list[bytes] = []  # frames that are not written yet
        self._kept_since = 0.0  # since when an answer waits for others
        self._closing: asyncio.Transport | None = None  # what is left of it after `end`
        self.line: Queuer[_Connection] = socket.turns.join(self, "")
        self._is_served = False  # its turn is now
        self._metadata: tuple[tuple[str, str], ...] = ()
        self._said_hello = False
        self._is_paused = False  # not read from
        self._is_blocked = False  # it does not read
        self._silent_beats = 0
        self._queued_bytes = 0
        self.queue: OrderedDict[int, Frame | Callable[[], None]] = OrderedDict()  # by call: a frame, or what goes on
        self.calls: dict[int, int | asyncio.Task[None] | None] = {}  # open call -> its number at the pool, or its task
        self.tasks: set[asyncio.Task[None]] = set()
        self.attachment: AttachmentId | None = None
        self.pid = 0

    # -- auth.identity.Connection ----

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        return {}

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata

    def peer(self) -> str:
        return "unix:"

    # -- asyncio.BufferedProtocol ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's, as in Ray's workers, has another base
        self._transport.set_write_buffer_limits(high=UNREAD_BYTES_MAX)
        try:
            self.pid, uid = peer_credentials(self._transport.get_extra_info("socket"))
            if uid != os.geteuid():
                self._pool.count("engine_strangers")
                raise Forbidden(f"this socket is for processes of user {os.geteuid()}, and the caller is user {uid}")
            if self._socket.is_stopping:
                raise Unavailable("the shard is stopping")
            self._socket.joins(self)
        except KVServiceError as error:
            self.end(error)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._socket.received

    def buffer_updated(self, nbytes: int) -> None:
        self._silent_beats = 0
        try:
            for frame in self._frames.feed(self._socket.received[:nbytes]):
                self._take(frame)
        except InvalidRequest as error:  # what follows cannot be told apart
            self.end(error)
        if self.queue and not self._is_blocked:
            self._socket.has_read(self.line)
        is_full = len(self.queue) > QUEUED_FRAMES_MAX or self._queued_bytes > QUEUED_BYTES_MAX
        if is_full and not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._pool.count("engine_pauses")
            self._transport.pause_reading()

    def pause_writing(self) -> None:
        self._is_blocked = True

    def resume_writing(self) -> None:
        self._is_blocked = False
        self._silent_beats = 0
        if self.queue:
            self._socket.has_frames(self.line)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = self._closing = None
        self._let_go()
        self._socket.turns.leave(self.line)
        self._socket.leaves(self)

    # -- frames ----

    def _take(self, frame: Frame) -> None:
        """Queue a frame that came until its turn. A CANCEL needs none: it makes other work unnecessary."""
        if frame.kind == FrameKind.HEARTBEAT or self._transport is None:
            return
        if frame.kind == FrameKind.CANCEL:
            self._cancel(frame.call)
        elif frame.call == NO_CALL or frame.call in self.queue or frame.call in self.calls:
            raise InvalidRequest(f"call {frame.call} is under way already")
        else:
            self.queue[frame.call] = frame
            self._queued_bytes += len(frame.body)

    @property
    def may_go_on(self) -> bool:
        """Whether it has something to do at its next turn."""
        return bool(self.queue) and not self._is_blocked and self._transport is not None

    @property
    def _has_room(self) -> bool:
        """Whether a connection that is not read from is read from again."""
        return len(self.queue) <= QUEUED_FRAMES_MAX // 2 and self._queued_bytes <= QUEUED_BYTES_MAX // 2

    def serve_next(self) -> None:
        """Its turn: one frame, or one more part of a long call."""
        if not self.may_go_on:
            return
        _, first = self.queue.popitem(last=False)
        self._is_served = True
        if isinstance(first, Frame):
            self._queued_bytes -= len(first.body)
            self._serve(first)
        else:
            first()
        self._is_served = False
        if self._is_paused and self._has_room and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()

    def _serve(self, frame: Frame) -> None:
        """Ask the pool, or answer at once. Every frame has one answer, unless it is cancelled."""
        self.calls[frame.call] = None
        try:
            kind = self._check(frame)
            if kind is FrameKind.HELLO:
                self._hello(frame.body)
                self.answer(frame.call, kind, b"")
            elif kind in engine_calls.OF_ATTACHED:
                self._ask(frame, kind)
            elif kind is FrameKind.ATTACH:
                self._run(frame, kind, partial(self._attach, frame.body))
            elif kind is FrameKind.DETACH:
                self._run(frame, kind, self._detach)
            elif kind is FrameKind.WARM:
                self._run(frame, kind, partial(self._warm, frame.body))
            else:
                raise InvalidRequest(f"{kind.name} is no question")
        except KVServiceError as error:
            self.refuse(frame.call, frame.kind, error)
        except Exception:  # noqa: BLE001  mailbox boundary: after a bug the engine must get an answer and not wait
            self.failed(frame.call, frame.kind)

    def _check(self, frame: Frame) -> FrameKind:
        if len(self.calls) > OPEN_CALLS_MAX:
            raise Exhausted(f"{OPEN_CALLS_MAX} calls of this engine are under way already: try again")
        if self._socket.is_stopping:
            raise Unavailable("the shard is stopping")
        kind = KINDS.get(frame.kind)
        if kind is None:
            raise InvalidRequest(f"frames of kind {frame.kind} are not known to this shard")
        if not self._said_hello and kind is not FrameKind.HELLO:
            raise InvalidRequest("the first frame of a connection is a HELLO with the version of its engine")
        return kind

    def _ask(self, frame: Frame, kind: FrameKind) -> None:
        if self.attachment is None:
            raise NotAttached("this connection has no attachment: attach again")
        make, later = engine_calls.question(kind, frame.body, self.attachment), partial(self._again, frame.call)
        if frame.trace:
            self._run(frame, kind, partial(self._traced, kind, make, later))
            return
        op = self._pool.post(make, self.attachment, _Answer(self, frame.call, kind), later)
        if frame.call in self.calls:  # not answered at once
            self.calls[frame.call] = op

    async def _traced(self, kind: FrameKind, make: engine_calls.Make, later: Later) -> bytes:
        return engine_calls.answer(kind, await self._pool.ask(make, self.attachment, later))

    def _again(self, call: int, go_on: Callable[[], None]) -> None:
        """Continue a long call at a later turn, after what this connection has asked meanwhile."""
        if self._transport is None or call not in self.calls:
            asyncio.get_running_loop().call_soon(go_on)  # it was given up; what it has begun is ended
            return
        self.queue[call] = go_on
        if not self._is_served:
            self._socket.has_frames(self.line)

    def _cancel(self, call: int) -> None:
        """Nobody waits for this call any more. A long one that gives something back goes on to its end."""
        waiting = self.queue.pop(call, None)
        if isinstance(waiting, Frame):
            self._queued_bytes -= len(waiting.body)
        under_way = self.calls.pop(call, None)
        if isinstance(under_way, int):
            self._pool.cancel(under_way)
        elif under_way is not None:
            under_way.cancel()
        if waiting is not None and not isinstance(waiting, Frame):
            waiting()

    # -- what is asked of the shard itself ----

    def _hello(self, body: bytes) -> None:
        message = parse(shard_pb2.Hello, body)
        check_version(message.protocol_version, "the engine")
        self._metadata = ((METADATA_KEY, message.authorization),) if message.authorization else ()
        caller = self._socket.authenticator.caller(self)
        self._said_hello = True
        if self.attachment is not None:
            self._socket.authenticator.renew(self.attachment, caller)
        if self.line.tenant.name != account_of(caller):
            self._socket.turns.leave(self.line)
            self.line = self._socket.turns.join(self, account_of(caller))

    async def _attach(self, body: bytes) -> bytes:
        message = parse(shard_pb2.AttachRequest, body)
        if self.attachment is not None:
            raise InvalidRequest("this connection is attached already: each attachment has a connection of its own")
        authenticator = self._socket.authenticator
        caller = authenticator.caller(self)
        spec = codec.decode_spec(message)
        attachment = await self._pool.attach(spec, lambda reason: self.end(Unavailable(reason)), account_of(caller))
        self.attachment = attachment.attachment_id
        try:
            bound = authenticator.bind(caller, attachment, lambda reason: self.end(Unauthenticated(reason)))
        except KVServiceError:
            self._leave_pool()
            raise
        return codec.encode_attachment(bound).SerializeToString()

    async def _detach(self) -> bytes:
        if self.attachment is not None:
            attachment, self.attachment = self.attachment, None
            self._socket.authenticator.unbind(attachment)
            await self._pool.detach(attachment)
        return b""

    async def _warm(self, body: bytes) -> bytes:
        message = parse(shard_pb2.WarmRequest, body)
        account = account_of(self._socket.authenticator.caller(self))
        return encode_warmed(await self._pool.warm(decode_warm(message), account)).SerializeToString()

    def _run(self, frame: Frame, kind: FrameKind, work: Callable[[], Coroutine[Any, Any, bytes]]) -> None:
        """Answer with what `work` returns, from a task."""

        async def run() -> None:
            name, trace = kind.name.title().replace("_", ""), frame.trace.decode("ascii", "replace")
            try:
                with tracing.served_span(f"Engine/{name}", lambda: ((tracing.HEADER, trace),)):
                    body = await work()
                self.answer(frame.call, kind, body)
            except KVServiceError as error:
                self.refuse(frame.call, kind, error)
            except Exception:  # noqa: BLE001  mailbox boundary, as in _serve
                self.failed(frame.call, kind)

        self.calls[frame.call] = begun(run(), self.tasks)

    # -- answers ----

    def answer(self, call: int, kind: FrameKind, body: bytes) -> None:
        """Answer an open call. One that was cancelled has no answer."""
        if call in self.calls:
            del self.calls[call]
            self._send(call, kind, GOOD, body)

    def refuse(self, call: int, kind: int, error: KVServiceError) -> None:
        if call in self.calls:
            del self.calls[call]
            self._send(call, kind, REFUSED, encode_failure(error))

    def failed(self, call: int, kind: int) -> None:
        log.exception("engine_call_failed", extra={"kind": kind})
        self.refuse(call, kind, KVServiceError("the call failed; see the shard's log"))

    def _send(self, call: int, kind: int, status: int, body: bytes) -> None:
        if self._transport is not None:
            self._out.append(pack_frame(kind, call, body, status))
            self._socket.has_answers(self)

    def keeps_answers(self, now: float) -> bool:
        """Whether its answers may wait for those of what it has asked already."""
        self._kept_since = self._kept_since or now
        return self.may_go_on and len(self._out) < ANSWERS_TOGETHER and now < self._kept_since + KEEP_SECONDS

    def flush(self) -> None:
        self._kept_since = 0.0
        if self._out and self._transport is not None:
            self._transport.write(b"".join(self._out))
        self._out.clear()

    def beat(self) -> None:
        """Send a heartbeat, or give up an engine that has not answered the last ones, or does not read."""
        if self._transport is None:
            self.abort()  # it was told goodbye a while ago, and has not read it
            return
        if self._silent_beats >= SILENT_BEATS_MAX:
            self._pool.count("engines_silent")
            self.abort()
            return
        self._silent_beats += not self._is_paused or self._is_blocked
        if not self._is_blocked:
            self._send(NO_CALL, FrameKind.HEARTBEAT, GOOD, b"")

    # -- the end ----

    def end(self, error: KVServiceError) -> None:
        """End the attachment and the connection, and say why."""
        if self._transport is not None:
            transport, self._transport = self._transport, None
            goodbye = pack_frame(FrameKind.GOODBYE, NO_CALL, encode_failure(error), REFUSED)
            transport.write(b"".join((*self._out, goodbye)))
            self._closing = transport
            transport.close()
            self._let_go()

    def abort(self) -> None:
        """End the connection at once, also when the engine does not read."""
        for transport in (self._transport, self._closing):
            if transport is not None:
                transport.abort()

    def _let_go(self) -> None:
        """Give up what was asked, and the attachment."""
        self._out.clear()
        for call in (*self.queue, *self.calls):
            self._cancel(call)
        self._leave_pool()

    def _leave_pool(self) -> None:
        if self.attachment is not None:
            attachment, self.attachment = self.attachment, None
            self._socket.authenticator.unbind(attachment)
            self._pool.attachment_lost(attachment)


class _Answer:
    """Waits for the answer to one call, and writes it down: pool.open_calls.Waiter."""

    __slots__ = ("_call", "_connection", "_kind")

    def __init__(self, connection: _Connection, call: int, kind: FrameKind) -> None:
        self._connection, self._call, self._kind = connection, call, kind

    def done(self) -> bool:
        return self._call not in self._connection.calls

    def set_result(self, value: Any, /) -> None:
        try:
            body = engine_calls.answer(self._kind, value)
        except Exception:  # noqa: BLE001  the pool goes on, whatever cannot be said
            self._connection.failed(self._call, self._kind)
        else:
            self._connection.answer(self._call, self._kind, body)

    def set_exception(self, error: KVServiceError, /) -> None:
        self._connection.refuse(self._call, self._kind, error)
