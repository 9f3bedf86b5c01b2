"""`kvservice demo`: the main job on one machine. Two Ray nodes, a shard on each, two vLLM replicas, one document.

Whatever happens (Ctrl-C, SIGTERM, a failing step), everything that was started is stopped and removed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

import kvservice
from kvservice.cli.demo.offspring import offspring_ended
from kvservice.cli.demo.replica import ENVIRONMENT, DemoReplica
from kvservice.cli.demo.report import Row, save, show_gain, show_table, show_transfers
from kvservice.errors import ConfigError, KVServiceError, Unavailable
from kvservice.units import MiB

EXAMPLES = Path(kvservice.__file__).parents[1] / "examples"
POOL_BYTES = 768 * MiB
ANSWER_TOKENS = 24
REPLICA_START_SECONDS = 300
ANSWER_SECONDS = 300
SETTLE_SECONDS = 20
CLOSE_SECONDS = 5
PLAIN_WIDTH = 120
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(model: str | None, out: Path, question_count: int) -> None:
    """Raises KVServiceError when a step fails; everything is cleaned up by then."""
    console = Console() if sys.stdout.isatty() else Console(width=PLAIN_WIDTH)
    stops = _Stops()
    stops.watch()
    started = time.perf_counter()
    try:
        with offspring_ended(), contextlib.ExitStack() as stack:
            rows, nodes = _measure(stack, stops, model, question_count, console)
    except BaseException as error:
        if stops.signal is not None:
            console.print("stopped; everything that was started is gone again")
            raise SystemExit(128 + stops.signal) from None
        raise _readable(error) from error
    show_table(rows, console)
    show_gain(rows, console)
    show_transfers(nodes, console)
    equal = _compare(rows, console)
    transport = nodes[0][1]["transport"].upper()
    title = f"one document, two vLLM replicas on two Ray nodes (CPU), blocks cross by {transport}"
    for path in save(rows, nodes, out, title):
        console.print(f"saved {path}")
    console.print(f"took {time.perf_counter() - started:.0f} s")
    remote = [row for row in rows if row.kind == "remote"]
    if not equal or not remote:
        raise KVServiceError("the demo did not show what it should: see the table")


class _Stops:
    """Ctrl-C, SIGTERM and a closed terminal end the demo once; further ones must not cut its cleaning up short."""

    def __init__(self) -> None:
        self.signal: int | None = None  # the one that ended the demo

    def watch(self) -> None:
        """Again after `ray.init`, which takes SIGTERM for itself."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._stop)

    def _stop(self, number: int, frame: object) -> None:
        for each in STOP_SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        self.signal = number
        raise KeyboardInterrupt  # also what Ray makes of any exception that interrupts its calls


def _readable(error: BaseException) -> BaseException:
    """What failed in a sentence, for the failures of Ray, of replicas and of the system; others keep their trace."""
    import subprocess

    from ray.exceptions import RayError

    if isinstance(error, RayError | OSError | RuntimeError | subprocess.SubprocessError):
        lines = str(error).strip().splitlines() or [""]
        return Unavailable(f"the demo failed: {type(error).__name__}: {lines[-1]}")
    return error


