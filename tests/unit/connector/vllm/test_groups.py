"""Which KV cache groups are stored, and that every other one is refused by its name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
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

from kvservice.connector.vllm import compat
from kvservice.connector.vllm.group_rules import stored_groups
from kvservice.core.block import window_groups
from kvservice.core.block.window_groups import Window
from kvservice.core.segment import layout
from kvservice.errors import ConfigError, UnsupportedLayout
from tests.unit.connector.vllm.test_connector import model, vllm_config

__all__ = ["model"]  # a fixture

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
    assert stored_groups(cache(spec)).full == spec


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (WINDOW, r"group 0 \(sliding_window of 512 tokens, 3 layers: layers.0.0, layers.0.1, …\).*left the window"),
        (CHUNKED, r"\(chunked_local_attention, 3 layers"),
        (MAMBA, r"\(mamba, 3 layers"),
        (RSWASpec(**COMMON, rswa_window=128), r"\(RSWASpec, 3 layers.*only FullAttentionSpec and MLA"),
        (SinkFullAttentionSpec(**COMMON, sink_len=4), r"\(sink_full_attention, 3 layers.*only FullAttentionSpec"),
        (HiddenStateCacheSpec(**COMMON), r"\(HiddenStateCacheSpec, 3 layers.*only FullAttentionSpec"),
        (CrossAttentionSpec(**COMMON), r"\(cross_attention, 3 layers.*what an encoder made"),
        (EncoderOnlyAttentionSpec(**COMMON), r"\(encoder_only_attention, 3 layers.*what an encoder made"),
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
def test_other_single_groups_are_refused_with_the_reason(spec: Any, says: str) -> None:
    with pytest.raises(UnsupportedLayout, match=says):
        stored_groups(cache(spec))


def test_groups_that_vllm_keeps_to_itself_are_refused() -> None:
    with pytest.raises(UnsupportedLayout, match="out of prefix caching or transfer"):
        stored_groups(cache(FULL, enable_kv_transfer=False))
    with pytest.raises(UnsupportedLayout, match="out of prefix caching or transfer"):
        stored_groups(cache(FULL, host_resident=True))
    with pytest.raises(UnsupportedLayout, match="its role is hisparse_source"):
        stored_groups(cache(FULL, role=KVCacheGroupRole.HISPARSE_SOURCE))


def test_scheduler_refuses_layers_of_several_shapes() -> None:
    """It is shown the first one only."""
    found = cache(FULL)
    found.kv_cache_tensors = [
        KVCacheTensor(size=4096, layers=["layers.0.0", "layers.0.1"], layer_stride=1024, block_stride=256),
        KVCacheTensor(size=4096, layers=["layers.0.2"], layer_stride=2048, block_stride=512, offset=2048),
    ]
    with pytest.raises(UnsupportedLayout, match="pages of different shapes"):
        stored_groups(found)


def test_groups_of_one_spec_are_stored_behind_the_full_ones() -> None:
    found = stored_groups(cache(WINDOW, FULL, WINDOW, CHUNKED, FULL))
    assert [group.engine_groups for group in found.groups] == [(1, 4), (0, 2), (3,)]
    assert [group.window for group in found.groups] == [None, Window(sliding_tokens=512), Window(chunk_tokens=8192)]
    assert [place.group for place in found.engine_groups()] == [1, 0, 1, 2, 0]
    assert found.block_tokens == 16


def test_groups_of_smaller_blocks_have_several_in_a_slot() -> None:
    found = stored_groups(cache(replace(FULL, block_size=48), replace(WINDOW, block_size=32)))
    assert found.block_tokens == 96
    assert [place.parts for place in found.engine_groups()] == [2, 3]


@pytest.mark.parametrize(
    ("specs", "says"),
    [
        ((FULL, MAMBA), r"group 1 \(mamba, .*not a block of tokens.*Mamba and linear-attention"),
        ((FULL, CrossAttentionSpec(**COMMON)), r"group 1 \(cross_attention, 3 layers.*what an encoder made"),
        ((FULL, RSWASpec(**COMMON, rswa_window=128)), r"group 1 \(RSWASpec, 3 layers: layers.1.0.*only FullAttention"),
        (
            (FULL, replace(FULL, head_size=16)),
            r"must have one shape.*group 0 \(full_att.*group 1 \(full_att",
        ),
        (
            (WINDOW, replace(WINDOW, sliding_window=64)),
            r"no group keeps every block.*group 0 .*group 1 .*no way",
        ),
        ((FULL, UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": WINDOW})), "group 1 .*different shapes"),
    ],
)
def test_one_group_that_cannot_be_stored_refuses_the_model(specs: tuple[Any, ...], says: str) -> None:
    with pytest.raises(UnsupportedLayout, match=says):
        stored_groups(cache(*specs))


def test_flag_is_advised_only_where_it_helps() -> None:
    with pytest.raises(UnsupportedLayout) as refused:
        stored_groups(cache(FULL, WINDOW, enable_kv_transfer=False))
    assert FLAG in str(refused.value)
    with pytest.raises(UnsupportedLayout) as refused:
        stored_groups(cache(FULL, MAMBA))
    assert FLAG not in str(refused.value)


def test_slots_of_several_blocks_need_one_group(model: Path) -> None:
    with pytest.raises(ConfigError, match="one KV cache group, and this one has 2"):
        compat.engine_spec(vllm_config(model, {}), cache(FULL, WINDOW), bytes(16), "", slot_tokens=256)


def test_windows_are_named_by_their_numbers(model: Path) -> None:
    """The text of a class of ours changes with the class, and engines would share nothing after an upgrade."""
    found = cache(FULL, WINDOW, CHUNKED)
    found.hash_block_size = 16
    fields = dict(compat.engine_spec(vllm_config(model, {}), found, bytes(16), "").fingerprint.fields)
    assert fields["window_1"] == "sliding 512 chunk 0 layers 3 heads 2 cell 512 block 16 parts 1"
    assert fields["window_2"] == "sliding 0 chunk 8192 layers 3 heads 2 cell 512 block 16 parts 1"
    ours = [name for name in vars(window_groups) | vars(layout) if name[0].isupper()]
    assert not [value for value in fields.values() if any(f"{name}(" in value for name in ours)]
