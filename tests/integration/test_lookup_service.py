"""The lookup service as processes: killed, stopped, rebuilt, fed with nonsense, watched."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvservice.aio import end_tasks
from kvservice.core.actions import Retract
from kvservice.core.block.keys import KEYS_PER_REQUEST_MAX, span_route
from kvservice.core.directory.announce import Announcer
from kvservice.core.directory.membership import FORGET_SECONDS, HIDE_SECONDS
from kvservice.core.messages import Holder
from kvservice.discovery import lookup_socket
from kvservice.errors import ConfigError, Unavailable
from kvservice.lookup.announce_pump import AnnouncePump
from kvservice.lookup.client import LookupAnswer, LookupClient
from kvservice.lookup.server import LookupServer
from kvservice.testing.eventually import eventually_async
from kvservice.units import BlockKey, BootEpoch, NodeId
from kvservice.wire.v1 import lookup_pb2, lookup_pb2_grpc
from kvservice.wire.versions import PROTOCOL_VERSION

SERVICE = "/kvservice.wire.v1.LookupService/"


class LookupProcess:
    """One lookup partition in a process of its own, at a socket that stays the same over restarts."""

    def __init__(self, partition: int, partition_count: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvl-")
        self.address = f"unix:{lookup_socket('default', partition, Path(self._folder.name))}"
        self._command = [sys.executable, "-m", "kvservice", "lookup"]
        self._command += ["--partition", str(partition), "--lookup-partitions", str(partition_count)]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            self._command,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "KVSERVICE_RUNTIME_DIR": self._folder.name},
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline().endswith(f"serves {self.address}\n")

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=10)

    def end(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
        self.process.communicate(timeout=10)
        return self.process.returncode


@pytest.fixture
def lookups() -> Iterator[list[LookupProcess]]:
    processes = [LookupProcess(partition, 2) for partition in range(2)]
    yield processes
    for process in processes:
        process.end()


def addresses_of(lookups: Sequence[LookupProcess]) -> list[str]:
    return [lookup.address for lookup in lookups]


class Node:
    """A cache shard's side: what it holds, and the pump that says so."""

    def __init__(self, name: str, chain: Sequence[BlockKey], addresses: Sequence[str], epoch: int = 1) -> None:
        self.held = {key: span_route(chain, position) for position, key in enumerate(chain)}
        self.holder = Holder(NodeId(name), f"{name}:1", BootEpoch(epoch))
        self.announcer = Announcer(len(addresses), lambda: list(self.held.items()))
        self.fenced = asyncio.Event()
        self.pump = AnnouncePump(self.announcer, addresses, lambda: self.holder, 0.5, self.fenced.set)
        self.task = asyncio.create_task(self.pump.run())

    def evict(self, key: BlockKey) -> None:
        self.announcer.change([Retract(key, self.held.pop(key))])
        self.pump.kick()

    async def end(self, leaving: bool = True) -> None:
        await self.pump.stop(leaving)
        await asyncio.gather(self.task, return_exceptions=True)


@asynccontextmanager
async def node(name: str, chain: Sequence[BlockKey], addresses: Sequence[str], epoch: int = 1) -> AsyncIterator[Node]:
    made = Node(name, chain, addresses, epoch)
    try:
        yield made
    finally:
        await made.end()


@asynccontextmanager
async def client(addresses: Sequence[str]) -> AsyncIterator[LookupClient]:
    made = LookupClient(addresses)
    try:
        yield made
    finally:
        await made.close()


@asynccontextmanager
async def one_lookup(**settings: tuple[float, float]) -> AsyncIterator[str]:
    server = LookupServer("127.0.0.1:0", 0, 1, allow_plaintext=True, **settings)
    try:
        yield await server.start()
    finally:
        await server.stop(0)


def new_chain(count: int) -> list[BlockKey]:
    return [BlockKey(os.urandom(16)) for _ in range(count)]


def known(answer: LookupAnswer) -> int:
    return sum(run.count for run in answer.runs)


async def until(
    client: LookupClient, chain: Sequence[BlockKey], accept: Callable[[LookupAnswer], bool], seconds: float = 20.0
) -> LookupAnswer:
    answer: LookupAnswer | None = None

    async def accepted() -> LookupAnswer | None:
        nonlocal answer
        answer = await client.resolve(chain, 0, 1.0)
        return answer if accept(answer) else None

    def told() -> str:
        return "" if answer is None else f"{known(answer)} of {len(chain)} known, complete={answer.complete}"

    return await eventually_async(accepted, "the directory to know it", seconds, detail=told)


