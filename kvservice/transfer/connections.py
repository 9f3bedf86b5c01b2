"""The peers that a puller can read from now, each in the first way that both have: mapped, or by the transport.

Owned by the puller's thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from kvservice.errors import TransferError
from kvservice.transfer import mapped
from kvservice.transfer.base import PeerHandle, Transport
from kvservice.transfer.mapped import MappedPeer
from kvservice.transfer.ways import unpack_ways
from kvservice.units import BootEpoch, NodeId

log = logging.getLogger("kvservice.transfer")

PEERS_MAX = 1024  # connections kept; for one more the peer connected longest ago is disconnected
GONE_SECONDS = 1.0  # between two looks for mapped segments that were removed: mapped, they still take their memory

AnyPeer = PeerHandle | MappedPeer


@dataclass(frozen=True, slots=True)
class _ConnectedPeer:
    epoch: BootEpoch
    description: bytes
    handle: AnyPeer


class Connections:
    """`count(name)` counts, `failed(name, error)` counts and logs."""

    def __init__(
        self,
        transport: Transport | None,
        maps_peers: bool,
        count: Callable[[str], None],
        failed: Callable[[str, Exception], None],
    ) -> None:
        self._transport = transport
        self._maps_peers = maps_peers
        self._count = count
        self._failed = failed
        self._peers: dict[NodeId, _ConnectedPeer] = {}
        self._looked_at = 0.0  # when it was last looked for segments that were removed

    def connect(self, peer: NodeId, epoch: BootEpoch, description: bytes) -> AnyPeer:
        """The connection to this boot of the peer, made if there is none. May block. Raises TransferError."""
        known = self._peers.get(peer)
        if known is not None and (known.epoch, known.description) == (epoch, description):
            return known.handle
        if known is not None or len(self._peers) >= PEERS_MAX:
            self.drop(peer if known is not None else next(iter(self._peers)))
        handle = self._connected_to(peer, epoch, description)
        self._peers[peer] = _ConnectedPeer(epoch, description, handle)
        self._count("connects")
        return handle

    def _connected_to(self, peer: NodeId, epoch: BootEpoch, description: bytes) -> AnyPeer:
        """Map a peer of this machine, and connect to any other one. Raises TransferError if there is no way."""
        ways = unpack_ways(description)
        reason = "it has no way in common with this node"
        if self._maps_peers and mapped.NAME in ways:
            try:
                if mapped.is_here(ways[mapped.NAME]):
                    return MappedPeer(ways[mapped.NAME], epoch)
                reason = "it runs on another machine, which takes NIXL on both"
            except TransferError as error:
                reason = error.message
                self._count("map_failed")
                log.info("peer_not_mapped", extra={"peer": peer, "reason": reason})
        transport = self._transport
        if transport is None or transport.name not in ways:
            raise TransferError(f"node {peer} cannot be read: {reason}")
        return transport.connect(ways[transport.name])

    def drop(self, peer: NodeId, handle: AnyPeer | None = None) -> None:
        """Disconnect the peer; with a handle, only if that is the peer's present connection."""
        known = self._peers.get(peer)
        if known is not None and handle in (None, known.handle):
            del self._peers[peer]
            try:
                if isinstance(known.handle, MappedPeer):
                    known.handle.close()
                elif self._transport is not None:
                    self._transport.disconnect(known.handle)
            except Exception as error:  # noqa: BLE001  thread boundary: the peer is forgotten anyway
                self._failed("disconnect_failed", error)

    def let_go_of_the_gone(self, in_use: Collection[AnyPeer]) -> None:
        """Unmap segments whose files were removed: the memory of a peer that is gone is freed only then."""
        if time.monotonic() - self._looked_at < GONE_SECONDS:
            return
        self._looked_at = time.monotonic()
        used = {id(handle) for handle in in_use}
        for peer, known in list(self._peers.items()):
            if isinstance(known.handle, MappedPeer) and id(known.handle) not in used and not known.handle.is_named():
                self.drop(peer)

    def close(self) -> None:
        """Unmap all peers; the transport closes its own."""
        for known in self._peers.values():
            if isinstance(known.handle, MappedPeer):
                known.handle.close()
