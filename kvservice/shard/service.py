"""The RPCs of a shard for peers and commands, mapped onto the pool. Decides nothing; wire.codec validates every value.

Runs on the shard's event loop.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any

from kvservice.auth.authenticator import Authenticator, is_private
from kvservice.auth.identity import caller_of, proof_in
from kvservice.core.acquire.handoff import FOLLOWS_MAX, check_handoff_id
from kvservice.core.block.keys import unpack_keys
from kvservice.core.drain.receiver import TAKES_MAX
from kvservice.core.drain.sender import DRAIN_SECONDS_MAX, DrainProgress
from kvservice.core.explain.records import check_request_id
from kvservice.core.messages import Holder, PoolStats
from kvservice.errors import Forbidden, InvalidRequest
from kvservice.pool.runtime import PoolRuntime
from kvservice.units import NAME_CHARS_MAX, AttachmentId, BootEpoch, LeaseId, NodeId
from kvservice.version import __version__
from kvservice.wire import codec
from kvservice.wire.explain import encode_explanation, encode_history
from kvservice.wire.figures import (
    SLOWEST_MAX,
    decode_filter,
    encode_drifts,
    encode_engines,
    encode_hits,
    encode_page,
    encode_refused,
    encode_slow,
    encode_tenant,
    encode_tiers,
    encode_windows,
)
from kvservice.wire.leaving import decode_items, encode_progress
from kvservice.wire.serving import LONG_CALLS_MAX, Context
from kvservice.wire.v1 import shard_pb2
from kvservice.wire.versions import check_version

assert LONG_CALLS_MAX >= FOLLOWS_MAX + TAKES_MAX, "the shard's own limits must be reached first"


class PeerServicer:
    """PeerService: other shards lease blocks here and read them one-sided."""

    def __init__(self, pool: PoolRuntime, holder: Callable[[], Holder]) -> None:
        self._pool = pool
        self._holder = holder

    async def handshake(self, request: shard_pb2.HandshakeRequest, context: Context) -> shard_pb2.HandshakeReply:
        check_version(request.protocol_version, "the asking shard")
        return shard_pb2.HandshakeReply(
            node=codec.encode_holder(self._holder()),
            geometry=codec.encode_geometry(self._pool.geometry),
            transport=self._pool.transport_name,
            description=self._pool.describe_transport(),
        )

    async def locate(self, request: shard_pb2.LocateRequest, context: Context) -> shard_pb2.LocateReply:
        reader = self._reader(request.reader, context)
        keys = unpack_keys(request.keys)
        epoch = BootEpoch(request.epoch)
        return codec.encode_located(await self._pool.locate(reader, epoch, keys, request.wait_seconds))

    async def follow(self, request: shard_pb2.FollowRequest, context: Context) -> shard_pb2.FollowReply:
        reader = self._reader(request.reader, context)
        handoff = check_handoff_id(request.handoff)
        keys = unpack_keys(request.keys)
        epoch = BootEpoch(request.epoch)
        return codec.encode_followed(await self._pool.follow(reader, epoch, handoff, keys, request.wait_seconds))

    async def take_over(self, request: shard_pb2.TakeOverRequest, context: Context) -> shard_pb2.TakeOverReply:
        leaver = codec.decode_holder(request.leaver)
        self._check_speaks_for(leaver.node_id, context)
        result = await self._pool.take_over(
            BootEpoch(request.epoch), leaver, request.payload_bytes, decode_items(request), request.wait_seconds
        )
        return shard_pb2.TakeOverReply(kept=result.kept, full=result.full)

    async def release_located(
        self, request: shard_pb2.ReleaseLocatedRequest, context: Context
    ) -> shard_pb2.ReleaseLocatedReply:
        reader = self._reader(request.reader, context)
        suspects = codec.decode_suspects(request.suspects)
        await self._pool.release_located(reader, BootEpoch(request.epoch), LeaseId(request.lease_id), suspects)
        return shard_pb2.ReleaseLocatedReply()

    def _reader(self, name: str, context: Context) -> NodeId:
        """The name under which a peer's leases are kept: the given name, and a proof that only its node can make.

        So a lease of one caller is never another's.
        """
        name = name[:NAME_CHARS_MAX]
        self._check_speaks_for(name, context)
        return NodeId(f"{name} {proof_in(context).hex()}")

    def _check_speaks_for(self, node: str, context: Context) -> None:
        try:
            caller_of(context).check_speaks_for(node)
        except Forbidden:
            self._pool.count("peer_forbidden")
            raise


class AdminServicer:
    """AdminService: figures for people, drains, and what is remembered of requests."""

    def __init__(
        self,
        pool: PoolRuntime,
        holder: Callable[[], Holder],
        leave: Callable[[float, bool, bool], DrainProgress],
        stay: Callable[[], Coroutine[Any, Any, DrainProgress]],
        authenticator: Authenticator,
        stats: Callable[[], PoolStats],
        pids: Callable[[], Mapping[AttachmentId, int]],
    ) -> None:
        """`leave(timeout_seconds, handover, exit)` begins a drain or continues it, and `stay` undoes it. `stats` covers
        pool and server. `pids` are the processes of the engines."""
        self._pids = pids
        self._pool = pool
        self._stats = stats
        self._authenticator = authenticator
        self._holder = holder
        self._leave = leave
        self._stay = stay

    async def stats(self, request: shard_pb2.StatsRequest, context: Context) -> shard_pb2.StatsReply:
        caller = self._authenticator.caller_if_any(context)
        restricted = caller is None and self._authenticator.has_tenants
        account = None if caller is None or caller.tenant.admin else caller.tenant.name
        stats, state, now = self._stats(), self._pool.state, self._pool.now()
        slowest = [] if restricted else state.records.slowest(SLOWEST_MAX, now, account)
        refused = [] if restricted else state.records.latest_refused(account)
        return shard_pb2.StatsReply(
            node=codec.encode_holder(self._holder()),
            segment_bytes=stats.segment_bytes,
            slab_count=stats.slab_count,
            slab_free_count=stats.slab_free_count,
            slots=stats.slots,
            counters=stats.counters,
            draining=stats.draining,
            transport=self._pool.transport_name,
            uptime_seconds=self._pool.uptime_seconds,
            slot_bytes=stats.slot_bytes,
            secondary_bytes=stats.secondary_bytes,
            slab_bytes=self._pool.geometry.slab_bytes,
            host=socket.gethostname(),
            version=__version__,
            engines=encode_engines(state.attached_engines(now), self._pids()),
            hits=encode_hits(stats.usage),
            windows=encode_windows(self._pool.windows()),
            pulls=[codec.encode_peer_speed(peer) for peer in state.peer_speeds()],
            tenants=[encode_tenant(usage) for usage in stats.tenants],
            tiers=encode_tiers(stats.tiers),
            drifts=encode_drifts(stats.drifts),
            refused=[encode_refused(one, now) for one in refused],
            slowest=[encode_slow(record, now) for record in slowest],
            restricted=restricted,
            accepts_spill=self._pool.accepts_spill,
            wall_seconds=state.freshness.wall(now),
        )

    async def list_blocks(self, request: shard_pb2.ListBlocksRequest, context: Context) -> shard_pb2.ListBlocksReply:
        wanted, start = decode_filter(request, self._authenticator.account(context))
        return encode_page(self._pool.state.list_slots(wanted, start, self._pool.now()))

    async def accounting(self, request: shard_pb2.AccountingRequest, context: Context) -> shard_pb2.AccountingReply:
        slots, capacity, violation, leases, attachments = self._pool.accounting()
        return shard_pb2.AccountingReply(
            slots=slots,
            capacity=capacity,
            balanced=not violation and sum(slots.values()) == capacity,
            violation=violation,
            leases=leases,
            attachments=attachments,
        )

    async def engine_stats(self, request: shard_pb2.EngineStatsRequest, context: Context) -> shard_pb2.EngineStatsReply:
        """The engines; with a tenant's token only its own, and on a private channel with their secret keys."""
        caller = self._authenticator.caller_if_any(context)
        stats = self._pool.state.engine_stats(None if caller is None else caller.tenant.name)
        reply = codec.encode_engine_stats(self._holder(), stats)
        if caller is not None and is_private(context):
            reply.tenant_key, reply.public_key = self._authenticator.keys_for(caller)
        return reply

    async def drain(self, request: shard_pb2.DrainRequest, context: Context) -> shard_pb2.DrainReply:
        if not 0 <= request.timeout_seconds <= DRAIN_SECONDS_MAX:
            raise InvalidRequest(f"a drain takes 0 to {DRAIN_SECONDS_MAX:.0f} s, not {request.timeout_seconds}")
        if request.undo:
            return encode_progress(await self._stay())
        if not request.timeout_seconds:
            return encode_progress(self._pool.drain())
        return encode_progress(self._leave(request.timeout_seconds, request.handover, request.exit))

    async def explain(self, request: shard_pb2.ExplainRequest, context: Context) -> shard_pb2.ExplainReply:
        account = self._authenticator.account(context)
        found, kinds, now = self._pool.explain(check_request_id(request.request_id), account)
        return encode_explanation(found, kinds, self._holder().node_id, socket.gethostname(), now)

    async def block_history(
        self, request: shard_pb2.BlockHistoryRequest, context: Context
    ) -> shard_pb2.BlockHistoryReply:
        account = self._authenticator.account(context)
        entries, now = self._pool.block_history(unpack_keys(request.keys), max(request.age_seconds, 0.0))
        if account is not None:  # the blocks that needed the room may be another tenant's
            entries = tuple(replace(entry, caused_by="") for entry in entries)
        return encode_history(entries, now)
