"""The socket of the engines: strangers, floods and ends, on a real socket with a real pool."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvservice.auth.authenticator import Authenticator
from kvservice.client.shard import ShardClient
from kvservice.core.messages import AcquireRequest, Handoff
from kvservice.core.segment.geometry import plan_geometry
from kvservice.core.slices import SliceSizes
from kvservice.errors import Forbidden, InvalidRequest, KVServiceError, NotAttached, Unavailable
from kvservice.pool.runtime import PoolConfig, PoolRuntime
from kvservice.shard import engine_socket
from kvservice.shard.engine_socket import (
    ANSWERS_TOGETHER,
    QUEUED_BYTES_MAX,
    QUEUED_FRAMES_MAX,
    EngineSocket,
)
from kvservice.testing.builders import make_chain, make_spec
from kvservice.testing.eventually import eventually_async
from kvservice.testing.pool_port_contract import PortEngine
from kvservice.testing.unique import unique_name
from kvservice.units import HandoffId, MiB, NodeId
from kvservice.wire.codec import encode_acquire, encode_refs, encode_spec
from kvservice.wire.frames import (
    GOOD,
    HEAD,
    NO_CALL,
    REFUSED,
    REPLY_BYTES_MAX,
    REQUEST_BYTES_MAX,
    Frame,
    FrameKind,
    FrameReader,
    decode_failure,
    pack_frame,
)
from kvservice.wire.v1 import shard_pb2
from kvservice.wire.versions import PROTOCOL_VERSION

CHAIN = make_chain(4)
HELLO = shard_pb2.Hello(protocol_version=PROTOCOL_VERSION).SerializeToString()
SECONDS = 10.0  # for an answer, on a busy machine
SLICE = 4  # slots; the pool has a few times as many
LAST = 12_000  # call of one that does not read: the kernel and the streams of the test take some thousands


class Raw:
    """A process that speaks frames as it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer
        self._frames, self._found = FrameReader(REPLY_BYTES_MAX), deque[Frame]()

    @classmethod
    async def connect(cls, path: Path) -> Raw:
        return cls(*await asyncio.open_unix_connection(path))

    def send(self, kind: int, call: int, body: bytes = b"") -> None:
        self.writer.write(HEAD.pack(len(body), kind, 0, 0, call) + body)

    async def next(self) -> Frame | None:
        """The next frame but heartbeats; None at the end."""
        async with asyncio.timeout(SECONDS):
            while True:
                while self._found:
                    if (frame := self._found.popleft()).kind != FrameKind.HEARTBEAT:
                        return frame
                if not (data := await self._reader.read(1 << 16)):
                    return None
                self._found.extend(self._frames.feed(data))

    async def refusal(self) -> KVServiceError:
        frame = await self.next()
        assert frame is not None and frame.status == REFUSED, frame
        return decode_failure(frame.body)


@pytest.fixture
async def pool() -> AsyncIterator[PoolRuntime]:
    path = Path(f"/dev/shm/kvservice-test{unique_name()}-n")
    made = await PoolRuntime.open(PoolConfig(NodeId("n"), path, plan_geometry(8 * MiB), lease_seconds=3600.0))
    yield made
    made.state.check_invariants()
    made.unlink()
    await made.close()


@pytest.fixture
async def socket(pool: PoolRuntime) -> AsyncIterator[EngineSocket]:
    made = EngineSocket(pool, Authenticator(None, pool))
    yield made
    await made.stop(0.0)


@pytest.fixture
async def path(socket: EngineSocket, tmp_path: Path) -> Path:
    await socket.listen(str(tmp_path / "s"))
    return tmp_path / "s"


@pytest.fixture
async def raw(path: Path) -> AsyncIterator[Raw]:
    made = await Raw.connect(path)
    yield made
    made.writer.close()


async def greeted(raw: Raw) -> Raw:
    raw.send(FrameKind.HELLO, 1, HELLO)
    answer = await raw.next()
    assert answer == Frame(FrameKind.HELLO, 0, 1, b"")
    return raw


async def test_only_this_user_may_open_the_socket_file(path: Path) -> None:
    assert path.stat().st_mode & 0o077 == 0


