"""What an operator can set: each setting is defined once, with its type, range, unit and meaning.

The definition feeds everything else: the settings file, the variables KVSERVICE_*, the options of the command line,
`kvservice config show`, the reference page and the shard itself; a test holds the chart to it. No other module reads
variables KVSERVICE_* or settings files.

A later source wins: defaults, then the file, then the environment, then the command line. Unknown names are errors.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

from annotated_types import Ge, Le
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from kvservice.errors import ConfigError
from kvservice.units import PORT_MAX, GiB, MiB, format_bytes, parse_bytes

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ENVIRONMENT_PREFIX = "KVSERVICE_"
# These variables are not settings of a service. They say which shard, tenant or key a process uses.
OTHER_VARIABLES: Mapping[str, str] = {
    "KVSERVICE_NODE": "The node whose shard an engine uses, or that `kvservice shard` is.",
    "KVSERVICE_TOKEN": "The token of the engine's or the command's tenant.",
    "KVSERVICE_TOKEN_FILE": "A file with that token. It wins over KVSERVICE_TOKEN.",
    "KVSERVICE_PROXY_API_KEY": "The key that `kvservice proxy` sends with its own health checks.",
}
_TEST_PREFIX = "KVSERVICE_TEST_"  # test runs mark their processes with such variables
POOL_BYTES_MIN = 4 * MiB  # the fixed areas of a segment and a few small slabs; a smaller pool is refused
LEASE_SECONDS_MIN = 2.0  # a pull stops one second before its lease ends, so a shorter lease leaves it no time
DISK_BYTES_MIN = 4 * MiB  # room for a few small blocks; a smaller disk tier would only cost writes
LOOKUP_PARTITIONS_MAX = 64  # each shard keeps a stream to every partition; more would cost without spreading load
COPY_WORKERS_MAX = 64  # more than the GPUs of any node
COMMAND_LINE = "the command line"
MIRROR_BYTES = 512 * MiB  # room for ten million blocks; it takes only the memory that it uses
REQUEST_TRIES = 2  # servers that get one request. The request may be what ends them, so it is not sent to a third.
# What Kubernetes puts into every pod beside a Service whose name begins with kvservice.
_OF_KUBERNETES = re.compile(r"(.+_)?(service_host|service_port(_.+)?|port(_\d+_(tcp|udp|sctp)(_.+)?)?)")
_ADDRESS = re.compile(r"(dns:///)?([A-Za-z0-9_.-]+|\[[0-9a-fA-F:]+\]):[0-9]{1,5}|unix:/[^,]+")


# -- what kinds of values there are ----


@dataclass(frozen=True, slots=True)
class Shown:
    """How people meet a setting, besides its name, type, range and meaning."""

    unit: str = ""
    allowed: str = ""  # in words, where type and range do not say it
    chart: str = ""  # which value of the chart sets it, for example cache.pool
    default: str = ""  # in words, where the default is chosen at run time


def _size(value: object) -> object:
    if not isinstance(value, str):
        return value
    if value.strip().startswith("-"):  # then the error is about the range, not about the spelling
        return -parse_bytes(value.strip()[1:])
    return parse_bytes(value.strip())


def _number(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError(f"{value} is not a number")
    return value


def _yes_or_no(value: object) -> object:
    return False if value == "" else value  # an empty variable says no


def _unprivileged(port: int) -> int:
    if port and not 1024 <= port <= PORT_MAX - LOOKUP_PARTITIONS_MAX:
        raise ValueError(f"{port} is not such a port")
    return port


def _without_password(url: str) -> str:
    if re.match(r"[^:]*://[^/@]*:[^/]*@", url):
        raise ValueError("it holds a password, which everybody who sees the settings could read")
    return url


def _listed(value: object) -> object:
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


Size = Annotated[int, BeforeValidator(_number), BeforeValidator(_size)]  # bytes; text such as 64GiB is read
Count = Annotated[int, BeforeValidator(_number)]
Seconds = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
Flag = Annotated[bool, BeforeValidator(_yes_or_no)]
AbsolutePath = Annotated[str, Field(pattern=r"^(/.*)?$"), Shown(allowed="an absolute path")]
Listed = Annotated[tuple[str, ...], BeforeValidator(_listed)]  # text with commas, or a list

# The same words in every mode: a service's setting, and an option of the connector for its embedded pool.
EvictionName = Annotated[
    str,
    Field(
        pattern=r"^[a-z][a-z0-9_-]{0,63}$",
        description="Which blocks go first when the pool is full. default keeps what is used again; lru drops what was "
        "used longest ago. A policy of another package goes by its name, see docs/plugins.md.",
    ),
    Shown(allowed="default, lru, or the name of a policy of another package"),
]

# The tiers below the pool, for a service and for an embedded pool.
TIER_WRITES = (
    "evicted: shortly before the block leaves the memory. stored: as soon as it is stored. reused: at its first "
)
DiskPath = Annotated[
    str,
    Field(
        pattern=r"^(/.*)?$",
        description="Directory on a disk of each node for blocks that no longer fit into the pool, the disk tier. "
        "It is private to the user of the service. Its blocks are found again after a restart. Empty: there is none.",
    ),
    Shown(allowed="an absolute path"),
]
DiskBytes = Annotated[
    Size,
    Field(
        ge=0,
        description="Room that blocks may take in disk_path on each node. It is evicted as the pool is. "
        "0 takes nine tenths of what is free there at the start.",
    ),
    Shown(default="0, nine tenths of what is free"),
]
DiskWrite = Annotated[
    Literal["evicted", "stored", "reused"],
    Field(
        description=f"When a block is written to the disk. {TIER_WRITES}use after that, so that what never comes back "
        "costs no write."
    ),
]
DiskIOName = Annotated[
    Literal["auto", "direct", "buffered", "nixl-posix", "gds"],
    Field(
        description="How files in disk_path are read and written. auto: directly (O_DIRECT), but through the page "
        "cache on file systems in memory and overlays. direct and buffered force one of the two. nixl-posix and gds: "
        "NIXL's plug-ins of these names. What does not work at the start is left for auto, and the log says so."
    ),
]
ObjectsUrl = Annotated[
    str,
    AfterValidator(_without_password),
    Field(
        pattern=r"^([a-z][a-z0-9+.-]*://[^\s]+)?$",
        description="Object store that all nodes share, below memory and disk. Its credentials come from the usual "
        "environment of S3, Google Cloud or Azure, never from the URL. Empty: there is none.",
    ),
    Shown(allowed="a URL without credentials, such as s3://bucket/prefix, gs://bucket, az://container or file:///path"),
]
ObjectsWrite = Annotated[
    Literal["evicted", "stored", "reused"],
    Field(description="When a block is written to the object store; the same words as for disk_write."),
]
CodecName = Annotated[
    str,
    Field(
        pattern=r"^[a-z][a-z0-9_]{0,15}([+][a-z][a-z0-9_]{0,15}){0,3}$",
        description="How the tier stores a block: none, planes (smaller), auto (planes where measured speeds say that "
        "it pays), aesgcm (encrypted), or names with + between, such as auto+aesgcm. See docs/codecs.md.",
    ),
    Shown(allowed="none, or names of codecs with + between"),
]
CodecKeyFile = Annotated[
    str,
    Field(
        pattern=r"^(/.*)?$",
        description="File of at least 32 random bytes. The codec aesgcm encrypts with it the blocks that belong to no "
        "tenant; those of a tenant are encrypted with the tenant's secret. The same file on all nodes. Empty: aesgcm "
        "writes no block that belongs to no tenant.",
    ),
    Shown(allowed="an absolute path"),
]
ObjectsNamespace = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,31}$",
        description="Services with one object store and one namespace share its blocks, also of several clusters.",
    ),
    Shown(allowed="up to 32 letters, digits, '-' and '_', the first one a letter or digit"),
]
MaxAge = Annotated[
    Seconds,
    Field(
        ge=0,
        description="Blocks that were computed longer ago are not found any more, and are removed from memory and "
        "disks; what is in an object store stays there until its life-cycle rule deletes it. For those who must "
        "delete. 0: blocks stay until there is no room.",
    ),
    Shown(unit="seconds"),
]


# The setting that says where a tier is → the others about it, which mean nothing without it.
TIERS: Mapping[str, tuple[str, ...]] = {
    "disk_path": ("disk_bytes", "disk_write", "disk_codec", "disk_io"),
    "objects_url": ("objects_write", "objects_codec", "objects_namespace"),
}


# -- the two faces of a definition: values, and words about them ----


class Settings(BaseModel):
    """Frozen values with a definition for each: the text below a field is its meaning.

    Whoever makes one gets ConfigError for a wrong value. It names the setting, the value and what is allowed."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
    what: ClassVar[str] = "setting"

    @model_validator(mode="wrap")
    @classmethod
    def _checked(cls, values: Any, build: Any) -> Any:
        try:
            return build(values)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = str(first["loc"][0]) if first["loc"] else ""
            raise ConfigError(cls._explain(name, first), key=name) from error

    @classmethod
    def unknown(cls, name: str) -> str:
        """What to say of a name that no setting has."""
        close = difflib.get_close_matches(name, cls.model_fields, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(sorted(cls.model_fields))}"
        return f"unknown {cls.what} {name!r}; {hint}"

    @classmethod
    def _explain(cls, name: str, error: ErrorDetails) -> str:
        if error["type"] == "extra_forbidden":
            return cls.unknown(name)
        said = str(error.get("ctx", {}).get("error", ""))
        if not name:
            return said or error["msg"]
        wanted = allowed(cls.model_fields[name])
        return f"{name}: {said}; give {wanted}" if said else f"{name} is {error['input']!r:.200}; give {wanted}"


