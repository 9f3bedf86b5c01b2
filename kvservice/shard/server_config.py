"""What one node's shard is started with. Whoever only starts shards elsewhere imports this, not all that they are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvservice.config import ServiceConfig
from kvservice.units import NodeId

DEV_SHM = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class ShardServerConfig:
    """The settings of the service, and those of this node only."""

    settings: ServiceConfig
    node_id: NodeId
    lookup_addresses: tuple[str, ...] = ()  # host:port or unix:/path of each, in partition order; () = no other nodes
    segment_dir: Path = DEV_SHM  # must have room for the pool
    peer_host: str = "127.0.0.1"  # bound and advertised, without brackets; loopback without TLS = a Unix socket instead
    peer_port: int = 0  # 0 = any free port
