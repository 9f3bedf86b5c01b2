"""Which pool an engine or a program uses, typed and checked once."""

from __future__ import annotations

import shutil
from enum import Enum
from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from kvservice.config import (
    TIERS,
    CodecKeyFile,
    CodecName,
    DiskBytes,
    DiskIOName,
    DiskPath,
    DiskWrite,
    EvictionName,
    MaxAge,
    ObjectsNamespace,
    ObjectsUrl,
    ObjectsWrite,
    Settings,
    Shown,
    Size,
    check_tiers,
)
from kvservice.errors import ConfigError
from kvservice.units import PORT_MAX, GiB, MiB, format_bytes

# Size of an embedded pool. Room for some long prompts, and small beside the memory of a machine that runs a model.
EMBEDDED_BYTES_DEFAULT = 4 * GiB
EMBEDDED_SHARE_DEFAULT = 0.25  # Share of what is free in /dev/shm that an embedded pool takes at most.
DEV_SHM = Path("/dev/shm")
MEMORY_MIN = 4 * MiB  # A smaller pool holds no prompt; it is refused.
MEMORY = f"a size of at least {format_bytes(MEMORY_MIN)}, such as 8GiB"
MEMORY_DEFAULT = "4 GiB, or a quarter of what is free in /dev/shm if that is less"
PoolMemory = Annotated[Annotated[Size, Field(ge=MEMORY_MIN)] | None, Shown(allowed=MEMORY, default=MEMORY_DEFAULT)]


class Mode(Enum):
    AUTO = "auto"  # the service if one is registered on this machine at start, else embedded
    SERVICE = "service"
    EMBEDDED = "embedded"


class PoolOptions(Settings):
    """Which pool. Whoever has more to say adds fields."""

    mode: Mode = Mode.AUTO
    """Where blocks are kept. service uses the shard of this node, embedded a pool in the engine's process. auto chooses
    once, at start: the service when one is registered on this machine, else embedded."""

    socket: str | None = None
    """Service: the shard's Unix socket. Without it the engine finds the shard by service and node."""

    service: str | None = None
    """Service: the name of the service, where several are registered on this machine."""

    node: str | None = None
    """Service: the node whose shard this engine uses, where several are registered on this machine."""

    token_file: str | None = None
    """Service: file with the token of the engine's tenant, instead of KVSERVICE_TOKEN_FILE."""

    memory: PoolMemory = None
    """Embedded: memory of the pool. `kvservice up` sets that of a service."""

    eviction: EvictionName = "default"

    disk_path: DiskPath = ""
    disk_bytes: DiskBytes = 0
    disk_write: DiskWrite = "evicted"
    disk_codec: CodecName = "none"
    disk_io: DiskIOName = "auto"
    objects_url: ObjectsUrl = ""
    objects_write: ObjectsWrite = "evicted"
    objects_codec: CodecName = "none"
    objects_namespace: ObjectsNamespace = "default"
    codec_key_file: CodecKeyFile = ""
    max_age_seconds: MaxAge = 0.0

    metrics_port: Annotated[int, Field(strict=True, ge=0, le=PORT_MAX)] = 0
    """Embedded: HTTP port where Prometheus finds the pool's /metrics, on every address of the machine, without login.
    0 serves none. Where several processes on one machine have the same port, the first serves."""

    @model_validator(mode="after")
    def _is_one_pool(self) -> PoolOptions:
        if self.mode is Mode.EMBEDDED and (self.socket or self.node or self.service or self.token_file):
            raise ConfigError("mode 'embedded' uses no service: remove socket, node, service, token_file, or the mode")
        for place in TIERS if self.mode is Mode.SERVICE else ():
            if getattr(self, place):
                raise ConfigError(
                    f"{place} is of a pool in this process: with mode 'service' give it to the service, for example "
                    f"with `kvservice up --{place.replace('_', '-')}`"
                )
        check_tiers(self)
        return self

    def embedded_bytes(self) -> int:
        """Size of the embedded pool's segment."""
        if self.memory is not None:
            return self.memory
        free = shutil.disk_usage(DEV_SHM).free
        return min(EMBEDDED_BYTES_DEFAULT, int(free * EMBEDDED_SHARE_DEFAULT))
