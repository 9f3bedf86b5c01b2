"""Domain values <-> protobuf messages. Decoding checks lengths, ranges and counts, not only types. Pure.

Every `decode_*` raises InvalidRequest for values that a correct peer never sends, and no other error for any message.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate, chain
from typing import cast

from kvservice.core.acquire.handoff import HANDOFF_ID_BYTES, check_handoff_id
from kvservice.core.acquire.suspects import NAMED_MAX
from kvservice.core.block.fingerprint import FIELDS_MAX, Fingerprint
from kvservice.core.block.keys import KEY_BYTES, KEYS_PER_REQUEST_MAX, pack_keys, unpack_keys
from kvservice.core.block.window_groups import WINDOW_GROUPS_MAX, Window, WindowGroup
from kvservice.core.explain.records import check_request_id
from kvservice.core.messages import (
    NO_HINTS,
    AcquireRequest,
    AcquireResult,
    Attachment,
    EngineKind,
    EngineSpec,
    EngineStats,
    FollowResult,
    Handoff,
    HandoffState,
    Hints,
    Holder,
    LocateResult,
    MissReason,
    PeerSpeed,
    Removed,
    SealItem,
    SealStatus,
    Statement,
)
from kvservice.core.reconcile import OPEN_CALLS_MAX, STATED_HANDOFFS_MAX, STATED_SLOTS_MAX
from kvservice.core.segment.geometry import Geometry
from kvservice.core.segment.layout import SlotLayout
from kvservice.core.segment.refs import REF_BYTES, BlockHandle, BlockRef, PackedRefs
from kvservice.errors import InvalidRequest, UnsupportedLayout
from kvservice.units import (
    NAME_CHARS_MAX,
    AttachmentId,
    BlockKey,
    BootEpoch,
    Generation,
    HandoffId,
    LeaseId,
    NodeId,
    SlotIndex,
    SpanRoute,
    printable,
)
from kvservice.wire.v1 import common_pb2, lookup_pb2, shard_pb2

BLOCKS_PER_MESSAGE_MAX = 8192  # as many as keys in a request; a Seal of more is refused, and the engine sends several
WINDOW_BLOCKS_MAX = WINDOW_GROUPS_MAX * BLOCKS_PER_MESSAGE_MAX  # a window can be as long as the hit, in every group
LEASES_PER_MESSAGE_MAX = 65_536  # of one heartbeat; an engine has one for each running request. More are refused.
TENANT_KEY_BYTES_MAX = 64  # the longest key that BLAKE2b takes
_SEAL_STATUSES = {status.value: status for status in SealStatus}
assert BLOCKS_PER_MESSAGE_MAX >= KEYS_PER_REQUEST_MAX, "an answer has a block for each key"


def encode_holder(holder: Holder) -> common_pb2.NodeInfo:
    return common_pb2.NodeInfo(node_id=holder.node_id, peer_address=holder.peer_address, epoch=holder.epoch)


def decode_holder(info: common_pb2.NodeInfo) -> Holder:
    if not info.node_id or len(info.node_id) > NAME_CHARS_MAX or len(info.peer_address) > NAME_CHARS_MAX:
        raise InvalidRequest(f"a node needs an id and an address of at most {NAME_CHARS_MAX} characters")
    if info.epoch == 0:
        raise InvalidRequest(f"node {info.node_id} has boot epoch 0")
    return Holder(NodeId(info.node_id), info.peer_address, BootEpoch(info.epoch))


def decode_live_nodes(reply: lookup_pb2.LookupStatsReply) -> list[Holder]:
    return [decode_holder(row.node) for row in reply.nodes if row.alive]


def newest_holders(holders: Iterable[Holder]) -> list[Holder]:
    """Each node once, in its newest epoch: lookup partitions may know several. Sorted by node."""
    found: dict[NodeId, Holder] = {}
    for holder in holders:
        if holder.node_id not in found or found[holder.node_id].epoch < holder.epoch:
            found[holder.node_id] = holder
    return sorted(found.values(), key=lambda holder: holder.node_id)


def encode_geometry(geometry: Geometry) -> shard_pb2.Geometry:
    return shard_pb2.Geometry(slab_bytes=geometry.slab_bytes, slab_count=geometry.slab_count)


def decode_geometry(message: shard_pb2.Geometry) -> Geometry:
    if message.slab_bytes == 0 or message.slab_count == 0:
        raise InvalidRequest("a segment geometry has at least one slab of some size")
    return Geometry(slab_bytes=message.slab_bytes, slab_count=message.slab_count)


def encode_spec(spec: EngineSpec) -> shard_pb2.AttachRequest:
    return shard_pb2.AttachRequest(
        engine_id=spec.engine_id,
        model=spec.model,
        namespace=spec.namespace,
        fingerprint=encode_fingerprint(spec.fingerprint),
        layout=encode_layout(spec.layout),
        window_groups=[
            shard_pb2.WindowGroup(
                layout=encode_layout(group.layout),
                sliding_tokens=group.window.sliding_tokens,
                chunk_tokens=group.window.chunk_tokens,
                is_state=group.window.is_state,
            )
            for group in spec.window_groups
        ],
        attempt=spec.attempt,
        hears_removals=spec.hears_removals,
    )


def check_names(namespace: str, model: str) -> None:
    """What an engine calls itself."""
    if not model or len(model) > NAME_CHARS_MAX or len(namespace) > NAME_CHARS_MAX:
        raise InvalidRequest(
            f"model and namespace have at most {NAME_CHARS_MAX} characters, and the model is not empty"
        )


def decode_spec(message: shard_pb2.AttachRequest) -> EngineSpec:
    check_names(message.namespace, message.model)
    count = len(message.window_groups)
    if count > WINDOW_GROUPS_MAX:
        raise InvalidRequest(f"an engine has at most {WINDOW_GROUPS_MAX} window groups, not {count}")
    fingerprint = decode_fingerprint(message.fingerprint)
    layout = decode_layout(message.layout)
    try:
        groups = tuple(
            WindowGroup(decode_layout(group.layout), Window(group.sliding_tokens, group.chunk_tokens, group.is_state))
            for group in message.window_groups
        )
    except UnsupportedLayout as error:
        raise InvalidRequest(f"layout: {error.message}") from error
    return EngineSpec(
        message.engine_id,
        message.model,
        fingerprint,
        layout,
        message.namespace,
        groups,
        message.attempt,
        message.hears_removals,
    )


def encode_fingerprint(fingerprint: Fingerprint) -> common_pb2.Fingerprint:
    fields = [common_pb2.FingerprintField(name=name, value=value) for name, value in fingerprint.fields]
    return common_pb2.Fingerprint(fields=fields)


def decode_fingerprint(message: common_pb2.Fingerprint) -> Fingerprint:
    if len(message.fields) > FIELDS_MAX:
        raise InvalidRequest(f"a fingerprint has 1 to {FIELDS_MAX} fields, not {len(message.fields)}")
    names = [pair.name for pair in message.fields]
    if len(set(names)) != len(names):
        raise InvalidRequest("a fingerprint field appears twice")
    return Fingerprint.of({pair.name: pair.value for pair in message.fields})


def encode_layout(layout: SlotLayout) -> shard_pb2.Layout:
    return shard_pb2.Layout(
        layer_count=layout.layer_count,
        kv_head_count=layout.kv_head_count,
        cell_bytes=layout.cell_bytes,
        block_tokens=layout.block_tokens,
        parts=layout.parts,
    )


def decode_layout(layout: shard_pb2.Layout) -> SlotLayout:
    try:
        return SlotLayout(
            layout.layer_count, layout.kv_head_count, layout.cell_bytes, layout.block_tokens, layout.parts
        )
    except UnsupportedLayout as error:
        raise InvalidRequest(f"layout: {error.message}") from error


def encode_attachment(attachment: Attachment) -> shard_pb2.Attached:
    return shard_pb2.Attached(
        attachment_id=attachment.attachment_id,
        node_id=attachment.node_id,
        epoch=attachment.epoch,
        lease_seconds=attachment.lease_seconds,
        segment_path=attachment.segment_path,
        geometry=encode_geometry(attachment.geometry),
        tenant_key=attachment.tenant_key,
        public_key=attachment.public_key,
        may_publish=attachment.may_publish,
        quota_bytes=attachment.quota_bytes,
    )


def decode_attachment(message: shard_pb2.Attached, node_directory: str) -> Attachment:
    return Attachment(
        AttachmentId(message.attachment_id),
        NodeId(message.node_id),
        BootEpoch(message.epoch),
        message.lease_seconds,
        message.segment_path,
        decode_geometry(message.geometry),
        node_directory,
        _decode_secret(message.tenant_key),
        _decode_secret(message.public_key),
        message.may_publish,
        message.quota_bytes,
    )


def _decode_secret(secret: bytes) -> bytes:
    if len(secret) > TENANT_KEY_BYTES_MAX:
        raise InvalidRequest(f"a tenant's key has {len(secret)} bytes, at most {TENANT_KEY_BYTES_MAX}")
    return secret


def encode_refs(refs: Iterable[BlockRef]) -> bytes:
    """See PackedRefs."""
    return refs.data if isinstance(refs, PackedRefs) else PackedRefs.of(tuple(chain.from_iterable(refs))).data


def decode_refs(data: bytes, most: int = BLOCKS_PER_MESSAGE_MAX) -> PackedRefs:
    """At most `most` blocks. Raises InvalidRequest for more, and for bytes that are no whole number of them."""
    if len(data) > most * REF_BYTES or len(data) % REF_BYTES:
        raise InvalidRequest(f"{len(data)} bytes of blocks in one message, at most {most} of {REF_BYTES} bytes each")
    return PackedRefs(data)


def decode_suspects(data: bytes) -> PackedRefs:
    """The first NAMED_MAX. The rest is left out, not refused: who meets them again names them again."""
    return decode_refs(data[: NAMED_MAX * REF_BYTES])


def decode_lease_ids(lease_ids: Collection[int]) -> list[LeaseId]:
    if len(lease_ids) > LEASES_PER_MESSAGE_MAX:
        raise InvalidRequest(f"{len(lease_ids)} leases in one message, at most {LEASES_PER_MESSAGE_MAX}")
    return cast("list[LeaseId]", list(lease_ids))


def encode_statement(statement: Statement) -> shard_pb2.Statement:
    return shard_pb2.Statement(
        calls=statement.calls,
        open_calls=statement.open_calls,
        slots=statement.slots,
        handoffs=b"".join(statement.handoffs),
    )


def decode_statement(message: shard_pb2.Statement) -> Statement:
    sizes = len(message.open_calls), len(message.slots), len(message.handoffs) // HANDOFF_ID_BYTES
    most = (OPEN_CALLS_MAX, STATED_SLOTS_MAX, STATED_HANDOFFS_MAX)
    if any(size > limit for size, limit in zip(sizes, most, strict=True)) or len(message.handoffs) % HANDOFF_ID_BYTES:
        raise InvalidRequest(f"a statement has {sizes} calls, slots and whole hand-off ids, at most {most}")
    ids = message.handoffs
    handoffs = tuple(HandoffId(ids[i : i + HANDOFF_ID_BYTES]) for i in range(0, len(ids), HANDOFF_ID_BYTES))
    slots = tuple(SlotIndex(slot) for slot in message.slots)
    return Statement(message.calls, tuple(message.open_calls), slots, handoffs)


def encode_acquire(request: AcquireRequest) -> shard_pb2.AcquireRequest:
    return shard_pb2.AcquireRequest(
        keys=pack_keys(request.keys),
        skip=request.skip,
        timeout_seconds=request.timeout_seconds,
        recompute_seconds_per_block=request.recompute_seconds_per_block,
        handoff=b"" if request.handoff is None else request.handoff.handoff_id,
        handoff_node="" if request.handoff is None else request.handoff.node_id,
        request_id=check_request_id(request.request_id),
        tail_at=0 if request.tail_at is None else request.tail_at + 1,
        hints=encode_hints(request.hints),
    )


def decode_acquire(message: shard_pb2.AcquireRequest) -> AcquireRequest:
    if not message.timeout_seconds >= 0 or not 0 <= message.recompute_seconds_per_block < math.inf:  # also refuses NaN
        raise InvalidRequest("timeout and recompute time are seconds and not negative")
    return AcquireRequest(
        unpack_keys(message.keys),
        message.skip,
        message.timeout_seconds,
        message.recompute_seconds_per_block,
        None if not message.handoff else Handoff(check_handoff_id(message.handoff), _name(message.handoff_node)),
        check_request_id(message.request_id),
        tail_at=message.tail_at - 1 if message.tail_at else None,
        hints=decode_hints(message.hints) if message.HasField("hints") else NO_HINTS,
    )


def encode_hints(hints: Hints) -> shard_pb2.Hints | None:
    """None for none, so that requests without hints are as short as they were."""
    if not hints.says_something:
        return None
    return shard_pb2.Hints(
        pin_seconds=hints.pin_seconds,
        prefetch=hints.prefetch,
        write_down=hints.write_down,
        share=hints.share,
        no_store=hints.no_store,
        reuse_seconds=hints.reuse_seconds,
        last_turn=hints.last_turn,
    )


def decode_hints(message: shard_pb2.Hints) -> Hints:
    """Raises InvalidRequest for times that are none."""
    if not (0 <= message.pin_seconds < math.inf and 0 <= message.reuse_seconds < math.inf):  # also refuses NaN
        raise InvalidRequest("the times of hints are seconds and not negative")
    return Hints(
        message.pin_seconds,
        message.prefetch,
        message.write_down,
        message.share,
        message.no_store,
        message.reuse_seconds,
        message.last_turn,
    )


def _name(node_id: str) -> NodeId:
    if not node_id or len(node_id) > NAME_CHARS_MAX:
        raise InvalidRequest(f"a node id is 1 to {NAME_CHARS_MAX} characters, not {len(node_id)}")
    return NodeId(node_id)


def encode_acquired(result: AcquireResult) -> shard_pb2.AcquireReply:
    blocks = encode_refs(result.blocks)
    message = shard_pb2.AcquireReply(lease_id=result.lease_id, blocks=blocks, miss=result.miss.value)
    # A hit in memory says no more, and each field that is named takes as long as it does to pack ten blocks.
    if result.window_blocks:
        message.window_blocks = encode_refs(ref for refs in result.window_blocks for ref in refs)
        message.window_counts.extend(map(len, result.window_blocks))
    if result.fetched_count or result.tier_count or result.farthest:
        message.fetched_count, message.tier_count = result.fetched_count, result.tier_count
        message.farthest = result.farthest
    if result.skipped_held:
        message.skipped_held = result.skipped_held
    if not result.admitted:
        message.not_admitted = True
    if result.tail_index:
        message.tail_index = result.tail_index
    return message


def decode_acquired(message: shard_pb2.AcquireReply) -> AcquireResult:
    try:
        miss = MissReason(message.miss)
    except ValueError:
        miss = MissReason.NEVER_STORED  # a reason that only newer shards know: a miss in any case
    windows = _decode_windows(message) if message.window_counts or message.window_blocks else ()
    blocks = decode_refs(message.blocks)
    lease_id, admitted = LeaseId(message.lease_id), not message.not_admitted
    return AcquireResult(
        lease_id,
        blocks,
        message.fetched_count,
        miss,
        windows,
        admitted,
        message.skipped_held,
        message.tier_count,
        printable(message.farthest),
        message.tail_index,
    )


def _decode_windows(message: shard_pb2.AcquireReply) -> tuple[Sequence[BlockRef], ...]:
    counts = message.window_counts
    if len(counts) > WINDOW_GROUPS_MAX or max(counts, default=0) > BLOCKS_PER_MESSAGE_MAX:
        raise InvalidRequest(
            f"at most {WINDOW_GROUPS_MAX} window groups of at most {BLOCKS_PER_MESSAGE_MAX} blocks each are answered"
        )
    refs = decode_refs(message.window_blocks, WINDOW_BLOCKS_MAX)
    if sum(counts) != len(refs):
        raise InvalidRequest(f"{len(refs)} blocks of window groups, counted as {sum(counts)}")
    ends = list(accumulate(counts))
    return tuple(refs[end - count : end] for end, count in zip(ends, counts, strict=True))


def encode_removed(removed: Removed) -> shard_pb2.RenewReply:
    return shard_pb2.RenewReply(removed=pack_keys(removed.keys), removed_lost=removed.lost)


def decode_removed(message: shard_pb2.RenewReply) -> Removed:
    return Removed(unpack_keys(message.removed) if message.removed else (), message.removed_lost)


def encode_seal_item(item: SealItem) -> shard_pb2.SealItem:
    return shard_pb2.SealItem(
        slot=item.ref.slot,
        generation=item.ref.generation,
        key=item.key,
        parent=item.parent or b"",
        position=item.position,
        route=item.route,
        hints=encode_hints(item.hints),
    )


def decode_seal_items(messages: Collection[shard_pb2.SealItem]) -> tuple[SealItem, ...]:
    if len(messages) > BLOCKS_PER_MESSAGE_MAX:
        raise InvalidRequest(f"{len(messages)} items in one Seal, at most {BLOCKS_PER_MESSAGE_MAX}")
    items: list[SealItem] = []
    for message in messages:
        if len(message.key) != KEY_BYTES or len(message.parent) not in (0, KEY_BYTES):
            raise InvalidRequest(f"a block key is {KEY_BYTES} bytes, not {len(message.key)}", length=len(message.key))
        parent = BlockKey(message.parent) if message.parent else None
        hints = decode_hints(message.hints) if message.HasField("hints") else NO_HINTS
        ref, route = BlockRef(SlotIndex(message.slot), Generation(message.generation)), SpanRoute(message.route)
        items.append(SealItem(ref, BlockKey(message.key), parent, message.position, route, hints))
    return tuple(items)


def decode_sealed(message: shard_pb2.SealReply, count: int) -> list[SealStatus]:
    """Raises InvalidRequest unless each of the `count` items has a status."""
    if len(message.statuses) != count:
        raise InvalidRequest(f"a shard answered {len(message.statuses)} times for {count} sealed blocks")
    # One that only newer shards know: the block is not stored, as far as this engine knows.
    return [_SEAL_STATUSES.get(status, SealStatus.FAILED) for status in message.statuses]


def encode_located(result: LocateResult) -> shard_pb2.LocateReply:
    handles = [
        shard_pb2.Handle()
        if handle is None
        else shard_pb2.Handle(
            held=True,
            slot=handle.slot,
            generation=handle.generation,
            length=handle.length,
            digest=handle.digest,
            position=handle.position,
            stored_at=handle.stored_at,
        )
        for handle in result.handles
    ]
    return shard_pb2.LocateReply(
        epoch=result.epoch, lease_id=result.lease_id, lease_seconds=result.lease_seconds, handles=handles
    )


def encode_followed(result: FollowResult) -> shard_pb2.FollowReply:
    located = encode_located(result.located)
    return shard_pb2.FollowReply(
        state=result.state.value,
        epoch=located.epoch,
        lease_id=located.lease_id,
        lease_seconds=located.lease_seconds,
        handles=located.handles,
    )


def decode_followed(message: shard_pb2.FollowReply, keys: tuple[BlockKey, ...]) -> FollowResult:
    if len(message.handles) > len(keys):
        raise InvalidRequest(f"a peer answered {len(message.handles)} handles for {len(keys)} keys")
    try:
        state = HandoffState(message.state)
    except ValueError as error:
        raise InvalidRequest(f"a peer answered hand-off state {message.state[:NAME_CHARS_MAX]!r}") from error
    handles = _decode_handles(message.handles, keys[: len(message.handles)])
    seconds = _lease_seconds(message.lease_seconds)
    located = LocateResult(BootEpoch(message.epoch), LeaseId(message.lease_id), seconds, handles)
    return FollowResult(state, located)


def decode_located(message: shard_pb2.LocateReply, keys: tuple[BlockKey, ...]) -> LocateResult:
    if len(message.handles) != len(keys):
        raise InvalidRequest(f"a peer answered {len(message.handles)} handles for {len(keys)} keys")
    handles = _decode_handles(message.handles, keys)
    return LocateResult(
        BootEpoch(message.epoch), LeaseId(message.lease_id), _lease_seconds(message.lease_seconds), handles
    )


def _lease_seconds(seconds: float) -> float:
    if not 0 <= seconds < math.inf:  # also refuses NaN, with which a deadline would never come
        raise InvalidRequest(f"a peer's lease lasts {seconds} s, which is not a valid time")
    return seconds


def _decode_handles(messages: Iterable[shard_pb2.Handle], keys: tuple[BlockKey, ...]) -> tuple[BlockHandle | None, ...]:
    return tuple(
        BlockHandle(
            key,
            SlotIndex(handle.slot),
            Generation(handle.generation),
            handle.length,
            handle.digest,
            handle.position,
            handle.stored_at if handle.stored_at > 0 else 0.0,  # also of NaN, which is no time
        )
        if handle.held
        else None
        for key, handle in zip(keys, messages, strict=True)
    )


def encode_peer_speed(peer: PeerSpeed) -> shard_pb2.PeerSpeed:
    return shard_pb2.PeerSpeed(
        node_id=peer.node_id,
        bytes_per_second=peer.bytes_per_second,
        overhead_seconds=peer.overhead_seconds,
        pulled_bytes=peer.pulled_bytes,
    )


def encode_engine_stats(node: Holder, stats: EngineStats) -> shard_pb2.EngineStatsReply:
    return shard_pb2.EngineStatsReply(
        node=encode_holder(node),
        engines=[
            shard_pb2.EngineKind(
                namespace=kind.namespace,
                model=kind.model,
                fingerprint=encode_fingerprint(kind.fingerprint),
                layout=encode_layout(kind.layout),
                attached=kind.attached,
                seconds_per_block=kind.seconds_per_block,
            )
            for kind in stats.engines
        ],
        peers=[encode_peer_speed(peer) for peer in stats.peers],
        draining=stats.draining,
    )


def decode_engine_stats(message: shard_pb2.EngineStatsReply) -> EngineStats:
    speeds = [
        *(kind.seconds_per_block for kind in message.engines),
        *(value for peer in message.peers for value in (peer.bytes_per_second, peer.overhead_seconds)),
    ]
    if not all(0 <= value < float("inf") for value in speeds):  # also refuses NaN
        raise InvalidRequest("engine stats need speeds that are numbers of at least 0")
    engines = [
        EngineKind(
            kind.namespace,
            kind.model,
            decode_fingerprint(kind.fingerprint),
            decode_layout(kind.layout),
            kind.attached,
            kind.seconds_per_block,
            _decode_secret(message.tenant_key),
            _decode_secret(message.public_key),
        )
        for kind in message.engines
    ]
    peers = [
        PeerSpeed(NodeId(peer.node_id), peer.bytes_per_second, peer.overhead_seconds, peer.pulled_bytes)
        for peer in message.peers
    ]
    return EngineStats(tuple(engines), tuple(peers), message.draining)
