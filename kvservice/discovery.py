"""Finds the shards and copy workers of this machine through small JSON files that they write when they serve.

    <runtime root>/<service>/<node id>/shard.json    {"service", "node_id", "socket", "peer_address", "pid", "epoch",
                                                     "lookup_addresses", "tls_dir", "log", "segment_dir"}
    <runtime root>/<service>/<node id>/shard.sock    Unix socket for the engines: frames, see wire/frames.py
    <runtime root>/<service>/<node id>/rpc.sock      Unix socket for gRPC: commands; without TLS the other shards, too
    <runtime root>/<service>/lookup-<i>.sock         Unix socket of lookup partition i, on one machine without TLS
    <runtime root>/<service>/<node id>/secret        32 bytes that identify the node to others; only its shards read it
    <runtime root>/<service>/<node id>/epoch         the boot epoch of the node's last shard, in decimal digits
    <runtime root>/<service>/<node id>/kept          link to the memory that waits for the node's next start, if any
    <runtime root>/<service>/<node id>/copy-<device>.json, copy-<device>.sock    a copy worker of that node, if any

All these files belong to one user, and no other user may read or write them. A record is stale when no process listens
on its socket; stale records are not returned. Every function blocks for a few file operations, on the calling thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kvservice.errors import ConfigError
from kvservice.private_files import (
    check_directory,
    check_socket_path,
    is_listening,
    make_directory,
    open_own,
    write_private,
)
from kvservice.units import BootEpoch, NodeId

ROOTS_RUNTIME = Path("/run/kvservice")
RECORD_NAME = "shard.json"
SOCKET_NAME = "shard.sock"
RPC_SOCKET_NAME = "rpc.sock"
MIRROR_NAME = "mirror"  # symbolic link to the mirror of the directory, in shared memory
SECRET_NAME = "secret"
EPOCH_NAME = "epoch"
MARKS_NAME = "marks"  # what was cleared
KEPT_NAME = "kept"  # symbolic link to the memory of a shard that has ended and keeps its blocks
KEPT_NAMES = (MARKS_NAME, KEPT_NAME)  # what stays in a node's directory as long as its memory does
OWN_NAMES = (
    SOCKET_NAME,
    RPC_SOCKET_NAME,
    SECRET_NAME,
    EPOCH_NAME,
    MARKS_NAME,
    KEPT_NAME,
    MIRROR_NAME,
)  # a shard's files beside its record
COPY_WORKER_PREFIX = "copy-"
HOW_TO_START = "`kvservice up --no-ray`, or `kvservice up` on Ray"  # what errors tell where no service is
SECRET_BYTES = 32  # 256 bits cannot be guessed. A file of another length is not a secret, and a new one is made.
# Attachment ids are an epoch followed by 20 bits, and must fit into the signed half of 64 bits on the wire: see
# core/shard.py. A larger epoch on disk is ignored, and the shard takes the clock's.
EPOCH_MAX = (1 << 43) - 1
# A record with 64 lookup addresses takes a few KiB. A larger file is not a record and is skipped.
RECORD_BYTES_MAX = 256 << 10
OPTIONAL_TEXTS = ("tls_dir", "log", "segment_dir")  # of a record: left out when they are empty


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """A registered shard, as its record file describes it."""

    service: str
    node_id: NodeId
    socket: str  # path of the Unix socket for engines
    peer_address: str  # gRPC target: host:port, or unix:<path>
    pid: int
    epoch: BootEpoch
    lookup_addresses: tuple[str, ...] = ()  # host:port of every lookup partition, in partition order
    tls_dir: str = ""  # the directory of the shard's certificate; empty = the service has no TLS
    log: str = ""  # the file that has the shard's logs; empty = they go to a terminal, a pipe or a journal
    segment_dir: str = ""  # the folder of the pool, where the memory of a killed shard stays; empty = /dev/shm

    @property
    def rpc_address(self) -> str:
        """Where commands of this machine call the shard."""
        return f"unix:{Path(self.socket).with_name(RPC_SOCKET_NAME)}"


@dataclass(frozen=True, slots=True)
class CopyWorkerRecord:
    """A registered copy worker, as its record file describes it."""

    service: str
    node_id: NodeId
    device: str  # "cpu", or the UUID of a GPU
    socket: str
    pid: int


def default_runtime_root() -> Path:
    """The directory that holds every service's runtime files.

    KVSERVICE_RUNTIME_DIR when it is set; else /run/kvservice for root and the state directory for any other user. It is
    never below /tmp, where any user can create the name first, nor below /run/user, which is deleted when the user logs
    out. Raises ConfigError for a user without a home directory.
    """
    named = os.environ.get("KVSERVICE_RUNTIME_DIR")
    if named:
        return Path(named)
    if os.geteuid() == 0:
        return ROOTS_RUNTIME
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    if state.is_absolute():
        return state / "kvservice"
    try:
        return Path.home() / ".local/state/kvservice"
    except RuntimeError as error:
        raise ConfigError(f"{error}: set KVSERVICE_RUNTIME_DIR", key="runtime_dir") from error


def node_directory(service: str, node_id: NodeId, runtime_root: Path | None = None) -> Path:
    return (runtime_root or default_runtime_root()) / service / node_id


def shard_socket(service: str, node_id: NodeId, runtime_root: Path | None = None) -> str:
    """Where this node's engines reach their shard. Raises ConfigError when the path is too long."""
    return _socket(node_directory(service, node_id, runtime_root) / SOCKET_NAME)


