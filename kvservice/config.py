"""What an operator can set, typed and checked once. The only place that reads KVSERVICE_* variables and TOML files.

Precedence: defaults < file < environment < command line. Unknown keys are errors.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kvservice.errors import ConfigError
from kvservice.units import GiB, MiB, format_bytes, parse_bytes

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ENVIRONMENT_PREFIX = "KVSERVICE_"
POOL_BYTES_MIN = 4 * MiB
_ADDRESS = re.compile(r"(dns:///)?([A-Za-z0-9_.-]+|\[[0-9a-fA-F:]+\]):[0-9]{1,5}|unix:/[^,]+")
# They pick a shard, a file or a tenant, they do not configure a service.
_NOT_CONFIG = frozenset({"NODE", "CONFIG", "TOKEN", "TOKEN_FILE"})
_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")
REQUEST_TRIES = 2  # servers that get one request, which may be what ends them; for whatever sends requests again
MIRROR_BYTES = 512 * MiB  # ten million blocks
_NOT_CONFIG_PREFIX = "TEST_"  # test runs mark their processes with such variables


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    """One installation of the service; the same on all its nodes."""

    # Name of the installation. Two services on one Ray cluster or machine need different names.
    service: str = "default"
    # Shared memory each node gives to the pool, in bytes. More holds more prompts; it is reserved at start. Take what
    # engines and the system leave free, and make /dev/shm at least that large.
    pool_bytes: int = 4 * GiB
    # Lookup partitions. Two survive the loss of one with half of the remote hits; more spread the load of large
    # clusters.
    lookup_partitions: int = 2
    # First TCP port of the lookup partitions, shard i takes lookup_port + i; 0 = any free one. Set it for firewalls.
    lookup_port: int = 0
    # How bytes move between nodes: nixl (RDMA, shared memory or TCP through UCX), shm (nodes of one machine), auto.
    transport: str = "auto"
    # Seconds a promise outlives a vanished engine. Lower frees memory sooner; below 2 s, pauses look like deaths.
    lease_seconds: float = 10.0
    # Seconds between a shard's signs of life. The directory hides a node after three missed ones.
    heartbeat_seconds: float = 1.0
    # Bytes of a slab, the unit in which memory is given to block sizes; 0 = choose. One block must fit.
    slab_bytes: int = 0
    # Shared memory each node gives at most to a mirror of the directory, so that its lookups need no call. It takes 28
    # to 57 bytes for each block of the cluster; 0 = none.
    mirror_bytes: int = MIRROR_BYTES
    # Where lookup partitions run that were started apart (`kvservice lookup`): host:port or dns:///host:port of each,
    # in their order, with commas between. Only `kvservice shard` reads it; with Ray the service places its own.
    lookup_addresses: str = ""
    # Directory for sockets and records on every node, of the service's user alone; empty = /run/kvservice for root,
    # else ~/.local/state/kvservice. Engines need the same one.
    runtime_dir: str = ""
    # HTTP port on every node where Prometheus finds /metrics; 0 = none.
    metrics_port: int = 0
    # Workers that copy between GPUs and the pool, one a GPU: auto = for every GPU, off, or how many a node at most. A
    # number also gives nodes without a GPU one for their CPU engines. Engines use them with "copier": "worker".
    copy_workers: str = "off"
    # Directory with tls.crt, tls.key and ca.crt, the same path on every node: with it everything between nodes that is
    # gRPC is encrypted, and both sides show a certificate. Read again when the files change. Empty = one machine only,
    # over Unix sockets.
    tls_dir: str = ""
    # Serve plaintext on ports all the same: whoever reaches one, on loopback every user of the machine, can read and
    # remove blocks. For networks and machines that nobody else is on.
    allow_plaintext: bool = False
    # File that says who may use the service, by hashes of their tokens, and how much each may hold; the same path on
    # every node, made by `kvservice tenants add`. Read again when it changes. Empty = everybody, as one tenant.
    tenants_file: str = ""

    def __post_init__(self) -> None:
        if not self.service or not self.service.replace("-", "").replace("_", "").isalnum() or len(self.service) > 32:
            raise ConfigError(f"service name {self.service!r}: use up to 32 letters, digits, '-' and '_'")
        if self.pool_bytes < POOL_BYTES_MIN:
            raise ConfigError(
                f"pool_bytes is {self.pool_bytes}, which holds nothing: give at least {format_bytes(POOL_BYTES_MIN)}, "
                "e.g. --pool 4GiB; to run without a cache, start no service"
            )
        if not 1 <= self.lookup_partitions <= 64:
            raise ConfigError(f"lookup_partitions is {self.lookup_partitions}; choose 1 to 64")
        if self.lookup_port and not 1024 <= self.lookup_port <= 65_535 - self.lookup_partitions:
            raise ConfigError(
                f"lookup_port is {self.lookup_port}; choose 1024 to {65_535 - self.lookup_partitions}, or 0"
            )
        if not 0 <= self.metrics_port <= 65_535:
            raise ConfigError(f"metrics_port is {self.metrics_port}; choose a TCP port, or 0 for none")
        if self.slab_bytes < 0:
            raise ConfigError(f"slab_bytes is {self.slab_bytes}; give a size such as 64MiB, or 0 to have one chosen")
        if self.mirror_bytes < 0:
            raise ConfigError(f"mirror_bytes is {self.mirror_bytes}; give a size such as 512MiB, or 0 for no mirror")
        if self.runtime_dir and not Path(self.runtime_dir).is_absolute():
            raise ConfigError(f"runtime_dir is {self.runtime_dir!r}; give an absolute path")
        if self.tls_dir and not Path(self.tls_dir).is_absolute():
            raise ConfigError(f"tls_dir is {self.tls_dir!r}; give an absolute path")
        if self.tenants_file and not Path(self.tenants_file).is_absolute():
            raise ConfigError(f"tenants_file is {self.tenants_file!r}; give an absolute path")
        for address in self.lookups_elsewhere:
            if not _ADDRESS.fullmatch(address):
                raise ConfigError(
                    f"lookup_addresses has {address!r}; write host:port, dns:///host:port or unix:/path, with commas"
                )
        if self.transport not in ("auto", "nixl", "shm"):
            raise ConfigError(f"transport is {self.transport!r}; choose auto, nixl or shm")
        if self.copy_workers not in ("auto", "off") and not (
            self.copy_workers.isdecimal() and int(self.copy_workers) < 65
        ):
            raise ConfigError(f"copy_workers is {self.copy_workers!r}; choose auto, off, or a number up to 64")
        if not 2.0 <= self.lease_seconds <= 600 or not 0.1 <= self.heartbeat_seconds <= 60:
            # A pull stops one second before its lease ends: shorter leases would leave it no time.
            raise ConfigError("lease_seconds must be 2 to 600, heartbeat_seconds 0.1 to 60")

    @property
    def lookups_elsewhere(self) -> tuple[str, ...]:
        """`lookup_addresses` one by one, in partition order."""
        return tuple(address.strip() for address in self.lookup_addresses.split(",") if address.strip())


def load_config(
    path: Path | None = None,
    environment: Mapping[str, str] | None = None,
    **overrides: object,
) -> ServiceConfig:
    """Read file and environment, then apply overrides that are not None. Raises ConfigError naming key and value."""
    values: dict[str, object] = {}
    if path is not None:
        try:
            values.update(tomllib.loads(path.read_text()))
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
        except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, a number without end
            raise ConfigError(f"{path} is not valid TOML: {error}") from error
    for name, text in (os.environ if environment is None else environment).items():
        key = name.removeprefix(ENVIRONMENT_PREFIX)
        if name.startswith(ENVIRONMENT_PREFIX) and key not in _NOT_CONFIG and not key.startswith(_NOT_CONFIG_PREFIX):
            values[key.lower()] = text
    values.update({key: value for key, value in overrides.items() if value is not None})
    checked: dict[str, Any] = {key: _convert(key, value) for key, value in values.items()}
    return ServiceConfig(**checked)


def tls_of_environment() -> tuple[str, bool]:
    """(`tls_dir`, `allow_plaintext`) of KVSERVICE_TLS_DIR and KVSERVICE_ALLOW_PLAINTEXT, for processes that take
    nothing else from the environment. Raises ConfigError."""
    names = (f"{ENVIRONMENT_PREFIX}TLS_DIR", f"{ENVIRONMENT_PREFIX}ALLOW_PLAINTEXT")
    config = load_config(environment={name: os.environ[name] for name in names if name in os.environ})
    return config.tls_dir, config.allow_plaintext


def tenants_of_environment() -> str:
    """`tenants_file` of KVSERVICE_TENANTS_FILE, likewise. Raises ConfigError."""
    name = f"{ENVIRONMENT_PREFIX}TENANTS_FILE"
    return load_config(environment={name: os.environ.get(name, "")}).tenants_file


def token_of_environment() -> tuple[str, str]:
    """(KVSERVICE_TOKEN, KVSERVICE_TOKEN_FILE) of a tenant's engine or command; the file wins."""
    return os.environ.get(f"{ENVIRONMENT_PREFIX}TOKEN", ""), os.environ.get(f"{ENVIRONMENT_PREFIX}TOKEN_FILE", "")


def _integer(key: str, value: object) -> int:
    if isinstance(value, int):
        return value
    text = str(value).strip()
    if text.startswith("-"):  # said as what it is: too small, not unreadable
        return -parse_bytes(text[1:])
    return parse_bytes(text) if key.endswith("_bytes") else int(text)


def _yes_or_no(value: object) -> bool:
    text = str(value).strip().lower()
    if text not in _YES and text not in _NO:
        raise ValueError(f"{value!r} is neither yes nor no; write 1 or 0")
    return text in _YES


def _convert(key: str, value: object) -> object:
    kinds = {field.name: field.type for field in fields(ServiceConfig)}
    if key not in kinds:
        close = difflib.get_close_matches(key, kinds, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(sorted(kinds))}"
        raise ConfigError(f"unknown setting {key!r}{hint}", key=key)
    try:
        if kinds[key] == "bool":
            return _yes_or_no(value)
        if isinstance(value, bool):
            raise ValueError(f"{value} is not a setting's value")
        if kinds[key] == "int":
            return _integer(key, value)
        return float(str(value)) if kinds[key] == "float" else str(value)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}", key=key) from error
