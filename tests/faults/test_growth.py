"""Nodes, engines, tenants and requests that come and go for as long as a service runs: nothing of them may pile up."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter, deque
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import grpc
import pytest

from kvservice.client.peer import PeerClient
from kvservice.core import actions as act
from kvservice.core import events as ev
from kvservice.core.block.keys import pack_keys
from kvservice.core.bounded_table import NODES_MAX, BoundedTable
from kvservice.core.directory.directory import Directory
from kvservice.core.directory.membership import MEMBERS_MAX
from kvservice.core.explain.evictions import NAMES_MAX
from kvservice.core.explain.records import RECORDS_MAX
from kvservice.core.messages import Holder
from kvservice.core.store.worth import GONE_MIN
from kvservice.observe.timings import Timings
from kvservice.pool.remote import RemoteShards
from kvservice.serve.load import LoadBook, SentPrefixes
from kvservice.testing.builders import CoreHarness, make_chain, make_holder, make_located, make_spec, run_of
from kvservice.units import BlockHash, BlockKey, BootEpoch, HandoffId, MiB, NodeId
from kvservice.wire.v1 import shard_pb2, shard_pb2_grpc
from tests.faults.rounds import rounds

pytestmark = pytest.mark.faults

TABLES = (dict, set, list, deque)
NAMES = rounds(2_500, failed_before=1.0, campaign=10_000)
# Tables that may be larger than NODES_MAX, each with the bound of its own.
LARGER = {
    "RequestRecords": RECORDS_MAX,
    "EvictionHistory": NAMES_MAX,
    "StretchTree": 2 * GONE_MIN,
    "UseLine": 2 * GONE_MIN,
    "Membership": MEMBERS_MAX,
}


def tables(root: object) -> Iterator[tuple[str, int]]:
    """(class and attribute, entries) of every table that can be reached from an object of ours."""
    seen: set[int] = set()
    waiting: list[object] = [root]
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen or not type(thing).__module__.startswith("kvservice."):
            continue
        seen.add(id(thing))
        for name in [*getattr(thing, "__dict__", {}), *getattr(type(thing), "__slots__", ())]:
            value = getattr(thing, name, None)
            if isinstance(value, TABLES):
                yield f"{type(thing).__name__}.{name}", len(value)
                waiting += list(value.values()) if isinstance(value, dict) else list(value)
            else:
                waiting.append(value)


def assert_bounded(*roots: object) -> None:
    found = [each for root in roots for each in tables(root)]
    assert found, "no table was looked at"
    large = {name: size for name, size in found if size > LARGER.get(name.split(".")[0], NODES_MAX)}
    assert not large, f"tables that grow with every name that ever was: {large}"


class Unchecked(CoreHarness):
    """Without looking at all invariants after each of so many events."""

    def send(self, event: ev.Event) -> list[act.Action]:
        actions = self.state.handle(event, self.now)
        for action in actions:
            self._perform(action)
        return actions


def test_a_table_that_grows_is_seen() -> None:
    table: BoundedTable[int, int] = BoundedTable(NODES_MAX + 1)
    for name in range(NODES_MAX + 1):
        table.put(name, name)
    with pytest.raises(AssertionError, match=r"BoundedTable\._entries"):
        assert_bounded(table)


def test_a_shard_forgets_engines_tenants_and_peers_that_were() -> None:
    harness = Unchecked(slab_count=32, lease_seconds=1.0)
    for number in range(NAMES):
        peer = make_holder(f"node-{number}")
        spec = make_spec(f"engine-{number}")
        engine = harness.attach(spec, tenant=f"tenant-{number}")
        chain = make_chain(2, f"prompt-{number}")
        op = harness.acquire(engine, chain)
        harness.resolved(op, run_of(0, 2, peer))
        harness.located(harness.locates[-1], make_located(chain))
        harness.pulled(harness.pulls[-1], ev.PullResult.OK)
        if number % 3:
            harness.release(engine, harness.result(op).lease_id)
        harness.reserve(engine, 1)
        harness.send(ev.OpenHandoff(harness.next_op(), engine, HandoffId(number.to_bytes(16, "big"))))
        harness.send(ev.PeerLocate(harness.next_op(), NodeId(f"node-{number}"), harness.state.epoch, chain))
        harness.send(ev.Detach(engine) if number % 2 else ev.AttachmentLost(engine))
        harness.send(ev.EngineGone(spec.engine_id))
        harness.advance(0.1)
        for told in (harness.locates, harness.pulls, harness.watched, harness.remote_releases, harness.resolves):
            told.clear()
        harness.answers.clear()
    harness.advance(120.0)
    harness.state.check_invariants()
    assert_bounded(harness.state)
    assert harness.state.lease_count == 0 and harness.slots("writing") == 0


def test_a_directory_forgets_nodes_that_were() -> None:
    directory, keys = Directory(hide_seconds=3.0, forget_seconds=30.0), count()
    for number in range(NAMES):
        now = number * 0.1
        holder = Holder(NodeId(f"node-{number}"), f"10.0.0.1:{number}", BootEpoch(1))
        held = pack_keys([BlockKey(next(keys).to_bytes(16, "big")) for _ in range(4)])
        directory.apply(holder, 1, held, full_begin=True, full_end=True, now=now)
        if number % 2:
            directory.apply(holder, 2, leaving=True, now=now)
        if number % 10 == 0:
            directory.sweep(10_000)
        if number % 1000 == 0:
            directory.resolve(held, now)
            directory.nodes(now)
    directory.expire(NAMES * 0.1)
    directory.check_invariants()
    assert_bounded(directory)


def test_a_router_forgets_replicas_and_requests_that_were() -> None:
    book, sent = LoadBook(), SentPrefixes(64, 60.0)
    for number in range(NAMES):
        now, replica = float(number), f"replica-{number}"
        book.keep([replica])
        sent.keep([replica])
        for request in (f"{number}-a", f"{number}-b"):
            book.decided(request, replica, 0.1, now)
            book.routed(request, replica, now)
            sent.remember(replica, [BlockHash(request.encode())], now)
        book.completed(f"{number}-a", replica, now)
    assert_bounded(book, sent)


class AnyNode(shard_pb2_grpc.PeerServiceServicer):
    """Answers as every node."""

    async def Handshake(self, request: shard_pb2.HandshakeRequest, context: object) -> shard_pb2.HandshakeReply:
        reply = shard_pb2.HandshakeReply(transport="shm", description=b"d" * 4096)
        reply.node.epoch, reply.geometry.slab_bytes, reply.geometry.slab_count = 7, MiB, 4
        return reply

    async def Locate(self, request: shard_pb2.LocateRequest, context: object) -> shard_pb2.LocateReply:
        return shard_pb2.LocateReply(epoch=7)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.timeout(900)
async def test_what_a_shard_keeps_of_peers_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every node has an address of its own on loopback, behind which one server answers. A smaller bound than the real
    one is reached sooner; `make faults` takes the real one."""
    nodes = rounds(1_000, failed_before=1.0, campaign=10_000)
    bound = min(NODES_MAX, nodes // 10)
    for module in ("kvservice.client.channels", "kvservice.client.peer", "kvservice.pool.remote"):
        monkeypatch.setattr(f"{module}.NODES_MAX", bound)
    monkeypatch.setattr("kvservice.client.channels.RETIRED_SECONDS", 0.1)
    server = grpc.aio.server()
    shard_pb2_grpc.add_PeerServiceServicer_to_server(AnyNode(), server)
    port = server.add_insecure_port("0.0.0.0:0")
    await server.start()
    peers = PeerClient("shm", NodeId("me"), secret=b"x" * 32)
    remote = RemoteShards(NodeId("me"), None, peers, time.monotonic, Counter(), Timings())
    settled = 0
    try:
        for number in range(nodes):
            address = f"127.{1 + number // 60_000}.{number // 250 % 250}.{1 + number % 250}:{port}"
            holder = Holder(NodeId(f"node-{number}"), address, BootEpoch(7))
            await remote.perform(act.Locate(number, holder, (BlockKey(b"k" * 16),), 10.0))
            assert remote.peer_info(holder.node_id, BootEpoch(7)) is not None, "the latest one is known"
            if number == 2 * bound:
                settled = resident_bytes()
        await asyncio.sleep(0.5)  # for what was retired to have closed
        names = [len(peers._channels._open), len(peers._breakers), len(peers._infos), len(remote._peer_infos)]
        assert names == [bound] * 4
        assert len(peers._channels._retired) < bound
        descriptors = len(list(Path("/proc/self/fd").iterdir()))
        grown = resident_bytes() - settled
    finally:  # collecting a server that runs would wait for ever
        await remote.close()
        await server.stop(0)
    assert descriptors < 4 * bound + 100
    # A channel takes 30 KB: without the bound, 80 % of the nodes would be in this difference.
    assert grown < 0.4 * (nodes - 2 * bound) * 30_000, (
        f"{grown >> 20} MiB more after {nodes} nodes than after {2 * bound}"
    )
