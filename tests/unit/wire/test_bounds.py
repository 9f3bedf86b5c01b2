"""What is too much is refused by its count, before anything is made of it; what a refusal says can travel."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from urllib.parse import quote

import pytest

from kvservice.core.block.fingerprint import FIELDS_MAX
from kvservice.core.block.window_groups import WINDOW_GROUPS_MAX
from kvservice.core.messages import Statement
from kvservice.core.reconcile import OPEN_CALLS_MAX, STATED_HANDOFFS_MAX, STATED_SLOTS_MAX
from kvservice.core.segment.refs import REF_BYTES, PackedRefs
from kvservice.errors import FingerprintMismatch, InvalidRequest
from kvservice.units import HandoffId, SlotIndex
from kvservice.wire import codec
from kvservice.wire.frames import REPLY_BYTES_MAX, REQUEST_BYTES_MAX
from kvservice.wire.status import ATTRIBUTES_BYTES_MAX, TEXT_BYTES_MAX, status_text
from kvservice.wire.v1 import common_pb2, shard_pb2

HEADERS_BYTES_MAX = 8192  # of gRPC, with which a client may refuse the whole answer


class Counted(list[object]):
    """Can be counted, but not looked at."""

    def __iter__(self) -> Iterator[object]:
        raise AssertionError("looked at what is too much")


@pytest.mark.parametrize(
    ("decode", "most"),
    [
        (codec.decode_seal_items, codec.BLOCKS_PER_MESSAGE_MAX),
        (codec.decode_lease_ids, codec.LEASES_PER_MESSAGE_MAX),
    ],
)
def test_lists_are_counted_before_they_are_decoded(decode: Callable[[object], object], most: int) -> None:
    with pytest.raises(InvalidRequest):
        decode(Counted([None] * (most + 1)))
    with pytest.raises(AssertionError):
        decode(Counted([None] * most))


@pytest.mark.parametrize("size", [REF_BYTES * codec.BLOCKS_PER_MESSAGE_MAX + REF_BYTES, 7, REF_BYTES + 1])
def test_too_many_blocks_and_parts_of_one_are_refused(size: int) -> None:
    with pytest.raises(InvalidRequest, match=f"{size} bytes of blocks"):
        codec.decode_refs(bytes(size))


def test_fingerprint_and_window_groups_are_counted_first() -> None:
    message = shard_pb2.AttachRequest(model="m")
    message.window_groups.extend([shard_pb2.WindowGroup()] * (WINDOW_GROUPS_MAX + 1))
    with pytest.raises(InvalidRequest, match="window groups"):
        codec.decode_spec(message)
    fields = [common_pb2.FingerprintField(name="same")] * (FIELDS_MAX + 1)
    with pytest.raises(InvalidRequest, match="fields"):
        codec.decode_fingerprint(common_pb2.Fingerprint(fields=fields))


def test_a_statement_is_counted_first() -> None:
    """The largest one that is meant fits a request."""
    whole = Statement(
        1 << 60,
        tuple(range(OPEN_CALLS_MAX)),
        tuple(SlotIndex((1 << 48) - 1 - i) for i in range(STATED_SLOTS_MAX)),
        tuple(HandoffId(i.to_bytes(16, "big")) for i in range(STATED_HANDOFFS_MAX)),
    )
    message = codec.encode_statement(whole)
    assert codec.decode_statement(message) == whole
    leases = range(codec.LEASES_PER_MESSAGE_MAX)
    assert shard_pb2.RenewRequest(lease_ids=leases, statement=message).ByteSize() < REQUEST_BYTES_MAX
    for more in ({"open_calls": [1]}, {"slots": [1]}, {"handoffs": bytes(16)}, {"handoffs": b"x"}):
        larger = shard_pb2.Statement()
        larger.MergeFrom(message)
        larger.MergeFrom(shard_pb2.Statement(**more))
        if "handoffs" in more:
            larger.handoffs = message.handoffs + more["handoffs"]
        with pytest.raises(InvalidRequest, match="statement"):
            codec.decode_statement(larger)


@pytest.mark.parametrize("seconds", [math.inf, -math.inf, math.nan, -1.0])
def test_an_engines_speed_is_a_finite_number(seconds: float) -> None:
    """Routers read it together with all others."""
    with pytest.raises(InvalidRequest):
        codec.decode_acquire(shard_pb2.AcquireRequest(keys=bytes(16), recompute_seconds_per_block=seconds))


def test_the_largest_seal_that_is_meant_fits_a_request() -> None:
    item = shard_pb2.SealItem(
        slot=(1 << 48) - 1,
        generation=(1 << 64) - 1,
        key=bytes(16),
        parent=bytes(16),
        position=(1 << 32) - 1,
        route=(1 << 32) - 1,
    )
    request = shard_pb2.SealRequest(items=[item] * codec.BLOCKS_PER_MESSAGE_MAX)
    assert request.ByteSize() < REQUEST_BYTES_MAX


def test_the_largest_promise_that_is_meant_fits_a_reply() -> None:
    """Every window can be as long as the hit."""
    block = PackedRefs.of([(1 << 48) - 1, (1 << 64) - 1]).data
    count = codec.BLOCKS_PER_MESSAGE_MAX
    reply = shard_pb2.AcquireReply(
        blocks=block * count,
        window_blocks=block * (count * WINDOW_GROUPS_MAX),
        window_counts=[count] * WINDOW_GROUPS_MAX,
    )
    assert reply.ByteSize() < REPLY_BYTES_MAX
    assert [len(window) for window in codec.decode_acquired(reply).window_blocks] == [count] * WINDOW_GROUPS_MAX


@pytest.mark.parametrize(
    "counts", [[codec.BLOCKS_PER_MESSAGE_MAX + 1], [0] * (WINDOW_GROUPS_MAX + 1)], ids=["long window", "many windows"]
)
def test_a_promise_of_more_windows_than_meant_is_refused(counts: list[int]) -> None:
    blocks = bytes(REF_BYTES * sum(counts))
    with pytest.raises(InvalidRequest, match="window groups of at most"):
        codec.decode_acquired(shard_pb2.AcquireReply(window_blocks=blocks, window_counts=counts))


@pytest.mark.parametrize("text", ["short", "x" * 100_000, "é" * 100_000, "%" * 100_000, "\U0001f980\0" * 5000])
def test_the_text_of_a_refusal_fits_the_headers_of_an_answer(text: str) -> None:
    """It names what the engine sent: two fingerprints of 64 long fields, for one."""
    shown = status_text(FingerprintMismatch(text))
    assert shown == text if len(text) < 100 else shown.endswith(" …")
    assert len(quote(shown, safe="")) <= TEXT_BYTES_MAX + 16
    assert TEXT_BYTES_MAX + 16 + ATTRIBUTES_BYTES_MAX + 1024 < HEADERS_BYTES_MAX
