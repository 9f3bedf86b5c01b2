"""What the demos run on: a Ray cluster of two nodes on this machine, the cache service, vLLM replicas, a document.

The nodes have a network between them where this process may make one, see `network`.
Everything that is entered here is left again, whatever happens: Ctrl-C, SIGTERM, a failing step.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from examples.demo.network import HERE, THERE, Crossing, NamespaceLink, two_namespaces
from examples.demo.offspring import offspring_ended
from examples.demo.replica import ENVIRONMENT, DemoReplica
from kvservice.errors import ConfigError, KVServiceError, Unavailable
from kvservice.units import MiB

POOL_BYTES = 768 * MiB
JOIN_SECONDS = 60
LEAVE_SECONDS = 10
REPLICA_START_SECONDS = 300
CLOSE_SECONDS = 5
PLAIN_WIDTH = 120  # characters a line where the output is no terminal
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stops:
    """Ctrl-C, SIGTERM and a closed terminal end the demo once; further ones must not cut its cleaning up short."""

    def __init__(self) -> None:
        self.signal: int | None = None  # the one that ended the demo

    def watch(self) -> None:
        """Install the handlers again after `ray.init`, which replaces that of SIGTERM."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._stop)

    def _stop(self, number: int, frame: object) -> None:
        for each in STOP_SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        self.signal = number
        raise KeyboardInterrupt  # also what Ray makes of any exception that interrupts its calls


class Steps:
    """A progress bar on a terminal, a line per step elsewhere. `redirect`: what others print appears above the bar."""

    def __init__(self, console: Console, total: int, *, redirect: bool = True) -> None:
        self._console = console
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self._progress = Progress(
            *columns,
            console=console,
            redirect_stdout=redirect,
            redirect_stderr=redirect,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("starting", total=total)

    def __enter__(self) -> Steps:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def begin(self, text: str) -> None:
        self._progress.update(self._task, description=text, advance=1)
        if not self._console.is_terminal:
            self._console.print(f"… {text}", highlight=False)

    def say(self, text: str) -> None:
        self._progress.console.print(text, highlight=False)


def screen() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=PLAIN_WIDTH)


def conclude(console: Console, started: float, saved: Iterable[Path], missing: Sequence[str] = ()) -> None:
    """Say what was saved and how long it took, since `started` by time.perf_counter(). Raises KVServiceError for what
    the demo did not show."""
    for path in saved:
        console.print(f"saved {path}")
    console.print(f"took {time.perf_counter() - started:.0f} s")
    if missing:
        raise KVServiceError(f"the demo did not show what it should: {'; '.join(missing)}")


@contextlib.contextmanager
def performance(console: Console) -> Iterator[tuple[contextlib.ExitStack, Stops]]:
    """Ends everything that was started within, and turns a signal into this process's exit code. Raises KVServiceError
    when a step fails."""
    stops = Stops()
    stops.watch()
    try:
        with offspring_ended(), contextlib.ExitStack() as stack:
            yield stack, stops
    except BaseException as error:
        if stops.signal is not None:
            console.print("stopped; everything that was started is removed")
            raise SystemExit(128 + stops.signal) from None
        raise _readable(error) from error


def _readable(error: BaseException) -> BaseException:
    """What failed in a sentence, for the failures of Ray, of replicas and of the system; others keep their trace."""
    from ray.exceptions import RayError

    if isinstance(error, RayError | OSError | RuntimeError | subprocess.SubprocessError):
        lines = str(error).strip().splitlines() or [""]
        return Unavailable(f"the demo failed: {type(error).__name__}: {lines[-1]}")
    return error


def shipped_document(count: int) -> tuple[str, list[str]]:
    folder = Path(__file__).parents[1] / "documents"
    described = json.loads((folder / "questions.json").read_text())
    return (folder / described["document"]).read_text(), described["questions"][:count]


def prepared_model(given: str | None) -> str:
    if given is not None:
        looks_like_path = given.startswith(("/", ".", "~")) or given.count("/") > 1
        folder = Path(given).expanduser()
        if looks_like_path and not folder.is_dir():
            raise ConfigError(f"--model {given} is no folder; give a model's folder, or its id on the hub")
        return str(folder.resolve()) if folder.is_dir() else given  # a replica runs in a folder of its own
    from examples.prepare_model import ensure_model

    return str(ensure_model())


SERVICE = f"demo-{os.getpid()}"


@dataclass(frozen=True, slots=True)
class TwoNodes:
    """The nodes of Ray, the head first."""

    ids: list[str]
    link: NamespaceLink | None
    reason: str  # there is no link

    @property
    def has_own_network(self) -> bool:
        """Whether the network is private, so that the service may use plaintext on it."""
        return self.link is not None

    def crossing(self) -> Crossing:
        """How blocks came from node to node until now. Raises Unavailable when its shard does not answer."""
        (shard,) = shard_numbers(self.ids[1:])
        return Crossing(shard["transport"], self.link.carried_bytes() if self.link else None, self.reason)


@contextlib.contextmanager
def ray_cluster(stops: Stops, reason: str | None) -> Iterator[TwoNodes]:
    """Two raylets on this machine, with a network between them unless there is a reason that there is none."""
    os.environ["RAY_AUTH_MODE"] = "disabled"  # a cluster of this process only, on loopback or on a network of its own
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_worker_niceness", "0")  # the replicas are the work here, not a background job
    with contextlib.nullcontext() if reason else two_namespaces() as link:
        if link is not None:
            os.environ["UCX_TLS"] = "tcp"  # in one machine's memory it would find a way beside the network
        with _raylets(stops, link) as ids:
            yield TwoNodes(ids, link, reason or "")


