"""What the frames of an attached engine ask of the pool, and what its answers say. Decides nothing. Pure.

wire.codec checks every value. The calls of an engine that is not attached yet are in shard.engine_socket.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvservice.core import events as ev
from kvservice.core.acquire.handoff import HANDOFF_ID_BYTES, check_handoff_id
from kvservice.core.acquire.suspects import NAMED_MAX
from kvservice.core.reconcile import OPEN_CALLS_MAX, STATED_HANDOFFS_MAX, STATED_SLOTS_MAX
from kvservice.core.segment.refs import REF_BYTES
from kvservice.core.writes import RESERVE_COUNT_MAX
from kvservice.units import AttachmentId
from kvservice.wire import codec
from kvservice.wire.explain import decode_reports
from kvservice.wire.frames import QUESTIONS, REQUEST_BYTES_MAX, FrameKind
from kvservice.wire.parsing import parse
from kvservice.wire.v1 import shard_pb2

assert RESERVE_COUNT_MAX <= codec.BLOCKS_PER_MESSAGE_MAX, "an answer has all reserved slots"
# The largest requests on the wire, in bytes: a seal item takes at most 75, a lease id or a slot at most 5.
assert 75 * codec.BLOCKS_PER_MESSAGE_MAX < REQUEST_BYTES_MAX, "a Seal must fit into a request"
assert (
    5 * (codec.LEASES_PER_MESSAGE_MAX + STATED_SLOTS_MAX)
    + 10 * OPEN_CALLS_MAX
    + HANDOFF_ID_BYTES * STATED_HANDOFFS_MAX
    + REF_BYTES * NAMED_MAX
    < REQUEST_BYTES_MAX
), "a heartbeat must fit into a request"

Make = Callable[[int], ev.Event]  # from the number of a call to the event


def question(kind: FrameKind, body: bytes, attachment: AttachmentId) -> Make:
    """The event of this frame. Raises InvalidRequest."""
    return _ASKED[kind](parse(QUESTIONS[kind], body), attachment)


def answer(kind: FrameKind, value: Any) -> bytes:
    """The body of the answer; empty when there is nothing to say."""
    encode = _SAID.get(kind)
    return b"" if encode is None else encode(value)


def _acquire(message: shard_pb2.AcquireRequest, attachment: AttachmentId) -> Make:
    request = codec.decode_acquire(message)
    return lambda op: ev.Acquire(op, attachment, request)


def _reserve(message: shard_pb2.ReserveRequest, attachment: AttachmentId) -> Make:
    return lambda op: ev.Reserve(op, attachment, message.count, message.group, message.call)


def _seal(message: shard_pb2.SealRequest, attachment: AttachmentId) -> Make:
    items = codec.decode_seal_items(message.items)
    return lambda op: ev.Seal(op, attachment, items)


def _abort(message: shard_pb2.AbortRequest, attachment: AttachmentId) -> Make:
    refs = tuple(codec.decode_refs(message.blocks))
    return lambda op: ev.Abort(op, attachment, refs)


def _release(message: shard_pb2.ReleaseRequest, attachment: AttachmentId) -> Make:
    leases = tuple(codec.decode_lease_ids(message.lease_ids))
    return lambda op: ev.Release(op, attachment, leases)


def _renew(message: shard_pb2.RenewRequest, attachment: AttachmentId) -> Make:
    leases, reports = tuple(codec.decode_lease_ids(message.lease_ids)), tuple(decode_reports(message.reports))
    statement = codec.decode_statement(message.statement) if message.HasField("statement") else None
    suspects = codec.decode_suspects(message.suspects)
    return lambda op: ev.Renew(op, attachment, leases, reports, statement, suspects)


def _open_handoff(message: shard_pb2.OpenHandoffRequest, attachment: AttachmentId) -> Make:
    handoff = check_handoff_id(message.handoff)
    return lambda op: ev.OpenHandoff(op, attachment, handoff, message.call)


def _close_handoff(message: shard_pb2.CloseHandoffRequest, attachment: AttachmentId) -> Make:
    handoff = check_handoff_id(message.handoff)
    return lambda op: ev.CloseHandoff(op, attachment, handoff)


_ASKED: dict[FrameKind, Callable[[Any, AttachmentId], Make]] = {
    FrameKind.ACQUIRE: _acquire,
    FrameKind.RESERVE: _reserve,
    FrameKind.SEAL: _seal,
    FrameKind.ABORT: _abort,
    FrameKind.RELEASE: _release,
    FrameKind.RENEW: _renew,
    FrameKind.OPEN_HANDOFF: _open_handoff,
    FrameKind.CLOSE_HANDOFF: _close_handoff,
}
OF_ATTACHED = frozenset(_ASKED)  # the kinds that `question` knows
_SAID: dict[FrameKind, Callable[[Any], bytes]] = {
    FrameKind.ACQUIRE: lambda result: codec.encode_acquired(result).SerializeToString(),
    FrameKind.RESERVE: lambda refs: shard_pb2.ReserveReply(blocks=codec.encode_refs(refs)).SerializeToString(),
    FrameKind.SEAL: lambda found: shard_pb2.SealReply(statuses=[status.value for status in found]).SerializeToString(),
    FrameKind.RENEW: lambda removed: codec.encode_removed(removed).SerializeToString(),
}