async def test_two_partitions_answer_one_chain_as_one_run(lookups: list[LookupProcess]) -> None:
    chain = new_chain(1000)
    addresses = addresses_of(lookups)
    async with client(addresses) as asking, node("a", chain[:700], addresses) as holder:
        answer = await until(asking, chain, lambda answer: known(answer) == 700)
        assert [(run.start, run.count, run.holders) for run in answer.runs] == [(0, 700, (holder.holder,))]
        assert answer.complete
        tail = await asking.resolve(chain, 650, 1.0)
        assert [(run.start, run.count) for run in tail.runs] == [(650, 50)]
        assert known(await asking.resolve(chain, 0, 1.0, exclude=NodeId("a"))) == 0
        stats = [await stats_of(address) for address in addresses]
        assert all(0 < reply.key_count < 700 for reply in stats), "both hold a part"


async def test_evicted_block_leaves_a_hole(lookups: list[LookupProcess]) -> None:
    chain = new_chain(300)
    async with client(addresses_of(lookups)) as asking, node("a", chain, addresses_of(lookups)) as holder:
        await until(asking, chain, lambda answer: known(answer) == 300)
        holder.evict(chain[100])
        answer = await until(asking, chain, lambda answer: known(answer) == 299, seconds=2)
        assert [(run.start, run.count) for run in answer.runs] == [(0, 100), (101, 199)]


async def test_killed_lookup_partition_is_rebuilt_from_the_shards(lookups: list[LookupProcess]) -> None:
    chain = new_chain(2000)
    async with client(addresses_of(lookups)) as asking, node("a", chain, addresses_of(lookups)):
        await until(asking, chain, lambda answer: known(answer) == 2000)
        lookups[0].kill()
        answer = await asking.resolve(chain, 0, 1.0)
        assert not answer.complete
        assert 0 < known(answer) < 2000, "only its own spans are unknown"
        lookups[0].start()
        await until(asking, chain, lambda answer: known(answer) == 2000 and answer.complete)


async def test_stopped_lookup_partition_costs_its_timeout_once(lookups: list[LookupProcess]) -> None:
    chain = new_chain(2000)
    async with client(addresses_of(lookups)) as asking, node("a", chain, addresses_of(lookups)):
        await until(asking, chain, lambda answer: known(answer) == 2000)
        lookups[1].signal(signal.SIGSTOP)
        for _ in range(3):
            begun = time.monotonic()
            answer = await asking.resolve(chain, 0, 0.2)
            assert time.monotonic() - begun < 2.0
            assert not answer.complete and 0 < known(answer) < 2000
        rpcs = asking.counters["lookup_rpcs"]
        answer = await asking.resolve(chain, 0, 0.2)
        assert asking.counters["lookup_rpcs"] == rpcs + 1, "the open breaker lets nothing through"
        assert asking.counters["lookup_skipped"] == 1 and not answer.complete
        lookups[1].signal(signal.SIGCONT)
        await until(asking, chain, lambda answer: known(answer) == 2000 and answer.complete)


async def test_stopped_partition_does_not_delay_finding_a_node(lookups: list[LookupProcess]) -> None:
    chain = new_chain(8)
    async with client(addresses_of(lookups)) as asking, node("a", chain, addresses_of(lookups)):
        await until(asking, chain, lambda answer: known(answer) == 8)
        for stopped in lookups:
            stopped.signal(signal.SIGSTOP)
            begun = time.monotonic()
            found = await asking.find_node(NodeId("a"), 5.0)
            assert found is not None and time.monotonic() - begun < 2.0
            stopped.signal(signal.SIGCONT)


async def test_dead_node_is_hidden_in_three_seconds_without_a_word(lookups: list[LookupProcess]) -> None:
    chain = new_chain(200)
    async with client(addresses_of(lookups)) as asking:
        holder = Node("a", chain, addresses_of(lookups))
        await until(asking, chain, lambda answer: known(answer) == 200)
        await holder.end(leaving=False)
        died = time.monotonic()
        await until(asking, chain, lambda answer: known(answer) == 0)
        assert 2.0 < time.monotonic() - died < 4.5


