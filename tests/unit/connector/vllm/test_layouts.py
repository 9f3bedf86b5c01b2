"""A slot's bytes do not depend on who wrote them: vLLM's own functions lay out the engines' memory here, one engine for
each physical layout, tensor-parallel degree and kernel block size, and blocks go from each to each."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    get_kv_quant_mode,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

try:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups, kv_cache_groups_tp_replicas
except ImportError:  # vLLM 0.32
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, kv_cache_groups_tp_replicas

from kvservice.connector.options import ConnectorOptions
from kvservice.connector.plan import CopyEntry
from kvservice.connector.vllm import compat
from kvservice.connector.worker.block_copier import BlockCopier
from kvservice.connector.worker.copier import HostCopier
from kvservice.copying.message import Direction
from kvservice.core.segment.layout import HeadShare, SlotLayout
from kvservice.core.segment.refs import BlockRef
from kvservice.errors import UnsupportedLayout
from kvservice.units import BlockKey, Generation, SlotIndex

LAYERS, BLOCKS, TOKENS = 3, 4, 16
NAMES = [f"model.layers.{i}.attn" for i in range(LAYERS)]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp8": torch.uint8, "e4m3": torch.float8_e4m3fn}


@dataclass(frozen=True)
class Model:
    kv_heads: int  # 1 with a latent
    head_size: int
    dtype: str
    latent: bool = False
    latent_format: str = "auto"

    def spec(self, degree: int) -> FullAttentionSpec:
        common: dict[str, Any] = {
            "block_size": TOKENS,
            "head_size": self.head_size,
            "dtype": DTYPES[self.dtype],
        }
        if self.latent:  # as vLLM's MLAAttention.get_kv_cache_spec
            return MLAAttentionSpec(
                **common,
                num_kv_heads=1,
                max_tp_shards=1,
                cache_dtype_str=self.latent_format,
                kv_quant_mode=get_kv_quant_mode(self.latent_format),
                state_content_bytes={"fp8_ds_mla": 656}.get(self.latent_format),
            )
        return FullAttentionSpec(**common, num_kv_heads=max(1, self.kv_heads // degree))


MODELS = {
    "MHA": Model(8, 4, "bf16"),
    "GQA": Model(2, 8, "fp32"),
    "GQA fp8": Model(2, 8, "fp8"),
    "MQA e4m3": Model(1, 8, "e4m3"),
    "MLA": Model(1, 576, "bf16", latent=True),
    "MLA fp8": Model(1, 576, "fp8", latent=True, latent_format="fp8"),
    "MLA fp8_ds_mla": Model(1, 576, "fp8", latent=True, latent_format="fp8_ds_mla"),
}


@dataclass(frozen=True)
class Rank:
    config: Any  # what compat reads of vLLM's configuration
    cache: KVCacheConfig
    tensors: dict[str, torch.Tensor]

    @property
    def share(self) -> HeadShare:
        return compat.rank_share(self.config, self.cache)

    def bytes_of(self, block: int) -> torch.Tensor:
        """`[layer, kv head of this rank, token, K‖V bytes]` of one block."""
        grouped = [self.tensors[name].view(torch.uint8).unflatten(0, (BLOCKS, -1))[block] for name in NAMES]
        return torch.stack([layer.transpose(0, 1).flatten(1, 2) for layer in grouped])

    def fill(self, truth: torch.Tensor) -> None:
        """`truth` has the heads of all ranks: `[layer, block, kv head, token, K‖V bytes]`."""
        mine = truth[:, :, self.share.heads.start : self.share.heads.stop]
        for name, layer in zip(NAMES, mine, strict=True):
            target = self.tensors[name].view(torch.uint8).unflatten(0, (BLOCKS, -1))
            parts = target.shape[1]
            target.copy_(layer.unflatten(2, (parts, -1)).transpose(1, 2))

    def block_copier(self, slots: memoryview, layout: SlotLayout, *, staged: bool = False) -> BlockCopier:
        layers = compat.ordered_layers(self.config, self.cache, self.tensors)
        block_copier = BlockCopier(layers, self.share.heads, staged=staged)
        block_copier.bind(slots, layout)
        return block_copier

    def copy(
        self, way: str, direction: Direction, slots: memoryview, layout: SlotLayout, slot: int, block: int
    ) -> None:
        """Between this block and the slot: by views, by views through a buffer, or by runs of bytes."""
        block_copier = self.block_copier(slots, layout, staged=way == "staged")
        offset = slot * layout.payload_bytes
        if way != "runs":
            block_copier.load(offset, block) if direction is Direction.LOAD else block_copier.store(block, offset)
            return
        offsets = lambda found, size: np.array(found, dtype=np.int64) * size  # noqa: E731  slots side by side
        pool = SimpleNamespace(geometry=SimpleNamespace(payload_offsets=offsets))
        copier = HostCopier(block_copier)
        copier.adopt(torch.frombuffer(slots, dtype=torch.uint8), pool)  # type: ignore[arg-type]
        assert copier.region_of(0) is not None, "these tensors are copied a layer at a time"
        entry = CopyEntry(block, BlockRef(SlotIndex(slot), Generation(2)), BlockKey(bytes(16)))
        assert copier.run(direction, [entry]).succeeded()


@dataclass(frozen=True)
class Engine:
    """What one engine's workers would have in memory."""

    model: Model
    layout: KVCacheLayout
    degree: int = 1
    ratio: int = 1  # kernel blocks in a block
    ranks: list[Rank] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", [self._rank(rank) for rank in range(self.degree)])

    def _rank(self, rank: int) -> Rank:
        config = vllm_config(self.model, self.layout, self.degree, rank)
        spec = self.model.spec(self.degree)
        cache = get_kv_cache_config_from_groups(
            config, [KVCacheGroupSpec(NAMES, spec)], BLOCKS * LAYERS * spec.page_size_bytes
        )
        cache.kv_tp_replicas = kv_cache_groups_tp_replicas(cache.kv_cache_groups, self.degree)
        cache.kv_cache_layout = self.layout.name
        assert cache.num_blocks == BLOCKS
        tensors = allocate_kv_cache(cache, torch.device("cpu"), self.layout, [TOKENS // self.ratio])
        return Rank(config, cache, tensors)

    @property
    def slot_layout(self) -> SlotLayout:
        config, cache = self.ranks[0].config, self.ranks[0].cache
        found = compat.supported(config, cache)
        return compat.layout_of(config, cache, found, found.groups[0])


def vllm_config(model: Model, layout: KVCacheLayout, degree: int, rank: int) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1,
            tensor_parallel_size=degree,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            rank=rank,
        ),
        cache_config=SimpleNamespace(
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=None,
            calculate_kv_scales=False,
            get_resolved_kv_cache_layout=lambda: layout,
        ),
        attention_config=SimpleNamespace(hisparse_config=None, backend=None),
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: model.kv_heads),
        device_config=SimpleNamespace(device_type="cuda"),
        speculative_config=None,
    )


