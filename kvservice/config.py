"""What an operator can set, typed and checked once. The only place that reads KVSERVICE_* variables and TOML files.

Precedence: built-in preset < file < environment < command line. Unknown keys are errors.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
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
_NOT_CONFIG = {"NODE", "RUNTIME_DIR"}  # read by client.discovery: they pick a shard, they do not configure one


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    """One installation of the service; the same on all its nodes."""

    # Name of the installation. Two services on one Ray cluster or machine need different names.
    service: str = "default"
    # Shared memory each node gives to the pool, in bytes. More holds more prompts; it is reserved at start. Take what
    # engines and the system leave free, and make /dev/shm at least that large.
    pool_bytes: int = 4 * GiB
    # Lookup shards. Two survive the loss of one with half of the remote hits; more spread the load of large clusters.
    lookup_shards: int = 2
    # How bytes move between nodes: nixl (RDMA, shared memory or TCP through UCX), shm (nodes of one machine), auto.
    transport: str = "auto"
    # Seconds a promise outlives a vanished engine. Lower frees memory sooner; below 2 s, pauses look like deaths.
    lease_seconds: float = 10.0
    # Seconds between a shard's signs of life. The directory hides a node after three missed ones.
    heartbeat_seconds: float = 1.0
    # Bytes of a slab, the unit in which memory is given to block sizes; 0 = choose. One block must fit.
    slab_bytes: int = 0

    def __post_init__(self) -> None:
        if not self.service or not self.service.replace("-", "").replace("_", "").isalnum() or len(self.service) > 32:
            raise ConfigError(f"service name {self.service!r}: use up to 32 letters, digits, '-' and '_'")
        if self.pool_bytes < POOL_BYTES_MIN:
            raise ConfigError(
                f"a pool of {format_bytes(max(self.pool_bytes, 0))} holds nothing: give at least "
                f"{format_bytes(POOL_BYTES_MIN)}, e.g. --pool 4GiB; to run without a cache, start no service"
            )
        if not 1 <= self.lookup_shards <= 64:
            raise ConfigError(f"lookup_shards is {self.lookup_shards}; choose 1 to 64")
        if self.transport not in ("auto", "nixl", "shm"):
            raise ConfigError(f"transport is {self.transport!r}; choose auto, nixl or shm")
        if not 0.5 <= self.lease_seconds <= 600 or not 0.1 <= self.heartbeat_seconds <= 60:
            raise ConfigError("lease_seconds must be 0.5 to 600, heartbeat_seconds 0.1 to 60")


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
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path} is not valid TOML: {error}") from error
    for name, text in (os.environ if environment is None else environment).items():
        key = name.removeprefix(ENVIRONMENT_PREFIX)
        if name.startswith(ENVIRONMENT_PREFIX) and key not in _NOT_CONFIG:
            values[key.lower()] = text
    values.update({key: value for key, value in overrides.items() if value is not None})
    checked: dict[str, Any] = {key: _convert(key, value) for key, value in values.items()}
    return replace(ServiceConfig(), **checked)


def _convert(key: str, value: object) -> object:
    kinds = {field.name: field.type for field in fields(ServiceConfig)}
    if key == "pool":
        raise ConfigError("the key is 'pool_bytes', not 'pool'", key=key)
    if key not in kinds:
        close = difflib.get_close_matches(key, kinds, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(sorted(kinds))}"
        raise ConfigError(f"unknown setting {key!r}{hint}", key=key)
    try:
        if kinds[key] == "int":
            return parse_bytes(value if isinstance(value, int) else str(value))
        return float(str(value)) if kinds[key] == "float" else str(value)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}", key=key) from error