def allowed(field: FieldInfo) -> str:
    """Which values a setting takes, in words: 'a size of at least 4.0 MiB', 'auto, nixl or shm'."""
    about = shown(field)
    kind = field.annotation
    if about.allowed:
        return about.allowed
    choices = [str(choice) for choice in get_args(kind)] if get_origin(kind) is Literal else []
    if isinstance(kind, type) and issubclass(kind, Enum):
        choices = [str(member.value) for member in kind]
    if choices:
        return f"{', '.join(choices[:-1])} or {choices[-1]}"
    if kind is bool:
        return "1 or 0"
    if _is_size(field):
        return "a size, or 0" if _range(field, str).endswith("least 0") else "a size" + _range(field, format_bytes)
    if kind in (int, float):
        noun = "a whole number" if kind is int else "a number"
        return noun + _range(field, lambda value: f"{value:g}") + (f" {about.unit}" if about.unit else "")
    return "a text"


def default_of(field: FieldInfo) -> str:
    """The default as an operator would write it; empty when there is none."""
    if words := shown(field).default:
        return words
    if field.is_required():
        return ""
    value = int(field.default) if isinstance(field.default, bool) else field.default
    if _is_size(field) and value:
        return format_bytes(value)
    if isinstance(value, Enum):
        return str(value.value)
    return "" if value in (None, "", ()) else f"{value:g}" if isinstance(value, float) else str(value)


