"""What shards tell each other and operators when one leaves <-> protobuf messages. Decoding validates. Pure.

Every `decode_*` raises InvalidRequest for values that a correct peer never sends, and no other error for any message.
"""

from __future__ import annotations

import math
import re

from kvservice.core.actions import Offer
from kvservice.core.block.engine_names import FINGERPRINT_BYTES
from kvservice.core.block.keys import pack_keys, unpack_keys
from kvservice.core.block.tenants import TAG_MAX
from kvservice.core.drain.sender import DrainPhase, DrainProgress
from kvservice.core.messages import Holder, TakeOverItem, TakeOverResult, names_of
from kvservice.core.store.blocks import NO_KEY
from kvservice.core.store.freshness import NAMES_MAX
from kvservice.errors import InvalidRequest
from kvservice.units import SpanRoute
from kvservice.wire.codec import check_names, encode_holder
from kvservice.wire.v1 import shard_pb2

NO_FINGERPRINT = bytes(FINGERPRINT_BYTES)
_COUNT = re.compile(r"[0-9]{1,18}")  # isdigit() accepts more than int() does


def encode_take_over(leaver: Holder, offer: Offer) -> shard_pb2.TakeOverRequest:
    items, names = offer.items, names_of(offer.items)
    return shard_pb2.TakeOverRequest(
        leaver=encode_holder(leaver),
        epoch=offer.peer.epoch,
        payload_bytes=offer.payload_bytes,
        keys=pack_keys(item.key for item in items),
        parents=pack_keys(item.parent or NO_KEY for item in items),
        positions=[item.position for item in items],
        routes=[item.route for item in items],
        idle_seconds=[item.idle_seconds for item in items],
        wait_seconds=offer.wait_seconds,
        account_tags=[item.account_tag for item in items] if any(item.account_tag for item in items) else [],
        fingerprints=b"".join(item.fingerprint or NO_FINGERPRINT for item in items) if names else b"",
        names=[
            shard_pb2.EngineName(fingerprint=fingerprint, namespace=namespace, model=model)
            for fingerprint, found in names.items()
            for namespace, model in sorted(found)
        ],
    )


def decode_items(message: shard_pb2.TakeOverRequest) -> tuple[TakeOverItem, ...]:
    keys, parents = unpack_keys(message.keys), unpack_keys(message.parents)
    count = len(keys)
    if not count == len(parents) == len(message.positions) == len(message.routes) == len(message.idle_seconds):
        raise InvalidRequest(f"{count} blocks are offered with lists of other lengths")
    tags = list(message.account_tags) or [0] * count
    if len(tags) != count or max(tags, default=0) > TAG_MAX:
        raise InvalidRequest(f"{count} blocks are offered with {len(tags)} account tags, or with one above {TAG_MAX}")
    if not all(0 <= idle < math.inf for idle in message.idle_seconds):
        raise InvalidRequest("a block's idle time is seconds and not negative")
    whose = _whose(message, count)
    return tuple(
        TakeOverItem(key, None if parent == NO_KEY else parent, position, SpanRoute(route), idle, tag, *of)
        for key, parent, position, route, idle, tag, of in zip(
            keys, parents, message.positions, message.routes, message.idle_seconds, tags, whose, strict=True
        )
    )


def _whose(message: shard_pb2.TakeOverRequest, count: int) -> list[tuple[bytes, frozenset[tuple[str, str]]]]:
    """The fingerprint of each offered block, and the names of its engines."""
    data, size = message.fingerprints or NO_FINGERPRINT * count, FINGERPRINT_BYTES
    if len(data) != size * count:
        raise InvalidRequest(f"{count} blocks are offered with {len(data)} bytes of fingerprints")
    names: dict[bytes, set[tuple[str, str]]] = {}
    for name in message.names:
        check_names(name.namespace, name.model)
        names.setdefault(name.fingerprint, set()).add((name.namespace, name.model))
    prints = [data[at : at + size] for at in range(0, len(data), size)]
    if names.keys() != set(prints) - {NO_FINGERPRINT} or any(len(found) > NAMES_MAX for found in names.values()):
        raise InvalidRequest(f"the fingerprints of offered blocks have 1 to {NAMES_MAX} names, and no others have any")
    none = (b"", frozenset[tuple[str, str]]())
    known = {fingerprint: (fingerprint, frozenset(found)) for fingerprint, found in names.items()}
    return [known.get(fingerprint, none) for fingerprint in prints]


def decode_taken(message: shard_pb2.TakeOverReply, count: int) -> TakeOverResult:
    if len(message.kept) != count:
        raise InvalidRequest(f"a peer answered {len(message.kept)} times for {count} offered blocks")
    return TakeOverResult(tuple(message.kept), message.full)


def encode_progress(progress: DrainProgress) -> shard_pb2.DrainReply:
    return shard_pb2.DrainReply(
        leases=progress.leases,
        phase=progress.phase.value,
        blocks_total=progress.blocks_total,
        blocks_handed=progress.blocks_handed,
        blocks_elsewhere=progress.blocks_elsewhere,
        blocks_lost=max(progress.blocks_lost, 0),
        bytes_handed=progress.bytes_handed,
        seconds=progress.seconds,
        note=progress.note,
        receivers=[f"{node} {count}" for node, count in progress.receivers],
    )


def decode_progress(message: shard_pb2.DrainReply) -> DrainProgress:
    try:
        phase = DrainPhase(message.phase)
    except ValueError as error:
        raise InvalidRequest(f"a shard answered drain phase {message.phase[:64]!r}") from error
    receivers = [line.rpartition(" ") for line in message.receivers]
    return DrainProgress(
        phase,
        message.leases,
        message.blocks_total,
        message.blocks_handed,
        message.blocks_elsewhere,
        message.bytes_handed,
        message.seconds,
        message.note,
        tuple((node, int(count)) for node, _, count in receivers if _COUNT.fullmatch(count)),
    )
