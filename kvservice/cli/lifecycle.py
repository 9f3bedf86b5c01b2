"""`kvservice up` and `kvservice down`, with Ray and without."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import typer

from kvservice.cli.extras import how_to_install
from kvservice.cli.progress import Progress
from kvservice.errors import ConfigError, NoService, ServiceConflict, Unavailable
from kvservice.units import counted, format_bytes

LOOPBACK = "127.0.0.1"
ALONE = "local"  # the node's id of a service in the foreground
# For `ray start --head`, which takes seconds; on a busy machine tens of seconds. Then `up` fails and names the log.
RAY_START_SECONDS = 60.0
RAY_STOP_SECONDS = 30.0  # For a Ray that this command started to end. Then its processes are killed.
# The command `ray` without the commands of Ray Serve: to import them takes a second where it is installed.
_RAY = """import os, sys
if not sys.stdin.readline(): sys.exit("nobody knows of this Ray, so it does not start")
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
sys.path = [path for path in sys.path if path]  # without the folder that it is called in, as for the command
sys.modules["ray.serve.scripts"] = None
from ray.scripts.scripts import main
main()"""
_RAY_DEFAULTS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # by default its workers get the least of the processor, but engines wait for ours
    # Ray's ten seconds for a process that does not listen yet, in smaller steps: one comes too early at most starts.
    "RAY_raylet_client_num_connect_attempts": "200",
    "RAY_raylet_client_connect_timeout_milliseconds": "50",
}
_ADDRESS = re.compile(r"--address=['\"]?([^'\"\s]+:\d+)")


def up(config: Any, address: str | None) -> None:
    """Start the service on a Ray cluster, or find it, and wait until it is complete. If this fails, what this call
    started is stopped again. Blocks."""
    from kvservice.observe import logs

    try:
        from kvservice.actors import deploy, ray_auth
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"`kvservice up` starts the service on Ray, which is not installed; use --no-ray. {how_to_install('ray')}"
        ) from error

    logs.configure(level=logging.WARNING)
    started_ray = _connect_or_start(config.service, address)
    _tell_of_access(config.service, started=started_ray)
    handle: deploy.ServiceHandle | None = None
    try:
        if not started_ray and deploy.find(config.service) is not None:
            _say(f"service '{config.service}' runs already")
        with Progress("starting") as progress:
            progress.update("the supervisor")
            handle = deploy.up(config)

            def tell(state: dict[str, Any]) -> None:
                parts = (len(state["lookup_partitions"]), len(state["shards"]))
                wanted = (config.lookup_partitions, len(state["nodes"]))
                progress.update(
                    f"{parts[0]} of {wanted[0]} lookup partitions, {parts[1]} of {wanted[1]} cache shards, "
                    f"{format_bytes(config.pool_bytes)} each",
                    sum(parts),
                    sum(wanted),
                )

            state = handle.wait_complete(on_progress=tell)
    except BaseException:
        if started_ray or (handle is not None and handle.started):
            _say("the service is not complete; stopping what was started")
            deploy.down(config.service, keep_blocks=True)
        if started_ray:
            _stop_head(ray_auth.head_record(config.service))
        raise
    _say(
        f"service '{config.service}' runs: {counted(len(state['shards']), 'cache shard')} of "
        f"{format_bytes(config.pool_bytes)} in /dev/shm, {counted(len(state['lookup_partitions']), 'lookup partition')}"
        ". Engines on these nodes find it by themselves; see `kvservice status`."
    )
    _tell_where(config)
    if not config.tls_dir and not config.allow_plaintext:
        _say(
            "There are no certificates, so it listens on Unix sockets. Machines that join later get no shard until it "
            "is started with KVSERVICE_TLS_DIR (`kvservice certs DIR`)."
        )


def _say(text: str) -> None:
    """Print it to stderr, as it is: it has paths and words of others, which are no markup."""
    typer.echo(text, err=True)


def _tell_where(config: Any) -> None:
    """Say where the logs of this machine's shards are, and whether there are metrics."""
    from kvservice.discovery import find_shards

    for record in find_shards(config.service, config.runtime_root):
        if record.log:
            _say(f"logs of node {record.node_id}: {record.log} (`kvservice logs`)")
    port = config.metrics_port
    _say(f"metrics: port {port} of each node" if port else "metrics: off; --metrics-port turns them on")