def _is_size(field: FieldInfo) -> bool:
    return any(isinstance(item, BeforeValidator) and item.func is _size for item in field.metadata)


def _range(field: FieldInfo, write: Any) -> str:
    low = next((item.ge for item in field.metadata if isinstance(item, Ge)), None)
    high = next((item.le for item in field.metadata if isinstance(item, Le)), None)
    if low is None:
        return "" if high is None else f" of at most {write(high)}"
    return f" of at least {write(low)}" if high is None else f" from {write(low)} to {write(high)}"


def shown(field: FieldInfo) -> Shown:
    """What the setting and its kind of value say together; the setting wins."""
    found = [asdict(item) for item in field.metadata if isinstance(item, Shown)]
    return Shown(**{name: word for each in found for name, word in each.items() if word})


def check_tiers(settings: Settings) -> None:
    """Raises ConfigError for words about a tier that is not there, and for a disk without room for blocks."""
    given = dict(settings)
    for place, about in TIERS.items():
        for name in about if not given[place] else ():
            if given[name] != type(settings).model_fields[name].default:
                raise ConfigError(
                    f"{name} is {given[name]} and {place} is empty: give {place} too, or leave {name} out"
                )
    if 0 < given["disk_bytes"] < DISK_BYTES_MIN:
        raise ConfigError(
            f"disk_bytes is {format_bytes(given['disk_bytes'])}; give at least {format_bytes(DISK_BYTES_MIN)}, or 0 "
            "for nine tenths of what is free"
        )


