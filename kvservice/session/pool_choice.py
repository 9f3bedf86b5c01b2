"""Chooses the pool that an engine uses: the shard of its node, or a pool of its own in this process."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from kvservice.auth.token import Token
from kvservice.client.shard import ShardClient
from kvservice.core.messages import Attachment, EngineSpec
from kvservice.core.segment.geometry import Geometry, plan_geometry
from kvservice.discovery import HOW_TO_START, choose_shard, find_shards, names_of
from kvservice.errors import ConfigError, Unavailable
from kvservice.pool.eviction import find_policy
from kvservice.pool.port import PoolPort
from kvservice.pool.runtime import PoolRuntime
from kvservice.pool.runtime_ports import PoolConfig
from kvservice.pool.tier_factory import open_coders
from kvservice.pool.tier_specs import find_tiers, marks_beside, names_beside
from kvservice.private_files import is_listening
from kvservice.session.embedded_metrics import watched
from kvservice.session.options import Mode, PoolOptions
from kvservice.units import NodeId, format_bytes

log = logging.getLogger("kvservice.session")
EMBEDDED = "embedded"  # the folder of an embedded pool below `disk_path`: the next process finds the blocks of this one


@dataclass(frozen=True, slots=True)
class PoolChoice:
    """How to open the pool, and the engine's spec with its id."""

    mode: Mode  # SERVICE or EMBEDDED
    spec: EngineSpec
    open: Callable[[], Awaitable[PoolPort]]


def choose_pool(options: PoolOptions, spec: EngineSpec) -> PoolChoice:
    """Choose once, at engine start. Raises ConfigError if several shards fit."""
    spec = replace(spec, engine_id=os.urandom(16))
    mode = choose_mode(options)
    if mode is Mode.SERVICE:
        log.info("mode service: using this node's shard")
        return PoolChoice(mode, spec, lambda: open_service(options))
    geometry = plan_geometry(options.embedded_bytes())
    log.info("mode embedded: using a pool of %s in this process", format_bytes(geometry.segment_bytes))
    return PoolChoice(mode, spec, embedded(options, geometry, NodeId(spec.engine_id.hex()[:12])))


def choose_mode(options: PoolOptions) -> Mode:
    """SERVICE or EMBEDDED. Raises ConfigError if several shards fit."""
    if options.mode is not Mode.AUTO:
        return options.mode
    found = options.socket is not None or choose_shard(options.service, options.node) is not None
    return Mode.SERVICE if found else Mode.EMBEDDED


async def open_service(options: PoolOptions) -> PoolPort:
    """The shard of this node. Raises Unavailable."""
    return NodeShard(options)


class NodeShard(ShardClient):
    """The shard of this node, looked up at every attempt to attach: it may come back in another place, with another
    node id or runtime directory."""

    def __init__(self, options: PoolOptions) -> None:
        """Raises Unavailable when no shard is up yet."""
        self._options = options
        super().__init__(find_socket(options), Token.of_environment(options.token_file))

    async def attach(self, spec: EngineSpec, on_lost: Callable[[str], None]) -> Attachment:
        self._socket_path = find_socket(self._options)
        return await super().attach(spec, on_lost)


def find_socket(options: PoolOptions) -> str:
    """Where the shard of this node listens. Raises Unavailable."""
    socket = options.socket
    try:
        if socket is None:
            record = choose_shard(options.service, options.node)
            if record is None:
                raise Unavailable(_nobody(options))
            socket = record.socket
        if not is_listening(socket):
            raise Unavailable(f"no shard listens at {socket}; start the service with {HOW_TO_START}")
    except ConfigError as error:  # several shards fit, or another user's process listens there
        raise Unavailable(error.message) from error
    return socket


def _nobody(options: PoolOptions) -> str:
    """What to tell if no shard fits: which are there, in case that the name is wrong. Raises ConfigError."""
    start = f"start the service with {HOW_TO_START}"
    there = find_shards()
    service = options.service or os.environ.get("KVSERVICE_SERVICE")
    node = options.node or os.environ.get("KVSERVICE_NODE")
    wanted = [f"{kind} {name!r}" for kind, name in (("node", node), ("service", service)) if name]
    if not there or not wanted:
        return f"no shard is registered on this machine; {start}"
    return (
        f"no shard of {' in '.join(wanted)} is registered on this machine; there is {names_of(there)} (service/node): "
        f"name one of these, or {start}"
    )


def service_of(options: PoolOptions) -> str | None:
    """The name of the service whose shard these options choose; None when no shard of it is registered now. Raises
    ConfigError if several shards fit."""
    if options.socket is None:
        record = choose_shard(options.service, options.node)
        return options.service if record is None else record.service
    found = [record.service for record in find_shards(live_only=False) if record.socket == options.socket]
    return found[0] if found else options.service


def embedded(options: PoolOptions, geometry: Geometry, node_id: NodeId) -> Callable[[], Awaitable[PoolRuntime]]:
    """How to open a pool in this process. Raises ConfigError for an unknown eviction policy."""
    eviction = find_policy(options.eviction)

    async def open_pool() -> PoolRuntime:
        # The segment has no name, so nothing is left behind however this process ends.
        coders = await asyncio.to_thread(open_coders, options)
        tiers = await find_tiers(options, EMBEDDED)
        config = PoolConfig(
            node_id,
            None,
            geometry,
            eviction=eviction,
            tiers=tiers,
            max_age_seconds=options.max_age_seconds,
            coders=coders,
            mark_files=marks_beside(tiers),
            name_files=names_beside(tiers),
        )
        pool = await PoolRuntime.open(config)
        return watched(pool, options.metrics_port) if options.metrics_port else pool

    return open_pool
