"""Offers and drain progress on the wire: what goes in comes out, and nonsense is refused."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from kvservice.core.actions import Offer
from kvservice.core.drain.sender import DrainPhase, DrainProgress
from kvservice.core.messages import TakeOverItem, TakeOverResult
from kvservice.core.store.freshness import NAMES_MAX
from kvservice.errors import InvalidRequest
from kvservice.testing.builders import make_chain, make_holder
from kvservice.units import NAME_CHARS_MAX, SpanRoute
from kvservice.wire.leaving import decode_items, decode_progress, decode_taken, encode_progress, encode_take_over
from kvservice.wire.v1 import shard_pb2

CHAIN = make_chain(3)
ITEMS = tuple(
    TakeOverItem(key, CHAIN[place - 1] if place else None, place, SpanRoute(9), 2.5 * place)
    for place, key in enumerate(CHAIN)
)
OFFER = Offer(1, make_holder(epoch=3), 4096, ITEMS, 5.0)


def test_an_offer_comes_out_as_it_went_in() -> None:
    message = encode_take_over(make_holder(), OFFER)
    assert decode_items(shard_pb2.TakeOverRequest.FromString(message.SerializeToString())) == ITEMS
    assert (message.epoch, message.payload_bytes, message.wait_seconds) == (3, 4096, 5.0)


@pytest.mark.parametrize("field", ["keys", "parents", "positions", "routes", "idle_seconds"])
def test_lists_of_different_lengths_are_refused(field: str) -> None:
    message = encode_take_over(make_holder(), OFFER)
    shorter = getattr(message, field)[:-16] if field in ("keys", "parents") else getattr(message, field)[:-1]
    message.ClearField(field)  # type: ignore[arg-type]
    if isinstance(shorter, bytes):
        setattr(message, field, shorter)
    else:
        getattr(message, field).extend(shorter)
    with pytest.raises(InvalidRequest):
        decode_items(message)


def test_an_offer_says_whose_its_blocks_are() -> None:
    """Of those that it knows it of. An older node leaves that out for all."""
    names = frozenset({("prod", "model"), ("", "other")})
    items = (replace(ITEMS[0], fingerprint=b"f" * 16, names=names), *ITEMS[1:])
    message = encode_take_over(make_holder(), replace(OFFER, items=items))
    assert decode_items(shard_pb2.TakeOverRequest.FromString(message.SerializeToString())) == items
    message.ClearField("fingerprints")
    message.ClearField("names")
    assert decode_items(message) == ITEMS


@pytest.mark.parametrize("harm", ["short", "unnamed", "of none", "too many", "too long", "no model"])
def test_names_are_1_to_16_of_each_fingerprint(harm: str) -> None:
    items = tuple(replace(item, fingerprint=b"f" * 16, names=frozenset({("", "model")})) for item in ITEMS)
    message = encode_take_over(make_holder(), replace(OFFER, items=items))
    match harm:
        case "short":
            message.fingerprints = message.fingerprints[:-1]
        case "unnamed":
            message.ClearField("names")
        case "of none":
            message.names.add(fingerprint=b"g" * 16, model="model")
        case "too many":
            for number in range(NAMES_MAX):
                message.names.add(fingerprint=b"f" * 16, model=f"run {number}")
        case _:
            message.names[0].model = "" if harm == "no model" else "m" * (NAME_CHARS_MAX + 1)
    with pytest.raises(InvalidRequest):
        decode_items(message)


@pytest.mark.parametrize("idle", [-1.0, math.nan, math.inf])
def test_idle_times_are_numbers_of_seconds(idle: float) -> None:
    message = encode_take_over(make_holder(), OFFER)
    message.idle_seconds[0] = idle
    with pytest.raises(InvalidRequest):
        decode_items(message)


def test_an_answer_speaks_of_every_offered_block() -> None:
    reply = shard_pb2.TakeOverReply(kept=[True, False], full=True)
    assert decode_taken(reply, 2) == TakeOverResult((True, False), full=True)
    with pytest.raises(InvalidRequest):
        decode_taken(reply, 3)


def test_progress_comes_out_as_it_went_in() -> None:
    progress = DrainProgress(DrainPhase.HANDING_OVER, 1, 10, 4, 3, 4096, 0.5, "a note", (("n 1", 4),))
    assert decode_progress(encode_progress(progress)) == progress
    assert encode_progress(progress).blocks_lost == 3
    with pytest.raises(InvalidRequest):
        decode_progress(shard_pb2.DrainReply(phase="asleep"))
