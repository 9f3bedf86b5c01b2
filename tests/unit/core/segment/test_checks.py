"""Headers are judged as bytes: with the same outcome as field by field."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvservice.core.segment import header_checks
from kvservice.core.segment.header import SlotHeader, pack_header, unpack_header
from kvservice.core.segment.header_checks import (
    are_as_located,
    are_as_promised,
    is_as_located,
    is_as_promised,
    is_reserved,
)
from kvservice.core.segment.native import native
from kvservice.core.segment.refs import BlockHandle, BlockRef
from kvservice.units import BlockKey, BootEpoch, Generation, SlotIndex, SpanRoute

EPOCH, KEY, BYTES, DIGEST = BootEpoch(3), BlockKey(b"k" * 16), 4096, 77
SLOT = SlotIndex(5)
RIGHT = SlotHeader(EPOCH, Generation(8), KEY, BYTES, SpanRoute(1), DIGEST, 2)
CHANGES = {
    "epoch": [EPOCH, BootEpoch(4)],
    "generation": [Generation(7), Generation(8), Generation(9)],
    "key": [KEY, BlockKey(b"K" * 16)],
    "length": [BYTES, BYTES * 2],
    "digest": [DIGEST, DIGEST + 1],
    "position": [2, 3],
    "account_tag": [0, 9],
}
headers = st.fixed_dictionaries({name: st.sampled_from(values) for name, values in CHANGES.items()})


@given(headers, st.none() | st.integers(0, 511), st.sampled_from([RIGHT.generation, Generation(9)]))
def test_checks_of_bytes_are_those_of_the_fields(
    fields: dict[str, object], flipped: int | None, asked: Generation
) -> None:
    """Only a slot of an even generation is read, and only one of an odd generation is written."""
    data = bytearray(pack_header(replace(RIGHT, **fields)))  # type: ignore[arg-type]
    if flipped is not None:
        data[flipped >> 3] ^= 1 << (flipped & 7)
    header = unpack_header(bytes(data))
    ref = BlockRef(SLOT, asked)
    in_term = header is not None and (header.epoch, header.generation) == (EPOCH, asked)
    fits = header is not None and in_term and header.length == BYTES
    is_block = header is not None and fits and header.key == KEY
    located = header is not None and is_block and header.digest == DIGEST
    assert is_reserved(bytes(data), EPOCH, ref, BYTES) == (fits and asked % 2 == 1)
    assert is_as_promised(bytes(data), EPOCH, ref, KEY, BYTES) == (is_block and asked % 2 == 0)
    rows = np.frombuffer(pack_header(RIGHT) + bytes(data), "<u8").reshape(2, 8)
    refs = [BlockRef(SLOT, RIGHT.generation), ref]
    handles = [BlockHandle(KEY, SLOT, each, BYTES, DIGEST, 2) for each in (RIGHT.generation, asked)]
    for compiled in (native, None):
        with patch.object(header_checks, "native", compiled):
            together = are_as_promised(rows, EPOCH, refs, [KEY, KEY], [BYTES, BYTES])
            assert together == (is_block and asked % 2 == 0)
            assert are_as_located(rows, handles, EPOCH) == located
    assert is_as_located(bytes(data), BlockHandle(KEY, SLOT, asked, BYTES, DIGEST, 2), EPOCH) == located
