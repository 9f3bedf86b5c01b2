"""Starts a service on a Ray cluster, finds it again, and takes it down. Runs in a driver; every function blocks."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray._private.services import get_ray_address_from_environment
from ray._raylet import GcsClient  # type: ignore[attr-defined]  # made by Cython
from ray.core.generated.gcs_pb2 import GcsNodeInfo
from ray.exceptions import ActorDiedError, ActorUnavailableError, AuthenticationError, GetTimeoutError, RayError
from ray.util import list_named_actors

from kvservice.actors import names, ray_auth, ray_port
from kvservice.actors.supervisor import STARTING, Supervisor
from kvservice.config import ServiceConfig
from kvservice.errors import ConfigError, ServiceConflict, Unavailable, plaintext_refused
from kvservice.units import endpoint_of

log = logging.getLogger("kvservice.actors")

# For all shards to start. Mapping and touching a large pool takes a minute or two; then Unavailable says what is
# missing.
UP_SECONDS = 180.0
# For one part to stop. A part that takes longer is killed, and the next `up` or `down` removes its files.
STOP_SECONDS = 20.0
POLL_SECONDS = 0.1  # Between two questions. Short beside a start of seconds, long beside a call of milliseconds.
CONNECT_SECONDS = 3.0  # For a TCP connection to the cluster's port. Ray itself would go on trying for minutes.
# If one problem stays this long and nothing is starting any more, waiting ends: the supervisor has looked about six
# times.
STUCK_SECONDS = 6.0
# For one answer of the supervisor, which is quick; after it the call is made again, until MOVE_SECONDS are over.
ANSWER_SECONDS = 30.0
# For a supervisor that does not answer. Ray needs seconds to notice that a node is gone and to start an actor
# elsewhere. Then Unavailable is raised.
MOVE_SECONDS = 30.0
# Ray repeats a call that was under way when the supervisor died. Otherwise Ray says of each death that it is for good,
# once the supervisor has left a node that Ray took away.
SUPERVISOR: dict[str, Any] = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1, "max_concurrency": 8}


@dataclass(frozen=True, slots=True)
class ServiceHandle:
    """A running service. Any driver of its Ray cluster can have a handle."""

    service: str
    supervisor: Any  # Ray actor handle
    started: bool = False  # by the call of `up` that returned this handle

    def describe(self) -> dict[str, Any]:
        """What runs where; see Supervisor.describe. Blocks for one actor call, or longer while Ray moves the
        supervisor."""
        found: dict[str, Any] = _ask(self.supervisor.describe)
        return found

    def config(self) -> dict[str, Any]:
        """The settings that the service runs with, as the fields of a ServiceConfig. Blocks as `describe` does."""
        found: dict[str, Any] = _ask(self.supervisor.config)
        return found

    def lookup_addresses(self) -> tuple[str, ...]:
        """The addresses of the lookup partitions, () while not all are known. Blocks as `describe` does."""
        return tuple(_ask(self.supervisor.lookup_addresses))

    def wait_complete(
        self, seconds: float = UP_SECONDS, on_progress: Callable[[dict[str, Any]], None] | None = None
    ) -> dict[str, Any]:
        """Block until every node has its shard. Raises Unavailable that names what is missing and why; it does so early
        if the same problem stays and nothing is starting any more."""
        started = changed = time.monotonic()
        problems: dict[str, str] = {}
        while True:
            state = self.describe()
            if on_progress is not None:
                on_progress(state)
            if state["complete"]:
                return state
            now = time.monotonic()
            if state["problems"] != problems or not problems or STARTING in problems.values():
                problems, changed = state["problems"], now
            if now - started > seconds or now - changed > STUCK_SECONDS:
                reasons = "; ".join(f"{what}: {why}" for what, why in state["problems"].items())
                running = sum(row["running"] for row in state["shards"])
                raise Unavailable(
                    f"service {self.service!r} is not complete after {now - started:.0f} s: {running} of "
                    f"{len(state['nodes'])} shards run. {reasons or 'No part reported a problem'}"
                )
            time.sleep(POLL_SECONDS)


def up(config: ServiceConfig) -> ServiceHandle:
    """Start the service on the connected Ray cluster, or find it if it runs with the same settings.

    Nodes whose shards were drained get a shard again. Returns before every shard is up; see
    `ServiceHandle.wait_complete`. The handle says whether this call has started it.

    Raises:
        Unavailable: its supervisor cannot start or does not answer, or somebody takes it down meanwhile.
        ServiceConflict: a service of this name runs with other settings.
        ConfigError: the service would be plaintext between machines; nothing is started.
    """
    found = find(config.service)
    if found is None:
        _check_listeners(config)
        found = _start(config)
    try:
        _take_up(found, config)
    except BaseException:
        if found.started:
            down(config.service, keep_blocks=True)
        raise
    return found


def _start(config: ServiceConfig) -> ServiceHandle:
    options = {"name": names.SUPERVISOR, "namespace": names.namespace(config.service), "lifetime": "detached"}
    kind = ray.remote(**SUPERVISOR)(Supervisor)
    try:
        return ServiceHandle(config.service, kind.options(**options).remote(config), started=True)
    except ValueError:  # somebody else starts it at the same moment
        found = find(config.service)
        if found is None:
            raise Unavailable(f"service {config.service!r} was taken down while it started; try again") from None
        return found


def _take_up(found: ServiceHandle, config: ServiceConfig) -> None:
    running = _ask(found.supervisor.config)
    wanted = config.model_dump()
    if running != wanted:
        changed = ", ".join(
            f"{k}: it runs with {running[k]!r}, you asked for {wanted[k]!r}" for k in wanted if running[k] != wanted[k]
        )
        raise ServiceConflict(
            f"a service named {config.service!r} runs on this cluster with other settings ({changed}): take it down "
            "first with `kvservice down`, or choose another --service name"
        )
    _ask(found.supervisor.readmit)


def _check_listeners(config: ServiceConfig) -> None:
    machines = sorted({node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]})
    if len(machines) > 1 and not config.tls_dir and not config.allow_plaintext:
        raise plaintext_refused(
            f"this Ray cluster has {len(machines)} machines ({', '.join(machines[:4])}), and the service between them "
            "would be plaintext"
        )


def find(service: str) -> ServiceHandle | None:
    """The running service of this name, or None. Blocks for a call to Ray's control plane."""
    try:
        return ServiceHandle(service, ray.get_actor(names.SUPERVISOR, namespace=names.namespace(service)))
    except ValueError:
        return None


