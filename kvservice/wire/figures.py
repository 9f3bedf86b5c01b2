"""A shard's figures and its slots -> protobuf messages, for the people who look at a service. Pure.

Times travel as ages, because clocks differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from google.protobuf.message import Message

from kvservice.core.block.keys import KEY_BYTES
from kvservice.core.block.tenants import TenantUsage
from kvservice.core.explain.counter_windows import CounterWindow
from kvservice.core.explain.records import LOCAL, RefusedAttach, RequestRecord, took_seconds
from kvservice.core.messages import AttachedEngine, CodecDrift, ListedSlot, TierFigures, UsageRow
from kvservice.core.store.listing import SlotFilter, SlotPage
from kvservice.core.store.slots import SHOWN_STATES
from kvservice.errors import InvalidRequest
from kvservice.units import AttachmentId, SlotIndex, printable
from kvservice.wire.status import readable
from kvservice.wire.v1 import shard_pb2

SLOWEST_MAX = 16  # requests in one answer; more do not help a reader
SLOTS_MAX = 1 << 32  # a slot's index has 32 bits
KEY_DIGITS_MAX = 32  # of a block's key in hex
DRIFT_TOLD_MAX = 1e6  # an infinite drift is no number of JSON
DETAIL_CHARS_MAX = 500  # of why a tier failed; a person reads it on a line or two
R = TypeVar("R", bound=Message)


def check_figures(reply: R | None, what: str) -> R:
    """The answer, as `readable` gives it. Raises InvalidRequest also when one of its numbers is infinite or none, which
    no table and no JSON has."""
    reply = readable(reply, what)
    for field, value in reply.ListFields():
        if not _is_finite(value):
            raise InvalidRequest(f"{what}: the answer cannot be read: its {field.name} has a number that is none")
    return reply


def _is_finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, Message):
        return all(_is_finite(part) for _, part in value.ListFields())
    if isinstance(value, Mapping):
        return all(map(_is_finite, value.values()))
    return not isinstance(value, Sequence) or isinstance(value, str | bytes) or all(map(_is_finite, value))


def encode_tenant(usage: TenantUsage) -> shard_pb2.TenantNumbers:
    return shard_pb2.TenantNumbers(
        name=usage.name,
        used_bytes=usage.used_bytes,
        quota_bytes=usage.quota_bytes,
        in_flight=max(usage.in_flight, 0),
        counters=usage.counters,
        disk_used_bytes=usage.disk_used_bytes,
        disk_quota_bytes=usage.disk_quota_bytes,
    )


def encode_engines(
    engines: Iterable[AttachedEngine], pids: Mapping[AttachmentId, int]
) -> list[shard_pb2.AttachedEngine]:
    return [
        shard_pb2.AttachedEngine(
            engine=one.engine,
            model=one.model,
            namespace=one.namespace,
            fingerprint=one.fingerprint,
            tenant=one.account,
            block_tokens=one.block_tokens,
            attached_seconds=one.attached_seconds,
            seconds_per_block=one.seconds_per_block,
            pid=pids.get(one.attachment, 0),
        )
        for one in engines
    ]


def encode_hits(rows: Iterable[UsageRow]) -> list[shard_pb2.ModelHits]:
    return [
        shard_pb2.ModelHits(
            model=row.model,
            tenant=row.tenant,
            asked_blocks=row.asked_blocks,
            hit_local_blocks=row.hit_local_blocks,
            hit_remote_blocks=row.hit_remote_blocks,
            hit_tier_blocks=row.hit_tier_blocks,
        )
        for row in rows
    ]


def encode_tiers(tiers: Iterable[TierFigures]) -> list[shard_pb2.TierNumbers]:
    return [
        shard_pb2.TierNumbers(
            name=one.name,
            state=one.state,
            detail=printable(one.detail)[:DETAIL_CHARS_MAX],
            shared=one.is_shared,
            blocks=one.blocks,
            used_bytes=one.used_bytes,
            budget_bytes=one.budget_bytes,
            waiting_blocks=one.waiting_blocks,
        )
        for one in tiers
    ]


def encode_drifts(drifts: Iterable[CodecDrift]) -> list[shard_pb2.CodecDrift]:
    return [
        shard_pb2.CodecDrift(
            model=one.model,
            limit=one.limit,
            blocks=one.blocks,
            checked=one.checked,
            keys=min(one.keys, DRIFT_TOLD_MAX),
            values=min(one.values, DRIFT_TOLD_MAX),
            off=one.is_off,
        )
        for one in drifts
    ]


def encode_windows(windows: Iterable[CounterWindow]) -> list[shard_pb2.CounterWindow]:
    return [shard_pb2.CounterWindow(name=one.name, seconds=one.seconds, counters=one.counters) for one in windows]


def encode_refused(refused: RefusedAttach, now: float) -> shard_pb2.RefusedAttach:
    return shard_pb2.RefusedAttach(
        age_seconds=now - refused.at,
        model=refused.model,
        namespace=refused.namespace,
        message=refused.message,
        differences=[
            shard_pb2.FieldDifference(name=field.name, refused=field.ours, attached=field.theirs)
            for field in refused.differences
        ],
        difference_count=refused.difference_count,
    )


def encode_slow(record: RequestRecord, now: float) -> shard_pb2.SlowRequest:
    local = sum(run.count for run in record.runs if run.source == LOCAL)
    return shard_pb2.SlowRequest(
        request_id=record.request_id,
        model=record.spec.model,
        tenant=record.account,
        age_seconds=now - record.asked_at,
        took_seconds=took_seconds(record),
        asked_blocks=len(record.keys) // KEY_BYTES - record.skip,
        local_blocks=local,
        fetched_blocks=record.promised - local,
        miss=record.miss.value,
    )


def decode_filter(request: shard_pb2.ListBlocksRequest, account: str | None) -> tuple[SlotFilter, SlotIndex]:
    """What is asked for, and from which slot on. With `account`, only that tenant's slots are.

    Raises InvalidRequest.
    """
    states = frozenset(request.states[: len(SHOWN_STATES)])
    if len(request.states) > len(SHOWN_STATES) or not states <= set(SHOWN_STATES):
        raise InvalidRequest(f"a slot is {', '.join(SHOWN_STATES)}; name each once")
    prefix = request.key_prefix.lower()
    if len(prefix) > KEY_DIGITS_MAX or not set(prefix) <= set("0123456789abcdef"):
        raise InvalidRequest(f"a key has {KEY_DIGITS_MAX} hex digits; give its first ones")
    if request.start_slot >= SLOTS_MAX:
        raise InvalidRequest(f"slots have numbers below {SLOTS_MAX}")
    if account is None and request.HasField("tenant"):
        account = request.tenant
    return SlotFilter(states, request.model, account, prefix), SlotIndex(request.start_slot)


def encode_page(page: SlotPage) -> shard_pb2.ListBlocksReply:
    return shard_pb2.ListBlocksReply(
        blocks=_encode_slots(page.slots), next_slot=page.next_slot or 0, more=page.next_slot is not None
    )


def _encode_slots(slots: Sequence[ListedSlot]) -> list[shard_pb2.ListedBlock]:
    return [
        shard_pb2.ListedBlock(
            slot=one.slot,
            state=one.state,
            payload_bytes=one.payload_bytes,
            tenant=one.account,
            key=one.key or b"",
            model=one.model,
            position=one.position,
            secondary=one.is_secondary,
            age_seconds=one.age_seconds,
            idle_seconds=one.idle_seconds,
            uses=one.uses,
        )
        for one in slots
    ]
