"""`kvservice shard` and `kvservice lookup`: the parts of a service as single processes without Ray, for Kubernetes and
systemd. Each runs in the foreground until SIGTERM."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvservice.errors import ConfigError
from kvservice.units import NodeId, bracketed

if TYPE_CHECKING:
    from kvservice.lookup.server import LookupServer

# Parts of file names, certificates and JSON: no "/", no blank, and nothing that a command takes for an option.
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
HINT = "every shard needs the addresses of all {count} lookup partitions: --lookup for each, in their order"
LOOKUP_PORT = 7400  # the default port of a lookup partition; two partitions on one host need two ports


def run_shard(
    config: Any,
    node: str,
    host: str,
    port: int,
    segment_dir: Path,
    *,
    keep_blocks: bool,
    grace_seconds: float,
) -> None:
    """Run one node's shard; blocks until a signal.

    Args:
        config: a ServiceConfig.
        host: the address that is bound and told to peers.
        segment_dir: the folder of the pool.

    Raises ConfigError.
    """
    from kvservice.observe.logs import say
    from kvservice.shard.process import serve
    from kvservice.shard.server_config import ShardServerConfig

    if not segment_dir.is_dir():
        raise ConfigError(
            f"--segment-dir is {segment_dir}, which is no folder: make it, or leave the option out for /dev/shm"
        )
    place = ShardServerConfig(
        config,
        node_named(node),
        config.lookup,
        segment_dir=segment_dir,
        peer_host=host.strip("[]"),
        peer_port=port,
    )
    if not config.lookup:
        say("no lookup partition is named with --lookup: this node finds blocks of no other node")
    asyncio.run(serve(place, keep_segment=keep_blocks, grace_seconds=grace_seconds))


def run_lookup(config: Any, partition: int, host: str, port: int | None) -> None:
    """Run one lookup partition of `config.lookup_partitions`. Without `port`, or `config.lookup_port`, it listens on a
    Unix socket if it needs no port. Blocks until a signal."""
    from kvservice.lookup.process import serve

    count, host = config.lookup_partitions, host.strip("[]")
    if port is None and config.lookup_port:
        port = config.lookup_port + partition
    address = address_of_lookup(config, partition, host, port or 0)
    if port is None and not address.startswith("unix:"):
        address = f"{bracketed(host)}:{LOOKUP_PORT}"

    async def run() -> None:
        await serve(
            lookup_server(config, address, partition, count),
            f"lookup partition {partition} of {count}",
            hint=HINT.format(count=count) if count > 1 else "",
            service=config.service,
            host=host,
            metrics_port=config.metrics_port,
            traces=config.traces,
        )

    asyncio.run(run())


def address_of_lookup(config: Any, partition: int, host: str, port: int) -> str:
    """Where this lookup partition listens."""
    from kvservice.discovery import lookup_address

    secure = {"tls": bool(config.tls_dir), "allow_plaintext": config.allow_plaintext}
    return lookup_address(config.service, partition, config.runtime_root, host, port, **secure)


def lookup_server(config: Any, address: str, partition: int = 0, count: int = 1) -> LookupServer:
    """A lookup partition with the settings of the service. Call it on its loop."""
    from kvservice.core.directory.membership import patience
    from kvservice.lookup.server import LookupServer

    return LookupServer(
        address,
        partition,
        count,
        silence=patience(config.heartbeat_seconds),
        tls_dir=config.tls_dir,
        allow_plaintext=config.allow_plaintext,
    )


def node_named(name: str) -> NodeId:
    """The name of a node. Raises ConfigError if it cannot be one."""
    if not _NODE.fullmatch(name):
        raise ConfigError(
            f"{name!r} cannot be a node's name; give the name of this machine: letters, digits, '.', '-' and '_', the "
            "first one a letter or digit",
            key="node",
        )
    return NodeId(name)


def warn_without_shard(service: str, node: str) -> None:
    """Tell if no shard of this name is known here: a copy worker serves the engines of one that may still start."""
    from kvservice.discovery import find_shards

    known = [record.node_id for record in find_shards(service, live_only=False)]
    if node not in known:
        there = f"there is {', '.join(known)}" if known else "there is none"
        print(
            f"no shard {node!r} of service {service!r} is on this machine yet; {there}. Engines use this worker only "
            "beside a shard of that name",
            file=sys.stderr,
        )