def down(service: str, *, keep_blocks: bool = False) -> bool:
    """Stop every part of the service and remove all its files, with `keep_blocks` not those of disk tiers. Blocks.
    Returns False if there was no such service.

    It works from the named actors and not from what the supervisor knows, because that may just have been restarted.
    """
    handle = find(service)
    parts = [name for name in _named(service) if name != names.SUPERVISOR]
    if handle is None and not parts:
        return False
    try:
        if handle is not None:
            _ask(handle.supervisor.stop)
            parts = [name for name in _named(service) if name != names.SUPERVISOR]
    except (RayError, Unavailable) as error:
        log.warning("supervisor_silent", extra={"service": service, "error": str(error)})
    finally:
        if handle is not None:
            ray.kill(handle.supervisor, no_restart=True)
    workers = [name for name in parts if name.startswith(names.GPU_WORKER)]
    shards = [name for name in parts if name.startswith(names.shard(""))]
    # Copy workers stop first, because they use the shards' memory. Shards stop before the lookup partitions, because
    # they tell them that they leave.
    _stop(service, workers)
    _stop(service, shards, keep_blocks=keep_blocks)
    _stop(service, [name for name in parts if name not in {*workers, *shards}])
    return True


def _ask(method: Any) -> Any:
    """Call the supervisor. Repeats the call while the supervisor is being restarted, maybe on another node."""
    deadline = time.monotonic() + MOVE_SECONDS
    while True:
        try:
            return ray.get(method.remote(), timeout=ANSWER_SECONDS)
        except (ActorUnavailableError, GetTimeoutError) as error:
            if time.monotonic() > deadline:
                raise Unavailable(f"the service's supervisor does not answer: {error}") from error
            time.sleep(POLL_SECONDS)
        except ActorDiedError as error:  # Ray restarts a supervisor for ever, unless `down` has ended it
            if error.actor_init_failed:
                reason = str(error).strip().splitlines()[-1]
                raise Unavailable(f"the service's supervisor cannot start: {reason}") from error
            raise Unavailable("the service was taken down meanwhile") from error


