"""Hints and questions for tails on the wire: they come out as they went in, and limits hold."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kvservice.core.messages import NO_HINTS, AcquireResult, Hints, MissReason, SealItem
from kvservice.core.segment.refs import BlockRef
from kvservice.errors import InvalidRequest
from kvservice.units import BlockKey, Generation, LeaseId, SlotIndex, SpanRoute
from kvservice.wire import codec
from kvservice.wire.v1 import shard_pb2

KEY, REF = BlockKey(bytes(range(16))), BlockRef(SlotIndex(3), Generation(4))
ALL = Hints(20.0, True, True, True, True, 60.0, True)


@pytest.mark.parametrize("hints", [NO_HINTS, ALL, Hints(last_turn=True)])
def test_hints_of_requests_and_blocks_come_out_as_they_went_in(hints: Hints) -> None:
    request = shard_pb2.AcquireRequest(keys=bytes(16), hints=codec.encode_hints(hints))
    assert codec.decode_acquire(request).hints == hints
    item = SealItem(REF, KEY, None, 0, SpanRoute(1), hints)
    assert codec.decode_seal_items([codec.encode_seal_item(item)]) == (item,)


def test_requests_without_hints_are_as_short_as_they_were() -> None:
    assert codec.encode_hints(Hints()) is None
    request = shard_pb2.AcquireRequest(keys=bytes(16), hints=None, tail_at=0)
    assert request.SerializeToString() == shard_pb2.AcquireRequest(keys=bytes(16)).SerializeToString()
    assert codec.decode_acquire(request).tail_at is None


def test_a_question_for_a_tail_names_its_position() -> None:
    assert codec.decode_acquire(shard_pb2.AcquireRequest(keys=bytes(16), tail_at=1)).tail_at == 0
    result = AcquireResult(LeaseId(1), (REF,), 0, MissReason.NONE, tail_index=5)
    assert codec.decode_acquired(codec.encode_acquired(result)).tail_index == 5


@pytest.mark.parametrize("times", [{"pin_seconds": -1.0}, {"pin_seconds": math.inf}, {"reuse_seconds": math.nan}])
def test_times_that_are_none_are_refused(times: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="seconds"):
        codec.decode_hints(shard_pb2.Hints(**times))