async def test_a_process_of_another_user_is_told_and_turned_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the file says: the kernel knows who it is."""
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    raw = await Raw.connect(path)
    error = await raw.refusal()
    assert isinstance(error, Forbidden) and f"user {me}" in error.message
    assert await raw.next() is None
    with pytest.raises(Forbidden, match=f"user {me} serves"):
        await ShardClient(str(path)).attach(make_spec(), lambda reason: None)


async def test_nothing_is_answered_before_a_hello(raw: Raw) -> None:
    raw.send(FrameKind.ATTACH, 7, encode_spec(make_spec()).SerializeToString())
    assert "HELLO" in (await raw.refusal()).message
    await greeted(raw)
    raw.send(FrameKind.RELEASE, 8)
    assert isinstance(await raw.refusal(), NotAttached)


async def test_a_connection_has_one_attachment(raw: Raw, pool: PoolRuntime) -> None:
    await greeted(raw)
    for call in (2, 3):
        raw.send(FrameKind.ATTACH, call, encode_spec(make_spec()).SerializeToString())
    answer = await raw.next()
    assert answer is not None and not answer.status
    assert "attached already" in (await raw.refusal()).message
    raw.writer.close()
    await eventually_async(lambda: not pool.state.attachment_count, "the attachment to end with its connection")


@pytest.mark.parametrize(
    ("kind", "text"), [(0, "not known"), (200, "not known"), (FrameKind.GOODBYE, "is no question")], ids=str
)
async def test_what_is_no_question_is_refused_and_the_rest_goes_on(raw: Raw, kind: int, text: str) -> None:
    await greeted(raw)
    raw.send(kind, 5, b"x")
    assert text in (await raw.refusal()).message
    raw.send(FrameKind.HELLO, 6, HELLO)
    assert await raw.next() == Frame(FrameKind.HELLO, 0, 6, b"")


@pytest.mark.parametrize(
    "data",
    [
        HEAD.pack(REQUEST_BYTES_MAX + 1, FrameKind.SEAL, 0, 0, 1),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        pack_frame(FrameKind.HELLO, 9, HELLO) * 2,
        pack_frame(FrameKind.HELLO, NO_CALL, HELLO),
    ],
    ids=["too long", "gRPC", "a number twice", "no number"],
)
async def test_what_cannot_be_told_apart_ends_the_connection(raw: Raw, data: bytes) -> None:
    raw.writer.write(data)
    assert isinstance(await raw.refusal(), InvalidRequest)
    assert await raw.next() is None


async def test_a_flood_that_is_not_read_stays_in_the_kernel(path: Path, socket: EngineSocket) -> None:
    """And whoever is polite is served meanwhile."""
    rude, polite = await greeted(await Raw.connect(path)), await PortEngine.attach(ShardClient(str(path)))
    (connection, *_) = socket._connections
    await polite.store(CHAIN)
    frames = b"".join(pack_frame(FrameKind.ACQUIRE, call, bytes(20_000)) for call in range(2, 2000))
    rude.writer.transport.set_write_buffer_limits(0)
    rude.writer.write(frames)
    for _ in range(20):
        assert len((await polite.acquire(CHAIN)).blocks) == len(CHAIN)
        assert len(connection.queue) <= QUEUED_FRAMES_MAX + 20 and connection._queued_bytes <= 2 * QUEUED_BYTES_MAX
    polite.segment.close()
    rude.writer.transport.abort()
    await eventually_async(lambda: connection not in socket._connections, "the end of the rude one")


async def test_who_does_not_read_its_answers_is_not_served(
    path: Path, socket: EngineSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_socket, "UNREAD_BYTES_MAX", 1024)
    raw = await greeted(await Raw.connect(path))
    (connection,) = socket._connections
    raw.writer.transport.pause_reading()  # type: ignore[attr-defined]
    raw.writer.write(b"".join(pack_frame(FrameKind.ACQUIRE, call) for call in range(2, LAST + 1)))
    await eventually_async(lambda: connection._is_blocked and connection._is_paused, "the shard to stop reading")
    raw.writer.transport.resume_reading()  # type: ignore[attr-defined]
    last = None
    while last is None or last.call < LAST:
        last = await raw.next()
        assert last is not None
    raw.writer.close()


@pytest.mark.parametrize("kept, together", [(60.0, ANSWERS_TOGETHER), (0.0, 1)])
async def test_answers_of_a_flood_go_out_together_and_soon(
    path: Path, socket: EngineSocket, monkeypatch: pytest.MonkeyPatch, kept: float, together: int
) -> None:
    monkeypatch.setattr(engine_socket, "TURN_SECONDS", 1e-9)  # one frame
    monkeypatch.setattr(engine_socket, "KEEP_SECONDS", kept)
    raw, written = await greeted(await Raw.connect(path)), list[int]()
    (connection,) = socket._connections
    write = connection.flush

    def flush() -> None:
        written.append(len(connection._out))
        write()

    monkeypatch.setattr(connection, "flush", flush)
    raw.writer.write(b"".join(pack_frame(FrameKind.RELEASE, call) for call in range(2, 66)))
    for call in range(2, 66):
        frame = await raw.next()
        assert frame is not None and frame.call == call
    assert sum(written) == 64
    assert written.count(together) >= 60 // together and max(written) == together
    raw.writer.close()


async def test_an_answer_does_not_wait_for_the_frames_of_a_flood(
    path: Path, socket: EngineSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is written while the flood has more to be served, in the same turn."""
    monkeypatch.setattr(engine_socket, "SHARED_TURN_SECONDS", 60.0)
    rude, polite = [await greeted(await Raw.connect(path)) for _ in range(2)]
    flood, asking = socket._connections
    left, write = list[int](), asking.flush

    def flush() -> None:
        left.append(len(flood.queue))
        write()

    monkeypatch.setattr(asking, "flush", flush)
    for call in range(2, 34):
        flood._take(Frame(FrameKind.RELEASE, GOOD, call, b""))
    asking._take(Frame(FrameKind.RELEASE, GOOD, 2, b""))
    socket.turns.wait(flood.line)
    socket.turns.wait(asking.line)
    socket._turn()
    assert not flood.queue
    assert left and left[0] > 0
    for raw in (rude, polite):
        assert (frame := await raw.next()) is not None and frame.call == 2
        raw.writer.close()


