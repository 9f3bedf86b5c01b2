"""What a client makes of servers that refuse, fail and fall silent: real servers, which do as the test says."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator, Awaitable, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvservice.breaker import FAILURES_TO_OPEN, OPEN_SECONDS_FIRST
from kvservice.client import engine_link
from kvservice.client.block_list import BlockFilter, list_blocks
from kvservice.client.channels import Channels
from kvservice.client.engine_stats import EngineStatsReader
from kvservice.client.operator import OperatorClient
from kvservice.client.overview import SILENT, as_json, gather_overview
from kvservice.client.peer import PeerClient
from kvservice.client.shard import ShardClient
from kvservice.core.actions import Follow, Locate
from kvservice.core.block.marks import Mark
from kvservice.core.messages import Attachment, Handoff, Holder, SealItem, SealStatus
from kvservice.core.segment.refs import BlockRef
from kvservice.errors import (
    DeadlineExceeded,
    Exhausted,
    InvalidRequest,
    KVServiceError,
    NotAttached,
    Unauthenticated,
    Unavailable,
)
from kvservice.lookup.client import LookupClient
from kvservice.shard.missed_marks import MissedMarks
from kvservice.testing.builders import make_chain, make_spec
from kvservice.testing.eventually import eventually_async
from kvservice.units import BootEpoch, Generation, HandoffId, NodeId, SlotIndex, SpanRoute
from kvservice.wire.frames import REFUSED, REQUEST_BYTES_MAX, Frame, FrameKind, FrameReader, encode_failure, pack_frame
from kvservice.wire.status import ATTRIBUTES_KEY, REASON_KEY
from kvservice.wire.v1 import lookup_pb2, lookup_pb2_grpc, shard_pb2, shard_pb2_grpc

CHAIN = make_chain(4)


async def never(marks: Sequence[Mark]) -> None:
    raise AssertionError(f"nobody said {marks}")


class Scripted(shard_pb2_grpc.PeerServiceServicer, lookup_pb2_grpc.LookupServiceServicer):
    """Each call ends with the next status; the last one stays."""

    def __init__(self) -> None:
        self.statuses: list[grpc.StatusCode] = []
        self.calls = 0

    async def _answer(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self.calls += 1
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        if status is not grpc.StatusCode.OK:
            await context.abort(status, "as the test says")

    async def Locate(
        self, request: shard_pb2.LocateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> shard_pb2.LocateReply:
        await self._answer(context)
        return shard_pb2.LocateReply(epoch=1)

    async def Resolve(
        self, request: lookup_pb2.ResolveRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> lookup_pb2.ResolveReply:
        await self._answer(context)
        return lookup_pb2.ResolveReply()


@pytest.fixture
async def served() -> AsyncIterator[tuple[Scripted, str]]:
    scripted, server = Scripted(), grpc.aio.server()
    shard_pb2_grpc.add_PeerServiceServicer_to_server(scripted, server)
    lookup_pb2_grpc.add_LookupServiceServicer_to_server(scripted, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield scripted, f"127.0.0.1:{port}"
    await server.stop(0)


class Figures(shard_pb2_grpc.AdminServiceServicer, shard_pb2_grpc.OperatorServiceServicer):
    """A shard with these figures, which says the number of each thing that it lists."""

    def __init__(self, stats: shard_pb2.StatsReply, number: float) -> None:
        self._stats, self._number = stats, number

    async def Stats(
        self, request: shard_pb2.StatsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> shard_pb2.StatsReply:
        return self._stats

    async def ListBlocks(
        self, request: shard_pb2.ListBlocksRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> shard_pb2.ListBlocksReply:
        return shard_pb2.ListBlocksReply(blocks=[shard_pb2.ListedBlock(age_seconds=self._number)])

    async def ListPins(
        self, request: shard_pb2.ListPinsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> shard_pb2.ListPinsReply:
        return shard_pb2.ListPinsReply(pins=[shard_pb2.Pinned(age_seconds=self._number)])


class Nonsense(grpc.GenericRpcHandler):
    """Every call is answered with bytes that are no message, or refused with attributes that are none."""

    def __init__(self, attributes: str = "") -> None:
        self._attributes = attributes

    def service(self, handler_call_details: object) -> Any:
        async def answer(request: bytes, context: Any) -> bytes:
            if self._attributes:
                metadata = ((REASON_KEY, "EXHAUSTED"), (ATTRIBUTES_KEY, self._attributes))
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no", metadata)
            return b"\xff\xff"

        return grpc.unary_unary_rpc_method_handler(answer)


@contextlib.asynccontextmanager
async def answering(handler: grpc.GenericRpcHandler) -> AsyncIterator[str]:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def test_answers_that_cannot_be_read_are_failures() -> None:
    """gRPC gives None for them."""
    async with answering(Nonsense()) as address:
        peers, lookup, operator = PeerClient("shm", NodeId("me")), LookupClient([address]), OperatorClient()
        holder = Holder(NodeId("peer"), address, BootEpoch(1))
        calls: list[Awaitable[object]] = [
            peers.handshake(holder, 20.0),
            peers.locate(Locate(0, holder, CHAIN, 20.0)),
            peers.follow(holder, Follow(0, 0, Handoff(HandoffId(b"h" * 16), holder.node_id), CHAIN, 0.0), 20.0),
            peers.room(holder, 20.0),
            operator.pins(address),
        ]
        for call in calls:
            with pytest.raises(InvalidRequest, match="cannot be read"):
                await call
        assert not (await lookup.resolve(CHAIN, 0, 20.0)).complete
        assert await lookup.find_node(NodeId("n0"), 20.0) is None
        assert await lookup.members(20.0) == []
        await MissedMarks(NodeId("me"), never, None).take([address])
        for client in (peers, lookup, operator):
            await client.close()


async def test_who_only_looks_is_told_of_answers_that_cannot_be_read() -> None:
    async with answering(Nonsense()) as address:
        router, channels = EngineStatsReader(), Channels()
        assert await router.read([address], 20.0) is None
        assert router.counters["engine_stats_lookup_malformed"] == 1
        overview = await gather_overview(channels, "s", [address], {"n0": address}, 20.0)
        assert [problem.endswith("cannot be read") for problem in overview.problems[:2]] == [True, True]
        assert "cannot be read" in str(await list_blocks(channels, {"n0": address}, BlockFilter(), 10))
        for asking in (router, channels):
            await asking.close()


@pytest.mark.parametrize("number", [math.nan, math.inf])
async def test_figures_that_are_no_numbers_cannot_be_read(number: float) -> None:
    """No table and no JSON has them."""
    window = shard_pb2.CounterWindow(name="1m", counters={"acquires": 1}, seconds=number)
    for stats in (shard_pb2.StatsReply(uptime_seconds=number), shard_pb2.StatsReply(windows=[window])):
        server, channels, operator = grpc.aio.server(), Channels(), OperatorClient()
        figures = Figures(stats, number)
        shard_pb2_grpc.add_AdminServiceServicer_to_server(figures, server)
        shard_pb2_grpc.add_OperatorServiceServicer_to_server(figures, server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        overview = await gather_overview(channels, "s", [], {"n0": address}, 20.0)
        assert (overview.nodes[0].state, "cannot be read: its " in overview.nodes[0].error) == (SILENT, True)
        assert json.dumps(as_json(overview), allow_nan=False)
        assert "cannot be read: its blocks" in str(await list_blocks(channels, {"n0": address}, BlockFilter(), 10))
        with pytest.raises(InvalidRequest, match="cannot be read: its pins"):
            await operator.pins(address)
        for client in (channels, operator):
            await client.close()
        await server.stop(0)


@pytest.mark.parametrize("attributes", ['{"message": "x", "self": "y"}', "[1]", "null", "[" * 4000])
async def test_no_attribute_of_a_refusal_hides_its_reason(attributes: str) -> None:
    async with answering(Nonsense(attributes)) as address:
        peers = PeerClient("shm", NodeId("me"))
        with pytest.raises(Exhausted, match="no"):
            await peers.locate(Locate(0, Holder(NodeId("peer"), address, BootEpoch(1)), CHAIN, 20.0))
        await peers.close()


@pytest.mark.parametrize(
    ("status", "is_asked_again"),
    [
        (grpc.StatusCode.FAILED_PRECONDITION, True),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, True),
        (grpc.StatusCode.UNAVAILABLE, False),
    ],
)
async def test_a_peer_that_refuses_is_asked_again_a_failed_one_not(
    served: tuple[Scripted, str], status: grpc.StatusCode, is_asked_again: bool
) -> None:
    scripted, address = served
    scripted.statuses = [status]
    peers = PeerClient("shm", NodeId("me"), clock=lambda: 100.0)
    holder = Holder(NodeId("peer"), address, BootEpoch(1))
    try:
        for _ in range(FAILURES_TO_OPEN + 2):
            with pytest.raises(KVServiceError):
                await peers.locate(Locate(0, holder, CHAIN, 20.0))
    finally:
        await peers.close()
    assert scripted.calls == FAILURES_TO_OPEN + 2 * is_asked_again


async def test_calls_that_fail_together_open_a_breaker_once(served: tuple[Scripted, str]) -> None:
    scripted, address = served
    scripted.statuses = [grpc.StatusCode.UNAVAILABLE]
    now = 100.0
    peers = PeerClient("shm", NodeId("me"), clock=lambda: now)
    holder = Holder(NodeId("peer"), address, BootEpoch(1))
    calls_under_way = 4 * FAILURES_TO_OPEN
    try:
        calls = [peers.locate(Locate(0, holder, CHAIN, 20.0)) for _ in range(calls_under_way)]
        await asyncio.gather(*calls, return_exceptions=True)
        assert scripted.calls == calls_under_way
        now += OPEN_SECONDS_FIRST
        with pytest.raises(KVServiceError, match="as the test says"):
            await peers.locate(Locate(0, holder, CHAIN, 20.0))
    finally:
        await peers.close()


@pytest.mark.parametrize("then", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.FAILED_PRECONDITION])
async def test_after_a_pause_one_request_tries_a_peer(served: tuple[Scripted, str], then: grpc.StatusCode) -> None:
    """The others do not wait for its answer. A refusal is one."""
    scripted, address = served
    scripted.statuses = [*[grpc.StatusCode.UNAVAILABLE] * FAILURES_TO_OPEN, then]
    now = 100.0
    peers = PeerClient("shm", NodeId("me"), clock=lambda: now)
    holder = Holder(NodeId("peer"), address, BootEpoch(1))
    try:
        for _ in range(FAILURES_TO_OPEN):
            with pytest.raises(Unavailable):
                await peers.locate(Locate(0, holder, CHAIN, 20.0))
        now += OPEN_SECONDS_FIRST
        calls = [peers.locate(Locate(0, holder, CHAIN, 20.0)) for _ in range(9)]
        await asyncio.gather(*calls, return_exceptions=True)
        assert scripted.calls == FAILURES_TO_OPEN + 1
        await asyncio.gather(peers.locate(Locate(0, holder, CHAIN, 20.0)), return_exceptions=True)
        is_answer = then is not grpc.StatusCode.UNAVAILABLE
        assert scripted.calls == FAILURES_TO_OPEN + 1 + is_answer
    finally:
        await peers.close()


async def test_one_lookup_a_second_tries_a_partition_that_failed(served: tuple[Scripted, str]) -> None:
    scripted, address = served
    scripted.statuses = [*[grpc.StatusCode.UNAVAILABLE] * (FAILURES_TO_OPEN + 2), grpc.StatusCode.OK]
    now = 100.0
    lookup = LookupClient([address], clock=lambda: now)
    try:
        for _ in range(FAILURES_TO_OPEN):
            await lookup.resolve(CHAIN, 0, 20.0)
        for trial in (1, 2):
            now += OPEN_SECONDS_FIRST
            answers = await asyncio.gather(*[lookup.resolve(CHAIN, 0, 20.0) for _ in range(9)])
            assert scripted.calls == FAILURES_TO_OPEN + trial and not any(answer.complete for answer in answers)
        now += OPEN_SECONDS_FIRST
        assert (await lookup.resolve(CHAIN, 0, 20.0)).complete
        answers = await asyncio.gather(*[lookup.resolve(CHAIN, 0, 20.0) for _ in range(9)])
        assert all(answer.complete for answer in answers)
    finally:
        await lookup.close()


async def test_an_answer_of_a_partition_forgives_its_failures(served: tuple[Scripted, str]) -> None:
    scripted, address = served
    fails, answers = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.OK
    scripted.statuses = [*[fails] * (FAILURES_TO_OPEN - 1), answers, *[fails] * (FAILURES_TO_OPEN - 1), answers]
    asked = len(scripted.statuses)
    lookup = LookupClient([address], clock=lambda: 100.0)
    try:
        for _ in range(asked):
            answer = await lookup.resolve(CHAIN, 0, 20.0)
    finally:
        await lookup.close()
    assert scripted.calls == asked and answer.complete
    assert not lookup.counters.get("lookup_skipped")


class SilentShard:
    """Attaches, and then says nothing, as a stopped process; or something else that the test wants."""

    def __init__(self, then: bytes = b"", after: float = 0.05, silent_to: FrameKind | None = None) -> None:
        self.heard: list[Frame] = []
        self._then, self._after, self._silent_to = then, after, silent_to

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        attached = shard_pb2.Attached(attachment_id=1, node_id="n", epoch=1, lease_seconds=10.0, segment_path="/none")
        attached.geometry.slab_bytes, attached.geometry.slab_count = 1 << 20, 4
        frames = FrameReader(REQUEST_BYTES_MAX)
        while data := await reader.read(1 << 16):
            for frame in frames.feed(data):
                self.heard.append(frame)
                if frame.kind == self._silent_to:
                    continue
                if frame.kind == FrameKind.HELLO:
                    writer.write(pack_frame(FrameKind.HELLO, frame.call))
                if frame.kind == FrameKind.ATTACH:
                    writer.write(pack_frame(FrameKind.ATTACH, frame.call, attached.SerializeToString()))
                    if self._after:
                        await asyncio.sleep(self._after)
                    writer.write(self._then)
        writer.close()


@contextlib.asynccontextmanager
async def at_shard(shard: SilentShard, path: Path) -> AsyncIterator[tuple[ShardClient, Attachment, asyncio.Queue[str]]]:
    """A client that is attached to this shard, and what it is told of the end."""
    lost, client = asyncio.Queue[str](), ShardClient(str(path))
    async with await asyncio.start_unix_server(shard.serve, str(path)):
        attachment = await client.attach(make_spec(), lost.put_nowait)
        yield client, attachment, lost
        await client.close()


async def test_a_shard_that_is_silent_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_link, "SILENCE_SECONDS", 0.2)
    async with at_shard(SilentShard(), tmp_path / "s") as (client, attachment, lost), asyncio.timeout(20):
        assert "no heartbeat" in await lost.get()
        with pytest.raises(NotAttached):
            await client.reserve(attachment.attachment_id, 1)


@pytest.mark.parametrize("kind", [FrameKind.HELLO, FrameKind.ATTACH], ids=["hello", "attach"])
async def test_a_shard_that_answers_nothing_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: FrameKind
) -> None:
    """It listens, and is stopped: the kernel takes the connection for it."""
    monkeypatch.setattr("kvservice.client.shard.ATTACH_SECONDS", 0.1)
    shard = SilentShard(silent_to=kind)
    with pytest.raises(Unavailable, match=r"did not answer within 0.1 s"):
        async with at_shard(shard, tmp_path / "s"):
            pass
    assert shard.heard[0].kind == FrameKind.HELLO


async def test_a_call_ends_by_its_deadline_and_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvservice.client.shard.CALL_SECONDS", 0.1)
    shard = SilentShard()
    async with at_shard(shard, tmp_path / "s") as (client, attachment, lost):
        with pytest.raises(DeadlineExceeded, match=r"Reserve at .* no answer within 0.1 s"):
            await client.reserve(attachment.attachment_id, 1)
        asked = next(frame.call for frame in shard.heard if frame.kind == FrameKind.RESERVE)
        await eventually_async(lambda: Frame(FrameKind.CANCEL, 0, asked, b"") in shard.heard, "the call to be given up")
        assert lost.empty()
        with pytest.raises(DeadlineExceeded):
            await client.detach(attachment.attachment_id)


async def test_a_status_that_only_newer_shards_know_is_not_stored(tmp_path: Path) -> None:
    items = [SealItem(BlockRef(SlotIndex(slot), Generation(2)), CHAIN[slot], None, 0, SpanRoute(0)) for slot in (0, 1)]
    for statuses, found in ((["sealed", "tomorrow"], [SealStatus.SEALED, SealStatus.FAILED]), (["sealed"], None)):
        reply = shard_pb2.SealReply(statuses=statuses).SerializeToString()
        third = SilentShard(pack_frame(FrameKind.SEAL, 3, reply), after=0.5)
        async with at_shard(third, tmp_path / f"s{len(statuses)}") as (client, attachment, _):
            if found is None:
                with pytest.raises(InvalidRequest, match="1 times for 2"):
                    await client.seal(attachment.attachment_id, items)
            else:
                assert await client.seal(attachment.attachment_id, items) == found


async def test_calls_go_out_together_and_one_alone_at_once(tmp_path: Path) -> None:
    async with at_shard(SilentShard(), tmp_path / "s") as (client, attachment, _):
        (link,) = client._links.values()
        transport, written = link._transport, list[int]()
        assert transport is not None

        class Watched:
            def __getattr__(self, name: str) -> object:
                return getattr(transport, name)

            def write(self, data: bytes) -> None:
                written.append(len(list(FrameReader(REQUEST_BYTES_MAX).feed(data))))
                transport.write(data)

        link._transport = Watched()  # type: ignore[assignment]
        calls = [asyncio.create_task(client.release(attachment.attachment_id, [])) for _ in range(4)]
        await asyncio.sleep(0)
        assert written == [1], "nobody else was waiting"
        await asyncio.sleep(0)
        assert written == [1, 3]
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        link.close()


@pytest.mark.parametrize(
    ("then", "reason"),
    [
        (b"\xff" * 64, "cannot be read"),
        (pack_frame(FrameKind.GOODBYE, 0, encode_failure(Unauthenticated("token revoked")), REFUSED), "token revoked"),
    ],
    ids=["noise", "goodbye"],
)
async def test_what_a_shard_says_last_is_why_the_engine_lost_it(tmp_path: Path, then: bytes, reason: str) -> None:
    async with at_shard(SilentShard(then), tmp_path / "s") as (_, _, lost), asyncio.timeout(20):
        assert reason in await lost.get()
        assert lost.empty(), "told once"


async def test_an_end_that_comes_with_the_answer_is_no_attachment(tmp_path: Path) -> None:
    shard = SilentShard(b"\xff" * 64, after=0.0)
    with pytest.raises(Unavailable, match="cannot be read"):
        async with at_shard(shard, tmp_path / "s"):
            pass


async def test_a_shard_that_reads_nothing_costs_a_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it does not take is refused here, at once."""
    async with at_shard(SilentShard(), tmp_path / "s") as (client, attachment, _):
        link = client._links[attachment.attachment_id]
        assert link._transport is not None
        monkeypatch.setattr(link, "_transport", Unread(link._transport))
        with pytest.raises(Unavailable, match="does not read"):
            await client.reserve(attachment.attachment_id, 1)


class Unread:
    """A transport whose other end reads nothing."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def get_write_buffer_size(self) -> int:
        return engine_link.UNSENT_BYTES_MAX + 1

    def abort(self) -> None:
        self._transport.abort()