def splits(model: Model, layout: KVCacheLayout, degree: int, ratio: int) -> bool:
    """vLLM splits blocks for its kernels only where those of one layer follow each other."""
    if ratio == 1:
        return True
    one_head = model.spec(degree).num_heads == 1
    return layout in (KVCacheLayout.LBNHC, KVCacheLayout.LBHNC) or (layout is KVCacheLayout.LHBNC and one_head)


def random_truth(layout: SlotLayout, seed: int) -> torch.Tensor:
    """`[layer, block, kv head, token, K‖V bytes]`."""
    width = layout.cell_bytes // layout.block_tokens
    shape = (layout.layer_count, BLOCKS, layout.kv_head_count, layout.block_tokens, width)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def check_way(writer: Engine, reader: Engine, *, way: str = "views", slot: int = 1) -> None:
    """Block 2 of the writer goes through a slot into block 1 of the reader."""
    layout = writer.slot_layout
    assert reader.slot_layout == layout
    truth, old = random_truth(layout, 1), random_truth(layout, 2)
    slots = bytearray(b"\xa5" * layout.payload_bytes * 3)
    offset = slot * layout.payload_bytes
    for rank in writer.ranks:
        rank.fill(truth)
        if rank.share.writes(slot):
            rank.copy(way, Direction.STORE, memoryview(slots), layout, slot, 2)
    wanted = truth[:, 2].contiguous().numpy().tobytes()
    assert bytes(slots[offset : offset + layout.payload_bytes]) == wanted, "not [layer][kv head][token][K‖V]"
    assert set(slots[:offset] + slots[offset + layout.payload_bytes :]) == {0xA5}, "a neighbouring slot was written"
    for rank in reader.ranks:
        rank.fill(old)
        rank.copy(way, Direction.LOAD, memoryview(slots), layout, slot, 1)
        heads = slice(rank.share.heads.start, rank.share.heads.stop)
        for block in range(BLOCKS):
            expected = truth[:, 2, heads] if block == 1 else old[:, block, heads]
            assert torch.equal(rank.bytes_of(block), expected), f"block {block} of the reader"


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", KVCacheLayout)
def test_slot_is_the_same_whatever_layout_and_degree_wrote_it(layout: KVCacheLayout, model: str) -> None:
    check_way(Engine(MODELS[model], layout, degree=2), Engine(MODELS[model], KVCacheLayout.LBNHC))
    check_way(Engine(MODELS[model], KVCacheLayout.LBHNC), Engine(MODELS[model], layout, degree=4))


