"""Which shards are registered on this machine: small JSON files that shards write when they serve.

    <runtime root>/<service>/<node id>/shard.json    {"service", "node_id", "socket", "peer_address", "pid", "epoch",
                                                     "lookup_addresses", "tls_dir"}
    <runtime root>/<service>/<node id>/shard.sock    the engines' Unix socket
    <runtime root>/<service>/<node id>/peer.sock     the other shards' Unix socket, on one machine without TLS
    <runtime root>/<service>/lookup-<i>.sock         likewise, of lookup partition i
    <runtime root>/<service>/<node id>/secret        32 bytes by which others know the node, for its shards only
    <runtime root>/<service>/<node id>/epoch         the boot epoch of its last shard, in digits
    <runtime root>/<service>/<node id>/copy-<device>.json, copy-<device>.sock    a copy worker of that node, if any

All of it belongs to one user, and nobody else may look inside. A record whose socket nobody listens on is stale and is
not returned.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
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
PEER_SOCKET_NAME = "peer.sock"
MIRROR_NAME = "mirror"  # symbolic link to the mirror of the directory, in shared memory
SECRET_NAME = "secret"
EPOCH_NAME = "epoch"
OWN_NAMES = (SOCKET_NAME, PEER_SOCKET_NAME, SECRET_NAME, EPOCH_NAME, MIRROR_NAME)  # of a shard, beside its record
COPY_WORKER_PREFIX = "copy-"
SECRET_BYTES = 32
EPOCH_MAX = (1 << 43) - 1  # with the number of an attachment behind it, it must go into 64 bits on the wire
RECORD_BYTES_MAX = 256 << 10


@dataclass(frozen=True, slots=True)
class ShardRecord:
    service: str
    node_id: NodeId
    socket: str  # path of the Unix socket
    peer_address: str  # gRPC target: host:port, or unix:<path>
    pid: int
    epoch: BootEpoch
    lookup_addresses: tuple[str, ...] = ()  # host:port of every lookup partition, in partition order
    tls_dir: str = ""  # where the shard has its certificate from; empty = the service has no TLS


@dataclass(frozen=True, slots=True)
class CopyWorkerRecord:
    service: str
    node_id: NodeId
    device: str  # "cpu", or the UUID of a GPU
    socket: str
    pid: int


def default_runtime_root() -> Path:
    """KVSERVICE_RUNTIME_DIR; else /run/kvservice for root and the state directory of any other user. Not below /tmp,
    where anybody can be first, nor below /run/user, which goes when the user logs out. Raises ConfigError for a user
    without a home."""
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


def peer_socket(service: str, node_id: NodeId, runtime_root: Path | None = None) -> str:
    """Where the other shards of this machine reach this one, when the service has no TLS. Raises ConfigError."""
    return _socket(node_directory(service, node_id, runtime_root) / PEER_SOCKET_NAME)


def lookup_socket(service: str, partition: int, runtime_root: Path | None = None) -> str:
    """Where a lookup partition of this machine is reached, when the service has no TLS. Raises ConfigError."""
    return _socket((runtime_root or default_runtime_root()) / service / f"lookup-{partition}.sock")


def lookup_address(
    service: str, partition: int, runtime_root: Path | None, host: str, port: int, *, tls: bool, allow_plaintext: bool
) -> str:
    """Where a lookup partition that was given this host and port listens and is called: see `local_or_tcp`."""
    path = lookup_socket(service, partition, runtime_root)
    from kvservice.auth.tls import local_or_tcp  # gRPC, which a copy worker finds its node without

    return local_or_tcp(host, port, path, tls=tls, allow_plaintext=allow_plaintext)


def _socket(path: Path) -> str:
    check_socket_path(str(path))
    return str(path)


def node_secret(directory: Path) -> bytes:
    """What tells this node from whoever else takes its name: made at the first start, kept for the next one in the
    node's directory, which must be private. Raises ConfigError when it cannot be kept."""
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
    """Raises ConfigError that says `what` could not be done."""
    try:
        write_private(path, data)
    except OSError as error:
        raise ConfigError(f"cannot {what} in {path}: {error.strerror}") from error


def keep_secret(directory: Path, secret: bytes) -> None:
    """Raises ConfigError."""
    _write(directory / SECRET_NAME, secret, "keep the node's secret")