@pytest.mark.parametrize("seconds", [HIDE_SECONDS + 1, FORGET_SECONDS + 1])
async def test_a_node_whose_clock_stood_still_is_told_it_was_hidden(seconds: float) -> None:
    """As the clock of a machine that was suspended. What was cleared meanwhile it must ask for."""
    suspended = 0.0
    told: list[bool] = []

    async def returned(is_later: bool) -> None:
        told.append(is_later)

    server = LookupServer("127.0.0.1:0", allow_plaintext=True, clock=lambda: time.monotonic() + suspended)
    announcer = Announcer(1, list)
    holder = Holder(NodeId("a"), "a:1", BootEpoch(1))
    pump = AnnouncePump(announcer, [await server.start()], lambda: holder, 0.1, lambda: None, on_return=returned)
    task = asyncio.create_task(pump.run())
    try:
        await eventually_async(lambda: told == [False], "the first answer")
        suspended = seconds
        await eventually_async(lambda: told[-1:] == [False] and len(told) > 1, "the node to hear that it was hidden")
    finally:
        await pump.stop(leaving=False)
        await end_tasks([task])
        await server.stop(0)


async def test_leaving_node_is_forgotten_at_once(lookups: list[LookupProcess]) -> None:
    chain = new_chain(200)
    async with client(addresses_of(lookups)) as asking:
        holder = Node("a", chain, addresses_of(lookups))
        await until(asking, chain, lambda answer: known(answer) == 200)
        await holder.end(leaving=True)
        answer = await asking.resolve(chain, 0, 1.0)
        assert known(answer) == 0 and answer.complete


async def test_newer_boot_of_a_node_fences_the_older_one(lookups: list[LookupProcess]) -> None:
    chain = new_chain(200)
    addresses = addresses_of(lookups)
    async with client(addresses) as asking, node("a", chain, addresses, epoch=1) as old:
        await until(asking, chain, lambda answer: known(answer) == 200)
        async with node("a", chain[:50], addresses, epoch=2) as new:
            await asyncio.wait_for(old.fenced.wait(), 5)
            answer = await until(asking, chain, lambda answer: known(answer) == 50)
            assert answer.runs[0].holders == (new.holder,)


async def test_terminated_lookup_partition_ends_cleanly(lookups: list[LookupProcess]) -> None:
    async with client(addresses_of(lookups)) as asking:
        await asking.members(5.0)
        assert [lookup.end() for lookup in lookups] == [0, 0]


async def test_moved_lookup_partition_is_found_at_its_new_address() -> None:
    chain = new_chain(100)
    async with one_lookup() as first, one_lookup() as second, client([first]) as asking, node("a", chain, [first]) as a:
        await until(asking, chain, lambda answer: known(answer) == 100)
        a.pump.set_addresses([second])
        asking.set_addresses([second])
        await until(asking, chain, lambda answer: known(answer) == 100 and answer.complete)
        with pytest.raises(ConfigError, match="fixed"):
            a.pump.set_addresses([first, second])


async def test_lookup_without_shards_or_time_is_incomplete_at_once() -> None:
    chain = new_chain(10)
    async with client([]) as nobody:
        assert await nobody.resolve(chain, 0, 1.0) == LookupAnswer((), False)
        assert await nobody.resolve(chain, 10, 1.0) == LookupAnswer((), True)
    async with client(["127.0.0.1:9"]) as refused:
        assert await refused.resolve(chain, 0, 0.0) == LookupAnswer((), False)
        assert not (await refused.resolve(chain, 0, 1.0)).complete
        assert refused.counters["lookup_failed_unavailable"] == 1
        assert await refused.members(1.0) == [] and refused.counters["members_failed"] == 1


async def test_partition_that_failed_is_still_asked_every_second() -> None:
    now = 100.0
    asking = LookupClient(["127.0.0.1:9"], lambda: now)
    try:
        for _ in range(12):
            await asking.resolve(new_chain(1), 0, 1.0)
            now += 1.01
        assert asking.counters["lookup_rpcs"] == 12, "the breaker never stays open for longer"
        assert asking.counters["lookup_breaker_opened"] == 10
    finally:
        await asking.close()


async def test_chain_longer_than_one_request_is_asked_in_several() -> None:
    chain = new_chain(KEYS_PER_REQUEST_MAX + 100)
    async with one_lookup() as address, client([address]) as asking, node("a", chain, [address]):
        answer = await until(asking, chain, lambda answer: known(answer) == len(chain))
        assert [(run.start, run.count) for run in answer.runs] == [(0, len(chain))]


async def test_node_without_an_identity_yet_announces_later() -> None:
    chain = new_chain(10)
    async with one_lookup() as address, client([address]) as asking, node("a", chain, [address]) as holder:
        answers = iter([Unavailable("not started"), Unavailable("not started")])
        holder.pump._node = lambda: _raise_next(answers) or holder.holder
        await until(asking, chain, lambda answer: known(answer) == 10)
        assert holder.announcer.counters["announce_failed"] >= 2


def _raise_next(errors: Iterator[Exception]) -> None:
    for error in errors:
        raise error


