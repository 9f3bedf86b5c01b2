"""Every RPC of a real shard and a real lookup partition is sent thousands of hostile messages, and none gets through.

The RPCs are those of the descriptors, so a new one is covered by itself. One seed is one campaign, but for the ids that
the servers choose. KVSERVICE_FUZZ_MESSAGES sets how many, KVSERVICE_FUZZ_SEED the seed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvservice.client.operator import OperatorClient
from kvservice.client.shard import ShardClient
from kvservice.core.actions import Offer
from kvservice.core.block.marks import CLOCK_SKEW_SECONDS, Mark, MarkKind
from kvservice.core.block.window_groups import Window, WindowGroup
from kvservice.core.messages import Holder, SealItem, TakeOverItem
from kvservice.core.segment.refs import BlockRef
from kvservice.lookup.server import LookupServer
from kvservice.testing.cluster import LocalCluster
from kvservice.testing.eventually import eventually_async
from kvservice.units import HandoffId, MiB, NodeId, SpanRoute
from kvservice.wire.codec import (
    decode_engine_stats,
    encode_fingerprint,
    encode_layout,
    encode_refs,
    encode_seal_item,
    encode_spec,
)
from kvservice.wire.leaving import encode_take_over
from kvservice.wire.serving import CHANNEL_OPTIONS
from kvservice.wire.status import REASON_KEY
from kvservice.wire.v1 import common_pb2, shard_pb2, shard_pb2_grpc
from tests.fuzz.messages import Fuzzer, Menu, methods, path_of
from tests.integration.engine import LAYOUT, Engine, chain, spec
from tests.integration.test_two_nodes import leave

MESSAGES = int(os.environ.get("KVSERVICE_FUZZ_MESSAGES", "3000"))
SEED = os.environ.get("KVSERVICE_FUZZ_SEED", "1")
ROUNDS = 6
AT_ONCE = 32
CALL_SECONDS = 1.0
GROWTH_BYTES_MAX = 64 * MiB  # of memory of its own, from the first round on
WAIT_SECONDS = 3.0  # of an ordinary call meanwhile, on a busy machine
PEAK_BYTES_MAX = 256 * MiB  # meanwhile, above what it had at first; the segment of 64 MiB counts
BACK_SECONDS = 20.0  # leases of 2 s, engines noticed to be gone every 0.5 s
READ_EVENTS = 3  # of a stream
ENDS_THE_SHARD = "kvservice.wire.v1.AdminService.Drain"
DOCUMENTED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
}
LEAVING = DOCUMENTED | {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}  # its process may end meanwhile
WITHOUT_REASON = {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}
VALUES: dict[str, list[object]] = {
    "handoff_node": ["n0", "n1"],
    "node_id": ["n0", "n1", "n7"],
    "reader": ["n1"],
    "request_id": ["r1", "r2"],
    "model": ["fuzzed0", "fuzzed1", "other"],
    "timeout_seconds": [0.01, 0.1],
    "wait_seconds": [0.01, 0.1],
    "count": [1, 2],
    "skip": [0, 1],
    "group": [0],
    "partition": [0],
    "partition_count": [1],
    "sequence": [1, 2, 3],
    "payload_bytes": [LAYOUT.payload_bytes],
    "cell_bytes": [8192],
    "layer_count": [4],
}


@dataclass(frozen=True, slots=True)
class Sent:
    """One message, so that a failure can be told."""

    number: str
    method: MethodDescriptor
    data: bytes

    def __str__(self) -> str:
        request = message_factory.GetMessageClass(self.method.input_type)()
        try:
            request.ParseFromString(self.data)
            shown = str(request)[:1500]
        except DecodeError:
            shown = self.data[:400].hex()
        what = f"message {self.number}: {self.method.full_name}, {len(self.data)} bytes"
        return f"KVSERVICE_FUZZ_SEED={SEED}, {what}\n{shown}"


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=2, lookup_partitions=1, transport="shm", lease_seconds=2.0) as running:
        yield running


async def send(channel: grpc.aio.Channel, sent: Sent) -> tuple[grpc.StatusCode, list[bytes], str]:
    """(status, what was answered, the error's text). A stream that goes on is left after some events."""
    path, events = path_of(sent.method), list[bytes]()
    try:
        if not sent.method.server_streaming:
            return (
                grpc.StatusCode.OK,
                [await channel.unary_unary(path, None, None)(sent.data, timeout=CALL_SECONDS)],
                "",
            )
        stream = channel.unary_stream(path, None, None)(sent.data, timeout=CALL_SECONDS / 4)
        async for event in stream:
            events.append(event)
            if len(events) == READ_EVENTS:
                stream.cancel()
                break
        return grpc.StatusCode.OK, events, ""
    except grpc.aio.AioRpcError as error:
        if events and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:  # ours: it would have gone on
            return grpc.StatusCode.OK, events, ""
        if events and error.details() == "the engine attached again":  # another message was of the same engine
            return grpc.StatusCode.OK, events, ""
        told = dict(error.trailing_metadata() or ()).get(REASON_KEY)  # only the shard itself says one
        expected = error.code() in WITHOUT_REASON or "larger than max" in str(error.details())
        assert told or expected, f"{error.code().name} without a reason: {error.details()}\n{sent}"
        return error.code(), [], str(error.details())


async def campaign(
    channel: grpc.aio.Channel, to_send: Sequence[Sent], allowed: set[grpc.StatusCode]
) -> Counter[tuple[str, str]]:
    """Send all, some at once. Fails at an answer that is not allowed or that cannot be read. Returns what came how
    often, by RPC and status."""
    turn, counts = asyncio.Semaphore(AT_ONCE), Counter[tuple[str, str]]()
    others = asyncio.ensure_future(somebody_else(channel))

    async def one(sent: Sent) -> None:
        async with turn:
            code, replies, details = await send(channel, sent)
        assert code in allowed, f"{code.name}: {details[:300]}\n{sent}"
        for reply in replies:
            message_factory.GetMessageClass(sent.method.output_type)().ParseFromString(reply)
        counts[sent.method.name, code.name] += 1

    try:
        await asyncio.gather(*map(one, to_send))
    finally:
        others.cancel()
        await asyncio.wait([others])
    assert others.cancelled() or allowed is LEAVING, f"an ordinary call waited too long: {others.exception()}"
    return counts


async def somebody_else(channel: grpc.aio.Channel) -> None:
    """Asks all the time, and must not wait while something large is looked at."""
    health = health_pb2_grpc.HealthStub(channel)
    while True:
        await health.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_SECONDS)
        await asyncio.sleep(0.02)


