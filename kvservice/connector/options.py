"""kv_connector_extra_config, typed and checked once. Unknown keys are errors: a typo would silently change nothing."""

from __future__ import annotations

import difflib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path

from kvservice.connector.weights import VERSION_CHARS_MAX, is_version
from kvservice.errors import ConfigError
from kvservice.units import GiB, MiB, format_bytes, parse_bytes

EMBEDDED_BYTES_DEFAULT = 4 * GiB
EMBEDDED_SHARE_DEFAULT = 0.25  # of what is free in /dev/shm
DEV_SHM = Path("/dev/shm")


class Mode(Enum):
    AUTO = "auto"  # the service when one is registered on this machine at start, else embedded
    SERVICE = "service"
    EMBEDDED = "embedded"


class Offload(Enum):
    EAGER = "eager"  # store every block as soon as it is full: other replicas see it at once
    LAZY = "lazy"  # store when the request ends: fewer copies, later hits


class Verify(Enum):
    SAMPLED = "sampled"  # digest of one loaded block in sixteen
    FULL = "full"
    OFF = "off"


class CopierChoice(Enum):
    AUTO = "auto"  # in the engine's process, until a benchmark shows a kind of machine where the worker is better
    IN_PROCESS = "in_process"
    WORKER = "worker"  # in a copy worker's process; in the engine's while there is none


class HandoffLoans(Enum):
    AUTO = "auto"  # on a GPU: there it saves both ways over the bus, on a CPU a slot is as near as another engine
    ON = "on"
    OFF = "off"


class Layerwise(Enum):
    """What is copied layer by layer during the forward that needs or computes it; the rest goes as whole blocks."""

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
    IMMUTABLE = "immutable"  # all: the operator's word that files at one path never change once they are there


@dataclass(frozen=True, slots=True)
class ConnectorOptions:
    mode: Mode = Mode.AUTO
    socket: str | None = None  # the shard's Unix socket; None = find it by service and node
    node: str | None = None  # which node's shard, where several are registered on this machine
    service: str | None = None
    token_file: str | None = None  # of the tenant that the engine belongs to; None = as the environment says
    memory_bytes: int | None = None  # embedded pool; None = 4 GiB, or a quarter of free /dev/shm if that is less
    offload: Offload = Offload.EAGER
    verify_load: Verify = Verify.SAMPLED
    copier: CopierChoice = CopierChoice.AUTO  # where blocks are copied between the engine's KV cache and the pool
    layerwise: Layerwise = Layerwise.OFF
    namespace: str = ""  # engines in different namespaces never share blocks, nor refuse each other
    fetch_timeout_seconds: float = 5.0  # longest a request waits for blocks of another node
    handoff_timeout_seconds: float = 60.0  # longest a decode request waits for its prefill elsewhere
    handoff_loans: HandoffLoans = HandoffLoans.AUTO  # a decode engine copies from the prefill's blocks
    loan_seconds: float = 5.0  # longest the prefill keeps its blocks for that
    adapter_files: AdapterFiles = AdapterFiles.CHECKED  # which LoRA adapters are cached
    weights_version: str | None = None  # what the operator calls the weights; None = read all of their bytes
    weights_version_file: str | None = None  # has the version of weights that are changed in place, read at each reset
    cache_folder: str | None = None  # for digests of weight files; None = $XDG_CACHE_HOME/kvservice

    @classmethod
    def parse(cls, given: Mapping[str, object]) -> ConnectorOptions:
        """Raises ConfigError naming the key, the value and what is allowed."""
        known = {"memory" if f.name == "memory_bytes" else f.name for f in fields(cls)}
        values: dict[str, object] = {}
        for key, value in given.items():
            if key not in known:
                close = difflib.get_close_matches(key, known, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(sorted(known))}"
                raise ConfigError(f"kv_connector_extra_config has an unknown key {key!r}{hint}", key=key)
            values["memory_bytes" if key == "memory" else key] = _convert(key, value)
        options = cls(**values)  # type: ignore[arg-type]
        if options.mode is Mode.EMBEDDED and (options.socket or options.node or options.service or options.token_file):
            raise ConfigError("mode 'embedded' uses no service: remove socket, node, service, token_file, or the mode")
        if options.handoff_loans is HandoffLoans.ON and options.copier is not CopierChoice.WORKER:
            raise ConfigError("handoff_loans 'on' needs copier 'worker': only a copy worker can copy between engines")
        if options.weights_version is not None and options.weights_version_file is not None:
            raise ConfigError(
                "weights_version names weights that stay, weights_version_file weights that are changed in place: "
                "give one of them"
            )
        return options

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
        if self.memory_bytes is not None:
            return self.memory_bytes
        free = shutil.disk_usage(DEV_SHM).free
        return min(EMBEDDED_BYTES_DEFAULT, int(free * EMBEDDED_SHARE_DEFAULT))


_CHOICES: dict[str, type[Enum]] = {
    "mode": Mode, "offload": Offload, "verify_load": Verify, "copier": CopierChoice, "handoff_loans": HandoffLoans,
    "layerwise": Layerwise, "adapter_files": AdapterFiles,
}  # fmt: skip
_MEMORY_MIN = 4 * MiB


def _convert(key: str, value: object) -> object:
    if key in _CHOICES:
        allowed = [member.value for member in _CHOICES[key]]
        if value not in allowed:
            raise ConfigError(f"{key} is {value!r}; choose one of {', '.join(allowed)}", key=key)
        return _CHOICES[key](value)
    if key == "memory":
        try:
            size = parse_bytes(value if isinstance(value, int) else str(value))
        except ValueError as error:
            raise ConfigError(f"memory: {error}", key=key) from error
        if size < _MEMORY_MIN:
            raise ConfigError(
                f"memory is {format_bytes(max(size, 0))}; the smallest pool is {format_bytes(_MEMORY_MIN)}. To switch "
                "the cache off, start the engine without --kv-transfer-config",
                key=key,
            )
        return size
    if key in ("fetch_timeout_seconds", "handoff_timeout_seconds", "loan_seconds"):
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 600:
            raise ConfigError(f"{key} is {value!r}; give seconds from 0 to 600", key=key)
        return float(value)
    if not isinstance(value, str):
        raise ConfigError(f"{key} is {value!r}; give a string", key=key)
    if key == "weights_version" and not is_version(value):
        raise ConfigError(f"weights_version is {value!r}; give 1 to {VERSION_CHARS_MAX} printable characters", key=key)
    return value
