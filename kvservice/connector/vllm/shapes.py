"""Which ways of spreading or extending a model over vLLM's processes can be stored, and why others cannot.

Written for vLLM 0.32 and 0.33. Called when an engine attaches; pure. What a KV cache group may be is in `group_rules`.
"""

from __future__ import annotations

from typing import Any

from kvservice.connector.vllm.draft_layers import STORED_DRAFT_LAYERS, has_draft_layers
from kvservice.errors import UnsupportedLayout


def refuse_shape(vllm_config: Any) -> None:
    """Raises UnsupportedLayout that names the setting, the reason, and what to do."""
    parallel = vllm_config.parallel_config
    reason = _spread(parallel) or _draft(vllm_config.speculative_config, parallel) or _encoder(vllm_config)
    if reason is None and getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        reason = (
            "KV scales calculated at run time differ between replicas; start the engine without --calculate-kv-scales"
        )
    if reason is not None:
        raise UnsupportedLayout(reason)


def _spread(parallel: Any) -> str | None:
    """Tensor parallelism divides the heads of a slot, and every degree fits. These divide something else."""
    stages = getattr(parallel, "pipeline_parallel_size", 1)
    if stages > 1:
        return (
            f"pipeline parallelism is not supported (pipeline_parallel_size is {stages}): a slot holds all layers, and "
            "each stage has only its own; start the engine with one pipeline stage"
        )
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size > 1:
            return (
                f"context parallelism is not supported ({name} is {size}): the tokens of a block lie on several ranks; "
                f"leave {name} at 1"
            )
    return None


def _draft(speculative: Any, parallel: Any) -> str | None:
    """A draft model of its own, n-grams, and draft layers that read one token ahead are fine."""
    if speculative is None:
        return None
    method = getattr(speculative, "method", None) or "a draft head"
    if has_draft_layers(speculative) and method not in STORED_DRAFT_LAYERS:
        return (
            f"speculative decoding with draft layers of the method {method!r} is not supported, because nobody has "
            "looked at what they keep in blocks; use EAGLE, MTP, a draft model or n-grams, or leave speculative_config "
            "out"
        )
    if has_draft_layers(speculative) and speculative.use_multi_module_mtp():
        return (
            "MTP with several modules is not supported: each reads one token further ahead, and those behind the first "
            "keep what was drafted; use num_speculative_tokens 1, or leave speculative_config out"
        )
    draft = getattr(speculative, "draft_parallel_config", None)
    if draft is not None and draft.tensor_parallel_size != parallel.tensor_parallel_size:
        return (
            f"a draft over {draft.tensor_parallel_size} tensor-parallel ranks beside a model over "
            f"{parallel.tensor_parallel_size} is not supported: leave draft_tensor_parallel_size out"
        )
    if getattr(speculative, "uses_extract_hidden_states", bool)():
        return (
            f"hidden states among the blocks (speculative method {method!r}) are not supported: a hit would bring no "
            "hidden states; leave speculative_config out"
        )
    return None


def _encoder(vllm_config: Any) -> str | None:
    """The outputs of encoders are no KV. A connector that moves them beside this one is left alone."""
    transfer = getattr(vllm_config, "ec_transfer_config", None)
    if transfer is not None and transfer.is_encode_only:
        return (
            "this engine only encodes images or sound for others (ec_role ec_producer), so it has no KV to store; "
            "leave kv_transfer_config out"
        )
    return None
