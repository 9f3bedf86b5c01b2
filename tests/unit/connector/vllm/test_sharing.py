"""Which of vLLM's engines and requests share pages with other kinds of engine, and how their pages are named."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

from kvservice.connector.cache_groups import PagesOfBlocks
from kvservice.connector.options import ConnectorOptions
from kvservice.connector.plan import StepPlan
from kvservice.connector.shared.gate import AGREES
from kvservice.connector.vllm import sharing
from kvservice.connector.vllm.block_hashes import block_namer
from kvservice.connector.vllm.sharing import SharedRequests
from kvservice.core.block.fingerprint import Fingerprint
from kvservice.core.block.pages import page_hashes, salted
from kvservice.core.messages import EngineSpec
from kvservice.core.segment.layout import SlotLayout
from kvservice.errors import UnsupportedLayout

LAYERS, HEADS, SIZE, BLOCK = 2, 2, 32, 32
FULL = FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=SIZE, dtype=torch.float32)
WINDOW = SlidingWindowSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=SIZE, dtype=torch.float32, sliding_window=64)
EXACT = EngineSpec(bytes(16), "m", Fingerprint.of({"engine": "vllm"}), SlotLayout(LAYERS, HEADS, 8192, BLOCK), "")


def cache_config(*specs: Any) -> KVCacheConfig:
    groups = [KVCacheGroupSpec(["model.0", "model.1"], spec) for spec in specs or (FULL,)]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups, hash_block_size=BLOCK)


def vllm_config(model: Path = Path("m"), **changed: Any) -> Any:
    given_: dict[str, Any] = {"dtype": torch.float32, "quantization": None, "hf_overrides": {}, "revision": None}
    speculative, device = changed.pop("speculative", None), changed.pop("device", "cpu")
    return SimpleNamespace(
        model_config=SimpleNamespace(model=str(model), hf_config=SimpleNamespace(), **{**given_, **changed}),
        speculative_config=speculative,
        device_config=SimpleNamespace(device_type=device),
    )


@pytest.fixture(autouse=True)
def vector_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever machine this is."""
    monkeypatch.setattr(cpu_attn, "_get_attn_isa", lambda dtype, block, head: "vec" if block % 32 == 0 else "vec16")


@pytest.mark.parametrize(
    ("config", "cache", "reason"),
    [
        ({}, cache_config(FULL, WINDOW), "2 KV cache groups"),
        ({"dtype": torch.bfloat16}, cache_config(), "torch.float32 for a model in torch.bfloat16"),
        ({"quantization": "fp8"}, cache_config(), "quantization 'fp8'"),
        ({"hf_overrides": {"rope_theta": 1}}, cache_config(), "hf_overrides"),
        ({"speculative": object()}, cache_config(), "speculative decoding"),
        ({}, cache_config(replace(FULL, block_size=16)), "'vec16' kernels"),
        ({"device": "cuda"}, cache_config(replace(FULL, block_size=8)), "multiple of 16"),
    ],
)
def test_engine_that_was_not_compared_is_refused_by_name(
    config: dict[str, Any], cache: KVCacheConfig, reason: str
) -> None:
    with pytest.raises(UnsupportedLayout, match=reason):
        sharing.check(vllm_config(**config), cache)


def test_engine_is_named_by_the_files_of_its_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": LAYERS, "rope_theta": 10}))
    options = ConnectorOptions.parse({"share": "engines", "cache_folder": str(tmp_path / "digests")})
    spec = sharing.engine_spec(vllm_config(tmp_path), cache_config(), EXACT, options)
    fields = dict(spec.fingerprint.fields)
    assert fields["rope"] == "default, rope_theta 10.0" and fields["weights"].startswith("xxh3:")
    assert spec.layout == SlotLayout(LAYERS, HEADS, 16 * 2 * SIZE * 4, 16)
    assert spec.model == "m (shared)", "exact engines of the model attach beside it"
    for salt in ("", "s"):  # a router names the same pages
        before = salted(salt.encode()) if salt else None
        assert block_namer(fields, salt)(list(range(40))) == page_hashes(list(range(40)), before)
    assert not spec.hears_removals and sharing.grouping(cache_config()) == PagesOfBlocks(2)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UnsupportedLayout, match=r"has no config\.json"):
        sharing.engine_spec(vllm_config(tmp_path), cache_config(), EXACT, options)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UnsupportedLayout, match="cannot be read"):
        sharing.engine_spec(vllm_config(tmp_path), cache_config(), EXACT, options)


@dataclass
class Request:
    """What is read of vLLM's request."""

    all_token_ids: list[int]
    request_id: str = "r"
    cache_salt: str | None = None
    lora_request: Any = None
    mm_features: list[Any] = field(default_factory=list)
    prompt_embeds: Any = None


def opened() -> SharedRequests:
    requests, plan = SharedRequests(1), StepPlan()
    requests.probe(plan, Request(list(range(40))), 40, [1, 2])  # type: ignore[arg-type]
    assert plan.probe is not None
    requests.gate.reported({AGREES: 1})
    return requests


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (Request([], lora_request=object()), "adapter"),
        (Request([], mm_features=[object()]), "media"),
        (Request([], prompt_embeds=object()), "embeddings"),
    ],
)
def test_request_whose_tokens_do_not_say_all_is_left_out(request_: Any, reason: str) -> None:
    requests = opened()
    assert not requests.begin(request_)
    assert requests.counters == {f"share_left_out_{reason}": 1}
    plan, waiting = StepPlan(), SharedRequests(1)
    request_.all_token_ids = list(range(64))
    waiting.probe(plan, request_, 64, [1, 2])
    assert plan.probe is None and waiting.gate.is_waiting


def test_nothing_is_shared_before_the_gate_is_open() -> None:
    requests = SharedRequests(1)
    assert not requests.begin(Request([]))  # type: ignore[arg-type]
    assert requests.counters == {"share_left_out_gate_waiting": 1}
    assert opened().begin(Request([]))  # type: ignore[arg-type]


def test_pages_are_named_as_tokens_come() -> None:
    requests, tokens = opened(), list(range(50))
    request: Any = Request(tokens[:20], cache_salt="s")
    assert requests.begin(request)
    hashes = requests.hashes(request)
    assert hashes == page_hashes(tokens[:20], salted(b"s"))
    request.all_token_ids = tokens
    assert requests.hashes(request) is hashes and len(hashes) == 3
    requests.end("r")
    assert requests.hashes(request) == []