def made(rpcs: Sequence[MethodDescriptor], count: int, label: str, menu: Menu) -> list[Sent]:
    found: list[Sent] = []
    for index in range(count):
        method = rpcs[index % len(rpcs)]
        number = f"{label}/{index}"
        found.append(Sent(number, method, Fuzzer(f"{SEED}/{number}", menu).request(method.input_type)))
    return found


def own_memory(pid: int, what: str = "RssAnon") -> int:
    """Bytes of a process that are neither shared nor of a file; VmHWM: the most it ever had, of any kind."""
    line = re.search(rf"{what}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert line is not None
    return int(line[1]) * 1024


@contextlib.asynccontextmanager
async def connected(address: str) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        yield channel


def of_services(*names: str) -> list[MethodDescriptor]:
    return [method for method in methods() if method.containing_service.name in names]


@contextlib.asynccontextmanager
async def busy_engines(cluster: LocalCluster, round_index: int) -> AsyncIterator[Menu]:
    """Engines of one node with blocks, reservations, leases and hand-offs, all of which the messages may name."""
    engines = [await Engine.attach(ShardClient(cluster.socket("n0")), spec(f"fuzzed{i}")) for i in range(3)]
    menu = Menu()
    try:
        for index, engine in enumerate(engines):
            await add_to_menu(menu, engine, 100 * round_index + index, cluster)
        yield menu
    finally:
        await leave(*engines)


async def add_to_menu(menu: Menu, engine: Engine, seed: int, cluster: LocalCluster) -> None:
    """Of this engine: what it holds, as values of fields, as parts of messages, and as whole requests."""
    keys = chain(seed=seed + 5000, count=12)
    await engine.store(keys[:8])
    lease = await engine.acquire(keys[:4])
    refs = await reserved(engine, 4)
    handoff = bytes([1 + seed % 255]) * 16
    await engine.pool.open_handoff(engine.id, HandoffId(handoff))
    n0, n1 = cluster.record("n0"), cluster.record("n1")
    for name, values in {
        **VALUES,
        "epoch": [n0.epoch],
        "blocks": [encode_refs(refs), encode_refs(lease.blocks)],
        **{key: list(keys) for key in ("keys", "key", "parents", "parent", "added", "removed")},
        **{key: [lease.lease_id] for key in ("lease_id", "lease_ids")},
        "handoff": [handoff],
        "engine_id": [os.urandom(16)],
    }.items():
        menu.fields.setdefault(name, []).extend(values)
    items = [
        encode_seal_item(SealItem(ref, key, keys[0], 8 + i, SpanRoute(1)))
        for i, (ref, key) in enumerate(zip(refs, keys[8:], strict=True))
    ]
    nodes = [common_pb2.NodeInfo(node_id=n.node_id, peer_address=n.peer_address, epoch=n.epoch) for n in (n0, n1)]
    fingerprint = spec(f"fuzzed{seed % 3}").fingerprint
    whose = (fingerprint.block_mark, frozenset({("", "fuzzed")}))
    whole = [
        shard_pb2.SealRequest(items=items),
        encode_take_over(
            Holder(NodeId("n1"), n1.peer_address, n1.epoch),
            Offer(
                0,
                Holder(NodeId("n0"), n0.peer_address, n0.epoch),
                LAYOUT.payload_bytes,
                tuple(TakeOverItem(key, None, i, SpanRoute(1), 1.0, 0, *whose) for i, key in enumerate(keys)),
                0.1,
            ),
        ),
        encode_fingerprint(fingerprint),
        *requests_about(n0.epoch, b"".join(keys), handoff),
        *requests_of_operators(fingerprint.digest, b"".join(keys)),
    ]
    for message in [*items, *nodes, encode_layout(LAYOUT), *whole]:
        menu.messages.setdefault(message.DESCRIPTOR.full_name, []).append(message)


def requests_of_operators(digest: bytes, keys: bytes) -> list[Message]:
    """What is cleared is nothing that the other messages need."""
    mark = shard_pb2.ClearMark(kind="prompt", at=time.time(), keys=bytes(range(16)))
    return [
        shard_pb2.WarmRequest(fingerprint=digest, keys=keys, timeout_seconds=0.1, hold_seconds=0.1),
        shard_pb2.PinRequest(fingerprint=digest, keys=keys[:16], timeout_seconds=0.1, name="fuzzed"),
        shard_pb2.ClearRequest(marks=[mark]),
    ]


async def reserved(engine: Engine, count: int) -> list[BlockRef]:
    """Waits for what the messages of the round before still hold."""
    refs: list[BlockRef] = []

    async def have_enough() -> bool:
        refs.extend(await engine.pool.reserve(engine.id, count - len(refs)))
        return len(refs) == count

    await eventually_async(have_enough, f"free slots again (KVSERVICE_FUZZ_SEED={SEED})", BACK_SECONDS)
    return refs


def with_strangers(menu: Menu) -> Menu:
    """Beside the two shards, whose announcements are their own, nodes that nobody is."""
    nodes: list[Message] = [common_pb2.NodeInfo(node_id=f"n{i}", peer_address="a:1", epoch=3) for i in (7, 8)]
    name = nodes[0].DESCRIPTOR.full_name
    messages = {**menu.messages, name: [*menu.messages[name], *nodes]}
    return Menu({**menu.fields, "node_id": ["n0", "n1", "n7", "n8"]}, messages)


def requests_about(epoch: int, keys: bytes, handoff: bytes) -> list[Message]:
    return [
        encode_spec(spec("another")),
        encode_spec(spec("fuzzed0", **{f"field{i}": "x" * 4096 for i in range(40)})),  # to be refused, with its reasons
        encode_spec(
            replace(
                spec("windowed"),
                window_groups=(
                    WindowGroup(LAYOUT, Window(sliding_tokens=40)),
                    WindowGroup(LAYOUT, Window(chunk_tokens=64)),
                    WindowGroup(LAYOUT, Window(is_state=True)),
                ),
            )
        ),
        shard_pb2.AcquireRequest(keys=keys, skip=1, timeout_seconds=0.1, request_id="r1"),
        shard_pb2.AcquireRequest(keys=keys, timeout_seconds=0.1, handoff=handoff, handoff_node="n0"),
        shard_pb2.LocateRequest(epoch=epoch, keys=keys, reader="n1"),
        shard_pb2.FollowRequest(epoch=epoch, handoff=handoff, keys=keys, reader="n1", wait_seconds=0.1),
        shard_pb2.OpenHandoffRequest(handoff=os.urandom(16)),
        shard_pb2.CloseHandoffRequest(handoff=handoff),
    ]


async def what_the_messages_took_comes_back(cluster: LocalCluster) -> None:
    """Leases end, the slots of engines that are gone are free again. A clear ends what is warm or pinned. It is of a
    moment ago: what is stored in the seconds behind a clear is read by no other node."""
    client = OperatorClient()
    before = time.time() - CLOCK_SKEW_SECONDS
    await client.clear(cluster.record("n0").peer_address, [Mark(MarkKind.EVERYTHING, before)])
    await client.close()

    def is_free() -> bool:
        books = cluster.accounting("n0")
        return books.leases == books.attachments == books.slots["writing"] == books.slots["quarantined"] == 0

    await eventually_async(is_free, "the slots of engines that are gone to be free", seconds=BACK_SECONDS)


async def still_serves(cluster: LocalCluster, seed: int) -> None:
    """An ordinary engine stores and reads, here and on the other node, and the books are right."""
    fresh = [await Engine.attach(ShardClient(cluster.socket(node)), spec(f"plain{seed}")) for node in ("n0", "n1")]
    keys = chain(seed=seed, count=8, model=f"plain{seed}")
    await fresh[0].store(keys)
    assert len((await fresh[0].read_all(keys)).blocks) == 8
    cluster.wait_until_known(keys)
    assert len((await fresh[1].read_all(keys)).blocks) == 8
    await leave(*fresh)
    accounting = cluster.accounting("n0")
    assert accounting.balanced, accounting.violation


async def drain(cluster: LocalCluster, node: str, *, undo: bool) -> None:
    """Take no writes, and stay; or take them again."""
    async with connected(cluster.record(node).rpc_address) as channel:
        await shard_pb2_grpc.AdminServiceStub(channel).Drain(shard_pb2.DrainRequest(undo=undo), timeout=5)


async def can_be_read(channel: grpc.aio.Channel) -> None:
    """What routers and people ask a shard: one engine's nonsense is not their problem."""
    admin = shard_pb2_grpc.AdminServiceStub(channel)
    decode_engine_stats(await admin.EngineStats(shard_pb2.EngineStatsRequest(), timeout=5))
    await admin.Explain(shard_pb2.ExplainRequest(), timeout=5)


async def test_no_message_breaks_a_shard_or_its_directory(cluster: LocalCluster) -> None:
    rpcs = [method for method in methods() if method.full_name != ENDS_THE_SHARD]
    at_lookup = of_services("LookupService")
    at_shard = [method for method in rpcs if method not in at_lookup]
    counts: Counter[tuple[str, str]] = Counter()
    pids = [cluster.pid("n0"), cluster.pid("lookup0")]
    at_first = [own_memory(pid, "VmHWM") for pid in pids]
    memory: list[int] = []
    shares = [(at_shard, MESSAGES * len(at_shard) // len(rpcs)), (at_lookup, MESSAGES * len(at_lookup) // len(rpcs))]
    addresses = (cluster.record("n0").rpc_address, cluster.lookup_addresses[0])
    async with contextlib.AsyncExitStack() as stack:
        await drain(cluster, "n1", undo=False)  # otherwise nothing that it offers is taken over
        channels = [await stack.enter_async_context(connected(address)) for address in addresses]
        for index in range(ROUNDS):
            async with busy_engines(cluster, index) as menu:
                for name, channel, (share, count) in zip("sl", channels, shares, strict=True):
                    sent = made(share, count // ROUNDS, f"{name}{index}", menu if name == "s" else with_strangers(menu))
                    counts += await campaign(channel, sent, DOCUMENTED)
                    await can_be_read(channels[0])
            accounting = cluster.accounting("n0")
            assert accounting.balanced, f"KVSERVICE_FUZZ_SEED={SEED}, round {index}: {accounting.violation}"
            memory = memory or [own_memory(pid) for pid in pids]
    await what_the_messages_took_comes_back(cluster)
    await drain(cluster, "n1", undo=True)
    await still_serves(cluster, seed=1)
    assert counts["Announce", "PERMISSION_DENIED"], "none spoke for a real shard"
    growth = [own_memory(pid) - before for pid, before in zip(pids, memory, strict=True)]
    assert max(growth) < GROWTH_BYTES_MAX, f"KVSERVICE_FUZZ_SEED={SEED}: memory grew by {growth} bytes"
    peak = [own_memory(pid, "VmHWM") - before for pid, before in zip(pids, at_first, strict=True)]
    assert max(peak) < PEAK_BYTES_MAX, f"KVSERVICE_FUZZ_SEED={SEED}: up to {peak} bytes more than at first"
    assert {name for name, _ in counts} == {method.name for method in rpcs}, "an RPC was left out"
    assert {name for name, code in counts if code == "OK"} == {method.name for method in rpcs}, "nothing gets through"
    print(f"{sum(counts.values())} messages, memory grew by {growth} bytes, {peak} at most")
    print(dict(sorted(counts.items())))


async def test_a_drain_with_any_numbers_leaves_or_is_refused(cluster: LocalCluster) -> None:
    """Apart, because a drain that is valid ends the shard: it may, and cleanly."""
    drain = [method for method in methods() if method.full_name == ENDS_THE_SHARD]
    assert drain, "no such RPC any more"
    async with connected(cluster.record("n1").rpc_address) as channel:
        await campaign(channel, made(drain, 60, "d", Menu()), LEAVING)
    accounting = None
    with contextlib.suppress(grpc.RpcError, IndexError):
        accounting = cluster.accounting("n1")
    assert cluster.exit_code("n1") == 0 if accounting is None else accounting.balanced


async def test_no_message_breaks_the_books_of_the_directory() -> None:
    server = LookupServer("127.0.0.1:0", allow_plaintext=True)
    address = await server.start()
    nodes = [common_pb2.NodeInfo(node_id=f"n{i}", peer_address="a:1", epoch=3) for i in range(4)]
    keys: list[object] = list(chain(seed=1, count=40))
    fields: dict[str, list[object]] = {"sequence": [1, 2, 3, 4], "partition": [0], "partition_count": [1]}
    fields |= {name: keys for name in ("keys", "added", "removed")}
    menu = Menu(fields, {nodes[0].DESCRIPTOR.full_name: list(nodes)})
    try:
        async with connected(address) as channel:
            for index in range(10):
                await campaign(channel, made(of_services("LookupService"), 40, f"b{index}", menu), DOCUMENTED)
                server._directory.check_invariants()
    finally:
        await server.stop(0)


async def test_a_call_without_a_deadline_is_refused(cluster: LocalCluster) -> None:
    async with connected(cluster.record("n0").rpc_address) as channel:
        for method in of_services("PeerService", "AdminService"):
            if not method.server_streaming:
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await channel.unary_unary(path_of(method), None, None)(b"")
                assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