async def test_a_failing_inventory_delays_announcements_only() -> None:
    """The shard may be short of memory for a moment. Without its announcements nobody would find it again."""
    chain, errors = new_chain(10), iter([MemoryError(), MemoryError()])
    async with one_lookup() as address, client([address]) as asking, node("a", chain, [address]) as holder:
        inventory = holder.announcer._inventory
        holder.announcer._inventory = lambda: _raise_next(errors) or inventory()
        await until(asking, chain, lambda answer: known(answer) == 10)
        assert next(errors, None) is None and not holder.task.done()


async def test_stopped_pump_returns() -> None:
    async with one_lookup() as address:
        holder = Node("a", [], [address])
        await asyncio.sleep(0.05)
        await holder.pump.stop(leaving=True)
        await asyncio.wait_for(holder.task, 2)


# -- what comes from the wire ----

KEY = bytes(16)
NODE = {
    "node": {"node_id": "a", "peer_address": "a:1", "epoch": 1},
    "partition": 0,
    "partition_count": 1,
    "protocol_version": PROTOCOL_VERSION,
}


async def stats_of(address: str) -> lookup_pb2.LookupStatsReply:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = lookup_pb2_grpc.LookupServiceStub(channel)
        reply: lookup_pb2.LookupStatsReply = await stub.LookupStats(lookup_pb2.LookupStatsRequest(), timeout=5)
        return reply


async def raw_call(address: str, method: str, data: bytes, timeout: float | None = 5.0) -> bytes:
    async with grpc.aio.insecure_channel(address) as channel:
        reply: bytes = await channel.unary_unary(SERVICE + method, None, None)(data, timeout=timeout)
        return reply


