"""kv_connector_extra_config, typed and checked once. Unknown keys are errors: a typo would silently change nothing."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field, model_validator

from kvservice.config import EvictionName, Seconds, Settings, Shown, Size
from kvservice.connector.weights import VERSION_CHARS_MAX, is_version
from kvservice.errors import ConfigError
from kvservice.units import GiB, MiB, format_bytes

# Size of an embedded pool. Room for some long prompts, and small beside the memory of a machine that runs a model.
EMBEDDED_BYTES_DEFAULT = 4 * GiB
EMBEDDED_SHARE_DEFAULT = 0.25  # Share of what is free in /dev/shm that an embedded pool takes at most.
DEV_SHM = Path("/dev/shm")
MEMORY_MIN = 4 * MiB  # A smaller pool holds no prompt; it is refused.
MEMORY = (
    f"a size of at least {format_bytes(MEMORY_MIN)}, such as 8GiB; to run without a cache, start the engine without "
    "--kv-transfer-config"
)
MEMORY_DEFAULT = "4 GiB, or a quarter of what is free in /dev/shm if that is less"
VERSION = f"1 to {VERSION_CHARS_MAX} printable characters"
Timeout = Annotated[Seconds, Field(ge=0, le=600), Shown(unit="seconds")]


def _version(text: str) -> str:
    if not is_version(text):
        raise ValueError(f"{text!r:.200} cannot name a version of weights")
    return text


class Mode(Enum):
    AUTO = "auto"  # the service if one is registered on this machine at start, else embedded
    SERVICE = "service"
    EMBEDDED = "embedded"


class Offload(Enum):
    EAGER = "eager"  # store each block as soon as it is full: other replicas see it at once
    LAZY = "lazy"  # store when the request ends: fewer copies, later hits


class Verify(Enum):
    SAMPLED = "sampled"  # check the digest of one loaded block in sixteen
    FULL = "full"
    OFF = "off"


class CopierChoice(Enum):
    AUTO = "auto"  # in the engine's process, until a benchmark shows a kind of machine on which the worker is better
    IN_PROCESS = "in_process"
    WORKER = "worker"  # in a copy worker's process; in the engine's while there is none


class HandoffLoans(Enum):
    AUTO = "auto"  # on for GPUs, where it saves two copies over the bus; on a CPU a slot is as near as another engine
    ON = "on"
    OFF = "off"


class Layerwise(Enum):
    """What is copied layer by layer during the forward that needs or computes it. The rest is copied as whole
    blocks."""

    OFF = "off"
    LOAD = "load"
    SAVE = "save"
    BOTH = "both"

    @property
    def loads(self) -> bool:
        return self in (Layerwise.LOAD, Layerwise.BOTH)

    @property
    def saves(self) -> bool:
        return self in (Layerwise.SAVE, Layerwise.BOTH)


class AdapterFiles(Enum):
    """Which LoRA adapters are cached."""

    CHECKED = "checked"  # those whose files have not changed since before the engine started
    IMMUTABLE = "immutable"  # all: the operator says that files at one path never change


class ConnectorOptions(Settings):
    """What the engine's operator can set, the keys of kv_connector_extra_config."""

    what: ClassVar[str] = "key of kv_connector_extra_config"

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

    memory: Annotated[Annotated[Size, Field(ge=MEMORY_MIN)] | None, Shown(allowed=MEMORY, default=MEMORY_DEFAULT)] = (
        None
    )
    """Embedded: memory of the pool. `kvservice up` sets that of a service."""

    eviction: EvictionName = "default"

    offload: Offload = Offload.EAGER
    """When blocks are stored: eager in the step that fills them, lazy when their request ends. lazy copies less and
    hits later."""

    verify_load: Verify = Verify.SAMPLED
    """Which loaded blocks are checked against their digest: one in sixteen, all, or none. Blocks that came from another
    node are always checked."""

    copier: CopierChoice = CopierChoice.AUTO
    """Service: who copies blocks between the engine's KV cache and the pool. in_process is the engine itself, worker a
    copy worker beside the shard. auto is in_process."""

    layerwise: Layerwise = Layerwise.OFF
    """What is copied layer by layer during the forward. The rest is copied as whole blocks."""

    namespace: str = ""
    """Engines in different namespaces never share blocks, and never refuse each other."""

    fetch_timeout_seconds: Timeout = 5.0
    """Service: longest that a request waits for blocks of another node."""

    handoff_timeout_seconds: Timeout = 60.0
    """Service: longest that a decode request waits for its prefill on another engine. The end of the prefill ends the
    wait at once."""

    handoff_loans: HandoffLoans = HandoffLoans.AUTO
    """With copier worker: a decode engine copies a handed-off prompt straight from the KV cache of the prefill engine
    of the same node. auto is on for GPUs."""

    loan_seconds: Timeout = 5.0
    """Longest that a prefill engine keeps its blocks for such a copy. 0 switches it off."""

    weights_version: Annotated[Annotated[str, AfterValidator(_version)] | None, Shown(allowed=VERSION)] = None
    """What you call the weights, such as step-1200. Without it the bytes of their files say which they are."""

    weights_version_file: str | None = None
    """File with the version of weights that are changed in place. It is read at each reset of the prefix cache."""

    adapter_files: AdapterFiles = AdapterFiles.CHECKED
    """Which LoRA adapters are cached: checked caches those whose files did not change since the engine started,
    immutable all of them."""

    cache_folder: Annotated[str | None, Shown(default="$XDG_CACHE_HOME/kvservice, else ~/.cache/kvservice")] = None
    """Directory for the digests of weight files."""

    @classmethod
    def parse(cls, given: Mapping[str, object]) -> ConnectorOptions:
        """Raises ConfigError naming the key, the value and what is allowed."""
        return cls(**given)  # type: ignore[arg-type]  # checked here, whatever it is

    @model_validator(mode="after")
    def _fits_together(self) -> ConnectorOptions:
        if self.mode is Mode.EMBEDDED and (self.socket or self.node or self.service or self.token_file):
            raise ConfigError("mode 'embedded' uses no service: remove socket, node, service, token_file, or the mode")
        if self.handoff_loans is HandoffLoans.ON and self.copier is not CopierChoice.WORKER:
            raise ConfigError("handoff_loans 'on' needs copier 'worker': only a copy worker can copy between engines")
        if self.weights_version is not None and self.weights_version_file is not None:
            raise ConfigError(
                "weights_version names weights that stay, weights_version_file weights that are changed in place: "
                "give one of them"
            )
        return self

    def loans_on(self, device: str) -> bool:
        """Whether an engine on this kind of device (vLLM's device type) lends and borrows blocks."""
        wanted = self.handoff_loans is HandoffLoans.ON or (self.handoff_loans is HandoffLoans.AUTO and device == "cuda")
        return wanted and self.copier is CopierChoice.WORKER

    def weights_name(self) -> str | None:
        """What the weights are called in the fingerprint; None where their bytes say it."""
        if self.weights_version is not None:
            return f"version {self.weights_version}"
        return None if self.weights_version_file is None else "by weights_version_file"

    def embedded_bytes(self) -> int:
        """Size of the embedded pool's segment."""
        if self.memory is not None:
            return self.memory
        free = shutil.disk_usage(DEV_SHM).free
        return min(EMBEDDED_BYTES_DEFAULT, int(free * EMBEDDED_SHARE_DEFAULT))
