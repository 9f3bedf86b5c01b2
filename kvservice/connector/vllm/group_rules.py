"""Decides which of vLLM's KV cache groups can be stored, and explains why others cannot.

Written for vLLM 0.32 and 0.33. Called once when an engine attaches; pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupRole,
    KVCacheGroupSpec,
    KVCacheSpecKind,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    get_kv_cache_spec_kind,
)

from kvservice.connector.cache_groups import EngineGroup
from kvservice.core.block.window_groups import WINDOW_GROUPS_MAX, Window
from kvservice.errors import UnsupportedLayout

Spec: TypeAlias = FullAttentionSpec | SlidingWindowSpec | ChunkedLocalAttentionSpec | MambaSpec
# vLLM can keep layers of these kinds as if they saw every token, which makes one group of them and of full attention.
LOCAL_KINDS = frozenset(
    {
        KVCacheSpecKind.SLIDING_WINDOW,
        KVCacheSpecKind.SLIDING_WINDOW_MLA,
        KVCacheSpecKind.CHUNKED_LOCAL_ATTENTION,
    }
)
KEEPS_STATES = "align"  # the mode in which vLLM keeps a state at the ends of blocks, chosen by it with prefix caching
FULL_KINDS = frozenset({KVCacheSpecKind.FULL_ATTENTION, KVCacheSpecKind.MLA_ATTENTION})
ENCODER_KINDS = frozenset({KVCacheSpecKind.CROSS_ATTENTION, KVCacheSpecKind.ENCODER_ONLY_ATTENTION})


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """vLLM's KV cache groups of one spec, which the pool stores as one group. A hit that needs a block of one of them
    needs it of all, so one slot holds the blocks of all."""

    spec: Spec
    engine_groups: tuple[int, ...]  # vLLM's indices
    window: Window | None  # None: every block of the prefix is needed


@dataclass(frozen=True, slots=True)
class StoredGroups:
    """Group 0, with full attention, then the window groups. A position of each has `block_tokens`, the least common
    multiple of their block sizes; vLLM's hits end there, too. Of a model of states alone, group 0 has signposts, which
    are of none of vLLM's groups."""

    groups: tuple[StoredGroup, ...]
    block_tokens: int

    @property
    def full(self) -> FullAttentionSpec:
        spec = self.groups[0].spec
        assert isinstance(spec, FullAttentionSpec)
        return spec

    @property
    def has_signposts(self) -> bool:
        return not self.groups[0].engine_groups

    @property
    def has_states(self) -> bool:
        return any(isinstance(group.spec, MambaSpec) for group in self.groups)

    def parts(self, group: StoredGroup) -> int:
        return int(self.block_tokens // group.spec.block_size)

    def engine_groups(self) -> tuple[EngineGroup, ...]:
        """The pool's group that each of vLLM's groups belongs to, by vLLM's index."""
        found = {
            index: EngineGroup(number, self.parts(group))
            for number, group in enumerate(self.groups)
            for index in group.engine_groups
        }
        return tuple(found[index] for index in sorted(found))


def group_count(cache_config: KVCacheConfig) -> int:
    """vLLM's KV cache groups, and the signposts of a model of states alone."""
    groups = cache_config.kv_cache_groups
    return len(groups) + (bool(groups) and _has_states_alone(groups))


def _has_states_alone(groups: Iterable[KVCacheGroupSpec]) -> bool:
    return all(isinstance(group.kv_cache_spec, MambaSpec) for group in groups)


def _signposts(block_tokens: int) -> StoredGroup:
    """They stand for attention, of which they have the kind only."""
    spec = FullAttentionSpec(block_size=block_tokens, num_kv_heads=1, head_size=1, dtype=torch.uint8)
    return StoredGroup(spec, engine_groups=(), window=None)


def stored_groups(cache_config: KVCacheConfig) -> StoredGroups:
    """Which groups of the model are stored together.

    Raises UnsupportedLayout if the model cannot be stored. The error names the group, its kind and layers, the reason,
    and what to do.
    """
    groups = cache_config.kv_cache_groups
    if not groups:
        raise UnsupportedLayout("the model has no KV cache")
    several = len(groups) > 1
    for index, group in enumerate(groups):
        reason = _why_not(cache_config, group, several=several)
        if reason is not None:
            advice = f". {way_out(groups)}" if several else ""
            raise UnsupportedLayout(f"{describe(index, group)} is not supported: {reason}{advice}")
    found: dict[Spec, list[int]] = {}
    for index, group in enumerate(groups):
        spec = group.kv_cache_spec
        assert isinstance(spec, Spec)
        found.setdefault(spec, []).append(index)
    full = [indices[0] for spec, indices in found.items() if isinstance(spec, FullAttentionSpec)]
    has_signposts = _has_states_alone(groups)
    if len(full) + has_signposts != 1 or len(found) + has_signposts > WINDOW_GROUPS_MAX + 1:
        named = "; ".join(describe(index, groups[index]) for index in full or range(len(groups)))
        reason = "no group keeps every block" if not full else "full attention must have one shape, and windows few"
        raise UnsupportedLayout(f"these KV cache groups are not supported, {reason}: {named}. {way_out(groups)}")
    ordered = sorted(found.items(), key=lambda item: (not isinstance(item[0], FullAttentionSpec), item[1][0]))
    made = tuple(StoredGroup(spec, tuple(indices), _window(spec)) for spec, indices in ordered)
    block_tokens = math.lcm(*(int(group.spec.block_size) for group in made))
    stored = StoredGroups((_signposts(block_tokens), *made) if has_signposts else made, block_tokens)
    for group in made:
        if isinstance(group.spec, MambaSpec) and stored.parts(group) > 1:
            index = group.engine_groups[0]
            raise UnsupportedLayout(
                f"{describe(index, groups[index])} is not supported: its states are {group.spec.block_size} tokens "
                f"apart, and a hit ends on {stored.block_tokens} only; give both the same --block-size"
            )
    return stored


def content_bytes(spec: Spec) -> int:
    """The bytes of one layer's block, without the padding that vLLM may add behind them."""
    return int(spec.state_content_size_bytes if isinstance(spec, MambaSpec) else spec.unpadded_page_size_bytes)


def _window(spec: Spec) -> Window | None:
    if isinstance(spec, SlidingWindowSpec):
        return Window(sliding_tokens=int(spec.sliding_window + spec.extra_retained_tokens))
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return Window(chunk_tokens=int(spec.attention_chunk_size))
    return Window(is_state=True) if isinstance(spec, MambaSpec) else None


def describe(index: int, group: KVCacheGroupSpec) -> str:
    """For example `KV cache group 1 (sliding_window of 512 tokens, 22 layers: model.layers.0, model.layers.1, …)`."""
    spec = group.kv_cache_spec
    kind = get_kv_cache_spec_kind(spec)
    # No subclass: they free, move or fill blocks by rules of their own, and vLLM lets platforms register more.
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
    return "There is no way around it yet"


def _why_not(cache_config: KVCacheConfig, group: KVCacheGroupSpec, *, several: bool) -> str | None:
    spec = group.kv_cache_spec
    tensors = sum(1 for tensor in cache_config.kv_cache_tensors if set(tensor.layers) & set(group.layer_names))
    if isinstance(spec, UniformTypeKVCacheSpecs) or tensors > 1:
        # The scheduler half is shown only the first layer's spec, but the places of all.
        return "its layers have pages of different shapes"
    kind = get_kv_cache_spec_kind(spec)
    if kind in LOCAL_KINDS and not several:
        return "vLLM gives up blocks that have left the window, and without another group there is no prefix to find"
    if kind in ENCODER_KINDS:
        return "its layers attend to what an encoder made of other input, and its blocks hold no tokens of the prompt"
    # Other subclasses free, move or rewrite blocks by rules of their own.
    beside = (SlidingWindowSpec, ChunkedLocalAttentionSpec) if several else ()
    known = (FullAttentionSpec, MLAAttentionSpec, MambaSpec, *beside)
    if type(spec) not in known:
        names = " and ".join(one.__name__ for one in known)
        return f"only {names} are known to keep blocks as they were computed"
    assert isinstance(spec, AttentionSpec | MambaSpec)
    if not spec.prefix_cacheable or not group.enable_kv_transfer or group.host_resident:
        return "vLLM keeps it out of prefix caching or transfer"
    if group.role is not KVCacheGroupRole.DEFAULT:
        return f"its role is {group.role.value}"
    return _why_no_state(spec) if isinstance(spec, MambaSpec) else _why_no_blocks(spec)


def _why_no_state(spec: MambaSpec) -> str | None:
    if spec.mamba_cache_mode != KEEPS_STATES:
        return (
            f"vLLM keeps no state at the ends of blocks (mamba_cache_mode {spec.mamba_cache_mode!r}); start the engine "
            "with --enable-prefix-caching"
        )
    return "drafts that are refused move its blocks" if spec.num_speculative_blocks else None


def _why_no_blocks(spec: AttentionSpec) -> str | None:
    if getattr(spec, "non_causal", False):
        return "it attends to later tokens, so equal prefixes do not have equal KV"
    if spec.tokens_per_state != 1:
        return f"one state stands for {spec.tokens_per_state} tokens"
    if spec.unpadded_page_size_bytes % spec.num_heads:
        return f"a page of {spec.unpadded_page_size_bytes} bytes does not divide over {spec.num_heads} heads"
    return None