# -- the service ----

NAME = "up to 32 letters, digits, '-' and '_', the first one a letter or digit"
PORTS = f"0, or a port from 1024 to {PORT_MAX - LOOKUP_PARTITIONS_MAX}"
ADDRESSES = "host:port, dns:///host:port or unix:/path of each, with commas between"
RUNTIME_DIRS = "/run/kvservice for root, else ~/.local/state/kvservice"

# The same words for a service, an engine and the proxy.
Traces = Annotated[
    str,
    Field(
        pattern=r"^(off|otlp|file:/.+)$",
        description="Where spans of requests go: otlp is the collector that OTEL_EXPORTER_OTLP_ENDPOINT names, or the "
        "one on this machine; file:/path appends a line of JSON for each. See docs/howto/traces.md.",
    ),
    Shown(allowed="off, otlp, or file:/path"),
]


class ServiceConfig(Settings):
    """The settings of one installation of the service, the same on all its nodes."""

    service: Annotated[
        str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,31}$"), Shown(allowed=NAME, chart="cache.service")
    ] = "default"
    """Name of the installation. Two services on one Ray cluster or machine need different names."""

    pool_bytes: Annotated[Size, Field(ge=POOL_BYTES_MIN), Shown(chart="cache.pool")] = 4 * GiB
    """Shared memory that each node gives to the pool. It is reserved at start. A larger pool holds more prompts. Take
    what engines and the system leave free, and make /dev/shm at least that large."""

    eviction: Annotated[EvictionName, Shown(chart="cache.eviction")] = "default"

    disk_path: Annotated[DiskPath, Shown(chart="tiers.disk.path")] = ""
    disk_bytes: Annotated[DiskBytes, Shown(chart="tiers.disk.size")] = 0
    disk_write: Annotated[DiskWrite, Shown(chart="tiers.disk.write")] = "evicted"
    disk_codec: Annotated[CodecName, Shown(chart="tiers.disk.codec")] = "none"
    disk_io: Annotated[DiskIOName, Shown(chart="tiers.disk.io")] = "auto"
    objects_url: Annotated[ObjectsUrl, Shown(chart="tiers.objects.url")] = ""
    objects_write: Annotated[ObjectsWrite, Shown(chart="tiers.objects.write")] = "evicted"
    objects_codec: Annotated[CodecName, Shown(chart="tiers.objects.codec")] = "none"
    objects_namespace: Annotated[ObjectsNamespace, Shown(chart="tiers.objects.namespace")] = "default"
    codec_key_file: Annotated[CodecKeyFile, Shown(chart="tiers.codecKeySecretName")] = ""
    max_age_seconds: Annotated[MaxAge, Shown(chart="tiers.maxAgeSeconds")] = 0.0

    accept_spill: Flag = False
    """Take blocks that other nodes evict, as far as there is room. Set it on nodes with memory and without engines, for
    example with `kvservice shard --accept-spill`."""

    spill: Annotated[Literal["evicted", "off"], Shown(chart="tiers.spill")] = "evicted"
    """Whether blocks that leave this node's memory are offered to nodes that accept them. Without such nodes nothing is
    sent."""

    transport: Annotated[Literal["auto", "nixl", "shm"], Shown(chart="cache.transport")] = "auto"
    """How a node reads the blocks of others. shm maps the memory of shards of the same machine and user, and reads no
    others. nixl reads all by NIXL: RDMA, shared memory or TCP. auto maps what it can and reads the rest by NIXL where
    that is installed; a service on loopback needs no NIXL."""

    lookup_partitions: Annotated[Count, Field(ge=1, le=LOOKUP_PARTITIONS_MAX), Shown(chart="lookup.partitions")] = 2
    """Parts of the directory. Losing one of two loses half of the remote hits and nothing else. More parts spread the
    load of a large cluster."""

    lookup_port: Annotated[Count, AfterValidator(_unprivileged), Shown(allowed=PORTS, chart="lookup.port")] = 0
    """First TCP port of the lookup partitions: partition i listens on lookup_port + i. Set it for firewalls. 0 takes
    any free port, or Unix sockets on one machine without TLS."""

    lookup: Annotated[Listed, Shown(allowed=ADDRESSES)] = ()
    """Where lookup partitions run that were started with `kvservice lookup`, in the order of their partitions. A shard
    joins them, and commands ask them from any machine. Without them a shard finds blocks of no other node. `kvservice
    up` starts lookup partitions itself."""

    lease_seconds: Annotated[
        Seconds, Field(ge=LEASE_SECONDS_MIN, le=600), Shown(unit="seconds", chart="cache.leaseSeconds")
    ] = 10.0
    """How long the blocks of an engine that vanished stay pinned. A lower value frees memory sooner. An engine that
    pauses for longer than this loses its leases."""

    heartbeat_seconds: Annotated[
        Seconds, Field(ge=0.1, le=60), Shown(unit="seconds", chart="cache.heartbeatSeconds")
    ] = 1.0
    """Time between two heartbeats of a shard. The directory hides a node after three missed ones, and after 3 seconds
    at the earliest."""

    slab_bytes: Annotated[Size, Field(ge=0), Shown(chart="cache.slab")] = 0
    """Unit in which the pool gives memory to block sizes. One block must fit into a slab. 0 lets the shard choose: 64
    MiB, or less in a small pool."""

    mirror_bytes: Annotated[Size, Field(ge=0), Shown(chart="cache.mirror")] = MIRROR_BYTES
    """Shared memory that each node gives at most to its copy of the directory, which answers lookups without a call. It
    takes 28 to 57 bytes for each block of the cluster. 0 switches it off."""

    runtime_dir: Annotated[AbsolutePath, Shown(chart="shard.hostRuntimeDir", default=RUNTIME_DIRS)] = ""
    """Directory for sockets and records on every node. It belongs to the service's user alone. Engines and commands
    need the same one: set KVSERVICE_RUNTIME_DIR for them."""

    metrics_port: Annotated[
        Count, Field(ge=0, le=PORT_MAX - COPY_WORKERS_MAX - LOOKUP_PARTITIONS_MAX), Shown(chart="cache.metricsPort")
    ] = 0
    """HTTP port on every node where Prometheus finds /metrics. Copy workers take the ports after it, and lookup
    partition i on Ray the port 65 + i further on. 0 serves no metrics."""

    traces: Traces = "off"

    copy_workers: Annotated[
        str,
        BeforeValidator(lambda value: str(value) if isinstance(value, int) else value),
        Field(pattern=r"^(auto|off|[0-9]|[1-5][0-9]|6[0-4])$"),
        Shown(allowed=f"auto, off, or a number up to {COPY_WORKERS_MAX}", chart="ray.copyWorkers"),
    ] = "off"
    """Copy workers that Ray starts on each node: auto starts one for every GPU, a number at most that many. A number
    also gives a node without a GPU one worker for its CPU engines."""

    head_shard: Annotated[Flag, Shown(chart="ray.head.shard")] = True
    """Whether the head node of a Ray cluster gets a shard. Set it to 0 for a head that runs no engine, so that its
    memory stays free."""

    tls_dir: Annotated[AbsolutePath, Shown(chart="tls.secretName")] = ""
    """Directory with tls.crt, tls.key and ca.crt, the same path on every node. With it, gRPC between nodes is encrypted
    and both sides show a certificate. Changed files are read again. Without it the service stays on one machine, on
    Unix sockets."""

    allow_plaintext: Annotated[Flag, Shown(chart="tls.allowPlaintext")] = False
    """Serve ports without TLS. Whoever reaches such a port can read and remove blocks; on loopback that is every user
    of the machine. Only for networks and machines that nobody else uses."""

    tenants_file: Annotated[AbsolutePath, Shown(chart="tenants.secretName")] = ""
    """File that says who may use the service, by hashes of their tokens, and how much each may hold. `kvservice tenants
    add` makes it; the same path on every node. A changed file is read again. Without it everybody is one tenant."""

    @model_validator(mode="after")
    def _fits_together(self) -> ServiceConfig:
        if self.slab_bytes > self.pool_bytes:
            raise ConfigError(
                f"slab_bytes is {format_bytes(self.slab_bytes)} and pool_bytes {format_bytes(self.pool_bytes)}: a slab "
                "is a part of the pool, so give a smaller slab or a larger pool"
            )
        for address in self.lookup:
            if not _ADDRESS.fullmatch(address):
                raise ConfigError(
                    f"lookup has {address!r}; write host:port, [IPv6 address]:port, dns:///host:port or "
                    "unix:/path, with commas"
                )
        check_tiers(self)
        return self

    @property
    def runtime_root(self) -> Path | None:
        """`runtime_dir` as a path; None where each process finds the default of its user."""
        return Path(self.runtime_dir) if self.runtime_dir else None


