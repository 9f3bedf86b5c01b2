"""The lookup client's cutting and joining: whatever the number of lookup partitions, their answers together are the
truth, and no reply, however wrong, does more than raise InvalidRequest."""

from __future__ import annotations

import hashlib
from itertools import pairwise
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from kvservice.core.block.keys import SPAN_BLOCKS, partition_of, span_route
from kvservice.core.directory.directory import Directory
from kvservice.core.messages import Holder, HolderRun
from kvservice.errors import InvalidRequest
from kvservice.lookup import client
from kvservice.lookup.client import decode_runs, merge_runs, split_chain
from kvservice.lookup.service import _encode_runs
from kvservice.units import BlockKey, BootEpoch, NodeId
from kvservice.wire.v1 import common_pb2, lookup_pb2

CHAIN = [BlockKey(hashlib.blake2b(bytes([i % 256, i // 256]), digest_size=16).digest()) for i in range(400)]
NODES = [Holder(NodeId(name), f"{name}:1", BootEpoch(1)) for name in "zab"]

ranges = st.tuples(st.integers(0, 399), st.integers(0, 400)).map(lambda pair: range(min(pair), max(pair)))


@given(
    count=st.integers(1, 5),
    start=st.integers(0, 399),
    length=st.integers(1, 400),
    held=st.lists(st.lists(ranges, max_size=4), min_size=3, max_size=3),
    excluded=st.sampled_from([None, NodeId("a")]),
    request_keys_max=st.sampled_from([7, 100, 8192]),
)
def test_answers_of_all_partitions_together_are_the_truth(
    count: int, start: int, length: int, held: list[list[range]], excluded: NodeId | None, request_keys_max: int
) -> None:
    chain = CHAIN[:length]
    partitions = [Directory() for _ in range(count)]
    truth: dict[int, set[str]] = {}
    for node, parts in zip(NODES, held, strict=True):
        positions = {position for part in parts for position in part if position < length}
        for index, partition in enumerate(partitions):
            mine = [CHAIN[p] for p in sorted(positions) if partition_of(span_route(CHAIN, p), count) == index]
            partition.apply(node, 1, mine, full_begin=True, full_end=True, now=0.0)
        if node.node_id != excluded:
            for position in positions:
                if position >= start:
                    truth.setdefault(position, set()).add(node.node_id)
    found: list[HolderRun] = []
    with mock.patch.object(client, "KEYS_PER_REQUEST_MAX", request_keys_max):
        parts_asked = split_chain(chain, start, count)
    for index, segments in parts_asked:
        keys = [key for first, number in segments for key in chain[first : first + number]]
        assert 0 < len(keys) <= request_keys_max
        reply = _encode_runs(partitions[index].resolve(keys, 0.0))
        found += decode_runs(lookup_pb2.ResolveReply.FromString(reply.SerializeToString()), segments)
    runs = merge_runs(found, excluded)
    answered = {
        p: {str(h.node_id) for h in run.holders} for run in runs for p in range(run.start, run.start + run.count)
    }
    assert answered == truth
    for before, after in pairwise(runs):
        assert before.start + before.count <= after.start
        assert before.start + before.count < after.start or before.holders != after.holders, "neighbours are one run"


@given(start=st.integers(0, 399), count=st.integers(1, 5))
def test_every_key_is_asked_once_of_the_owner_of_its_span(start: int, count: int) -> None:
    asked = [
        (index, p) for index, segments in split_chain(CHAIN, start, count) for f, n in segments for p in range(f, f + n)
    ]
    assert sorted(position for _, position in asked) == list(range(start, 400))
    for index, position in asked:
        assert partition_of(span_route(CHAIN, position), count) == index


def test_neighbouring_spans_of_a_partition_are_one_segment() -> None:
    assert split_chain(CHAIN, 10, 1) == [(0, [(10, 390)])]
    assert all(first % SPAN_BLOCKS == 0 for _, segments in split_chain(CHAIN, 0, 3) for first, _ in segments)


small = st.integers(0, 12)
nodes = st.builds(
    common_pb2.NodeInfo, node_id=st.text(max_size=2), peer_address=st.just("h:1"), epoch=st.integers(0, 2)
)
wire_runs = st.builds(lookup_pb2.ResolveRun, start=small, count=small, holders=st.lists(st.integers(0, 3), max_size=3))
replies = st.builds(lookup_pb2.ResolveReply, runs=st.lists(wire_runs, max_size=4), nodes=st.lists(nodes, max_size=3))


@given(reply=replies)
def test_wrong_reply_is_refused(reply: lookup_pb2.ResolveReply) -> None:
    """A right one stays within what was asked."""
    segments = [(100, 4), (200, 3)]
    try:
        runs = decode_runs(reply, segments)
    except InvalidRequest:
        return
    allowed = {*range(100, 104), *range(200, 203)}
    positions = [p for run in runs for p in range(run.start, run.start + run.count)]
    assert len(positions) == len(set(positions)) == sum(run.count for run in reply.runs)
    assert set(positions) <= allowed
    assert all(run.holders for run in runs)


def test_honest_reply_is_not_refused() -> None:
    info = common_pb2.NodeInfo(node_id="a", peer_address="h:1", epoch=1)
    reply = lookup_pb2.ResolveReply(nodes=[info], runs=[lookup_pb2.ResolveRun(start=2, count=4, holders=[0])])
    holders = (Holder(NodeId("a"), "h:1", BootEpoch(1)),)
    assert decode_runs(reply, [(100, 4), (200, 3)]) == [HolderRun(102, 2, holders), HolderRun(200, 2, holders)]
