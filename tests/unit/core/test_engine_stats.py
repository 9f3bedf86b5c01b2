"""What a shard tells routers: engines that are alike, what they measured, and how fast other nodes are read."""

from __future__ import annotations

import dataclasses
import math

import pytest

from kvservice.core import events as ev
from kvservice.core.block.tenants import NOBODY, TenantLimits
from kvservice.core.messages import AcquireRequest, EngineStats, Holder, PeerSpeed
from kvservice.errors import InvalidRequest
from kvservice.testing.builders import CoreHarness, make_chain, make_spec
from kvservice.units import AttachmentId, BootEpoch, NodeId
from kvservice.wire.codec import decode_engine_stats, encode_engine_stats
from kvservice.wire.v1 import shard_pb2


def ask(harness: CoreHarness, attachment: AttachmentId, seconds_per_block: float) -> None:
    request = AcquireRequest(tuple(make_chain(1)), 0, 1.0, seconds_per_block)
    harness.send(ev.Acquire(harness.next_op(), attachment, request))


def test_alike_engines_are_one_group_with_one_measurement() -> None:
    harness = CoreHarness()
    one, two = harness.attach(make_spec("one")), harness.attach(make_spec("two"))
    harness.attach(make_spec("other", "another model"))
    ask(harness, one, 0.25)
    ask(harness, two, 0.0)
    groups = {group.model: group for group in harness.state.engine_stats().engines}
    assert len(groups) == 2
    assert (groups["another model"].attached, groups["another model"].seconds_per_block) == (1, 0.0)
    (both,) = [group for name, group in groups.items() if name != "another model"]
    assert (both.attached, both.seconds_per_block) == (2, 0.25)
    assert both.fingerprint == make_spec("one").fingerprint


def test_an_engine_that_left_is_not_told_of() -> None:
    harness = CoreHarness()
    attachment = harness.attach(make_spec("one"))
    harness.send(ev.Detach(attachment))
    assert harness.state.engine_stats().engines == ()


def test_engine_stats_survive_the_wire() -> None:
    harness = CoreHarness()
    harness.attach(make_spec("one"))
    stats = dataclasses.replace(harness.state.engine_stats(), peers=(PeerSpeed(NodeId("b"), 1e9, 0.002),))
    node = Holder(NodeId("a"), "a:1", BootEpoch(3))
    data = encode_engine_stats(node, stats).SerializeToString()
    assert decode_engine_stats(shard_pb2.EngineStatsReply.FromString(data)) == stats


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_a_speed_that_is_none_is_refused(value: float) -> None:
    node = Holder(NodeId("a"), "a:1", BootEpoch(3))
    message = encode_engine_stats(node, EngineStats((), (PeerSpeed(NodeId("b"), value, 0.0),)))
    with pytest.raises(InvalidRequest):
        decode_engine_stats(message)


def test_an_engine_is_charged_to_its_tenant() -> None:
    harness = CoreHarness(tenants={"acme": TenantLimits()})
    engine = harness.attach(make_spec("one"), "acme")
    assert harness.state.account_of(engine) == "acme"
    assert harness.state.account_of(AttachmentId(99)) == NOBODY