def _named(service: str) -> list[str]:
    rows: list[Any] = list_named_actors(all_namespaces=True)
    return [row["name"] for row in rows if row["namespace"] == names.namespace(service)]


def _stop(service: str, parts: list[str], **how: bool) -> None:
    handles: list[Any] = []
    for part in parts:
        with contextlib.suppress(ValueError):  # the actor is gone meanwhile
            handles.append(ray.get_actor(part, namespace=names.namespace(service)))
    calls = [handle.stop.remote(**how) for handle in handles]
    if calls:
        ray.wait(calls, num_returns=len(calls), timeout=STOP_SECONDS)
    for handle in handles:
        ray.kill(handle, no_restart=True)


def connect(address: str | None) -> None:
    """Join a Ray cluster as a driver. If `address` is None, RAY_ADDRESS counts, then the cluster of this machine.
    Blocks.

    Raises:
        Unavailable: there is no cluster.
        ConfigError: there is one, but it refuses this process's token, wants other TLS, has lost its nodes, or does
            not answer.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if ray.is_initialized():
        return
    try:
        # Ray would take the same address, but go on trying for minutes if nothing listens there.
        wanted = get_ray_address_from_environment(address or "auto", None) if address in (None, "auto") else address
    except ConnectionError as error:
        raise Unavailable(f"no Ray cluster on this machine: {error}") from error
    endpoint = endpoint_of(wanted)
    ray_auth.prepare(None if endpoint is None else wanted)
    listens = endpoint is not None and _listens(*endpoint)
    if endpoint is not None and not listens:
        raise Unavailable(f"no Ray cluster at {wanted}: nothing listens there")
    if endpoint is not None:
        ray_port.check_answers(*endpoint)
    try:
        ray.init(address=wanted, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RayError, RuntimeError, ValueError) as error:
        if listens or isinstance(error, AuthenticationError):
            raise ConfigError(f"a Ray cluster answers at {wanted}, but {_why_not_joined(wanted, error)}") from error
        raise Unavailable(f"no Ray cluster at {wanted}: {error}") from error


def _why_not_joined(address: str, error: Exception) -> str:
    """Ray's own error names neither a token that is wrong nor nodes that are gone: its control plane knows both."""
    try:
        if isinstance(error, AuthenticationError):
            raise error
        nodes = GcsClient(address=address).get_all_node_info(timeout=ray_port.ANSWER_SECONDS)
    except AuthenticationError:
        return (
            f"refuses this process with {ray_auth.MODE}={os.environ[ray_auth.MODE]}: set it to the mode that the "
            f"cluster was started with, and name the token in {ray_auth.TOKEN_PATH}. Ray says: {error}"
        )
    except RayError:  # it went away meanwhile
        pass
    else:
        if not any(node.state == GcsNodeInfo.ALIVE for node in nodes.values()):
            return "all its nodes are gone: end what is left of it with `ray stop`, or start a node"
    return f"this process cannot join it. Ray says: {error}"


def _listens(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), CONNECT_SECONDS):
            return True
    except OSError:
        return False