@contextlib.contextmanager
def _raylets(stops: Stops, link: NamespaceLink | None) -> Iterator[list[str]]:
    import ray
    from ray.cluster_utils import Cluster

    logging.getLogger("ray").setLevel(logging.ERROR)

    from kvservice.actors import deploy
    from kvservice.actors.leftovers import remove_leftovers

    settings: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 100 * MiB, "include_dashboard": False}
    at: dict[str, Any] = {"node_ip_address": HERE} if link else {}
    cluster = Cluster(initialize_head=True, head_node_args={**settings, **at, "resources": {"demo_a": 1}})
    try:
        with contextlib.ExitStack() as stack:
            if link is None:
                cluster.add_node(**settings, resources={"demo_b": 1})
            deploy.connect(cluster.address)
            stops.watch()
            if link is not None:
                stack.enter_context(_raylet_over_there(link, cluster.address, settings))
            marks = ("demo_a", "demo_b")
            by_mark = {mark: n["NodeID"] for n in ray.nodes() for mark in marks if mark in n["Resources"]}
            if len(by_mark) != 2:
                raise Unavailable(f"Ray has {len(ray.nodes())} nodes, the demo needs two")
            yield [by_mark[mark] for mark in marks]
    finally:
        ray.shutdown()
        cluster.shutdown()
        remove_leftovers(SERVICE, [])  # of shards that the end of the cluster has cut short


@contextlib.contextmanager
def _raylet_over_there(link: NamespaceLink, head: str, settings: dict[str, Any]) -> Iterator[None]:
    """Start a node that joins the head at the other end of the link."""
    import ray

    command = [
        "setpriv",
        "--pdeathsig",
        "KILL",  # with this process; what it started ends with it
        *link.over_there,
        str(Path(sys.executable).with_name("ray")),
        "start",
        "--block",
        f"--address={head}",
        f"--node-ip-address={THERE}",
        f"--num-cpus={settings['num_cpus']}",
        f"--object-store-memory={settings['object_store_memory']}",
        f"--resources={json.dumps({'demo_b': 1})}",
    ]
    with tempfile.TemporaryFile("w+") as output:
        node = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            deadline = time.monotonic() + JOIN_SECONDS
            while sum(one["Alive"] for one in ray.nodes()) < 2:
                if node.poll() is not None or time.monotonic() > deadline:
                    output.seek(0)
                    raise Unavailable(f"the second Ray node did not join: {output.read()[-500:]}")
                time.sleep(0.1)
            yield
        finally:
            node.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):  # then it is killed with all others
                node.wait(LEAVE_SECONDS)


@contextlib.contextmanager
def cache_service(step: Any, cluster: TwoNodes) -> Iterator[list[str]]:
    """The service on both nodes; yields the socket of each node's shard, in the order of the nodes."""
    import ray

    from kvservice.actors import deploy, names
    from kvservice.config import ServiceConfig
    from kvservice.discovery import find_shards

    step("starting the cache service")
    # In one machine's memory the shards would map each other, beside the network.
    way: Literal["auto", "nixl"] = "nixl" if cluster.has_own_network else "auto"
    config = ServiceConfig(
        service=SERVICE, pool_bytes=POOL_BYTES, allow_plaintext=cluster.has_own_network, transport=way
    )
    handle = deploy.up(config)
    try:
        handle.wait_complete()
        by_node = {record.node_id: record.socket for record in find_shards(SERVICE)}
        yield [by_node[names.node_id(node)] for node in cluster.ids]
    finally:
        with contextlib.suppress(KVServiceError, ray.exceptions.RayError):  # the cluster may be what failed
            deploy.down(SERVICE)


def running_replica(
    model: str, ray_node: str, socket: str | None, role: str = "kv_both", batch_tokens: int | None = None
) -> contextlib.AbstractContextManager[Any]:
    """Start a replica, which begins to load. It is killed at the end."""
    return running_actor(DemoReplica, ray_node, model, socket, role, batch_tokens, environment=ENVIRONMENT)


@contextlib.contextmanager
def running_actor(
    kind: type, ray_node: str, model: str, *others: object, environment: Mapping[str, str] | None = None
) -> Iterator[Any]:
    """Start `kind(model, *others)` as an actor on this node of Ray. It is closed and killed at the end."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    variables = {**(environment or {}), "OMP_NUM_THREADS": str(os.cpu_count() or 1)}
    if Path(model).exists():
        variables["HF_HUB_OFFLINE"] = "1"
    actor = ray.remote(num_cpus=1, max_restarts=0)(kind).options(
        scheduling_strategy=NodeAffinitySchedulingStrategy(ray_node, soft=False),
        runtime_env={"env_vars": variables},
    )
    handle = actor.remote(model, *others)
    try:
        yield handle
    finally:
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(handle.close.remote(), timeout=CLOSE_SECONDS)
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(handle)


def wait_ready(*replicas: Any) -> None:
    import ray

    try:
        ray.get([replica.ready.remote() for replica in replicas], timeout=REPLICA_START_SECONDS)
    except ray.exceptions.RayError as error:
        reason = str(error).strip().splitlines()[-1]
        raise Unavailable(f"a replica did not start: {reason}") from error


def shard_numbers(ray_nodes: list[str]) -> list[dict[str, Any]]:
    """What `status` knows of the shards of these nodes, in their order. Raises Unavailable when one does not answer."""
    from kvservice.actors import names
    from kvservice.cli.status import collect
    from kvservice.client.overview import as_json

    found = {node["node_id"]: node for node in as_json(collect(SERVICE))["nodes"] if not node["error"]}
    try:
        return [found[names.node_id(node)] for node in ray_nodes]
    except KeyError as error:
        raise Unavailable(f"the shard of node {error} does not answer") from error
