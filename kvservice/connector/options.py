"""kv_connector_extra_config, typed and checked once. Unknown keys are errors: a typo would silently change nothing."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field, model_validator

from kvservice.config import Count, Seconds, Shown, Traces
from kvservice.connector.weights import VERSION_CHARS_MAX, is_version
from kvservice.core.block.numbers import ACCEPTED
from kvservice.errors import ConfigError
from kvservice.session.options import MEMORY, PoolMemory, PoolOptions

NO_CACHE = "to run without a cache, start the engine without --kv-transfer-config"
VERSION = f"1 to {VERSION_CHARS_MAX} printable characters"
Timeout = Annotated[Seconds, Field(ge=0, le=600), Shown(unit="seconds")]


def checked_version(text: str) -> str:
    """For validators: raises ValueError."""
    if not is_version(text):
        raise ValueError(f"{text!r:.200} cannot name a version of weights")
    return text


class Offload(Enum):
    EAGER = "eager"  # store each block as soon as it is full: other replicas see it at once
    LAZY = "lazy"  # store when the request ends or is preempted: fewer copies, later hits
    EVICTING = "evicting"  # store what the engine is about to evict: the fewest copies, and the latest hits


class StoredPart(Enum):
    ALL = "all"
    PROMPTS = "prompts"  # not what the engine generates


class DeferStores(Enum):
    AUTO = "auto"  # on where the engine's own thread copies: a CPU without a copy worker
    ON = "on"
    OFF = "off"


class Verify(Enum):
    SAMPLED = "sampled"  # check every digest that comes with the copy; else that of one loaded block in sixteen
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


class Share(Enum):
    OFF = "off"  # blocks are exact: they are found by engines of the same kind and version only
    ENGINES = "engines"  # pages that any kind of engine finds which computes the same model in the same type


class AdapterFiles(Enum):
    """Which LoRA adapters are cached."""

    CHECKED = "checked"  # those whose files have not changed since before the engine started
    IMMUTABLE = "immutable"  # all: the operator says that files at one path never change


def slot_parts(slot_tokens: int | None, block_tokens: int) -> int:
    """How many blocks of `block_tokens` of the engine lie in a slot. Raises ConfigError if they do not fill it."""
    parts, rest = divmod(slot_tokens or block_tokens, block_tokens)
    if rest:
        nearest = (max(parts, 1) * block_tokens, (max(parts, 1) + 1) * block_tokens)
        raise ConfigError(
            f"slot_tokens {slot_tokens} is no multiple of the engine's block size, which is {block_tokens}: choose "
            f"{nearest[0]} or {nearest[1]}"
        )
    return parts


class EngineCacheOptions(PoolOptions):
    """What is the same for every engine: how its blocks are named, and when and how they are loaded."""

    namespace: str = ""
    """Engines in different namespaces never share blocks, and never refuse each other."""

    fetch_timeout_seconds: Timeout = 5.0
    """Service: longest that a request waits for blocks of another node."""

    verify_load: Verify = Verify.SAMPLED
    """Which loaded blocks are checked against their digest. sampled: all where the copy itself makes the digest, as a
    processor that reads whole slots does at no cost, and one in sixteen where a device copies; full: all; off: none.
    Blocks that came from another node are always checked."""

    weights_version: Annotated[Annotated[str, AfterValidator(checked_version)] | None, Shown(allowed=VERSION)] = None
    """What you call the weights, such as step-1200. Without it the bytes of their files say which they are."""

    accept_codec: Annotated[
        Annotated[str, Field(pattern=rf"^({ACCEPTED})?$")], Shown(allowed="int8, or int8:0.1 with a limit of drift")
    ] = ""
    """A codec that loses something, which tiers below the memory may use for this engine's blocks. Engines with another
    choice never share blocks with it. See docs/codecs.md."""

    cache_folder: Annotated[str | None, Shown(default="$XDG_CACHE_HOME/kvservice, else ~/.cache/kvservice")] = None
    """Directory for the digests of weight files."""

    def weights_name(self) -> str | None:
        """What the weights are called in the fingerprint; None where their bytes say it."""
        return None if self.weights_version is None else f"version {self.weights_version}"

    @property
    def weights_cache(self) -> Path | None:
        """`cache_folder` as a path; None = the default."""
        return None if self.cache_folder is None else Path(self.cache_folder).expanduser()


class SharingOptions(EngineCacheOptions):
    """Of engines that can share pages with engines of other kinds."""

    share: Share = Share.OFF
    """Who finds this engine's blocks. off: engines of the same kind, version and settings; tokens are exactly those of
    an engine without a cache. engines: every kind of engine with this option that computes the same weights in the same
    type. Their K and V differ by rounding, so tokens may differ as they do between two sizes of a prefill chunk.
    Nothing is shared until the engine's own K and V of a first prompt agree with the model's files. See
    docs/howto/share-engines.md."""


class ConnectorOptions(SharingOptions):
    """What the engine's operator can set, the keys of kv_connector_extra_config."""

    what: ClassVar[str] = "key of kv_connector_extra_config"

    memory: Annotated[PoolMemory, Shown(allowed=f"{MEMORY}; {NO_CACHE}")] = None
    """Embedded: memory of the pool. `kvservice up` sets that of a service."""

    offload: Offload = Offload.EAGER
    """When blocks are stored: eager in the step that fills them, lazy when their request ends or is preempted, evicting
    shortly before the engine would lose them. The later, the fewer copies and the later the hits of others. A prompt
    that is handed off is stored as with eager. evicting needs vLLM's prefix caching, a model with one KV cache group,
    and no EAGLE or MTP."""

    store: StoredPart = StoredPart.ALL
    """What is stored of a request: all of it, or only its prompt and nothing that the engine generates. Agents and
    chats want all: the next prompt contains the answer. One-shot traffic saves the copies with prompts."""

    store_after_handoff: bool = False
    """Decode engine: store what it computes for a prompt that another engine handed off. A request can say so for
    itself."""

    defer_stores: DeferStores = DeferStores.AUTO
    """Whether copies into the pool start with the next step, after the tokens of this one are sampled and sent. auto is
    on where the engine's own thread copies: on a CPU with the copier in_process. Layer-wise saves are never
    deferred."""

    slot_tokens: Annotated[
        Annotated[Count, Field(ge=1, le=65536)] | None,
        Shown(allowed="a multiple of the engine's block size", default="the engine's block size"),
    ] = None
    """Tokens of a slot of the pool, a multiple of the engine's block size. A slot is found, fetched and evicted as one,
    under one name. With 256 a small model has a sixteenth of the names, messages and files of blocks of 16. Only whole
    slots are stored, so a shared prefix that is shorter than one is no hit. Engines with different slot_tokens share
    nothing. Not with offload evicting, loans, or several KV cache groups."""

    tails: bool = False
    """Whether the beginning of a request's last block is stored too, when the request ends, and hit by prompts that go
    on behind it. It saves up to a block of computing per hit, for one more question per request and one slot per tail:
    worth it for blocks of 128 tokens and more, and for latent attention (MLA). Not with layerwise loads, offload
    evicting, slot_tokens, share, EAGLE or MTP, or several KV cache groups. With store prompts no tail is stored."""

    copier: CopierChoice = CopierChoice.AUTO
    """Service: who copies blocks between the engine's KV cache and the pool. in_process is the engine itself, worker a
    copy worker beside the shard. auto is in_process."""

    layerwise: Layerwise = Layerwise.OFF
    """What is copied layer by layer during the forward. The rest is copied as whole blocks."""

    traces: Traces = "off"

    handoff_timeout_seconds: Timeout = 60.0
    """Service: longest that a decode request waits for its prefill on another engine. The end of the prefill ends the
    wait at once."""

    handoff_loans: HandoffLoans = HandoffLoans.AUTO
    """With copier worker: a decode engine copies a handed-off prompt straight from the KV cache of the prefill engine
    of the same node. auto is on for GPUs."""

    loan_seconds: Timeout = 5.0
    """Longest that a prefill engine keeps its blocks for such a copy. 0 switches it off."""

    weights_version_file: str | None = None
    """File with the version of weights that are changed in place. It is read at each reset of the prefix cache."""

    adapter_files: AdapterFiles = AdapterFiles.CHECKED
    """Which LoRA adapters are cached: checked caches those whose files did not change since the engine started,
    immutable all of them."""

    @classmethod
    def parse(cls, given: Mapping[str, object]) -> ConnectorOptions:
        """Raises ConfigError naming the key, the value and what is allowed."""
        return cls(**given)  # type: ignore[arg-type]  # checked here, whatever it is

    @model_validator(mode="after")
    def _fits_together(self) -> ConnectorOptions:
        if self.handoff_loans is HandoffLoans.ON and self.copier is not CopierChoice.WORKER:
            raise ConfigError("handoff_loans 'on' needs copier 'worker': only a copy worker can copy between engines")
        if self.offload is Offload.EVICTING and self.layerwise.loads:
            raise ConfigError(
                "offload 'evicting' and layerwise loads exclude each other: a block near eviction may be one whose "
                "load is not confirmed yet"
            )
        if self.slot_tokens is not None and self.offload is Offload.EVICTING:
            raise ConfigError(
                "offload 'evicting' and slot_tokens exclude each other: the engine evicts its blocks one by one, and a "
                "slot is stored whole"
            )
        if self.slot_tokens is not None and self.handoff_loans is HandoffLoans.ON:
            raise ConfigError("handoff_loans 'on' and slot_tokens exclude each other: blocks are lent one by one")
        if self.share is Share.ENGINES:
            self._shares_pages()
        if self.tails and (self.layerwise.loads or self.offload is Offload.EVICTING or self.slot_tokens is not None):
            raise ConfigError(
                "tails and layerwise loads, offload 'evicting' or slot_tokens exclude each other: a tail is one block "
                "of the engine, loaded before its step and stored when its request ends"
            )
        if self.weights_version is not None and self.weights_version_file is not None:
            raise ConfigError(
                "weights_version names weights that stay, weights_version_file weights that are changed in place: "
                "give one of them"
            )
        return self

    def _shares_pages(self) -> None:
        """Raises ConfigError for what copies or names blocks in the engine's own way."""
        refused = {
            "copier": (self.copier is CopierChoice.WORKER, "a copy worker copies blocks as they are"),
            "layerwise": (self.layerwise is not Layerwise.OFF, "layers are copied as they are"),
            "slot_tokens": (self.slot_tokens is not None, "a slot holds one page of 16 tokens"),
            "tails": (self.tails, "other engines look for whole pages"),
            "offload 'evicting'": (
                self.offload is Offload.EVICTING,
                "the engine knows blocks about to go by its names",
            ),
        }
        for name, (is_set, reason) in refused.items():
            if is_set:
                raise ConfigError(f"share 'engines' and {name} exclude each other: {reason}")

    def loans_on(self, device: str) -> bool:
        """Whether an engine on this kind of device (vLLM's device type) lends and borrows blocks."""
        wanted = self.handoff_loans is HandoffLoans.ON or (self.handoff_loans is HandoffLoans.AUTO and device == "cuda")
        return wanted and self.copier is CopierChoice.WORKER and self.slot_tokens is None

    def weights_name(self) -> str | None:
        by_file = None if self.weights_version_file is None else "by weights_version_file"
        return super().weights_name() or by_file