@dataclass(frozen=True, slots=True)
class Given:
    """A value that somebody gave for a setting, and who: 'the file x.toml', 'the variable KVSERVICE_POOL_BYTES'."""

    value: Any
    origin: str


def load_config(
    path: Path | None = None, environment: Mapping[str, str] | None = None, /, **overrides: object
) -> ServiceConfig:
    """Read file and environment, then apply overrides that are not None. Raises ConfigError naming key, value and, for
    a variable or a file, where it comes from."""
    given = gather_given(path, environment, **overrides)
    try:
        return ServiceConfig(**{name: each.value for name, each in given.items()})
    except ConfigError as error:
        found = given.get(str(error.attributes.get("key", "")))
        if found is None or found.origin == COMMAND_LINE:
            raise
        hint = _hint_at_kubernetes(str(error.attributes["key"]), found)
        raise ConfigError(f"{error.message} (from {found.origin}){hint}", **error.attributes) from error


def _hint_at_kubernetes(name: str, given: Given) -> str:
    """What to say of a wrong variable that looks as if nobody had set it."""
    if given.origin != _origin(name) or not (
        str(given.value).startswith("tcp://")
        or (_OF_KUBERNETES.fullmatch(name) and name not in ServiceConfig.model_fields)
    ):
        return ""
    return (
        ". Kubernetes makes such variables for a Service named kvservice: name it otherwise, or turn them off with "
        "`enableServiceLinks: false` in the pod"
    )