def rpc_socket(service: str, node_id: NodeId, runtime_root: Path | None = None) -> str:
    """Where the commands of this machine reach a shard, and when the service has no TLS its other shards. Raises
    ConfigError when the path is too long."""
    return _socket(node_directory(service, node_id, runtime_root) / RPC_SOCKET_NAME)


def lookup_socket(service: str, partition: int, runtime_root: Path | None) -> str:
    """Where a lookup partition of this machine is reached, when the service has no TLS. Raises ConfigError."""
    return _socket((runtime_root or default_runtime_root()) / service / f"lookup-{partition}.sock")


def lookup_address(
    service: str, partition: int, runtime_root: Path | None, host: str, port: int, *, tls: bool, allow_plaintext: bool
) -> str:
    """Where a lookup partition with this host and port listens and is called: see `local_or_tcp`."""
    path = lookup_socket(service, partition, runtime_root)
    from kvservice.auth.tls import local_or_tcp  # loads gRPC, which a copy worker does not need to find its node

    return local_or_tcp(host, port, path, tls=tls, allow_plaintext=allow_plaintext)


def _socket(path: Path) -> str:
    check_socket_path(str(path))
    return str(path)


def node_secret(directory: Path) -> bytes:
    """The secret that proves this node is the owner of its name.

    It is made at the node's first start and kept in its directory, which must be private. Raises ConfigError when it
    cannot be read or written.
    """
    path = directory / SECRET_NAME
    try:
        known = path.read_bytes() if path.exists() else b""
        if len(known) == SECRET_BYTES:
            return known
    except OSError as error:
        raise ConfigError(f"cannot keep the node's secret in {path}: {error.strerror}") from error
    made = secrets.token_bytes(SECRET_BYTES)
    keep_secret(directory, made)
    return made


def _write(path: Path, data: bytes, what: str) -> None:
    """Raises ConfigError with the text "cannot `what` in PATH"."""
    try:
        write_private(path, data)
    except OSError as error:
        raise ConfigError(f"cannot {what} in {path}: {error.strerror}") from error


def keep_secret(directory: Path, secret: bytes) -> None:
    """Write the node's secret. Raises ConfigError when it cannot be written."""
    _write(directory / SECRET_NAME, secret, "keep the node's secret")


def last_epoch(directory: Path) -> int:
    """The boot epoch of the node's last shard, or 0 when its directory has no valid one."""
    try:
        found = int((directory / EPOCH_NAME).read_bytes()[:32])
    except (OSError, ValueError):
        return 0
    return found if 0 < found <= EPOCH_MAX else 0


def keep_epoch(directory: Path, epoch: BootEpoch) -> None:
    """Write the node's boot epoch. Raises ConfigError when it cannot be written."""
    _write(directory / EPOCH_NAME, str(epoch).encode(), "keep the node's boot epoch")


def name_kept_memory(directory: Path, segment: Path) -> None:
    """Note in a node's directory where its memory waits, because no record of the node says it any more. Without the
    directory nothing is noted, and `kvservice down` looks in /dev/shm."""
    link = directory / KEPT_NAME
    with contextlib.suppress(FileNotFoundError):
        link.unlink(missing_ok=True)
        link.symlink_to(segment)


def kept_memory(service: str, runtime_root: Path | None = None) -> dict[NodeId, Path]:
    """Where the memory of nodes waits whose shards have ended in order."""
    found = sorted((runtime_root or default_runtime_root()).glob(f"{service}/*/{KEPT_NAME}"))
    return {NodeId(path.parent.name): path.readlink() for path in found if path.is_symlink()}


def write_record(record: ShardRecord, runtime_root: Path | None = None) -> Path:
    """Register a shard atomically. Returns the path of the record; the shard removes it when it stops.

    Raises ConfigError when the record cannot be written.
    """
    directory = node_directory(record.service, record.node_id, runtime_root)
    make_directory(directory)
    target = directory / RECORD_NAME
    fields = asdict(record)
    for name in OPTIONAL_TEXTS:
        if not fields[name]:  # the reader takes a missing field as an empty one
            del fields[name]
    _write(target, json.dumps(fields).encode(), "register the shard")
    return target


def own_log() -> str:
    """The file that has what this process logs: its standard error, if that is a file. Else an empty text."""
    try:
        target = str(Path("/proc/self/fd/2").readlink())
    except OSError:
        return ""
    return target if Path(target).is_file() else ""


