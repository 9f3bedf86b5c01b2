"""`kvservice up` and `down`, with Ray and without."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from kvservice.errors import Unavailable

RAY_START_SECONDS = 60.0
RAY_STOP_SECONDS = 30.0


def up(config: Any, address: str | None) -> None:
    """Start or find the service on a Ray cluster and wait until it is complete."""
    from kvservice.actors import deploy

    console = Console(stderr=True)
    _connect_or_start(config.service, address, console)
    with console.status("starting") as progress:
        handle = deploy.up(config)

        def tell(state: dict[str, Any]) -> None:
            progress.update(
                f"{len(state['lookups'])} of {config.lookup_shards} lookup shards, "
                f"{len(state['shards'])} of {len(state['nodes'])} cache shards"
            )

        state = handle.wait_complete(on_progress=tell)
    console.print(
        f"service '{config.service}' runs: {len(state['shards'])} cache shards, {len(state['lookups'])} lookup shards. "
        "Engines on these nodes find it by themselves; see `kvservice status`."
    )


def down(service: str, address: str | None) -> bool:
    """Stop the service. False when there is none."""
    from kvservice.actors import deploy

    console = Console(stderr=True)
    head = _head_record(service)
    try:
        deploy.connect(address or _recorded_address(head))
        found = deploy.down(service)
    except Unavailable as error:
        if not head.exists():
            console.print(f"no service '{service}': {error.message}")
            return False
        found = True
    _stop_head(head)
    console.print(f"service '{service}' is down" if found else f"there is no service '{service}' on this Ray cluster")
    return found


def run_foreground(config: Any) -> None:
    """One node: lookup shard and cache shard in this process until Ctrl-C or SIGTERM."""
    asyncio.run(_foreground(config))


async def _foreground(config: Any) -> None:
    from kvservice.lookup.server import LookupServer
    from kvservice.shard.server import ShardServer, ShardServerConfig
    from kvservice.units import NodeId

    console = Console(stderr=True)
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    lookup = LookupServer("127.0.0.1:0")
    port = await lookup.start()
    shard = ShardServer(
        ShardServerConfig(
            service=config.service,
            node_id=NodeId("local"),
            pool_bytes=config.pool_bytes,
            lookup_addresses=(f"127.0.0.1:{port}",),
            lease_seconds=config.lease_seconds,
            heartbeat_seconds=config.heartbeat_seconds,
            transport=config.transport,
            slab_bytes=config.slab_bytes or None,
        )
    )
    try:
        await shard.start()
        console.print(f"service '{config.service}' runs on this machine; Ctrl-C stops it")
        await stopped.wait()
    finally:
        await shard.stop()
        await lookup.stop()


def _connect_or_start(service: str, address: str | None, console: Console) -> None:
    from kvservice.actors import deploy

    if address or os.environ.get("RAY_ADDRESS"):
        deploy.connect(address)
        return
    try:
        deploy.connect(_recorded_address(_head_record(service)))
    except Unavailable:
        console.print("no Ray cluster on this machine: starting a local one; `kvservice down` stops it again")
        deploy.connect(_start_head(service))


def _start_head(service: str) -> str:
    """`ray start --head` in a session of its own; its address."""
    from kvservice.client.discovery import ensure_private_directory

    record = _head_record(service)
    ensure_private_directory(record.parent)
    ray = shutil.which("ray", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if ray is None:
        raise Unavailable("the `ray` command is not installed: pip install 'kvservice[ray]', or use --no-ray")
    environment = {**os.environ, "RAY_AUTH_MODE": os.environ.get("RAY_AUTH_MODE", "disabled")}
    environment.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with record.with_suffix(".log").open("wb") as log:
        process = subprocess.Popen(
            [ray, "start", "--head", "--block", "--port=0", "--include-dashboard=false", "--disable-usage-stats"],
            stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=environment,
        )  # fmt: skip
    deadline = time.monotonic() + RAY_START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        text = record.with_suffix(".log").read_text(errors="replace")
        found = [
            word.strip("'\"") for line in text.splitlines() if "--address=" in line for word in line.split("=")[1:]
        ]
        if found:
            address = found[0].strip("'\" ")
            record.write_text(json.dumps({"pid": process.pid, "address": address}))
            return address
        time.sleep(0.2)
    process.kill()
    raise Unavailable(f"a local Ray did not start; its words are in {record.with_suffix('.log')}")


def _stop_head(record: Path) -> None:
    """End the Ray that `up` started, if it did."""
    if not record.exists():
        return
    import ray

    ray.shutdown()
    pid = int(json.loads(record.read_text())["pid"])
    try:
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + RAY_STOP_SECONDS
        while time.monotonic() < deadline:
            os.kill(pid, 0)
            time.sleep(0.2)
    except ProcessLookupError:
        pass  # it has ended
    record.unlink(missing_ok=True)
    record.with_suffix(".log").unlink(missing_ok=True)


def _head_record(service: str) -> Path:
    from kvservice.client.discovery import default_runtime_root

    return default_runtime_root() / f"ray-head-{service}.json"


def _recorded_address(record: Path) -> str | None:
    try:
        return str(json.loads(record.read_text())["address"])
    except (OSError, ValueError, KeyError):
        return None
