"""What vLLM adds to shared pages: which engines and requests may share, and where K and V lie in its tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.attention.backends import cpu_attn

from kvservice.connector.cache_groups import Grouping, PagesOfBlocks
from kvservice.connector.options import ConnectorOptions
from kvservice.connector.plan import StepPlan
from kvservice.connector.shared.gate import ShareGate
from kvservice.connector.shared.identity import shared_model, sharing
from kvservice.connector.shared.judge import Judge, Probation
from kvservice.connector.vllm.group_rules import Spec, group_count, stored_groups
from kvservice.connector.worker.page_copier import PageCopier, column_views, row_views
from kvservice.core.block.pages import PAGE_TOKENS, PageChain
from kvservice.core.messages import EngineSpec
from kvservice.errors import UnsupportedLayout
from kvservice.units import BlockHash

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


def check(vllm_config: Any, cache_config: KVCacheConfig) -> Spec:
    """The engine's only kind of KV cache. Raises UnsupportedLayout that names what of it is not shared."""
    model, spec = vllm_config.model_config, stored_groups(cache_config).full
    count = group_count(cache_config)
    refused = {
        f"{count} KV cache groups": count > 1,
        f"a KV cache of {spec.dtype} for a model in {model.dtype}": spec.dtype != model.dtype,
        "K and V of different sizes": int(getattr(spec, "head_size_v", None) or spec.head_size) != spec.head_size,
        "a packed KV cache": spec.num_head_slots is not None or spec.state_content_bytes is not None,
        f"quantization {model.quantization!r}": model.quantization is not None,
        "hf_overrides": bool(model.hf_overrides),
        "speculative decoding, whose draft model has pages of its own": vllm_config.speculative_config is not None,
    }
    for name, is_so in refused.items():
        if is_so:
            raise UnsupportedLayout(f"share 'engines' is not supported with {name}")
    if spec.block_size % PAGE_TOKENS:
        raise UnsupportedLayout(f"share 'engines' needs a --block-size that is a multiple of {PAGE_TOKENS}")
    if vllm_config.device_config.device_type == "cpu":
        kernels = cpu_attn._get_attn_isa(spec.dtype, int(spec.block_size), int(spec.head_size))  # noqa: SLF001
        if kernels != "vec":
            raise UnsupportedLayout(
                f"share 'engines': nobody has compared the order of K in a block of vLLM's {kernels!r} kernels for CPUs"
            )
    return spec


def engine_spec(
    vllm_config: Any, cache_config: KVCacheConfig, exact: EngineSpec, options: ConnectorOptions
) -> EngineSpec:
    """The engine's identity when it shares pages, from its exact one. Raises UnsupportedLayout as `check`."""
    spec, model = check(vllm_config, cache_config), vllm_config.model_config
    shared = shared_model(
        str(model.model),
        dtype=str(spec.dtype),
        layer_count=exact.layout.layer_count,
        kv_head_count=exact.layout.kv_head_count,
        head_size=int(spec.head_size),
        revision=model.revision,
        commit=getattr(model.hf_config, "_commit_hash", None),
        weights=options.weights_name(),
        weights_cache=options.weights_cache,
        accepts=options.accept_codec,
    )
    return sharing(exact, shared)


def grouping(cache_config: KVCacheConfig) -> Grouping:
    return PagesOfBlocks(int(stored_groups(cache_config).full.block_size) // PAGE_TOKENS)


def page_copier(vllm_config: Any, layers: Sequence[torch.Tensor], heads: range) -> PageCopier:
    """For the engine's tensors, as `compat.ordered_layers` returns them. Raises UnsupportedLayout."""
    is_packed = vllm_config.device_config.device_type == "cpu"
    return PageCopier(layers, column_views(layers) if is_packed else row_views(layers), heads)


def probation(vllm_config: Any, copier: PageCopier) -> Probation:
    """Reads the first layers of the model, which takes seconds. Raises UnsupportedLayout."""
    model = vllm_config.model_config
    return Probation(Judge(str(model.model), str(model.dtype).removeprefix("torch."), model.revision), copier)


class SharedRequests:
    """The scheduler's half: names the pages of each request, and shares nothing before the gate is open."""

    def __init__(self, worker_count: int) -> None:
        self.counters: Counter[str] = Counter()
        self.gate = ShareGate(worker_count)
        self._chains: dict[str, PageChain] = {}  # by request

    def begin(self, request: Request) -> bool:
        """Whether the request may share. Its pages are named either way."""
        self._chains[request.request_id] = PageChain((request.cache_salt or "").encode())
        reason = _left_out(request)
        if not reason and not self.gate.is_open:
            reason = f"gate_{self.gate.state.value}"
        if reason:
            self.counters[f"share_left_out_{reason}"] += 1
        return not reason

    def hashes(self, request: Request) -> list[BlockHash]:
        """Of the full pages of its tokens; the same list for each call, grown."""
        chain = self._chains.get(request.request_id)
        return [] if chain is None else chain.follow(request.all_token_ids)

    def end(self, request_id: str) -> None:
        self._chains.pop(request_id, None)

    def probe(self, plan: StepPlan, request: Request, computed: int, block_ids: Sequence[int]) -> None:
        """Send this request to the workers with the step, if it is the one that opens the gate."""
        if plan.probe is None and not _left_out(request):
            plan.probe = self.gate.probe(request.all_token_ids, computed, block_ids)


def _left_out(request: Request) -> str:
    """Why token ids do not say what this request's K and V are; empty if they do."""
    if request.lora_request is not None:
        return "adapter"
    if request.mm_features:
        return "media"
    return "embeddings" if request.prompt_embeds is not None else ""