async def test_turns_are_short_while_another_engine_may_ask(
    path: Path, socket: EngineSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_socket, "TURN_SECONDS", 60.0)
    monkeypatch.setattr(engine_socket, "SHARED_TURN_SECONDS", 1e-9)  # one frame
    raws, left = [await greeted(await Raw.connect(path))], list[int]()
    for _ in range(2):
        first = next(iter(socket._connections))
        for call in range(2, 10):
            first._take(Frame(FrameKind.RELEASE, GOOD, call, b""))
        socket.turns.wait(first.line)
        socket._turn()
        left.append(len(first.queue))
        for call in range(2, 10):
            assert (frame := await raws[0].next()) is not None and frame.call == call
        raws.append(await greeted(await Raw.connect(path)))
    assert left == [0, 7]
    for raw in raws:
        raw.writer.close()


async def test_who_finds_nobody_waiting_has_its_turn_at_once(path: Path, socket: EngineSocket) -> None:
    """And who finds somebody waiting waits as well."""
    raws = [await greeted(await Raw.connect(path)) for _ in range(2)]
    first, second = socket._connections

    def comes(connection: engine_socket._Connection, call: int) -> None:
        frame = pack_frame(FrameKind.RELEASE, call)
        connection.get_buffer(-1)[: len(frame)] = frame
        connection.buffer_updated(len(frame))

    comes(first, 2)
    assert not first.queue and not first._out, "it is served, and the answer is written"
    socket.has_frames(first.line)
    comes(second, 2)
    assert list(second.queue) == [2], "the turn of the loop that others wait for is near"
    for raw in raws:
        assert (frame := await raw.next()) is not None and frame.call == 2
        raw.writer.close()


