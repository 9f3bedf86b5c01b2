"""Which KV cache groups are stored, and that every other one is refused by its name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
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

from kvservice.connector.cache_groups import SeveralGroups
from kvservice.connector.options import ConnectorOptions
from kvservice.connector.vllm import compat
from kvservice.connector.vllm.group_rules import group_count, stored_groups
from kvservice.connector.worker.copier import BATCHED_RUN_BYTES
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
# As vLLM pads it to the page of the attention beside it: 24 bytes of a convolution and 64 of a state.
MAMBA = MambaSpec(
    block_size=16,
    shapes=((3, 4), (4, 4)),
    dtypes=(torch.bfloat16, torch.float32),
    page_size_padded=1024,
    mamba_cache_mode="align",
)
GDN = replace(MAMBA, shapes=((4, 8),), dtypes=(torch.bfloat16,), mamba_type=MambaAttentionBackendEnum.GDN_ATTN)
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
        (replace(MAMBA, mamba_cache_mode="none"), r"\(mamba, 3 layers.*'none'.*--enable-prefix-caching$"),
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
        ((FULL, CrossAttentionSpec(**COMMON)), r"group 1 \(cross_attention, 3 layers.*what an encoder made"),
        ((FULL, replace(MAMBA, mamba_cache_mode="none")), r"group 1 \(mamba, .*'none'.*--enable-prefix-caching"),
        ((FULL, replace(MAMBA, num_speculative_blocks=2)), r"group 1 \(mamba, .*drafts that are refused"),
        ((FULL, MAMBA, replace(WINDOW, block_size=32)), r"group 1 \(mamba, .*16 tokens apart.*on 32 only"),
        ((MAMBA, WINDOW), r"no group keeps every block"),
        ((FULL, replace(MAMBA, mamba_cache_mode="all")), r"group 1 \(mamba, .*'all'"),
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
        stored_groups(cache(FULL, replace(MAMBA, mamba_cache_mode="none")))
    assert FLAG not in str(refused.value)


def test_groups_of_states_lie_in_one_slot_without_padding(model: Path) -> None:
    """As of Granite-4 or Qwen3-Next: three groups of states and one of attention."""
    found = cache(MAMBA, MAMBA, FULL, MAMBA, GDN)
    stored = stored_groups(found)
    assert [group.engine_groups for group in stored.groups] == [(2,), (0, 1, 3), (4,)]
    assert [group.window for group in stored.groups] == [None, Window(is_state=True), Window(is_state=True)]
    config = vllm_config(model, {})
    spec = compat.engine_spec(config, found, ConnectorOptions())
    assert [group.layout.payload_bytes for group in spec.window_groups] == [3 * 3 * (24 + 64), 3 * 64]
    assert isinstance(grouping := compat.grouping(config, found, spec), SeveralGroups)
    assert grouping.has_states
    tensors = {
        name: torch.zeros(4, 1, 1, 88 if index != 4 else 64, dtype=torch.int8)
        for index, group in enumerate(found.kv_cache_groups)
        for name in group.layer_names
        if index != 2
    } | {name: torch.zeros(4, 2, 16, 16, dtype=torch.bfloat16) for name in found.kv_cache_groups[2].layer_names}
    segment = memoryview(bytearray(1 << 16))
    copiers = compat.grouped_block_copiers(config, found, tensors)
    copiers.bind(segment, spec.layout)
    tensors["layers.1.2"][3] = 7  # the last layer of the second group: the sixth state in the slot
    copiers.of(1).store(3, 0)
    assert [offset for offset in range(0, 9 * 88, 88) if segment[offset] == 7] == [5 * 88]
    tensors["layers.1.2"].zero_()
    copiers.of(1).load(0, 2)
    assert [int(block.sum()) for block in tensors["layers.1.2"]] == [0, 0, 88 * 7, 0]


def test_states_alone_are_stored_behind_signposts(model: Path) -> None:
    """A prefix is found by signposts where no layer has attention. They hold nothing that was in the slot before."""
    found, config = cache(MAMBA), vllm_config(model, {})
    stored = stored_groups(found)
    assert [(group.engine_groups, group.window) for group in stored.groups] == [
        ((), None),
        ((0,), Window(is_state=True)),
    ]
    spec = compat.engine_spec(config, found, ConnectorOptions())
    assert [group.layout.payload_bytes for group in spec.window_groups] == [3 * (24 + 64)]
    assert spec.layout.payload_bytes < BATCHED_RUN_BYTES, "a GPU's driver would take host memory for its own"
    assert isinstance(grouping := compat.grouping(config, found, spec), SeveralGroups)
    assert grouping.stored(grouping.table(([7],)), 0, 0) == [(1, 0, 0)]
    states = {name: torch.ones(4, 1, 1, 88, dtype=torch.int8) for name in found.kv_cache_groups[0].layer_names}
    copiers = compat.grouped_block_copiers(config, found, states)
    size = spec.layout.payload_bytes
    segment = memoryview(bytearray(b"\xff" * 4096))
    copiers.bind(segment, spec.layout)
    copiers.of(1).store(0, 64)
    assert bytes(segment).replace(bytes(size), b"") == b"\xff" * (4096 - size)
    assert segment[64] == segment[64 + size - 1] == 0


def test_states_alone_count_as_two_groups() -> None:
    """What needs one group of attention is refused for them as well."""
    assert [group_count(cache(*specs)) for specs in [(MAMBA,), (MAMBA, GDN), (FULL,), (FULL, MAMBA)]] == [2, 3, 1, 2]
    with pytest.raises(ConfigError, match="tails needs a model with one KV cache group"):
        compat.check_tails(SimpleNamespace(speculative_config=None), cache(MAMBA), ConnectorOptions(tails=True))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"speculative_config": SimpleNamespace(use_eagle=lambda: False)}, "speculative decoding with states"),
        ({"parallel_config__tensor_parallel_size": 2}, "states .* over several tensor-parallel ranks"),
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline"),
    ],
)
def test_what_cannot_be_done_with_states_is_named(model: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedLayout, match=says):
        compat.supported(vllm_config(model, {}, **changes), cache(MAMBA, FULL))


@pytest.mark.parametrize(
    "other",
    [
        replace(MAMBA, shapes=((3, 4), (5, 4))),
        replace(MAMBA, shapes=((4, 3), (4, 4))),  # the same bytes in another order
        replace(MAMBA, dtypes=(torch.float16, torch.float32)),
        replace(MAMBA, mamba_type=MambaAttentionBackendEnum.GDN_ATTN),
    ],
)
def test_whatever_changes_a_state_changes_its_name(model: Path, other: MambaSpec) -> None:
    config = vllm_config(model, {})
    prints = {
        compat.engine_spec(config, cache(FULL, spec), ConnectorOptions()).fingerprint.digest for spec in (MAMBA, other)
    }
    assert len(prints) == 2
    padded = replace(MAMBA, page_size_padded=2048)
    prints = {
        compat.engine_spec(config, cache(FULL, spec), ConnectorOptions()).fingerprint.digest for spec in (MAMBA, padded)
    }
    assert len(prints) == 1, "padding is not stored"


def test_layout_of_convolution_states_is_in_their_name(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "DS")
    fields = dict(compat.engine_spec(vllm_config(model, {}), cache(FULL, MAMBA), ConnectorOptions()).fingerprint.fields)
    assert fields["env.VLLM_SSM_CONV_STATE_LAYOUT"] == "DS"
    assert fields["window_1"] == "state layers 3 heads 1 cell 88 block 16 parts 1"
    assert fields["group_1"] == "layers [3] block 16 state MAMBA2 [3, 4] torch.bfloat16, [4, 4] torch.float32"


def test_slots_of_several_blocks_need_one_group(model: Path) -> None:
    with pytest.raises(ConfigError, match="one KV cache group, and this one has 2"):
        compat.engine_spec(vllm_config(model, {}), cache(FULL, WINDOW), ConnectorOptions(slot_tokens=256))


def test_windows_are_named_by_their_numbers(model: Path) -> None:
    """The text of a class of ours changes with the class, and engines would share nothing after an upgrade."""
    found = cache(FULL, WINDOW, CHUNKED)
    found.hash_block_size = 16
    fields = dict(compat.engine_spec(vllm_config(model, {}), found, ConnectorOptions()).fingerprint.fields)
    assert fields["window_1"] == "sliding 512 chunk 0 layers 3 heads 2 cell 512 block 16 parts 1"
    assert fields["window_2"] == "sliding 0 chunk 8192 layers 3 heads 2 cell 512 block 16 parts 1"
    ours = [name for name in vars(window_groups) | vars(layout) if name[0].isupper()]
    assert not [value for value in fields.values() if any(f"{name}(" in value for name in ours)]