def down(service: str, address: str | None, *, keep_blocks: bool = False, disk_path: str = "") -> None:
    """Stop the service, and remove what earlier ones left on this machine; with `keep_blocks` not the blocks of its
    disk tiers, nor the memory of nodes without Ray. `disk_path`: of this machine, as far as it is known here. Blocks.
    Raises NoService if there was neither, Unavailable if processes run that were started without Ray; they must be
    ended where they were started."""
    from kvservice.actors.leftovers import is_running, remove_dead, remove_leftovers
    from kvservice.client.members import services_here
    from kvservice.discovery import find_shards
    from kvservice.observe import logs

    logs.configure(level=logging.WARNING)
    # A Ray of somebody else that does not answer would keep this waiting for minutes.
    on_ray = address is not None or not _is_without_ray(service)
    found, stopped, no_ray = _stop_on_ray(service, address, keep_blocks=keep_blocks) if on_ray else (False, False, "")
    alone = [] if stopped else [record for record in find_shards(service, live_only=False) if is_running(record)]
    if no_ray and not alone:
        _say(no_ray)
    removed, owned = remove_dead(service, [record.node_id for record in alone], keep_memory=keep_blocks)
    removed += [] if alone else remove_leftovers(service, [])
    for path in removed:
        _say(f"removed {path}, which an earlier service left behind")
    if alone:
        processes = ", ".join(f"node {record.node_id} as pid {record.pid}" for record in alone)
        pids = " ".join(str(record.pid) for record in alone)
        raise Unavailable(
            f"service {service!r} runs without Ray on this machine: {processes}. End it with Ctrl-C where it was "
            f"started, or with `kill {pids}`"
        )
    if owned and not stopped:
        raise Unavailable(f"service {service!r} is starting or ending: a process has {owned[0]}; try again in a moment")
    if disk_path and not keep_blocks:
        removed += _remove_blocks(Path(disk_path) / service)
    found = found or bool(removed)
    others = services_here()
    there = f"; there is {', '.join(others)}; name it with --service" if others else ""
    if not found:
        raise NoService(f"there is no service '{service}'{there}")
    _say(f"service '{service}' is down")


def _remove_blocks(folder: Path) -> list[Path]:
    """Remove what disk tiers of the service left in this folder. Returns the folders of their nodes."""
    from kvservice.tier.block_files import LOCK_NAME, remove_blocks

    removed = [node for node in sorted(folder.glob("*")) if (node / LOCK_NAME).exists()]
    for node in removed:
        _say(f"removed {counted(remove_blocks(node), 'block')} on disk from {node}")
    with contextlib.suppress(OSError):  # it is not there, or holds something else
        folder.rmdir()
    return removed


def _is_without_ray(service: str) -> bool:
    """Whether this machine knows shards of the service, running, killed or with memory that they keep, and none of
    them is one of Ray."""
    from kvservice.actors import ray_auth
    from kvservice.actors.leftovers import is_ray_node
    from kvservice.discovery import find_shards, kept_memory

    if ray_auth.head_record(service).exists():
        return False
    known = [*(record.node_id for record in find_shards(service, live_only=False)), *kept_memory(service)]
    return bool(known) and not any(is_ray_node(node) for node in known)