async def test_a_cancelled_call_is_given_up_at_the_pool(path: Path, pool: PoolRuntime, socket: EngineSocket) -> None:
    client = ShardClient(str(path))
    engine = await PortEngine.attach(client)
    handoff = HandoffId(bytes(range(16)))
    await client.open_handoff(engine.attachment.attachment_id, handoff, 1)
    wanted = AcquireRequest(CHAIN, 0, 60.0, handoff=Handoff(handoff, NodeId("n")))
    asking = asyncio.create_task(client.acquire(engine.attachment.attachment_id, wanted))
    (connection,) = socket._connections
    await eventually_async(lambda: bool(connection.calls), "the call at the shard")
    assert pool._calls._open
    asking.cancel()
    await eventually_async(lambda: not connection.calls and not pool._calls._open, "the call to be given up")
    engine.segment.close()
    await client.close()


async def test_a_frame_that_was_cancelled_in_the_queue_is_not_served(raw: Raw, pool: PoolRuntime) -> None:
    await greeted(raw)
    raw.writer.write(
        pack_frame(FrameKind.HELLO, 5, HELLO) + pack_frame(FrameKind.CANCEL, 5) + pack_frame(FrameKind.HELLO, 6, HELLO)
    )
    assert await raw.next() == Frame(FrameKind.HELLO, 0, 6, b"")


@pytest.mark.parametrize("how", ["cancelled", "traced and cancelled", "ended"])
async def test_a_long_call_that_is_given_up_gives_back_all(
    path: Path, pool: PoolRuntime, socket: EngineSocket, how: str
) -> None:
    """It has had one slice of several. Nobody comes back to what is left of it but the shard."""
    client = ShardClient(str(path))
    engine = await PortEngine.attach(client)
    pool.state._context.slices.sizes = SliceSizes(SLICE, SLICE)
    refs = await client.reserve(engine.attachment.attachment_id, 3 * SLICE)
    assert len(refs) == 3 * SLICE
    (connection,) = socket._connections
    trace = b"00-" + b"1" * 32 + b"-" + b"2" * 16 + b"-01" if how.startswith("traced") else b""
    body = shard_pb2.AbortRequest(blocks=encode_refs(refs)).SerializeToString()
    connection._take(Frame(FrameKind.ABORT, 0, 900, body, trace))
    connection.serve_next()
    await asyncio.sleep(0)
    assert 900 in connection.queue and len(pool.state.reserved_slots()) == 2 * SLICE
    if how == "ended":
        connection.end(Unavailable("as the test says"))
    else:
        connection._cancel(900)
    await eventually_async(lambda: not pool.state._context.slices._open, "the call to end")
    if how != "ended":
        assert not pool.state.reserved_slots()
    engine.segment.close()


async def test_more_of_a_long_call_waits_behind_the_others(path: Path, pool: PoolRuntime, socket: EngineSocket) -> None:
    """A call that goes on takes its turn again. One that is given up goes on without waiting for a turn."""
    await greeted(await Raw.connect(path))
    (connection,) = socket._connections
    done: list[str] = []
    connection.calls = {7: 70, 8: 80}
    connection._again(7, lambda: done.append("seven"))
    connection._again(8, lambda: done.append("eight"))
    connection._cancel(8)
    assert done == ["eight"]
    connection._again(8, lambda: done.append("the rest of eight"))
    await eventually_async(lambda: sorted(done) == ["eight", "seven", "the rest of eight"], "their turns")


async def test_a_stopped_engine_is_given_up_and_a_live_one_stays(
    path: Path, pool: PoolRuntime, socket: EngineSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_socket, "HEARTBEAT_SECONDS", 0.02)
    stopped, live = await greeted(await Raw.connect(path)), await PortEngine.attach(ShardClient(str(path)))
    stopped.send(FrameKind.ATTACH, 2, encode_spec(replace(make_spec(), engine_id=bytes(16))).SerializeToString())
    socket._beat()
    assert await stopped.next() is not None
    await eventually_async(lambda: pool.state.attachment_count == 1, "the stopped engine to be given up")
    assert await stopped.next() is None and live.lost == []
    assert pool.state.counters["engines_silent"] == 1
    live.segment.close()