def _measure(
    stack: contextlib.ExitStack, stops: _Stops, model: str | None, question_count: int, console: Console
) -> tuple[list[Row], list[tuple[str, dict[str, Any]]]]:
    document, questions = _document(question_count)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    progress = stack.enter_context(Progress(*columns, console=console))
    steps = progress.add_task("starting", total=5 + 4 * len(questions))

    def step(text: str) -> None:
        progress.update(steps, description=text, advance=1)
        if not console.is_terminal:
            console.print(f"… {text}", highlight=False)

    rows: list[Row] = []

    def ask(label: str, replica: Any, number: int, *, with_cache: bool = True) -> None:
        import ray

        step(f"question {number} to {label}")
        prompt = f"{document}\n\n{questions[number - 1]}"
        answer = ray.get(replica.ask.remote(prompt, ANSWER_TOKENS), timeout=ANSWER_SECONDS)
        rows.append(Row.of(number, label, answer, with_cache=with_cache))
        row = rows[-1]
        progress.console.print(
            f"Q{number} {label}: first token after {row.first_token_seconds:.2f} s, {row.computed_tokens:,} tokens "
            f"computed, {row.engine_tokens + row.pool_tokens:,} hit locally, {row.remote_tokens:,} hit remotely",
            highlight=False,
        )

    step("preparing the model")
    folder = _model(model)
    step("starting a Ray cluster of two nodes")
    with _ray_cluster(stops) as ray_nodes, _service(step) as sockets:
        step("loading the model into two replicas, one on each node")
        with _replica(folder, ray_nodes[0], sockets[0]) as a:
            with _replica(folder, ray_nodes[1], sockets[1]) as b:
                _wait_ready(a, b)
                for number in range(1, len(questions) + 1):
                    ask("A", a, number)
                _wait_for_announcements()
                for number in range(1, len(questions) + 1):
                    ask("B", b, number)
                _forget(b)
                ask("B, engine emptied", b, 1)
            nodes = _shard_numbers(ray_nodes)
        step("loading a replica without the cache on B's node")
        with _replica(folder, ray_nodes[1], None) as plain:
            _wait_ready(plain)
            for number in range(1, len(questions) + 1):
                _forget(plain)
                ask("B, cache off", plain, number, with_cache=False)
        step("stopping")
    return rows, nodes


def _compare(rows: list[Row], console: Console) -> bool:
    """Is every answer of B what B says with the cache off?"""
    wanted = {row.question: row for row in rows if row.kind == "recompute"}
    answers = [row for row in rows if row.replica.startswith("B") and row.kind != "recompute"]
    different = [row for row in answers if row.token_ids != wanted[row.question].token_ids]
    for row in different:
        console.print(
            f"[red]different[/]: Q{row.question} {row.replica}: {row.text!r}, without: {wanted[row.question].text!r}"
        )
    if not different:
        console.print(f"all {len(answers)} answers of B equal, token for token, what B says with the cache off")
    return not different


def _document(count: int) -> tuple[str, list[str]]:
    folder = EXAMPLES / "documents"
    if not folder.is_dir():
        raise ConfigError(f"the demo's document is not at {folder}: run the demo from a clone of the repository")
    described = json.loads((folder / "questions.json").read_text())
    return (folder / described["document"]).read_text(), described["questions"][:count]


def _model(given: str | None) -> str:
    if given is not None:
        looks_like_path = given.startswith(("/", ".", "~")) or given.count("/") > 1
        folder = Path(given).expanduser()
        if looks_like_path and not folder.is_dir():
            raise ConfigError(f"--model {given} is no folder; give a model's folder, or its id on the hub")
        return str(folder.resolve()) if folder.is_dir() else given  # a replica runs in a folder of its own
    source = EXAMPLES / "prepare_model.py"
    spec = importlib.util.spec_from_file_location("kvservice_prepare_model", source)
    if spec is None or spec.loader is None or not source.exists():
        raise ConfigError(f"{source} is missing: run the demo from a clone, or give --model")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.ensure_model())


SERVICE = f"demo-{os.getpid()}"


