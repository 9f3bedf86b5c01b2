"""Supervisor: keeps one CacheShard on every node of the Ray cluster, and the lookup partitions and copy workers that
the settings ask for.

It only places and replaces. Ray restarts processes by itself, and requests never pass through here. While this actor or
Ray's control plane is away, everything that runs goes on. One thread does the rounds; methods run on Ray's threads.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnschedulableError, GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from kvservice.actors import names
from kvservice.actors.cache_shard import CacheShard
from kvservice.actors.drained import DrainedNodes
from kvservice.actors.draining import draining_nodes
from kvservice.actors.gpu_worker import GpuWorker
from kvservice.actors.lookup_node import LookupNode
from kvservice.config import COPY_WORKERS_MAX, ServiceConfig
from kvservice.discovery import lookup_address
from kvservice.errors import KVServiceError
from kvservice.garbage import keep_tables
from kvservice.observe.failpoints import failpoint
from kvservice.shard.server_config import ShardServerConfig
from kvservice.units import bracketed

log = logging.getLogger("kvservice.actors")

# Between two rounds. A new node waits at most this long for its shard, and a round costs one small call per part.
ROUND_SECONDS = 1.0
ANSWER_SECONDS = 5.0  # For all answers of one round. A part that takes longer is asked again in the next round.
# For one call to a part that has answered before. Then the call counts as failed, and the next round repeats it.
CALL_SECONDS = 30.0
# A lookup partition that has not answered once in so many rounds is placed again: it may wait for a node that is gone.
# So is one that has refused to start in so many, because its port may be taken. That is at least ten seconds; Ray
# starts an actor in fewer.
SILENT_ROUNDS_MAX = 10
STARTING = "is starting, or does not answer"
LOOPBACK = "127.0.0.1"
HEAD_RESOURCE = "node:__internal_head__"  # what Ray gives to the head of a cluster, and to no other node


@dataclass(slots=True)
class _Part:
    """One actor that should run."""

    what: str  # shown to people
    handle: Any
    ray_node: str
    asked: Any = None  # the ready() call that is not answered yet
    answer: dict[str, Any] = field(default_factory=dict)  # the last answer; kept while the part restarts
    running: bool = False
    silent_rounds: int = 0  # rounds without an answer, in a row
    refused_rounds: int = 0  # rounds in which it could not start, since it last ran
    dead: bool = False  # Ray gave the actor up: place it again
    address: str = ""  # of a lookup partition that this supervisor placed anew; "" = it will say it
    leaving: int | None = None  # the epoch of a shard that was told that Ray takes its node away
    told: tuple[object, ...] = ()  # what the shard was last told: (epoch, lookup addresses)

    def row(self) -> dict[str, Any]:
        return {**self.answer, "ray_node": self.ray_node, "running": self.running}


class Supervisor:
    """The supervisor as a Ray actor; actors.deploy makes it a named, detached one."""

    def __init__(self, config: ServiceConfig) -> None:
        self._config = config
        self._lookups: dict[int, _Part] = {}
        self._shards: dict[str, _Part] = {}  # by Ray node id
        self._copy_workers: dict[tuple[str, int], _Part] = {}  # by Ray node id and index on the node
        self._left = DrainedNodes(config.service)  # they get no shard until `readmit`
        self._draining: frozenset[str] = frozenset()  # Ray nodes that Ray takes away
        self._is_new = True  # has not looked yet for the shards that an earlier supervisor placed
        self._problems: dict[str, str] = {}
        self._failed: list[Exception] = []  # of the calls of one round; the next round repeats them
        self._lock = threading.Lock()  # one round at a time, and none after stop
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="kvservice-supervisor", daemon=True)
        self._thread.start()
        keep_tables()  # the process is the actor's alone

    def config(self) -> dict[str, Any]:
        return self._config.model_dump()

    def describe(self) -> dict[str, Any]:
        """What runs where, and what keeps the other parts from running. `nodes` are those that are to have a shard."""
        nodes = with_shard(_alive_nodes(), self._config)
        lookups = [part.row() for _, part in sorted(dict(self._lookups).items()) if part.answer]
        shards = [part.row() for part in list(self._shards.values()) if part.answer]
        running = {row["ray_node"] for row in shards if row["running"]}
        left = set(self._left.read())
        return {
            "service": self._config.service,
            "complete": sum(row["running"] for row in lookups) == self._config.lookup_partitions
            and running >= set(nodes) - left - self._draining,
            "nodes": nodes,
            "left": sorted(names.node_id(node) for node in left & set(nodes)),
            "lookup_partitions": lookups,
            "shards": sorted(shards, key=lambda row: row["node_id"]),
            "copy_workers": [part.row() for _, part in sorted(dict(self._copy_workers).items()) if part.answer],
            "problems": dict(self._problems),
        }

    def lookup_addresses(self) -> list[str]:
        """The addresses of the lookup partitions, in order. Empty while not all are known: their number decides where
        keys are."""
        known = [part.answer["address"] for _, part in sorted(dict(self._lookups).items()) if part.answer]
        return known if len(known) == self._config.lookup_partitions else []

    def readmit(self) -> None:
        """Give nodes whose shards were drained a shard again, except those that Ray takes away."""
        self._left.clear()

    def stop(self) -> None:
        """Place nothing any more. Blocks until a round under way has ended."""
        self._stopping.set()
        with self._lock:
            pass

    # -- the thread ----

    def _follow(self) -> None:
        while not self._stopping.is_set():
            with self._lock:
                if not self._stopping.is_set():
                    self._round()
            self._stopping.wait(ROUND_SECONDS)

    def _round(self) -> None:
        self._failed = []
        try:
            nodes = listening_hosts(_alive_nodes(), self._config)
            self._drop(nodes)
            if nodes:
                draining = draining_nodes()
                self._draining = frozenset(draining)
                staying = {node: host for node, host in nodes.items() if node not in draining}
                self._take_up_shards(nodes)
                self._place_lookups(staying or nodes)
                self._place_shards(with_shard(staying, self._config), sorted(nodes))
                self._ask_lookups()
                self._ask_shards()
                self._drain_shards(draining)
                self._keep_copy_workers(nodes)
            if self._failed:
                self._note("ray", self._failed[0])
            else:
                self._problems.pop("ray", None)
        except (RayError, GetTimeoutError, KVServiceError, ValueError, OSError) as error:
            # Ray's control plane is away, or a node went meanwhile. Everything that runs goes on, and the next round
            # starts from the state that it finds.
            self._note("ray", error)
        except Exception as error:  # task boundary: the next round may succeed, and without rounds nothing is replaced
            log.exception("round_failed")
            self._note("ray", error)

    def _drop(self, nodes: dict[str, str]) -> None:
        """Forget the parts that cannot come back by themselves, so that their names are free."""
        self._lookups = {key: part for key, part in self._lookups.items() if self._stays(part, nodes)}
        self._shards = {key: part for key, part in self._shards.items() if self._stays(part, nodes)}
        self._copy_workers = {key: part for key, part in self._copy_workers.items() if self._stays(part, nodes)}

    def _stays(self, part: _Part, nodes: dict[str, str]) -> bool:
        if not part.dead and part.ray_node in nodes:
            return True
        ray.kill(part.handle, no_restart=True)
        self._problems.pop(part.what, None)
        return False

    def _place_lookups(self, nodes: dict[str, str]) -> None:
        for partition in range(self._config.lookup_partitions):
            if partition in self._lookups:
                continue
            ray_node = sorted(nodes)[partition % len(nodes)]
            config = self._config
            port = config.lookup_port + partition if config.lookup_port else 0
            root = config.runtime_root
            # The actor gets this address for good: when it is restarted, its clients must find it in the same place.
            address = lookup_address(
                config.service,
                partition,
                root,
                nodes[ray_node],
                port,
                tls=bool(config.tls_dir),
                allow_plaintext=config.allow_plaintext,
            )
            if address.endswith(":0"):
                address = f"{bracketed(nodes[ray_node])}:{_free_port_on(ray_node)}"
            arguments = (
                address,
                partition,
                config.lookup_partitions,
                config.tls_dir,
                config.allow_plaintext,
                config.heartbeat_seconds,
                config.traces,
                config.service,
                config.metrics_port and config.metrics_port + 1 + COPY_WORKERS_MAX + partition,
            )
            is_new = self._found(names.lookup(partition)) is None
            handle = self._place(LookupNode, ray_node, names.lookup(partition), arguments)
            part = _Part(f"lookup partition {partition}", handle, ray_node, address=address if is_new else "")
            self._lookups[partition] = part

    def _ask_lookups(self) -> None:
        self._ask(self._lookups.values())
        for part in self._lookups.values():
            # An actor that was found by its name may wait for ever for a node that went while no supervisor ran.
            part.dead = part.dead or (not part.answer and part.silent_rounds >= SILENT_ROUNDS_MAX)
            # Its port is one that the kernel gives away: while it is restarted, another process may get it and keep it.
            part.dead = part.dead or (not self._config.lookup_port and part.refused_rounds >= SILENT_ROUNDS_MAX)
            # An earlier supervisor may have placed it elsewhere.
            part.ray_node = part.answer.get("ray_node", part.ray_node)

    def _take_up_shards(self, nodes: dict[str, str]) -> None:
        """Find the shards that an earlier supervisor placed, also on nodes that are to have none any more: whoever
        leaves must still be told so, or be ended."""
        if self._is_new:
            for ray_node, host in nodes.items():
                node = names.node_id(ray_node)
                handle = self._found(names.shard(node))
                if handle is not None:
                    self._shards[ray_node] = _Part(f"shard {node} on {host}", handle, ray_node)
            self._is_new = False

    def _place_shards(self, nodes: dict[str, str], cluster: Sequence[str]) -> None:
        """Place shards, also while lookup partitions start: a shard waits for them when its process is there."""
        addresses = [part.answer.get("address") or part.address for _, part in sorted(self._lookups.items())]
        if not all(addresses):
            return
        alive = [names.node_id(ray_node) for ray_node in cluster]
        for ray_node, host in nodes.items():
            if ray_node not in self._shards and ray_node not in self._left.read():
                node = names.node_id(ray_node)
                arguments = (self._shard_config(node, host, addresses), alive, self._config.metrics_port)
                handle = self._place(CacheShard, ray_node, names.shard(node), arguments)
                self._shards[ray_node] = _Part(f"shard {node} on {host}", handle, ray_node)

    def _ask_shards(self) -> None:
        self._ask(self._shards.values())
        addresses = self.lookup_addresses()
        if not addresses:
            return
        calls = []
        for part in self._shards.values():
            # A shard that Ray restarted begins with the addresses of its first start.
            if part.running and not part.answer.get("left") and part.told != (part.answer.get("epoch"), *addresses):
                calls.append((part, part.handle.set_lookup_addresses.remote(addresses)))
        for part in self._heard(calls):
            part.told = (part.answer.get("epoch"), *addresses)

    def _drain_shards(self, draining: dict[str, float]) -> None:
        """Tell the shards of nodes that Ray takes away to leave. Shards that have left are not placed again."""
        calls = []
        for ray_node, part in list(self._shards.items()):
            if part.answer.get("left"):
                self._left.add(ray_node)
                ray.kill(part.handle, no_restart=True)
                self._problems.pop(part.what, None)
                del self._shards[ray_node]
            elif ray_node in draining and part.running and part.leaving != part.answer["epoch"]:
                log.info("%s leaves, because Ray takes its node away in %.0f s", part.what, draining[ray_node])
                calls.append((part, part.handle.leave.remote(draining[ray_node])))
        for part in self._heard(calls):
            part.leaving = part.answer["epoch"]

    def _keep_copy_workers(self, nodes: dict[str, str]) -> None:
        if self._config.copy_workers == "off":
            return
        from kvservice.copying.worker.server import CopyWorkerConfig

        gpus = _gpus_of_nodes()
        for ray_node, host in nodes.items():
            if ray_node not in self._shards or not self._shards[ray_node].answer:
                continue  # the worker must run beside its shard, in the same directory of the node
            for index, device in enumerate(copy_worker_devices(self._config.copy_workers, gpus.get(ray_node, 0))):
                if (ray_node, index) not in self._copy_workers:
                    node = names.node_id(ray_node)
                    root = self._config.runtime_root
                    port = self._config.metrics_port + 1 + index if self._config.metrics_port else 0
                    arguments = (CopyWorkerConfig(self._config.service, node, root), device, port)
                    handle = self._place(GpuWorker, ray_node, names.gpu_worker(node, index), arguments)
                    part = _Part(f"copy worker {index} of {node} on {host}", handle, ray_node)
                    self._copy_workers[ray_node, index] = part
        if not self._copy_workers:
            return
        self._ask(self._copy_workers.values())
        for part in self._copy_workers.values():
            trouble = _end_of(part.answer) if part.running else ""
            if trouble:
                # A thread that hangs or a dead GPU context cannot be repaired. Ray starts a new process.
                log.error("%s: %s, it is replaced", part.what, trouble)
                ray.kill(part.handle, no_restart=False)
                part.running = False
                self._problems[part.what] = f"{trouble}: it is being replaced"

    def _ask(self, parts: Iterable[_Part]) -> None:
        """Ask all parts at once, so that a cluster starts as fast as its slowest node."""
        parts = list(parts)
        for part in parts:
            if part.asked is None:
                part.asked = part.handle.ready.remote()
        answered, _ = ray.wait([part.asked for part in parts], num_returns=len(parts), timeout=ANSWER_SECONDS)
        for part in parts:
            part.running = False
            if part.asked not in answered:
                self._problems[part.what] = STARTING
                part.silent_rounds += 1
                continue
            part.silent_rounds = 0
            asked, part.asked = part.asked, None
            try:
                part.answer = ray.get(asked, timeout=CALL_SECONDS)
                part.running, part.refused_rounds = True, 0
                self._problems.pop(part.what, None)
            except (ActorDiedError, ActorUnschedulableError) as error:
                part.dead = True
                self._note(part.what, error)
            except (RayError, KVServiceError, GetTimeoutError) as error:  # the part is being restarted, or cannot start
                part.refused_rounds += isinstance(error, KVServiceError)
                self._note(part.what, error)

    def _heard(self, calls: Sequence[tuple[_Part, Any]]) -> list[_Part]:
        """The parts that have answered these calls. They run at once, so that one that fails or hangs keeps no other
        part from hearing."""
        if not calls:
            return []
        answered, _ = ray.wait([call for _, call in calls], num_returns=len(calls), timeout=CALL_SECONDS)
        heard = []
        for part, call in calls:
            try:
                if call not in answered:
                    raise GetTimeoutError(f"{part.what} did not answer within {CALL_SECONDS:.0f} s")
                ray.get(call, timeout=CALL_SECONDS)
                heard.append(part)
            except (RayError, KVServiceError, GetTimeoutError) as error:
                self._failed.append(error)
        return heard

    def _note(self, what: str, error: Exception) -> None:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        text = error.message if isinstance(error, KVServiceError) and hasattr(error, "message") else lines[-1]
        if self._problems.get(what) != text:
            log.warning("%s: %s", what, text)
        self._problems[what] = text

    def _place(self, kind: type, ray_node: str, name: str, arguments: tuple[object, ...]) -> Any:
        """Place an actor: pinned to its node, restarted for ever, without CPUs that engines need, and independent of
        the driver that made it."""
        failpoint("supervisor.place")
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

    def _found(self, name: str) -> Any | None:
        """The actor of this name, which an earlier supervisor has placed. None if there is none."""
        try:
            return ray.get_actor(name, namespace=names.namespace(self._config.service))
        except ValueError:
            return None

    def _shard_config(self, node: Any, host: str, addresses: list[str]) -> ShardServerConfig:
        return ShardServerConfig(self._config, node, tuple(addresses), peer_host=host)


def _end_of(worker: Mapping[str, Any]) -> str:
    """Why a copy worker in this state must be replaced; "" if it need not be."""
    if worker["device_lost"]:
        return "its process cannot use the GPU any more"
    return "a copy hung" if worker["wedged"] else ""


def _alive_nodes() -> dict[str, str]:
    """Ray node id -> address of each node that is alive."""
    return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}


def listening_hosts(nodes: Mapping[str, str], config: ServiceConfig) -> dict[str, str]:
    """Ray node id -> the address on which its parts listen and are found.

    Without TLS, a service on one machine uses loopback, whatever address Ray has. On several machines each part then
    refuses to start, and says why.
    """
    if config.tls_dir or config.allow_plaintext or len(set(nodes.values())) > 1:
        return dict(nodes)
    return dict.fromkeys(nodes, LOOPBACK)


def with_shard(nodes: Mapping[str, str], config: ServiceConfig) -> dict[str, str]:
    """Those of these Ray nodes that are to have a shard: all, or all but the head."""
    if config.head_shard:
        return dict(nodes)
    heads = {node["NodeID"] for node in ray.nodes() if HEAD_RESOURCE in node["Resources"]}
    return {node: host for node, host in nodes.items() if node not in heads}


def _gpus_of_nodes() -> dict[str, int]:
    """Ray node id -> number of GPUs."""
    return {node["NodeID"]: int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]}


def copy_worker_devices(setting: str, gpus: int) -> list[str]:
    """The devices of a node's copy workers by the setting `copy_workers`: GPU indices, or "cpu" if the node has no GPU
    and the setting is a number."""
    if setting == "off":
        return []
    from kvservice.copying.device import HOST

    count = gpus if setting == "auto" else min(int(setting), max(gpus, 1))
    return [str(index) if gpus else HOST for index in range(count)]


def _free_port_on(ray_node: str) -> int:
    strategy = NodeAffinitySchedulingStrategy(ray_node, soft=False)
    port: int = ray.get(ray.remote(num_cpus=0, scheduling_strategy=strategy)(_free_port).remote(), timeout=60)
    return port


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
