"""What another shard asks is checked first: a number that no honest shard sends is refused."""

from __future__ import annotations

import pytest

from kvservice.core import actions as act
from kvservice.core import events as ev
from kvservice.core.messages import TakeOverItem
from kvservice.errors import InvalidRequest, Unavailable
from kvservice.testing.builders import SMALL, CoreHarness, make_chain, make_holder
from kvservice.units import BootEpoch, HandoffId, NodeId, SpanRoute

CHAIN = make_chain(2)
READER = NodeId("reader")
WRONG_WAITS = (-0.1, 1e9)


def refusal(shard: CoreHarness, event: ev.PeerFollow | ev.PeerTakeOver) -> InvalidRequest:
    shard.send(event)
    answer = shard.answers[event.op]
    assert isinstance(answer, act.Refuse) and isinstance(answer.error, InvalidRequest)
    return answer.error


@pytest.mark.parametrize("wait", WRONG_WAITS)
def test_a_reader_waits_within_bounds(wait: float) -> None:
    shard = CoreHarness()
    event = ev.PeerFollow(shard.next_op(), READER, BootEpoch(1), HandoffId(bytes(range(16))), CHAIN, wait)
    assert "is not within 0 to" in refusal(shard, event).message


@pytest.mark.parametrize("wait", WRONG_WAITS)
def test_a_shard_that_leaves_waits_within_bounds(wait: float) -> None:
    shard = CoreHarness()
    items = (TakeOverItem(CHAIN[0], None, 0, SpanRoute(1), 1.0),)
    event = ev.PeerTakeOver(shard.next_op(), BootEpoch(1), make_holder("leaver"), SMALL, items, wait)
    assert "is not within 0 to" in refusal(shard, event).message


def test_a_shard_takes_no_blocks_from_itself() -> None:
    shard = CoreHarness()
    items = (TakeOverItem(CHAIN[0], None, 0, SpanRoute(1), 1.0),)
    event = ev.PeerTakeOver(shard.next_op(), BootEpoch(1), make_holder("here"), SMALL, items, 1.0)
    assert "an offer to oneself" in refusal(shard, event).message


def test_a_shard_that_leaves_lets_nobody_wait_for_it() -> None:
    shard = CoreHarness()
    shard.send(ev.Drain(timeout_seconds=1.0))
    shard.advance(2.0)
    event = ev.PeerFollow(shard.next_op(), READER, BootEpoch(1), HandoffId(bytes(range(16))), CHAIN, 1.0)
    shard.send(event)
    answer = shard.answers[event.op]
    assert isinstance(answer, act.Refuse) and isinstance(answer.error, Unavailable)