def find_shards(
    service: str | None = None, runtime_root: Path | None = None, *, live_only: bool = True
) -> list[ShardRecord]:
    """Registered shards of this machine, sorted by service and node.

    With `live_only` each record costs one connection attempt, which blocks for a second at most. Raises ConfigError,
    with the name of the user, when another user could have written a record.
    """
    found: list[ShardRecord] = []
    root = runtime_root or default_runtime_root()
    check_directory(root)
    for path in sorted(root.glob(f"{service or '*'}/*/{RECORD_NAME}")):
        check_directory(path.parent)
        fields = _read_fields(path)
        record = None if fields is None else _shard_record(fields)
        if record is not None and (not live_only or is_listening(record.socket)):
            found.append(record)
    return found


def _shard_record(fields: Mapping[str, object]) -> ShardRecord | None:
    addresses = fields.get("lookup_addresses", [])
    texts = ("service", "node_id", "socket", "peer_address")
    if not isinstance(addresses, list) or not all(isinstance(address, str) for address in addresses):
        return None
    if not _are(str, fields, *texts) or not _are(int, fields, "pid", "epoch"):
        return None
    if not all(isinstance(fields.get(name, ""), str) for name in OPTIONAL_TEXTS):
        return None
    known = {name: value for name, value in fields.items() if name in ShardRecord.__slots__}  # a later version has more
    return ShardRecord(**{**known, "lookup_addresses": tuple(addresses)})  # type: ignore[arg-type]


def _are(kind: type, fields: Mapping[str, object], *names: str) -> bool:
    return all(type(fields.get(name)) is kind for name in names)


def _read_fields(path: Path) -> dict[str, object] | None:
    """The JSON object in this file. None when the file is gone, half removed or not a JSON object.

    Raises ConfigError for a file that another user can have written.
    """
    try:
        with os.fdopen(open_own(path), "rb") as file:
            data = file.read(RECORD_BYTES_MAX + 1)
        fields = json.loads(data) if len(data) <= RECORD_BYTES_MAX else None
        json.dumps(fields, ensure_ascii=False).encode()  # fails for lone surrogates, which no log or RPC accepts
    except (OSError, ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None


def choose_shard(service: str | None = None, node_id: str | None = None) -> ShardRecord | None:
    """The shard an engine of this machine should use; None when none is registered.

    With several, `node_id` (or KVSERVICE_NODE) picks one. Raises ConfigError when the choice is not clear, because an
    engine on the wrong node's shard would silently lose its locality.
    """
    wanted = node_id or os.environ.get("KVSERVICE_NODE")
    shards = find_shards(service or os.environ.get("KVSERVICE_SERVICE"))
    if wanted is not None:
        shards = [shard for shard in shards if shard.node_id == wanted]
    if len(shards) > 1:
        raise ConfigError(
            f"several shards are registered on this machine ({names_of(shards)}): set {_telling_apart(shards)} in "
            "an engine's kv_connector_extra_config or a program's connect(), to the one it belongs to"
        )
    return shards[0] if shards else None


def names_of(shards: Sequence[ShardRecord]) -> str:
    """The shards as people choose them: service/node, with commas between."""
    return ", ".join(f"{shard.service}/{shard.node_id}" for shard in shards)


def _telling_apart(shards: Sequence[ShardRecord]) -> str:
    """What to set so that one of them is left: a variable, or the option of an engine. Every node without Ray has the
    same name, so the node alone may not do."""
    if len({shard.service for shard in shards}) == len(shards):
        return "KVSERVICE_SERVICE, or service"
    if len({shard.node_id for shard in shards}) == len(shards):
        return "KVSERVICE_NODE, or node"
    return "KVSERVICE_SERVICE and KVSERVICE_NODE, or service and node"


def copy_worker_socket(directory: Path, device: str) -> Path:
    """Where the copy worker of this device listens, in its node's directory. Short: socket paths are limited."""
    return directory / f"{COPY_WORKER_PREFIX}{device.removeprefix('GPU-')[:8]}.sock"


def write_copy_worker(record: CopyWorkerRecord, directory: Path) -> Path:
    """Register a copy worker atomically. Returns the path, which the worker removes when it stops."""
    target = copy_worker_socket(directory, record.device).with_suffix(".json")
    write_private(target, json.dumps(asdict(record)).encode())
    return target


def read_copy_worker(path: Path) -> CopyWorkerRecord | None:
    """The record in this file; None when it cannot be read or belongs to another user."""
    try:
        fields = _read_fields(path)
    except ConfigError:
        return None
    if (
        fields is None
        or not _are(str, fields, "service", "node_id", "device", "socket")
        or not _are(int, fields, "pid")
    ):
        return None
    known = {name: value for name, value in fields.items() if name in CopyWorkerRecord.__slots__}
    return CopyWorkerRecord(**known)  # type: ignore[arg-type]


def find_copy_workers(directory: Path) -> list[CopyWorkerRecord]:
    """Copy workers registered in a node's directory, sorted by device.

    A record may be stale or another user's; the caller finds out when it connects.
    """
    found = [read_copy_worker(path) for path in sorted(directory.glob(f"{COPY_WORKER_PREFIX}*.json"))]
    return [record for record in found if record is not None]
