"""Window groups on the wire: what goes in comes out, and what no honest peer sends is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvservice.core.block.window_groups import Window, WindowGroup
from kvservice.core.messages import AcquireResult, MissReason
from kvservice.core.segment.refs import BlockRef
from kvservice.errors import InvalidRequest
from kvservice.testing.builders import make_layout, make_spec
from kvservice.units import Generation, LeaseId, SlotIndex
from kvservice.wire.codec import decode_acquired, decode_spec, encode_acquired, encode_spec

REFS = tuple(BlockRef(SlotIndex(i), Generation(2 * i)) for i in range(7))


@pytest.mark.parametrize("windows", [(), ((),), ((), REFS[:2]), (REFS[:2], (), REFS[2:5])])
def test_promise_of_windows_survives_the_wire(windows: tuple[tuple[BlockRef, ...], ...]) -> None:
    result = AcquireResult(LeaseId(3), REFS, 2, MissReason.WINDOW, windows)
    assert decode_acquired(encode_acquired(result)) == result


def test_window_groups_of_an_engine_survive_the_wire() -> None:
    groups = (
        WindowGroup(make_layout(5), Window(sliding_tokens=512)),
        WindowGroup(make_layout(7), Window(chunk_tokens=8192)),
        WindowGroup(make_layout(9), Window(is_state=True)),
    )
    assert decode_spec(encode_spec(replace(make_spec(), window_groups=groups))) == replace(
        make_spec(), window_groups=groups
    )


def test_wrong_counts_and_wrong_windows_are_refused() -> None:
    message = encode_acquired(AcquireResult(LeaseId(3), REFS, 2, MissReason.NONE, (REFS[:2],)))
    message.window_counts.append(1)
    with pytest.raises(InvalidRequest, match="2 blocks of window groups, counted as 3"):
        decode_acquired(message)
    spec = encode_spec(replace(make_spec(), window_groups=(WindowGroup(make_layout(5), Window(sliding_tokens=512)),)))
    spec.window_groups[0].chunk_tokens = 3
    with pytest.raises(InvalidRequest, match="a window or a chunk"):
        decode_spec(spec)
