"""Talks to the shards of other nodes: one handshake per epoch, one Locate and one release per fetch.

All coroutines run on the shard's loop. A peer that fails three times in a row is not asked for a second or longer, and
then by one request first, so that a dead node does not cost every request a connection timeout.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from kvservice.auth.identity import proofs_of, shard_audience
from kvservice.auth.tls import TlsFiles
from kvservice.breaker import Breaker
from kvservice.client.channels import Channels
from kvservice.core.actions import Follow, Locate, Offer, ReleaseRemote
from kvservice.core.block.keys import pack_keys
from kvservice.core.bounded_table import NODES_MAX, BoundedTable
from kvservice.core.drain.receiver import room_bytes
from kvservice.core.messages import FollowResult, Holder, LocateResult, Peer, TakeOverResult
from kvservice.core.segment.geometry import Geometry
from kvservice.errors import StaleEpoch, TransferError, Unavailable
from kvservice.observe import tracing
from kvservice.units import BootEpoch, NodeId
from kvservice.wire.calls import call_in_time
from kvservice.wire.codec import decode_followed, decode_geometry, decode_located, encode_refs
from kvservice.wire.leaving import decode_taken, encode_take_over
from kvservice.wire.serving import CHANNEL_OPTIONS
from kvservice.wire.status import error_from_rpc, readable
from kvservice.wire.v1 import shard_pb2, shard_pb2_grpc
from kvservice.wire.versions import PROTOCOL_VERSION

TRIAL_SECONDS = 1.0  # a peer that is back has answered the first call by then; if that was lost, another one asks


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """What a reader must know of a peer's segment in one of its boot epochs."""

    epoch: BootEpoch
    geometry: Geometry
    description: bytes  # for Transport.connect


class PeerPort(Protocol):
    """Calls to peers. Each raises KVServiceError when the peer does not answer or refuses."""

    async def handshake(self, holder: Holder, timeout: float) -> PeerInfo: ...

    async def locate(self, wanted: Locate) -> LocateResult: ...

    async def follow(self, holder: Holder, wanted: Follow, timeout: float) -> FollowResult: ...

    async def release(self, lease: ReleaseRemote, timeout: float) -> None: ...

    async def take_over(self, leaver: Holder, offer: Offer, timeout: float) -> TakeOverResult: ...

    async def room(self, holder: Holder, timeout: float) -> Peer: ...

    async def close(self) -> None: ...