@given(
    model=st.builds(
        Model,
        kv_heads=st.sampled_from([1, 2, 4, 8]),
        head_size=st.sampled_from([2, 8]),
        dtype=st.sampled_from(sorted(DTYPES)),
    )
    | st.sampled_from([model for model in MODELS.values() if model.latent]),
    layouts=st.tuples(st.sampled_from(KVCacheLayout), st.sampled_from(KVCacheLayout)),
    degrees=st.tuples(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8])),
    ratios=st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4])),
    way=st.sampled_from(["views", "staged", "runs"]),
    slot=st.integers(0, 2),
)
@settings(max_examples=150)
def test_any_engine_reads_what_any_other_wrote(
    model: Model,
    layouts: tuple[KVCacheLayout, KVCacheLayout],
    degrees: tuple[int, int],
    ratios: tuple[int, int],
    way: str,
    slot: int,
) -> None:
    ways = list(zip(layouts, degrees, ratios, strict=True))
    assume(all(splits(model, *way) for way in ways))
    writer, reader = (Engine(model, *way) for way in ways)
    check_way(writer, reader, way=way, slot=slot)


def engine_fields(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What the fingerprint of its first rank says."""
    monkeypatch.setattr(compat, "weights_identity", lambda model, *_: f"weights of {model}")
    rank = engine.ranks[0]
    hf = SimpleNamespace(to_dict=dict)
    vars(rank.config.model_config).update(
        model="m",
        served_model_name="m",
        revision=None,
        dtype=torch.bfloat16,
        quantization=None,
        hf_config=hf,
        hf_text_config=hf,
    )
    vars(rank.config.cache_config).update(cache_dtype="auto", prefix_caching_hash_algo="sha256_cbor")
    return dict(compat.engine_spec(rank.config, rank.cache, ConnectorOptions()).fingerprint.fields)


@pytest.mark.parametrize("model", ["GQA", "MLA fp8_ds_mla"])
def test_layout_and_degree_are_no_part_of_the_identity(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    """The sizes of kernel blocks are none either."""
    one = engine_fields(Engine(MODELS[model], KVCacheLayout.LBNHC), monkeypatch)
    for other in (
        Engine(MODELS[model], KVCacheLayout.BLHNC, degree=2),
        Engine(MODELS[model], KVCacheLayout.LBHNC, degree=8, ratio=4),
    ):
        assert engine_fields(other, monkeypatch) == one


def test_format_of_the_latent_is_part_of_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [engine_fields(Engine(model, KVCacheLayout.LBNHC), monkeypatch) for model in MODELS.values()]
    latents = [fields["latent"] for fields in found if "latent" in fields]
    assert latents == ["576 auto", "576 fp8", "576 fp8_ds_mla"]
    assert len({tuple(sorted(fields.items())) for fields in found}) == len(MODELS)


@dataclass(frozen=True)
class HalvesModel(Model):
    """As FlashInfer keeps NVFP4: all K heads of a rank, then all its V heads."""

    def spec(self, degree: int) -> FullAttentionSpec:
        spec = super().spec(degree)
        return replace(spec, num_head_slots=2 * spec.num_kv_heads, state_content_bytes=self.head_size)


def test_degree_is_identity_where_the_format_spans_heads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The layout is part of it as well."""
    model = HalvesModel(4, 8, "fp8")
    engines = [
        Engine(model, KVCacheLayout.LBNHC),
        Engine(model, KVCacheLayout.LBNHC, degree=2),
        Engine(model, KVCacheLayout.LBHNC, degree=2),
    ]
    assert len({engine.slot_layout for engine in engines}) == 1, "nothing else tells them apart"
    assert len({engine_fields(engine, monkeypatch)["packing"] for engine in engines}) == len(engines)
    check_way(Engine(model, KVCacheLayout.LBHNC, degree=8), Engine(model, KVCacheLayout.LBHNC, degree=4))
    with pytest.raises(UnsupportedLayout, match="kernel blocks are not supported for a KV format that spans tokens"):
        Engine(model, KVCacheLayout.LBHNC, ratio=2).ranks[0].block_copier(
            memoryview(bytearray()), engines[0].slot_layout
        )


def test_padding_behind_a_page_is_not_stored() -> None:
    @dataclass(frozen=True)
    class Padded(Model):
        def spec(self, degree: int) -> FullAttentionSpec:
            spec = super().spec(degree)
            return replace(spec, page_size_padded=spec.unpadded_page_size_bytes + 512)

    padded = Engine(Padded(2, 8, "bf16"), KVCacheLayout.LBNHC)
    check_way(padded, Engine(Model(2, 8, "bf16"), KVCacheLayout.BLHNC, degree=2))


def test_kernel_blocks_with_k_and_v_apart_are_refused() -> None:
    """A CPU keeps them apart in each kernel block."""
    rank = Engine(MODELS["GQA"], KVCacheLayout.LBHNC, ratio=2).ranks[0]
    rank.config.device_config.device_type = "cpu"
    with pytest.raises(UnsupportedLayout, match="4 blocks in 8 kernel blocks are not supported on CPU"):
        rank.block_copier(memoryview(bytearray()), SlotLayout(1, 1, 1, 1))


def test_heads_that_vllm_places_in_another_way_are_refused() -> None:
    odd = Engine(Model(4, 8, "bf16"), KVCacheLayout.LBHNC, degree=2)
    odd.ranks[0].config.model_config.get_total_num_kv_heads = lambda: 5
    with pytest.raises(UnsupportedLayout, match="5 kv heads over 2 tensor-parallel ranks with 2 each"):
        _ = odd.slot_layout


def test_draft_whose_heads_the_ranks_hold_otherwise_is_refused() -> None:
    """Its heads would be taken for copies, or copies for heads."""
    engine = Engine(Model(2, 8, "bf16"), KVCacheLayout.LBHNC, degree=4)
    draft = SimpleNamespace(get_total_num_kv_heads=lambda: 4)
    for rank in engine.ranks:
        rank.config.speculative_config = SimpleNamespace(draft_model_config=draft, use_eagle=lambda: False)
    with pytest.raises(UnsupportedLayout, match="a draft of 4 kv heads beside a model of 2 is not supported"):
        _ = engine.slot_layout
    draft.get_total_num_kv_heads = lambda: 2
    assert engine.slot_layout.kv_head_count == 2


def test_draft_model_in_the_same_blocks_is_part_of_the_identity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fields_with(drafts: bool) -> dict[str, str]:
        engine = Engine(MODELS["GQA"], KVCacheLayout.LBHNC)
        hf = SimpleNamespace(to_dict=lambda: {"hidden_size": 8})
        engine.ranks[0].config.speculative_config = SimpleNamespace(
            use_eagle=lambda: False,
            uses_draft_model=lambda: drafts,
            draft_model_config=SimpleNamespace(model="small", revision=None, hf_config=hf, hf_text_config=hf),
        )
        return engine_fields(engine, monkeypatch)

    assert fields_with(True)["draft"] == "weights of small"
    assert fields_with(True)["draft.hf.hidden_size"] == "8"
    assert "draft" not in fields_with(False), "n-gram speculation keeps nothing"