@pytest.mark.parametrize(
    ("method", "data", "code"),
    [
        ("Resolve", b"\xff\xff\xff", grpc.StatusCode.INVALID_ARGUMENT),
        ("Announce", os.urandom(64), grpc.StatusCode.INVALID_ARGUMENT),
        ("Resolve", lookup_pb2.ResolveRequest(keys=b"x" * 17), grpc.StatusCode.INVALID_ARGUMENT),
        ("Resolve", lookup_pb2.ResolveRequest(keys=KEY * 8193), grpc.StatusCode.INVALID_ARGUMENT),
        ("Resolve", lookup_pb2.ResolveRequest(keys=bytes(5 << 20)), grpc.StatusCode.RESOURCE_EXHAUSTED),
        ("Announce", lookup_pb2.AnnounceRequest(**NODE), grpc.StatusCode.INVALID_ARGUMENT),
        ("Announce", lookup_pb2.AnnounceRequest(**NODE, sequence=1, added=b"abc"), grpc.StatusCode.INVALID_ARGUMENT),
        ("Announce", lookup_pb2.AnnounceRequest(**NODE, sequence=1, removed=b"a"), grpc.StatusCode.INVALID_ARGUMENT),
        (
            "Announce",
            lookup_pb2.AnnounceRequest(**NODE, sequence=1, added=KEY * 65_537),
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
        (
            "Announce",
            lookup_pb2.AnnounceRequest(protocol_version=PROTOCOL_VERSION, partition_count=1, sequence=1),
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
        (
            "Announce",
            lookup_pb2.AnnounceRequest(**{**NODE, "partition": 1, "partition_count": 2}, sequence=1),
            grpc.StatusCode.FAILED_PRECONDITION,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
async def test_bad_input_is_refused_with_its_code_and_changes_nothing(
    method: str, data: bytes | lookup_pb2.ResolveRequest | lookup_pb2.AnnounceRequest, code: grpc.StatusCode
) -> None:
    packed = data if isinstance(data, bytes) else data.SerializeToString()
    async with one_lookup() as address:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await raw_call(address, method, packed)
        assert caught.value.code() is code, caught.value.details()
        stats = await stats_of(address)
        assert stats.key_count == 0 and not stats.nodes


async def test_call_without_deadline_is_refused() -> None:
    async with one_lookup() as address:
        with pytest.raises(grpc.aio.AioRpcError, match="deadline"):
            await raw_call(address, "Resolve", b"", timeout=None)


async def test_health_service_says_serving() -> None:
    async with one_lookup() as address, grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", "kvservice.wire.v1.LookupService"):
            reply = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize(("partition", "count"), [(2, 2), (-1, 1), (0, 0)])
def test_partition_outside_the_count_is_a_config_error(partition: int, count: int) -> None:
    with pytest.raises(ConfigError, match="partition"):
        LookupServer("127.0.0.1:0", partition, count)


async def test_port_that_is_taken_is_a_config_error() -> None:
    async with one_lookup() as address:
        with pytest.raises(ConfigError, match="cannot listen"):
            await LookupServer(address, allow_plaintext=True).start()


# -- watching ----


class Mirror:
    """What a watcher makes of the events."""

    def __init__(self) -> None:
        self.held: dict[str, set[bytes]] = {}
        self.snapshot_complete = False

    def take(self, event: lookup_pb2.WatchEvent) -> None:
        if event.snapshot_end:
            self.snapshot_complete = True
            return
        keys = self.held.setdefault(event.node.node_id, set())
        if event.reset:
            keys.clear()
        keys |= {event.added[i : i + 16] for i in range(0, len(event.added), 16)}
        keys -= {event.removed[i : i + 16] for i in range(0, len(event.removed), 16)}


async def test_watcher_sees_a_snapshot_and_then_every_change() -> None:
    chain = new_chain(6000)
    async with one_lookup(silence=(0.9, 1.5)) as address, client([address]) as asking:
        async with grpc.aio.insecure_channel(address) as channel:
            a = Node("a", chain[:5000], [address])
            await until(asking, chain, lambda answer: known(answer) == 5000)
            events = lookup_pb2_grpc.LookupServiceStub(channel).Watch(
                lookup_pb2.WatchRequest(protocol_version=PROTOCOL_VERSION), timeout=20
            )
            mirror = Mirror()
            while not mirror.snapshot_complete:
                mirror.take(await events.read())
            assert mirror.held == {"a": set(chain[:5000])}
            b = Node("b", chain[5000:], [address])
            a.evict(chain[3])
            while mirror.held != {"a": set(chain[:5000]) - {chain[3]}, "b": set(chain[5000:])}:
                mirror.take(await events.read())
            await b.end(leaving=True)
            await a.end(leaving=False)
            while any(mirror.held.values()):
                mirror.take(await events.read())
            events.cancel()

        async def watcher_is_gone() -> bool:
            return (await stats_of(address)).counters["watchers"] == 0

        await eventually_async(watcher_is_gone, "the watcher that went to leave nothing behind")


async def test_watcher_hears_heartbeats_and_of_silent_nodes() -> None:
    """It hears heartbeats only if it wants them."""
    async with (
        one_lookup(silence=(0.5, 30.0)) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        stub = lookup_pb2_grpc.LookupServiceStub(channel)
        request = lookup_pb2.AnnounceRequest(**NODE, sequence=1, added=KEY, full_begin=True, full_end=True)
        await stub.Announce(request, timeout=5)
        events = stub.Watch(
            lookup_pb2.WatchRequest(protocol_version=PROTOCOL_VERSION, heartbeat_seconds=0.05), timeout=20
        )
        seen = []
        while not (seen and seen[-1].hidden):
            seen.append(await events.read())
        nodes = [event for event in seen if event.HasField("node")]
        assert [event.hidden for event in nodes] == [False, False, True], "its reset, its key, its silence"
        beats = [event for event in seen if not event.HasField("node") and not event.snapshot_end]
        assert 2 <= len(beats) < 20
        await stub.Announce(lookup_pb2.AnnounceRequest(**NODE, sequence=2), timeout=5)
        while not (event := await events.read()).HasField("node"):
            pass
        assert not event.hidden and not event.added, "it is back"
        events.cancel()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Watch(
                lookup_pb2.WatchRequest(protocol_version=PROTOCOL_VERSION, heartbeat_seconds=0.001), timeout=5
            ).read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_watcher_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvservice.lookup.watch.QUEUE_BYTES_MAX", 1 << 20)
    async with one_lookup() as address, grpc.aio.insecure_channel(address) as channel:
        stub = lookup_pb2_grpc.LookupServiceStub(channel)
        events = stub.Watch(lookup_pb2.WatchRequest(protocol_version=PROTOCOL_VERSION), timeout=20)
        await events.read()  # subscribed
        block = os.urandom(16 * 65_536)
        async with grpc.aio.insecure_channel(address) as other:
            announcing = lookup_pb2_grpc.LookupServiceStub(other)
            for sequence in range(1, 40):  # more than HTTP/2 and gRPC buffer on the way
                request = lookup_pb2.AnnounceRequest(
                    **NODE, sequence=sequence, added=block, full_begin=sequence == 1, full_end=sequence == 1
                )
                await announcing.Announce(request, timeout=5)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while True:
                assert await events.read() is not grpc.aio.EOF, "ended without a reason"  # type: ignore[attr-defined]
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await stats_of(address)).counters["watchers_cut_off"] == 1
