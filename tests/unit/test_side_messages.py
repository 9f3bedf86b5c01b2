"""Sides on the wire: what goes in comes out, and what no honest peer sends is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvservice.core.block.window_groups import Reach, Side
from kvservice.core.messages import AcquireResult, MissReason
from kvservice.core.segment.refs import BlockRef
from kvservice.errors import InvalidRequest
from kvservice.testing.builders import make_layout, make_spec
from kvservice.units import Generation, LeaseId, SlotIndex
from kvservice.wire.codec import decode_acquired, decode_spec, encode_acquired, encode_spec

REFS = tuple(BlockRef(SlotIndex(i), Generation(2 * i)) for i in range(7))


@pytest.mark.parametrize("sides", [(), ((),), ((), REFS[:2]), (REFS[:2], (), REFS[2:5])])
def test_promise_of_sides_survives_the_wire(sides: tuple[tuple[BlockRef, ...], ...]) -> None:
    result = AcquireResult(LeaseId(3), REFS, 2, MissReason.WINDOW, sides)
    assert decode_acquired(encode_acquired(result)) == result


def test_sides_of_an_engine_survive_the_wire() -> None:
    sides = (Side(make_layout(5), Reach(window=512)), Side(make_layout(7), Reach(chunk=8192)))
    assert decode_spec(encode_spec(replace(make_spec(), sides=sides))) == replace(make_spec(), sides=sides)


def test_counts_that_do_not_fit_and_reaches_that_are_none_are_refused() -> None:
    message = encode_acquired(AcquireResult(LeaseId(3), REFS, 2, MissReason.NONE, (REFS[:2],)))
    message.side_counts.append(1)
    with pytest.raises(InvalidRequest, match="2 blocks of sides, counted as 3"):
        decode_acquired(message)
    spec = encode_spec(replace(make_spec(), sides=(Side(make_layout(5), Reach(window=512)),)))
    spec.sides[0].chunk = 3
    with pytest.raises(InvalidRequest, match="a window or a chunk"):
        decode_spec(spec)
