"""Which KV cache groups are stored, and that every other one is refused by its name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheConfig,
    KVCacheGroupRole,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvservice.connector.groups import only_group
from kvservice.errors import UnsupportedLayout

COMMON: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": torch.bfloat16}
FULL = FullAttentionSpec(**COMMON)
LATENT = MLAAttentionSpec(**{**COMMON, "num_kv_heads": 1, "head_size": 576}, max_tp_shards=1)
WINDOW = SlidingWindowSpec(**COMMON, sliding_window=512)
CHUNKED = ChunkedLocalAttentionSpec(**COMMON, attention_chunk_size=8192)
MAMBA = MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,))
FLAG = "--disable-hybrid-kv-cache-manager"


def cache(*specs: Any, **group: Any) -> KVCacheConfig:
    groups = [
        KVCacheGroupSpec([f"layers.{index}.{part}" for part in range(3)], spec, **group)
        for index, spec in enumerate(specs)
    ]
    return KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=groups)


@pytest.mark.parametrize(
    "spec",
    [
        FULL,
        LATENT,
        replace(LATENT, cache_dtype_str="fp8_ds_mla", state_content_bytes=656, dtype=torch.uint8),
        # Without the hybrid manager: the layer computes with a window and keeps every block all the same.
        replace(FULL, sliding_window=512),
        replace(FULL, attention_chunk_size=8192),
    ],
)
def test_one_group_that_keeps_every_block_is_stored(spec: FullAttentionSpec) -> None:
    assert only_group(cache(spec)) == spec


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (WINDOW, r"group 0 \(sliding_window of 512 tokens, 3 layers: layers.0.0, layers.0.1, …\).*left the window"),
        (CHUNKED, r"\(chunked_local_attention, 3 layers"),
        (MAMBA, r"\(mamba, 3 layers"),
        (RSWASpec(**COMMON, rswa_window=128), r"\(RSWASpec, 3 layers.*only FullAttentionSpec and MLA"),
        (SinkFullAttentionSpec(**COMMON, sink_len=4), r"\(sink_full_attention, 3 layers.*only FullAttentionSpec"),
        (HiddenStateCacheSpec(**COMMON), r"\(HiddenStateCacheSpec, 3 layers.*only FullAttentionSpec"),
        (replace(FULL, non_causal=True), "attends to later tokens"),
        (replace(LATENT, tokens_per_state=4), "one state stands for 4 tokens"),
        (
            UniformTypeKVCacheSpecs(
                block_size=16, kv_cache_specs={"layers.0.0": FULL, "layers.0.1": replace(FULL, head_size=16)}
            ),
            "pages of different shapes",
        ),
    ],
)
def test_other_single_groups_are_refused_by_name_and_with_the_reason(spec: Any, says: str) -> None:
    with pytest.raises(UnsupportedLayout, match=says):
        only_group(cache(spec))


def test_groups_that_vllm_keeps_to_itself_are_refused() -> None:
    with pytest.raises(UnsupportedLayout, match="out of prefix caching or transfer"):
        only_group(cache(FULL, enable_kv_transfer=False))
    with pytest.raises(UnsupportedLayout, match="out of prefix caching or transfer"):
        only_group(cache(FULL, host_resident=True))
    with pytest.raises(UnsupportedLayout, match="its role is hisparse_source"):
        only_group(cache(FULL, role=KVCacheGroupRole.HISPARSE_SOURCE))


def test_scheduler_refuses_layers_of_several_shapes_although_it_is_shown_the_first_only() -> None:
    found = cache(FULL)
    found.kv_cache_tensors = [
        KVCacheTensor(size=4096, layers=["layers.0.0", "layers.0.1"], layer_stride=1024, block_stride=256),
        KVCacheTensor(size=4096, layers=["layers.0.2"], layer_stride=2048, block_stride=512, offset=2048),
    ]
    with pytest.raises(UnsupportedLayout, match="pages of different shapes"):
        only_group(found)


def test_several_groups_are_named_by_index_kind_and_layers_with_the_way_out() -> None:
    with pytest.raises(UnsupportedLayout) as refused:
        only_group(cache(FULL, WINDOW, CHUNKED))
    said = str(refused.value)
    assert "group 0 (full_attention, 3 layers: layers.0.0, layers.0.1, …)" in said
    assert "group 1 (sliding_window of 512 tokens, 3 layers: layers.1.0, layers.1.1, …)" in said
    assert "group 2 (chunked_local_attention, 3 layers: layers.2.0" in said
    assert FLAG in said


def test_flag_is_not_advised_where_it_does_not_help() -> None:
    with pytest.raises(UnsupportedLayout, match=r"group 1 \(mamba, .*Mamba and linear-attention") as refused:
        only_group(cache(FULL, MAMBA))
    assert FLAG not in str(refused.value)
    with pytest.raises(UnsupportedLayout, match="no way around it yet") as refused:
        only_group(cache(WINDOW, replace(WINDOW, sliding_window=64)))
    assert FLAG not in str(refused.value)