class PeerClient:
    """PeerPort over gRPC. `transport` names the ways in which this node reads peers, such as "shm+nixl": one of them
    must be the peer's as well.

    `reader` is this node. With `secret` it proves who it is, so that peers keep its leases apart from others'.
    """

    def __init__(
        self,
        transport: str,
        reader: NodeId,
        clock: Callable[[], float] = time.monotonic,
        tls: TlsFiles | None = None,
        secret: bytes = b"",
    ) -> None:
        self._transport = transport
        self._proofs = proofs_of(secret)
        self._reader = reader
        self._clock = clock
        # A subchannel pool of its own: gRPC shares connections to one address, and their pause after a failure.
        options = [*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
        self._channels = Channels(tls, options)
        # The newest epoch of each node that was called.
        self._epochs: BoundedTable[NodeId, BootEpoch] = BoundedTable(NODES_MAX)
        self._infos: BoundedTable[NodeId, PeerInfo] = BoundedTable(NODES_MAX)
        self._breakers: BoundedTable[NodeId, Breaker] = BoundedTable(NODES_MAX)

    async def handshake(self, holder: Holder, timeout: float) -> PeerInfo:
        known = self._infos.get(holder.node_id)
        if known is not None and known.epoch == holder.epoch:
            return known
        request = shard_pb2.HandshakeRequest(protocol_version=PROTOCOL_VERSION)
        reply = await self._call(holder, lambda stub: stub.Handshake, request, timeout, "handshake")
        if not (set(self._transport.split("+")) & set(reply.transport.split("+"))):
            raise TransferError(
                f"node {holder.node_id} moves bytes by {reply.transport!r} and this one by {self._transport!r}: "
                "start both with a transport setting that they have in common",
                ours=self._transport,
                theirs=reply.transport,
            )
        info = PeerInfo(BootEpoch(reply.node.epoch), decode_geometry(reply.geometry), reply.description)
        self._infos.put(holder.node_id, info)
        if info.epoch != holder.epoch:
            raise StaleEpoch(f"node {holder.node_id} restarted: epoch {info.epoch}, the directory said {holder.epoch}")
        return info

    async def locate(self, wanted: Locate) -> LocateResult:
        holder, keys = wanted.holder, pack_keys(wanted.keys)
        request = shard_pb2.LocateRequest(
            epoch=holder.epoch, keys=keys, reader=self._reader, wait_seconds=wanted.wait_seconds
        )
        timeout, proof = wanted.timeout_seconds, self._proof(holder)
        reply = await self._call(holder, lambda stub: stub.Locate, request, timeout, "locate", proof)
        return decode_located(reply, wanted.keys)

    async def follow(self, holder: Holder, wanted: Follow, timeout: float) -> FollowResult:
        request = shard_pb2.FollowRequest(
            epoch=holder.epoch,
            handoff=wanted.handoff.handoff_id,
            keys=pack_keys(wanted.keys),
            reader=self._reader,
            wait_seconds=wanted.wait_seconds,
        )
        proof = self._proof(holder)
        reply = await self._call(holder, lambda stub: stub.Follow, request, timeout, "follow", proof)
        return decode_followed(reply, wanted.keys)

    async def release(self, lease: ReleaseRemote, timeout: float) -> None:
        request = shard_pb2.ReleaseLocatedRequest(
            epoch=lease.epoch, lease_id=lease.lease_id, reader=self._reader, suspects=encode_refs(lease.suspects)
        )
        proof = self._proof(lease.holder)
        await self._call(lease.holder, lambda stub: stub.ReleaseLocated, request, timeout, "release", proof)

    async def take_over(self, leaver: Holder, offer: Offer, timeout: float) -> TakeOverResult:
        request = encode_take_over(leaver, offer)
        reply = await self._call(offer.peer, lambda stub: stub.TakeOver, request, timeout, "take over")
        return decode_taken(reply, len(offer.items))

    async def room(self, holder: Holder, timeout: float) -> Peer:
        """How many bytes a node could take over.

        This is an estimate, because it includes room in slots of other sizes. The node itself corrects it when blocks
        are offered.
        """
        stub = shard_pb2_grpc.AdminServiceStub(self._channels.get(holder.peer_address))
        try:
            stats = await call_in_time(stub.Stats, shard_pb2.StatsRequest(), timeout)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, f"stats of node {holder.node_id}") from error
        stats = readable(stats, f"stats of node {holder.node_id}")
        free = room_bytes(stats.slab_free_count, stats.slab_bytes, stats.slot_bytes, stats.secondary_bytes)
        return Peer(holder, free, stats.segment_bytes, stats.uptime_seconds, stats.draining, stats.accepts_spill)

    async def close(self) -> None:
        await self._channels.close()

    async def _call(
        self,
        holder: Holder,
        method: Callable[[shard_pb2_grpc.PeerServiceStub], Callable[..., Awaitable[Any]]],
        request: Any,
        timeout: float,
        what: str,
        proof: Sequence[tuple[str, str | bytes]] = (),
    ) -> Any:
        self._follow_boot(holder)
        breaker = self._breakers.get(holder.node_id) or self._breakers.put(holder.node_id, Breaker())
        if not breaker.admits(self._clock(), TRIAL_SECONDS):
            raise Unavailable(f"node {holder.node_id} failed {breaker.failures} times in a row: not asked for now")
        try:
            reply = await call_in_time(method(self._stub(holder.peer_address)), request, timeout, proof)
        except grpc.aio.AioRpcError as error:
            # A refusal is an answer. Only a peer that does not answer opens the breaker.
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                breaker.failed_once(self._clock())
            else:
                breaker.succeeded()
            raise error_from_rpc(error, f"{what} at node {holder.node_id}") from error
        breaker.succeeded()
        return readable(reply, f"{what} at node {holder.node_id}")

    def _follow_boot(self, holder: Holder) -> None:
        """Call a node that has restarted at once: failures of its previous boot do not count."""
        if holder.epoch <= (self._epochs.get(holder.node_id) or 0):
            return
        self._epochs.put(holder.node_id, holder.epoch)
        self._channels.drop(holder.peer_address)
        self._breakers.pop(holder.node_id)

    def _proof(self, holder: Holder) -> tuple[tuple[str, str | bytes], ...]:
        return (*self._proofs(shard_audience(holder.node_id)), *tracing.metadata())

    def _stub(self, address: str) -> shard_pb2_grpc.PeerServiceStub:
        return shard_pb2_grpc.PeerServiceStub(self._channels.get(address))
