"""How a shard asks the others what was cleared while it was away."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest

from kvservice.core.block.marks import Mark, MarkKind
from kvservice.observe.logs import fields_of
from kvservice.shard import missed_marks
from kvservice.shard.missed_marks import marks_of_others
from kvservice.units import NodeId
from kvservice.wire.clearing import decode_marks, encode_marks
from kvservice.wire.v1 import lookup_pb2, lookup_pb2_grpc, shard_pb2, shard_pb2_grpc

MARKS = [Mark(MarkKind.NAMESPACE, 1000.0 + number, f"customer/{number}") for number in range(3)]


class ThreeNodes(lookup_pb2_grpc.LookupServiceServicer, shard_pb2_grpc.OperatorServiceServicer):
    """A lookup partition that knows three nodes, and each of these."""

    address = ""

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
        return shard_pb2.ListMarksReply(marks=encode_marks(MARKS))


async def test_marks_that_all_nodes_keep_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise those of a few hundred nodes hold a shard up for seconds."""
    nodes, server = ThreeNodes(), grpc.aio.server()
    lookup_pb2_grpc.add_LookupServiceServicer_to_server(nodes, server)
    shard_pb2_grpc.add_OperatorServiceServicer_to_server(nodes, server)
    nodes.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    reads: list[int] = []
    monkeypatch.setattr(missed_marks, "decode_marks", lambda *read: (reads.append(1), decode_marks(*read))[1])
    try:
        assert await marks_of_others(NodeId("a"), [nodes.address], None) == tuple(MARKS)
        assert len(reads) == 1
    finally:
        await server.stop(None)


async def test_a_lookup_that_is_down_is_logged_in_words(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert await marks_of_others(NodeId("a"), [f"unix:{tmp_path}/l.sock"], None) == ()
    (record,) = [each for each in caplog.records if each.getMessage() == "marks_not_asked"]
    reason = str(fields_of(record)["reason"])
    assert reason.startswith("the lookup partition: ") and "AioRpcError" not in reason and "\n" not in reason