def _stop_on_ray(service: str, address: str | None, *, keep_blocks: bool) -> tuple[bool, bool, str]:
    """Stop the service's actors, and the Ray cluster that `up` started. Returns whether there was anything, whether
    actors were stopped, and why Ray was not asked."""
    try:
        from kvservice.actors import deploy, ray_auth
    except ModuleNotFoundError:
        return False, False, ""
    head = ray_auth.head_record(service)
    found, stopped, no_ray = head.exists(), False, ""
    if found and address is None and _recorded_address(head) is None:  # `up` was killed before anything could join it
        _stop_head(head)
        return found, stopped, no_ray
    try:
        with Progress("stopping") as progress:
            progress.update(f"service '{service}'")
            deploy.connect(address or _recorded_address(head))
            stopped = deploy.down(service, keep_blocks=keep_blocks)
    except Unavailable as error:
        no_ray = error.message
    _stop_head(head)
    return found or stopped, stopped, no_ray


def run_foreground(config: Any) -> None:
    """Run one node in this process: a lookup partition and a cache shard. Blocks until Ctrl-C, SIGTERM or a
    closed terminal."""
    from kvservice.observe import logs

    logs.configure()
    asyncio.run(_foreground(config))


async def _foreground(config: Any) -> None:
    from kvservice.signals import EndSignals

    asked = EndSignals()  # before what takes a second to load, or Ctrl-C would cancel the start half-way
    from kvservice.cli.processes import address_of_lookup, lookup_server
    from kvservice.observe import tracing
    from kvservice.observe.endpoint import on_loop
    from kvservice.observe.lookup_metrics import LookupCollector
    from kvservice.shard.process import serve_until_asked
    from kvservice.shard.server_config import ShardServerConfig
    from kvservice.units import NodeId

    lookup = lookup_server(config, address_of_lookup(config, 0, LOOPBACK, config.lookup_port))
    await asyncio.sleep(0)  # lets a signal be heard
    if asked.to_end.is_set():
        return
    tracing.start(config.traces, "kvservice", service=config.service)

    def tell(_: object) -> None:
        _say(
            f"service '{config.service}' runs on this machine, with {format_bytes(config.pool_bytes)} in /dev/shm; "
            "engines here find it by themselves; see `kvservice status`. Its logs follow; Ctrl-C stops it"
        )

    try:
        try:
            address = await lookup.start()
        except ServiceConflict as error:
            raise ServiceConflict(
                f"service {config.service!r} runs on this machine already: `kvservice status` shows it, and `kvservice "
                "down` says how to end it. For one more choose another --service"
            ) from error
        shard = ShardServerConfig(config, NodeId(ALONE), (address,), peer_host=LOOPBACK)
        numbers = on_loop(asyncio.get_running_loop(), lookup.numbers)
        await serve_until_asked(shard, asked, tell, [LookupCollector(config.service, numbers)])
    finally:
        await lookup.stop()
        await asyncio.to_thread(tracing.stop)


def _connect_or_start(service: str, address: str | None) -> bool:
    """Join a cluster, or start one. Returns whether one was started."""
    from kvservice.actors import deploy, ray_auth

    if address or os.environ.get("RAY_ADDRESS"):
        deploy.connect(address)
        return False
    try:
        deploy.connect(_recorded_address(ray_auth.head_record(service)))
    except Unavailable:
        _say("there is no Ray cluster on this machine; starting a local one, which `kvservice down` stops")
        try:
            deploy.connect(_start_head(service))
        except BaseException as error:  # Ctrl-C, too: Ray is in a session of its own and does not hear of it
            _stop_head(ray_auth.head_record(service), keep_log=isinstance(error, Unavailable))
            raise
        return True
    return False


