"""Which of vLLM's KV cache groups can be stored, and what to say of the others.

Written against vLLM 0.32. Called once when an engine attaches; pure.
"""

from __future__ import annotations

from collections.abc import Iterable

from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupRole,
    KVCacheGroupSpec,
    KVCacheSpecKind,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
    get_kv_cache_spec_kind,
)

from kvservice.errors import UnsupportedLayout

# vLLM can keep layers of these kinds as if they saw every token, which makes one group of them and of full attention.
LOCAL_KINDS = frozenset(
    {
        KVCacheSpecKind.SLIDING_WINDOW,
        KVCacheSpecKind.SLIDING_WINDOW_MLA,
        KVCacheSpecKind.CHUNKED_LOCAL_ATTENTION,
    }
)
FULL_KINDS = frozenset({KVCacheSpecKind.FULL_ATTENTION, KVCacheSpecKind.MLA_ATTENTION})


def only_group(cache_config: KVCacheConfig) -> FullAttentionSpec:
    """The spec of the model's one group, whose every block keeps the KV of its tokens for as long as the request runs.

    Raises UnsupportedLayout for anything else, naming the group, its kind and layers, and what to do.
    """
    groups = cache_config.kv_cache_groups
    if len(groups) != 1:
        named = "; ".join(describe(index, group) for index, group in enumerate(groups))
        raise UnsupportedLayout(f"{len(groups)} KV cache groups are not supported: {named}. {way_out(groups)}")
    group, spec = groups[0], groups[0].kv_cache_spec
    reason = _why_not(cache_config, group)
    if reason is not None:
        raise UnsupportedLayout(f"{describe(0, group)} is not supported: {reason}")
    assert isinstance(spec, FullAttentionSpec)
    return spec


def describe(index: int, group: KVCacheGroupSpec) -> str:
    """`KV cache group 1 (sliding_window of 512 tokens, 22 layers: model.layers.0, model.layers.1, …)`."""
    spec = group.kv_cache_spec
    kind = get_kv_cache_spec_kind(spec)
    plain = type(spec) in (FullAttentionSpec, MLAAttentionSpec)
    name = kind.value if plain or kind not in FULL_KINDS | {KVCacheSpecKind.UNKNOWN} else type(spec).__name__
    window = getattr(spec, "sliding_window", None)
    size = f" of {window} tokens" if window is not None else ""
    shown = ", ".join(group.layer_names[:2]) + (", …" if len(group.layer_names) > 2 else "")
    return f"KV cache group {index} ({name}{size}, {len(group.layer_names)} layers: {shown})"


def way_out(groups: Iterable[KVCacheGroupSpec]) -> str:
    """What a user can do about several groups."""
    kinds = {get_kv_cache_spec_kind(group.kv_cache_spec) for group in groups}
    if kinds <= FULL_KINDS | LOCAL_KINDS and kinds & FULL_KINDS:
        return (
            "Start the engine with --disable-hybrid-kv-cache-manager: vLLM then keeps one group, and the layers with a "
            "window take as much of its cache as the others"
        )
    if KVCacheSpecKind.MAMBA in kinds:
        return "The state of Mamba and linear-attention layers is not a block of tokens; there is no way around it yet"
    return "There is no way around it yet"


def _why_not(cache_config: KVCacheConfig, group: KVCacheGroupSpec) -> str | None:
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs) or len(cache_config.kv_cache_tensors) > 1:
        # The scheduler half is shown the first layer's spec only, but places of all.
        return "its layers have pages of different shapes"
    kind = get_kv_cache_spec_kind(spec)
    if kind in LOCAL_KINDS:
        return "vLLM gives up blocks that have left the window, and a stored prefix would need them"
    # Subclasses free, move or rewrite blocks by rules of their own.
    if type(spec) is not FullAttentionSpec and type(spec) is not MLAAttentionSpec:
        return "only FullAttentionSpec and MLAAttentionSpec are known to keep every block as it was computed"
    if not spec.prefix_cacheable or not group.enable_kv_transfer or group.host_resident:
        return "vLLM keeps it out of prefix caching or transfer"
    if group.role is not KVCacheGroupRole.DEFAULT:
        return f"its role is {group.role.value}"
    if spec.non_causal:
        return "it attends to later tokens, so equal prefixes do not have equal KV"
    if spec.tokens_per_state != 1:
        return f"one state stands for {spec.tokens_per_state} tokens"
    if spec.unpadded_page_size_bytes % spec.num_heads:
        return f"a page of {spec.unpadded_page_size_bytes} bytes does not divide over {spec.num_heads} heads"
    return None
