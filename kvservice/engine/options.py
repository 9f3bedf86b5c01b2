"""What a user of the reference engine can set. The options of the connector come first: both engines read the same."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, ClassVar

from pydantic import Field, model_validator
from pydantic_core import ErrorDetails

from kvservice.config import Count, Shown, Size
from kvservice.connector.options import ConnectorOptions, CopierChoice, Layerwise, Offload, Share
from kvservice.core.block.pages import PAGE_TOKENS
from kvservice.errors import ConfigError
from kvservice.units import GiB

CPU_BYTES = 1 * GiB  # of K/V blocks on a CPU by default: some ten thousand tokens of a model that a test can run
# What engines for serving have and this one leaves out, by the names that their users know, with what to do instead.
REFUSED = {
    "adapters": "LoRA adapters are not supported: merge the adapter into the weights first",
    "pipeline stages": "a model in pipeline stages is not supported: load it on one device",
    "multi-step scheduling": "several forwards per scheduling step are not supported: each step is one forward",
}
NAMES_REFUSED = {
    **dict.fromkeys(("enable_lora", "lora_modules", "lora_request", "adapter", "adapters"), "adapters"),
    **dict.fromkeys(("pipeline_parallel_size", "pipeline_stages"), "pipeline stages"),
    **dict.fromkeys(("num_scheduler_steps", "multi_step", "scheduler_steps"), "multi-step scheduling"),
}


class PreemptBy(Enum):
    AUTO = "auto"  # the way whose measured speed promises to be faster
    SWAP = "swap"  # to the host, wherever there is room
    RECOMPUTE = "recompute"


class EngineRole(Enum):
    BOTH = "both"
    PRODUCER = "producer"  # a prefill engine: stores and never loads
    CONSUMER = "consumer"  # a decode engine: loads and never stores


class EngineOptions(ConnectorOptions):
    what: ClassVar[str] = "option of the reference engine"

    cache: bool = True
    """Whether blocks are kept in a pool. Without it prompts are computed, and preempted requests computed again."""

    role: EngineRole = EngineRole.BOTH

    block_tokens: Annotated[Count, Field(ge=1, le=1024)] = 16
    """Tokens of a block."""

    device_blocks: Annotated[Annotated[Count, Field(ge=1)] | None, Shown(default="as many as fit")] = None
    """Blocks on the model's device. By default as many as fit into device_memory."""

    device_memory: Annotated[
        Size | None, Shown(default="1 GiB on a CPU; on a GPU what the model leaves of nine tenths")
    ] = None
    """Memory for the blocks on the model's device."""

    host_blocks: Annotated[Annotated[Count, Field(ge=0)] | None, Shown(default="as many as device_blocks")] = None
    """The most blocks of preempted requests that are on the host at once. Their bytes are in the pool; 0 switches
    swapping off."""

    step_tokens: Annotated[Count, Field(ge=1)] = 2048
    """The most tokens that one step computes."""

    sequences: Annotated[Count, Field(ge=1)] = 64
    """The most sequences that run at once."""

    watermark: Annotated[float, Field(ge=0, lt=1)] = 0.01
    """Share of the device's blocks that is kept free when a request is admitted."""

    preempt_by: PreemptBy = PreemptBy.AUTO
    """How a running request makes room for an older one."""

    @classmethod
    def _explain(cls, name: str, error: ErrorDetails) -> str:
        if error["type"] == "extra_forbidden" and name in NAMES_REFUSED:
            return f"{name}: {REFUSED[NAMES_REFUSED[name]]}"
        return super()._explain(name, error)

    @model_validator(mode="after")
    def _is_one_engine(self) -> EngineOptions:
        if self.offload is Offload.EVICTING:
            raise ConfigError("offload 'evicting' reads the free queue of vLLM, which this engine does not have")
        if self.weights_version_file is not None:
            raise ConfigError(
                "weights_version_file is for weights that are changed in place, and this engine keeps those that it "
                "starts with: leave it out, or name them with weights_version"
            )
        if self.layerwise is not Layerwise.OFF and self.copier is CopierChoice.WORKER:
            raise ConfigError("layerwise and copier 'worker' exclude each other: a copy worker copies whole blocks")
        if self.share is Share.ENGINES and self.block_tokens != PAGE_TOKENS:
            raise ConfigError(f"share 'engines' needs block_tokens {PAGE_TOKENS}: a block is a page")
        if self.preempt_by is PreemptBy.SWAP and not self.swaps:
            raise ConfigError(
                "preempt_by 'swap' needs the cache, host_blocks above 0, role 'both' and offload 'eager': the host "
                "side of a swap is the pool"
            )
        return self

    @property
    def swaps(self) -> bool:
        """Whether preempted requests may go to the host."""
        stores_and_loads = self.cache and self.role is EngineRole.BOTH and self.offload is Offload.EAGER
        return stores_and_loads and self.host_blocks != 0 and self.preempt_by is not PreemptBy.RECOMPUTE