async def test_the_end_of_the_shard_is_told_and_calls_end(path: Path, socket: EngineSocket) -> None:
    client = ShardClient(str(path))
    engine = await PortEngine.attach(client)
    handoff = HandoffId(bytes(16))
    await client.open_handoff(engine.attachment.attachment_id, handoff, 1)
    wanted = AcquireRequest(CHAIN, 0, 60.0, handoff=Handoff(handoff, NodeId("n")))
    asking = asyncio.create_task(client.acquire(engine.attachment.attachment_id, wanted))
    await asyncio.sleep(0.05)
    await socket.stop(0.05)
    with pytest.raises(Unavailable):
        await asking
    assert engine.lost == ["the shard ended"]
    with pytest.raises(NotAttached):
        await engine.acquire(CHAIN)
    with pytest.raises(Unavailable, match="nobody answers at"):
        await client.attach(make_spec(), lambda reason: None)
    engine.segment.close()


async def test_a_socket_whose_file_is_gone_is_made_again(path: Path, socket: EngineSocket) -> None:
    engine = await PortEngine.attach(ShardClient(str(path)))
    path.unlink()
    await socket.listen(str(path))
    again = await PortEngine.attach(ShardClient(str(path)), "another")
    assert engine.lost == [] and await engine.store(CHAIN)
    assert len((await again.acquire(CHAIN)).blocks) == len(CHAIN)
    engine.segment.close()
    again.segment.close()


def test_engines_are_served_on_the_loop_of_ray_workers(tmp_path: Path) -> None:
    uvloop = pytest.importorskip("uvloop")

    async def serve() -> None:
        path = Path(f"/dev/shm/kvservice-test{unique_name()}-n")
        pool = await PoolRuntime.open(PoolConfig(NodeId("n"), path, plan_geometry(8 * MiB), lease_seconds=3600.0))
        socket = EngineSocket(pool, Authenticator(None, pool))
        await socket.listen(str(tmp_path / "s"))
        engine = await PortEngine.attach(ShardClient(str(tmp_path / "s")))
        assert await engine.store(CHAIN) and len((await engine.acquire(CHAIN)).blocks) == len(CHAIN)
        assert list(socket.pids().values()) == [os.getpid()]
        await socket.stop(0.0)
        assert engine.lost == ["the shard ended"]
        engine.segment.close()
        pool.unlink()
        await pool.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())


KINDS = st.one_of(st.sampled_from(FrameKind), st.integers(0, 255))
BODIES = st.one_of(
    st.binary(max_size=60),
    st.sampled_from(
        [
            HELLO,
            encode_spec(make_spec()).SerializeToString(),
            encode_acquire(AcquireRequest(CHAIN, 0, 0.05)).SerializeToString(),
            shard_pb2.ReserveRequest(count=3).SerializeToString(),
            shard_pb2.ReleaseRequest(lease_ids=[1, 2]).SerializeToString(),
            shard_pb2.AbortRequest(blocks=bytes(32)).SerializeToString(),
        ]
    ),
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(KINDS, st.integers(0, 6), BODIES), max_size=12), st.integers(1, 40))
async def test_whatever_a_stranger_sends_it_is_answered_or_turned_away(
    path: Path, pool: PoolRuntime, frames: list[tuple[int, int, bytes]], cut: int
) -> None:
    """The books are right afterwards, and nothing of it is left."""
    raw = await Raw.connect(path)
    raw.send(FrameKind.HELLO, 100, HELLO)
    raw.send(FrameKind.ATTACH, 101, encode_spec(make_spec()).SerializeToString())
    data = b"".join(HEAD.pack(len(body), kind, 0, 0, call) + body for kind, call, body in frames)
    for start in range(0, len(data), cut * 16):
        raw.writer.write(data[start : start + cut * 16])
    raw.send(FrameKind.HELLO, 102, HELLO)
    frame = await raw.next()
    while frame is not None and frame.call != 102:
        is_goodbye = (frame.kind, frame.call) == (FrameKind.GOODBYE, NO_CALL)  # no answer to that kind
        frame = await raw.next()
        assert frame is None or not is_goodbye, "the last word"
    raw.writer.close()
    pool.state.check_invariants()
    await eventually_async(lambda: not pool.state.attachment_count, "the end of its attachment")
    assert not pool._calls._open
