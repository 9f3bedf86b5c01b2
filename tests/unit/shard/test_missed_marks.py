"""How a shard asks the others what was cleared while it was away."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvservice.core.block.marks import Mark, MarkKind
from kvservice.observe.logs import fields_of
from kvservice.shard import missed_marks
from kvservice.shard.missed_marks import MissedMarks, order_of
from kvservice.units import NodeId
from kvservice.wire.clearing import decode_marks, encode_marks
from kvservice.wire.v1 import lookup_pb2, lookup_pb2_grpc, shard_pb2, shard_pb2_grpc

MARKS = [Mark(MarkKind.NAMESPACE, 1000.0 + number, f"customer/{number}") for number in range(3)]


class Nodes(lookup_pb2_grpc.LookupServiceServicer, shard_pb2_grpc.OperatorServiceServicer):
    """A lookup partition that knows three nodes, and each of these."""

    def __init__(self) -> None:
        self.address = ""
        self.asked_at: list[float] = []

    async def LookupStats(
        self, request: lookup_pb2.LookupStatsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> lookup_pb2.LookupStatsReply:
        reply = lookup_pb2.LookupStatsReply()
        for name in ("n0", "n1", "n2"):
            row = reply.nodes.add(alive=True)
            row.node.node_id, row.node.peer_address, row.node.epoch = name, self.address, 1
        return reply

    async def ListMarks(
        self, request: shard_pb2.ListMarksRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> shard_pb2.ListMarksReply:
        """The first node that is asked knows one mark less."""
        self.asked_at.append(time.monotonic())
        return shard_pb2.ListMarksReply(marks=encode_marks(MARKS[: len(self.asked_at) + 1]))


@pytest.fixture
async def nodes() -> AsyncIterator[Nodes]:
    nodes, server = Nodes(), grpc.aio.server()
    lookup_pb2_grpc.add_LookupServiceServicer_to_server(nodes, server)
    shard_pb2_grpc.add_OperatorServiceServicer_to_server(nodes, server)
    nodes.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield nodes
    await server.stop(None)


class Taken:
    """What was told, and when."""

    def __init__(self) -> None:
        self.marks: list[Sequence[Mark]] = []
        self.taken_at: list[float] = []

    async def take(self, marks: Sequence[Mark]) -> None:
        self.marks.append(marks)
        self.taken_at.append(time.monotonic())


async def test_marks_that_all_nodes_keep_are_read_once(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise those of a few hundred nodes hold a shard up for seconds."""
    nodes.asked_at = [0.0, 0.0]  # so that all know the same
    taken, reads = Taken(), list[int]()
    monkeypatch.setattr(missed_marks, "decode_marks", lambda *read: (reads.append(1), decode_marks(*read))[1])
    await MissedMarks(NodeId("a"), taken.take, None).take([nodes.address])
    assert taken.marks == [MARKS] and len(reads) == 1


async def test_a_node_that_returns_asks_the_others_one_by_one(nodes: Nodes) -> None:
    """After an outage of the directory all do so. What the first answers is cleared before the last is asked."""
    taken = Taken()
    await MissedMarks(NodeId("a"), taken.take, None).take([nodes.address], apart_seconds=0.5)
    first, second, third = nodes.asked_at
    assert second - first > 0.25 and third - second > 0.25
    assert taken.marks == [MARKS[:2], MARKS[2:]] and taken.taken_at[0] < third


def test_each_node_asks_the_others_in_an_order_of_its_own() -> None:
    """And in the same one each time."""
    names = [NodeId(f"node-{number}") for number in range(300)]
    orders = [order_of(name, set(names) - {name}) for name in names]
    assert orders == [order_of(name, set(names) - {name}) for name in names]
    assert all(len(set(order)) == 299 and name not in order for name, order in zip(names, orders, strict=True))
    for turn in (0, 150, 298):
        assert max(Counter(order[turn] for order in orders).values()) < 10


async def test_a_lookup_that_is_down_is_logged_in_words(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    taken = Taken()
    await MissedMarks(NodeId("a"), taken.take, None).take([f"unix:{tmp_path}/l.sock"])
    assert not taken.marks
    (record,) = [each for each in caplog.records if each.getMessage() == "marks_not_asked"]
    reason = str(fields_of(record)["reason"])
    assert reason.startswith("the lookup partition: ") and "AioRpcError" not in reason and "\n" not in reason