@contextlib.contextmanager
def _ray_cluster(stops: _Stops) -> Iterator[list[str]]:
    """Two raylets on this machine; yields their node ids, head first."""
    os.environ["RAY_AUTH_MODE"] = "disabled"  # a cluster of this process only, on loopback
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_worker_niceness", "0")  # the replicas are the work here, not a background job
    import ray
    from ray.cluster_utils import Cluster

    logging.getLogger("ray").setLevel(logging.ERROR)

    from kvservice.actors import deploy
    from kvservice.actors.leftovers import remove_leftovers

    settings: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 100 * MiB, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={**settings, "resources": {"demo_a": 1}})
    try:
        cluster.add_node(**settings, resources={"demo_b": 1})
        deploy.connect(cluster.address)
        stops.watch()
        by_mark = {mark: n["NodeID"] for n in ray.nodes() for mark in ("demo_a", "demo_b") if mark in n["Resources"]}
        if len(by_mark) != 2:
            raise Unavailable(f"Ray has {len(ray.nodes())} nodes, the demo needs two")
        yield [by_mark["demo_a"], by_mark["demo_b"]]
    finally:
        ray.shutdown()
        cluster.shutdown()
        remove_leftovers(SERVICE, [])  # of shards that the end of the cluster has cut short


@contextlib.contextmanager
def _service(step: Any) -> Iterator[list[str]]:
    """The service on both nodes; yields the socket of each node's shard, in the order of the nodes."""
    import ray

    from kvservice.actors import deploy, names
    from kvservice.client.discovery import find_shards
    from kvservice.config import ServiceConfig

    step("starting the cache service")
    handle = deploy.up(ServiceConfig(service=SERVICE, pool_bytes=POOL_BYTES))
    try:
        handle.wait_complete()
        by_node = {record.node_id: record.socket for record in find_shards(SERVICE)}
        marked = {m: n["NodeID"] for n in ray.nodes() for m in ("demo_a", "demo_b") if m in n["Resources"]}
        yield [by_node[names.node_id(marked[mark])] for mark in ("demo_a", "demo_b")]
    finally:
        with contextlib.suppress(KVServiceError, ray.exceptions.RayError):  # the cluster may be what failed
            deploy.down(SERVICE)


@contextlib.contextmanager
def _replica(model: str, ray_node: str, socket: str | None) -> Iterator[Any]:
    """A replica that starts loading now; killed at the end."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    variables = {**ENVIRONMENT, "OMP_NUM_THREADS": str(os.cpu_count() or 1)}
    if Path(model).exists():
        variables["HF_HUB_OFFLINE"] = "1"
    actor = ray.remote(num_cpus=1, max_restarts=0)(DemoReplica).options(
        scheduling_strategy=NodeAffinitySchedulingStrategy(ray_node, soft=False),
        runtime_env={"env_vars": variables},
    )
    handle = actor.remote(model, socket)
    try:
        yield handle
    finally:
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(handle.close.remote(), timeout=CLOSE_SECONDS)
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(handle)


def _wait_ready(*replicas: Any) -> None:
    import ray

    try:
        ray.get([replica.ready.remote() for replica in replicas], timeout=REPLICA_START_SECONDS)
    except ray.exceptions.RayError as error:
        reason = str(error).strip().splitlines()[-1]
        raise Unavailable(f"a replica did not start: {reason}") from error


def _forget(replica: Any) -> None:
    import ray

    ray.get(replica.forget.remote(), timeout=60)


def _wait_for_announcements() -> None:
    """Until every block that A's shard has sealed is in the directory: seconds at most, usually milliseconds."""
    from kvservice.cli.status import collect

    deadline = time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < deadline:
        state = collect(SERVICE)
        if state is not None:
            sealed = sum(node["slots"].get(name, 0) for node in state["nodes"] for name in ("sealed", "leased"))
            known = sum(lookup["key_count"] for lookup in state["lookups"])
            writing = sum(node["slots"].get("writing", 0) for node in state["nodes"])
            if known >= sealed > 0 and writing < sealed:
                return
        time.sleep(0.2)


def _shard_numbers(ray_nodes: list[str]) -> list[tuple[str, dict[str, Any]]]:
    from kvservice.actors import names
    from kvservice.cli.status import collect

    state = collect(SERVICE)
    found = {} if state is None else {node["node_id"]: node for node in state["nodes"]}
    return [
        (label, found[names.node_id(node)]) for label, node in zip(("A's node", "B's node"), ray_nodes, strict=True)
    ]