def _origin(name: str) -> str:
    """How a value of the environment is said to come from there."""
    return f"the variable {ENVIRONMENT_PREFIX}{name.upper()}"


def gather_given(
    path: Path | None = None, environment: Mapping[str, str] | None = None, /, **overrides: object
) -> dict[str, Given]:
    """What file, environment and overrides give, and where each value comes from; a later source wins. Nothing is
    checked but that the file can be read, else it raises ConfigError."""
    variables = os.environ if environment is None else environment
    given = {
        name: Given(value, f"the file {path}") for name, value in ({} if path is None else read_file(path)).items()
    }
    for name, value in read_environment(variables).items():
        given[name] = Given(value, _origin(name))
    given.update({name: Given(value, COMMAND_LINE) for name, value in overrides.items() if value is not None})
    return given


def read_file(path: Path) -> dict[str, Any]:
    """The keys of a TOML file, as they are. Raises ConfigError when it cannot be read."""
    try:
        found: dict[str, Any] = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, a number without end
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    return found


def read_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """The settings that variables KVSERVICE_* give, as text; unknown ones too, which ServiceConfig then refuses."""
    return {
        name.removeprefix(ENVIRONMENT_PREFIX).lower(): text
        for name, text in environment.items()
        if name.startswith(ENVIRONMENT_PREFIX) and name not in OTHER_VARIABLES and not name.startswith(_TEST_PREFIX)
    }


def tls_of_environment() -> tuple[str, bool]:
    """(`tls_dir`, `allow_plaintext`) from KVSERVICE_TLS_DIR and KVSERVICE_ALLOW_PLAINTEXT.

    For processes that read no other setting from the environment. Raises ConfigError.
    """
    names = (f"{ENVIRONMENT_PREFIX}TLS_DIR", f"{ENVIRONMENT_PREFIX}ALLOW_PLAINTEXT")
    config = load_config(None, {name: os.environ[name] for name in names if name in os.environ})
    return config.tls_dir, config.allow_plaintext


def token_of_environment() -> tuple[str, str]:
    """(KVSERVICE_TOKEN, KVSERVICE_TOKEN_FILE) of an engine or a command; the file takes precedence."""
    return os.environ.get(f"{ENVIRONMENT_PREFIX}TOKEN", ""), os.environ.get(f"{ENVIRONMENT_PREFIX}TOKEN_FILE", "")
