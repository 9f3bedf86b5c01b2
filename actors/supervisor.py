"""Supervisor: follows the Ray cluster and keeps one CacheShard on every node and the lookup shards running.

Only placement and replacement: Ray restarts processes by itself, and requests never pass through here. When this
actor or Ray's control plane is away, everything that runs goes on.
"""

from __future__ import annotations

import logging
import socket
import threading
from dataclasses import asdict
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from kvservice.actors import names
from kvservice.actors.cache_shard import CacheShard
from kvservice.actors.lookup_node import LookupNode
from kvservice.config import ServiceConfig
from kvservice.errors import KVServiceError
from kvservice.shard.server import ShardServerConfig

log = logging.getLogger("kvservice.actors")

ROUND_SECONDS = 1.0
READY_SECONDS = 150.0
CALL_SECONDS = 30.0


class Supervisor:
    """Made into a named, detached Ray actor by actors.deploy."""

    def __init__(self, config: ServiceConfig) -> None:
        self._config = config
        self._lookups: dict[int, dict[str, Any]] = {}  # partition -> {handle, address, pid, node}
        self._shards: dict[str, dict[str, Any]] = {}  # Ray node id -> {handle, node_id, peer_address, epoch, pid}
        self._told: dict[str, tuple[object, ...]] = {}  # Ray node id -> (epoch, addresses) last pushed
        self._problems: dict[str, str] = {}
        self._lock = threading.Lock()  # one round at a time, and none after stop
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="kvservice-supervisor", daemon=True)
        self._thread.start()

    def config(self) -> dict[str, Any]:
        return asdict(self._config)

    def describe(self) -> dict[str, Any]:
        """What runs where, and what keeps the rest from running."""
        nodes = _alive_nodes()
        lookups = [{key: value for key, value in row.items() if key != "handle"} for row in self._lookups.values()]
        shards = [{key: value for key, value in row.items() if key != "handle"} for row in self._shards.values()]
        complete = len(lookups) == self._config.lookup_shards and {row["ray_node"] for row in shards} >= set(nodes)
        return {
            "service": self._config.service,
            "complete": complete,
            "nodes": nodes,
            "lookups": sorted(lookups, key=lambda row: row["partition"]),
            "shards": sorted(shards, key=lambda row: row["node_id"]),
            "problems": dict(self._problems),
        }

    def stop(self) -> None:
        """Stop every part cleanly. Blocks until they have removed their files."""
        self._stopping.set()
        with self._lock:
            handles = [row["handle"] for row in [*self._shards.values(), *self._lookups.values()]]
            for handle in handles:
                try:
                    ray.get(handle.stop.remote(), timeout=CALL_SECONDS)
                except RayError as error:
                    log.warning("stop failed: %s", error)
                ray.kill(handle, no_restart=True)
            self._shards.clear()
            self._lookups.clear()

    # -- the thread ----

    def _follow(self) -> None:
        while not self._stopping.is_set():
            with self._lock:
                if not self._stopping.is_set():
                    self._round()
            self._stopping.wait(ROUND_SECONDS)

    def _round(self) -> None:
        try:
            nodes = _alive_nodes()
        except (RayError, OSError) as error:
            self._problems["ray"] = str(error)
            return
        self._problems.pop("ray", None)
        for partition in range(self._config.lookup_shards):
            self._attempt(f"lookup {partition}", self._keep_lookup, partition, nodes)
        for gone in self._shards.keys() - nodes.keys():
            self._shards.pop(gone)
        addresses = [row["address"] for _, row in sorted(self._lookups.items())]
        if len(addresses) == self._config.lookup_shards:
            for ray_node, host in nodes.items():
                self._attempt(f"shard on {host}", self._keep_shard, ray_node, host, addresses)

    def _attempt(self, what: str, step: Any, *arguments: Any) -> None:
        """One part's trouble must not keep the others from being looked after."""
        try:
            step(*arguments)
            self._problems.pop(what, None)
        except (RayError, KVServiceError, GetTimeoutError, ValueError, OSError) as error:
            text = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
            if self._problems.get(what) != text:
                log.warning("%s: %s", what, text)
            self._problems[what] = text

    def _keep_lookup(self, partition: int, nodes: dict[str, str]) -> None:
        row = self._lookups.get(partition)
        if row is not None and row["ray_node"] not in nodes:
            self._lookups.pop(partition)
            row = None
        if row is None:
            ray_node = sorted(nodes)[partition % len(nodes)]
            address = f"{nodes[ray_node]}:{_free_port_on(ray_node)}"
            handle = self._place(
                LookupNode, ray_node, names.lookup(partition), address, partition, self._config.lookup_shards
            )
            row = {"handle": handle, "partition": partition, "ray_node": ray_node}
        row.update(self._ready(row["handle"]))
        self._lookups[partition] = row

    def _keep_shard(self, ray_node: str, host: str, addresses: list[str]) -> None:
        row = self._shards.get(ray_node)
        if row is None:
            node = names.node_id(ray_node)
            config = self._shard_config(node, host, addresses)
            row = {"handle": self._place(CacheShard, ray_node, names.shard(node), config), "ray_node": ray_node}
        row.update(self._ready(row["handle"]))
        self._shards[ray_node] = row
        told = (row["epoch"], *addresses)
        if self._told.get(ray_node) != told:
            ray.get(row["handle"].set_lookup_addresses.remote(addresses), timeout=CALL_SECONDS)
            self._told[ray_node] = told

    def _place(self, kind: type, ray_node: str, name: str, *arguments: object) -> Any:
        """Pinned to its node, restarted for ever, takes no CPU from engines, survives the driver that made it."""
        options = {
            "name": name,
            "namespace": names.namespace(self._config.service),
            "lifetime": "detached",
            "get_if_exists": True,
            "num_cpus": 0,
            "max_restarts": -1,
            "max_concurrency": 4,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(ray_node, soft=False),
        }
        return ray.remote(kind).options(**options).remote(*arguments)

    @staticmethod
    def _ready(handle: Any) -> dict[str, Any]:
        found: dict[str, Any] = ray.get(handle.ready.remote(), timeout=READY_SECONDS)
        return found

    def _shard_config(self, node: Any, host: str, addresses: list[str]) -> ShardServerConfig:
        config = self._config
        return ShardServerConfig(
            service=config.service,
            node_id=node,
            pool_bytes=config.pool_bytes,
            lookup_addresses=tuple(addresses),
            peer_host=host,
            lease_seconds=config.lease_seconds,
            heartbeat_seconds=config.heartbeat_seconds,
            transport=config.transport,
            slab_bytes=config.slab_bytes or None,
        )


def _alive_nodes() -> dict[str, str]:
    """Ray node id -> address."""
    return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}


def _free_port_on(ray_node: str) -> int:
    strategy = NodeAffinitySchedulingStrategy(ray_node, soft=False)
    port: int = ray.get(ray.remote(num_cpus=0, scheduling_strategy=strategy)(_free_port).remote(), timeout=60)
    return port


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
