"""Every kind of frame is sent to a real shard thousands of times with hostile messages, and none gets through.

The messages are those of wire.frames, so a new kind is covered by itself. KVSERVICE_FUZZ_MESSAGES and
KVSERVICE_FUZZ_SEED are as in test_rpc_fuzz.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from kvservice.aio import end_tasks, within
from kvservice.testing.cluster import LocalCluster
from kvservice.wire.codec import encode_spec
from kvservice.wire.frames import (
    ANSWERS,
    HEAD,
    QUESTIONS,
    REFUSED,
    REPLY_BYTES_MAX,
    FrameKind,
    FrameReader,
    decode_failure,
    pack_frame,
)
from kvservice.wire.parsing import parse
from kvservice.wire.v1 import shard_pb2
from kvservice.wire.versions import PROTOCOL_VERSION
from tests.fuzz.messages import Fuzzer, Menu
from tests.integration.engine import attached, spec
from tests.integration.test_rpc_fuzz import (
    GROWTH_BYTES_MAX,
    MESSAGES,
    SEED,
    busy_engines,
    cluster,
    own_memory,
    still_serves,
    what_the_messages_took_comes_back,
)
from tests.integration.test_two_nodes import leave

__all__ = ["cluster"]  # the fixture

ROUNDS = 6
CALLS = 60  # of one connection; then it is left, as if its process had ended
WAIT_SECONDS = 1.0  # for answers; what waits longer does so by its nature, and ends with the connection
HOSTILE_HEADS = 0.03  # of the frames
DOCUMENTED = {
    "INVALID_REQUEST",
    "NOT_ATTACHED",
    "EXHAUSTED",
    "FINGERPRINT",
    "LAYOUT",
    "VERSION",
    "UNAVAILABLE",
    "DEADLINE",
    "CONFIG",
}


class Stranger:
    """One connection: frames out, and what was answered, by kind."""

    def __init__(self, socket: str, seed: str, menu: Menu) -> None:
        self._socket, self._draw, self._fuzzer = socket, random.Random(seed), Fuzzer(seed, menu)
        self.counts: Counter[tuple[str, str]] = Counter()

    async def run(self) -> None:
        open_calls: dict[int, FrameKind] = {}
        pieces = await asyncio.to_thread(self._made, open_calls)  # large ones take long, and others share this loop
        reader, writer = await asyncio.open_unix_connection(self._socket)
        reading = asyncio.ensure_future(self._read(reader, open_calls))
        try:
            with contextlib.suppress(ConnectionError, asyncio.TimeoutError):
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                await within(WAIT_SECONDS, reading)
        finally:
            writer.transport.abort()
            await end_tasks([reading])

    def _made(self, open_calls: dict[int, FrameKind]) -> list[bytes]:
        """All frames of this connection. Adds the calls that will be answered."""
        hello = shard_pb2.Hello(protocol_version=PROTOCOL_VERSION).SerializeToString()
        engine = encode_spec(spec(engine_id=self._draw.randbytes(16))).SerializeToString()
        open_calls.update({1: FrameKind.HELLO, 2: FrameKind.ATTACH})
        pieces = [pack_frame(FrameKind.HELLO, 1, hello), pack_frame(FrameKind.ATTACH, 2, engine)]
        for call in range(3, CALLS):
            kind = self._draw.choice([*QUESTIONS, FrameKind.DETACH] if call > CALLS - 5 else list(QUESTIONS))
            body = self._fuzzer.request(QUESTIONS[kind].DESCRIPTOR) if kind in QUESTIONS else b""
            open_calls[call] = kind
            pieces.append(self._head(kind, call, len(body)) + body)
            if self._draw.random() < 0.1:
                pieces.append(pack_frame(FrameKind.CANCEL, call))
                del open_calls[call]
        return pieces

    def _head(self, kind: int, call: int, length: int) -> bytes:
        if self._draw.random() > HOSTILE_HEADS / CALLS * 10:
            return HEAD.pack(length, kind, 0, 0, call)
        drawn = self._draw.choice((length, length + 1, 0, 1 << 20, (1 << 32) - 1))
        return HEAD.pack(drawn, self._draw.randrange(256), self._draw.randrange(256), self._draw.choice((0, 55)), call)

    async def _read(self, reader: asyncio.StreamReader, open_calls: dict[int, FrameKind]) -> None:
        """Until every call is answered, or the shard ends the connection."""
        frames = FrameReader(REPLY_BYTES_MAX)
        while open_calls and (data := await reader.read(1 << 16)):
            for frame in frames.feed(data):
                if frame.kind == FrameKind.HEARTBEAT:
                    continue
                kind = open_calls.pop(frame.call, None)
                name = FrameKind(frame.kind).name if frame.kind in set(FrameKind) else "?"
                if frame.status == REFUSED:
                    reason = decode_failure(frame.body).reason
                    assert reason in DOCUMENTED, f"KVSERVICE_FUZZ_SEED={SEED}: {name}: {decode_failure(frame.body)!r}"
                    self.counts[name, reason] += 1
                elif kind is not None:
                    if kind in ANSWERS:
                        parse(ANSWERS[kind], frame.body)
                    self.counts[kind.name, "OK"] += 1
                if frame.kind == FrameKind.GOODBYE:
                    return


@contextlib.asynccontextmanager
async def somebody_else(running: LocalCluster) -> AsyncIterator[None]:
    """Asks all the time, and must not wait while something large is looked at."""
    engine = await attached(running.socket("n0"), spec("polite"))

    async def ask() -> None:
        while True:
            await within(3.0, engine.pool.release(engine.attachment.attachment_id, []))
            await asyncio.sleep(0.02)

    asking = asyncio.ensure_future(ask())
    try:
        yield
    finally:
        asking.cancel()
        await asyncio.wait([asking])
        assert asking.cancelled(), f"an ordinary call failed: {asking.exception()}, {engine.lost}"
        await leave(engine)


@pytest.mark.usefixtures("cluster")
async def test_no_frame_breaks_a_shard(cluster: LocalCluster) -> None:
    counts: Counter[tuple[str, str]] = Counter()
    pid, memory = cluster.pid("n0"), 0
    connections = max(MESSAGES // CALLS // ROUNDS, 4)
    for index in range(ROUNDS):
        async with busy_engines(cluster, 50 + index) as menu, somebody_else(cluster):
            for number in range(connections):
                stranger = Stranger(cluster.socket("n0"), f"{SEED}/{index}/{number}", menu)
                await stranger.run()
                counts += stranger.counts
        accounting = cluster.accounting("n0")
        assert accounting.balanced, f"KVSERVICE_FUZZ_SEED={SEED}, round {index}: {accounting.violation}"
        memory = memory or own_memory(pid)
    await what_the_messages_took_comes_back(cluster)
    await still_serves(cluster, seed=71)
    assert own_memory(pid) - memory < GROWTH_BYTES_MAX
    asked = {kind.name for kind in QUESTIONS}
    assert {name for name, code in counts if code == "OK"} >= asked - {"WARM"}, "nothing gets through"
    assert {name for name, code in counts if code == "INVALID_REQUEST"} >= asked - {"HELLO", "RELEASE"}