def _start_head(service: str) -> str:
    """Run `ray start --head` in a session of its own. Returns its address. Blocks."""
    from ray.util import get_node_ip_address

    from kvservice.actors import ray_auth
    from kvservice.private_files import make_directory, write_private

    record = ray_auth.head_record(service)
    make_directory(record.parent)
    host = get_node_ip_address()
    auth = ray_auth.of_new_cluster(record.with_suffix(".token"))
    tls_dir = _certificates_for_ray(record.with_suffix(".tls"), host)
    tls = {} if tls_dir is None else ray_auth.tls_variables(tls_dir)
    environment = {**_RAY_DEFAULTS, **os.environ, **auth, **tls}
    words = record.with_suffix(".log")
    with words.open("wb") as log:
        process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                _RAY,
                "start",
                "--head",
                "--block",
                f"--node-ip-address={host}",
                "--port=0",
                "--include-dashboard=false",
                "--disable-usage-stats",
            ],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )
    token_path = auth.get(ray_auth.TOKEN_PATH, "")
    note = {"pid": process.pid, "token_path": token_path, "tls_dir": str(tls_dir or "")}
    write_private(record, json.dumps(note).encode())  # if this process is killed, `down` finds that one
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as waits:
        waits.write(b"\n")  # not before: killed in between, this process would leave a Ray that nothing stops
    deadline = time.monotonic() + RAY_START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        found = _ADDRESS.search(words.read_text(errors="replace"))
        if found is not None:
            write_private(record, json.dumps({**note, "address": found.group(1)}).encode())
            return found.group(1)
        time.sleep(0.02)
    raise Unavailable(f"a local Ray did not start; its output is in {words}")


def _certificates_for_ray(directory: Path, host: str) -> Path | None:
    """The folder of certificates for the new Ray. None if the user has set Ray's TLS, or if certificates cannot be
    made."""
    from kvservice.actors import ray_auth
    from kvservice.cli import certs

    if ray_auth.USE_TLS in os.environ:
        return None
    try:
        certs.for_ray(directory, host)
    except ConfigError as error:
        _say(f"warning: this Ray will have a token, but no TLS: {error.message}")
        return None
    return directory


def _stop_head(record: Path, *, keep_log: bool = False) -> None:
    """Stop the Ray cluster that `up` started, if it did, and remove the files about it."""
    from kvservice.actors import ray_auth

    pid = ray_auth.read_head(record).get("pid")
    if isinstance(pid, int):
        import ray

        ray.shutdown()
        deadline = time.monotonic() + RAY_STOP_SECONDS
        if _is_ray(pid):
            os.kill(pid, signal.SIGTERM)
        while _is_ray(pid) and time.monotonic() < deadline:
            time.sleep(0.2)
    for suffix in (".json", ".token", *(() if keep_log else (".log",))):
        record.with_suffix(suffix).unlink(missing_ok=True)
    shutil.rmtree(record.with_suffix(".tls"), ignore_errors=True)


def _is_ray(pid: int) -> bool:
    """Whether this is the recorded process: not a later one with its number, and not a zombie, whose command line is
    empty."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"start" in words and b"--head" in words


def _tell_of_access(service: str, *, started: bool) -> None:
    from kvservice.actors import ray_auth

    head = ray_auth.read_head(ray_auth.head_record(service))
    token_path, tls_dir = head.get("token_path"), head.get("tls_dir")
    variables = {ray_auth.MODE: "token", ray_auth.TOKEN_PATH: token_path} if token_path else {}
    variables |= ray_auth.tls_variables(Path(str(tls_dir))) if tls_dir else {}
    if started and variables:
        asked = " and ".join(word for word, given in (("a token", token_path), ("TLS", tls_dir)) if given)
        lines = "".join(f"\n  export {name}={value}" for name, value in variables.items())
        _say(f"This Ray asks for {asked}, which kvservice's own commands find. Your programs that join it need{lines}")
    elif not started and not ray_auth.asks_for_token():
        _say(
            "warning: this Ray cluster asks for no token, so anyone who reaches its ports can run code on it; start "
            f"Ray with {ray_auth.MODE}=token and {ray_auth.TOKEN_PATH} on every node (docs/security.md)"
        )


def _recorded_address(record: Path) -> str | None:
    from kvservice.actors import ray_auth

    address = ray_auth.read_head(record).get("address")
    return str(address) if address else None
