"""`python -m kvservice.shard`: one node's shard as a plain process, without Ray. SIGTERM and Ctrl-C stop it cleanly.
TLS is as KVSERVICE_TLS_DIR and KVSERVICE_ALLOW_PLAINTEXT say, tenants as KVSERVICE_TENANTS_FILE says."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from pathlib import Path

from kvservice.config import MIRROR_BYTES, ServiceConfig, tenants_of_environment, tls_of_environment
from kvservice.errors import KVServiceError
from kvservice.shard.process import serve
from kvservice.shard.server import DEV_SHM, ShardServerConfig
from kvservice.units import NodeId, parse_bytes


def parse_config(arguments: list[str] | None = None) -> tuple[ShardServerConfig, bool, float]:
    """(configuration, keep the segment, seconds for a drain when told to end)"""
    parser = argparse.ArgumentParser(prog="python -m kvservice.shard", description=__doc__)
    parser.add_argument("--service", default="default", help="name shared by all parts of one installation")
    parser.add_argument("--node", required=True, help="name of this node, unique in the service")
    parser.add_argument(
        "--pool",
        type=parse_bytes,
        default=ServiceConfig().pool_bytes,
        help="shared memory budget, e.g. 64GiB; default 4GiB",
    )
    parser.add_argument(
        "--lookup",
        action="append",
        default=[],
        metavar="ADDRESS",
        help="host:port or unix:/path of a lookup partition; repeat in order",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address peers reach this node by; bound and advertised")
    parser.add_argument("--port", type=int, default=0, help="port for peers; 0 = any, or none on loopback without TLS")
    parser.add_argument("--transport", choices=("auto", "nixl", "shm"), default="auto")
    parser.add_argument("--lease-seconds", type=float, default=ServiceConfig().lease_seconds)
    parser.add_argument("--runtime-root", type=Path, default=None)
    parser.add_argument("--segment-dir", type=Path, default=DEV_SHM)
    parser.add_argument("--mirror-bytes", type=parse_bytes, default=MIRROR_BYTES, help="0 = no mirror of the directory")
    parser.add_argument("--slab-bytes", type=parse_bytes, default=None)
    parser.add_argument("--keep-segment", action="store_true", help="leave the blocks for the next start of this node")
    parser.add_argument(
        "--drain-seconds", type=float, default=20.0, help="on SIGTERM, hand hot blocks over for so long; 0 = at once"
    )
    parser.add_argument("--eviction", choices=("reuse", "lru"), default="reuse")
    given = parser.parse_args(arguments)
    tls_dir, allow_plaintext = tls_of_environment()
    config = ShardServerConfig(
        service=given.service,
        node_id=NodeId(given.node),
        pool_bytes=given.pool,
        lookup_addresses=tuple(given.lookup),
        runtime_root=given.runtime_root,
        segment_dir=given.segment_dir,
        peer_host=given.host,
        peer_port=given.port,
        lease_seconds=given.lease_seconds,
        transport=given.transport,
        slab_bytes=given.slab_bytes,
        eviction=given.eviction,
        mirror_bytes=given.mirror_bytes,
        tls_dir=tls_dir,
        allow_plaintext=allow_plaintext,
        tenants_file=tenants_of_environment(),
    )
    return config, given.keep_segment, given.drain_seconds


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        config, keep_segment, drain_seconds = parse_config()
        asyncio.run(serve(config, keep_segment=keep_segment, grace_seconds=drain_seconds))
    except KVServiceError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