def last_epoch(directory: Path) -> int:
    """The boot epoch that the node had last, as far as its directory knows; else 0."""
    try:
        found = int((directory / EPOCH_NAME).read_bytes()[:32])
    except (OSError, ValueError):
        return 0
    return found if 0 < found <= EPOCH_MAX else 0


def keep_epoch(directory: Path, epoch: BootEpoch) -> None:
    """Raises ConfigError when it cannot be kept."""
    _write(directory / EPOCH_NAME, str(epoch).encode(), "keep the node's boot epoch")


def write_record(record: ShardRecord, runtime_root: Path | None = None) -> Path:
    """Register atomically. Returns the path, which the shard removes when it stops. Raises ConfigError when it cannot
    be written."""
    directory = node_directory(record.service, record.node_id, runtime_root)
    make_directory(directory)
    target = directory / RECORD_NAME
    fields = asdict(record)
    if not record.tls_dir:  # engines of an earlier version do not know it
        del fields["tls_dir"]
    _write(target, json.dumps(fields).encode(), "register the shard")
    return target


def find_shards(
    service: str | None = None, runtime_root: Path | None = None, *, live_only: bool = True
) -> list[ShardRecord]:
    """Registered shards of this machine, by service and node. Blocks for a connect per record at most. Raises
    ConfigError, with the name of the user, where somebody else could have written a record."""
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
    if not isinstance(fields.get("tls_dir", ""), str):
        return None
    try:
        return ShardRecord(**{**fields, "lookup_addresses": tuple(addresses)})  # type: ignore[arg-type]
    except TypeError:  # other fields: of another version
        return None


def _are(kind: type, fields: Mapping[str, object], *names: str) -> bool:
    return all(type(fields.get(name)) is kind for name in names)


def _read_fields(path: Path) -> dict[str, object] | None:
    """The JSON object in this file; None for a half-removed file or one that is no record. Raises ConfigError for a
    file that somebody else can have written."""
    try:
        with os.fdopen(open_own(path), "rb") as file:
            data = file.read(RECORD_BYTES_MAX + 1)
        fields = json.loads(data) if len(data) <= RECORD_BYTES_MAX else None
        json.dumps(fields, ensure_ascii=False).encode()  # halves of surrogate pairs are no text to anybody else
    except (OSError, ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None


def choose_shard(
    service: str | None = None, node_id: str | None = None, runtime_root: Path | None = None
) -> ShardRecord | None:
    """The shard an engine of this machine should use; None when none is registered.

    With several, `node_id` (or KVSERVICE_NODE) picks one. Raises ConfigError when the choice is not clear, because an
    engine on the wrong node's shard would silently lose its locality.
    """
    wanted = node_id or os.environ.get("KVSERVICE_NODE")
    shards = find_shards(service or os.environ.get("KVSERVICE_SERVICE"), runtime_root)
    if wanted is not None:
        shards = [shard for shard in shards if shard.node_id == wanted]
    if len(shards) > 1:
        names = ", ".join(f"{shard.service}/{shard.node_id}" for shard in shards)
        raise ConfigError(
            f"several shards are registered on this machine ({names}): set KVSERVICE_NODE, or node and service in "
            "kv_connector_extra_config, to the one this engine belongs to"
        )
    return shards[0] if shards else None


def copy_worker_socket(directory: Path, device: str) -> Path:
    """Where the copy worker of this device listens, in its node's directory. Short: socket paths are limited."""
    return directory / f"{COPY_WORKER_PREFIX}{device.removeprefix('GPU-')[:8]}.sock"


def write_copy_worker(record: CopyWorkerRecord, directory: Path) -> Path:
    """Register a copy worker atomically. Returns the path, which the worker removes when it stops."""
    target = copy_worker_socket(directory, record.device).with_suffix(".json")
    write_private(target, json.dumps(asdict(record)).encode())
    return target


def read_copy_worker(path: Path) -> CopyWorkerRecord | None:
    """The record in this file; None when there is none that can be read, or another user's."""
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
    try:
        return CopyWorkerRecord(**fields)  # type: ignore[arg-type]
    except TypeError:
        return None


def find_copy_workers(directory: Path) -> list[CopyWorkerRecord]:
    """Copy workers registered in a node's directory, by device. Whether they listen, and whose they are,
    shows when connecting."""
    found = [read_copy_worker(path) for path in sorted(directory.glob(f"{COPY_WORKER_PREFIX}*.json"))]
    return [record for record in found if record is not None]
