"""What is part of a block's name: every setting that may change its bytes, and no setting that cannot.

Uses vLLM's own configuration classes, resolved as an engine resolves them; no engine is started.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable, Set
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.model_executor.models
from vllm import envs
from vllm.config import VllmConfig
from vllm.config.attention import AttentionConfig, HiSparseConfig
from vllm.config.cache import CacheConfig
from vllm.config.diffusion import DiffusionConfig
from vllm.config.engram import EngramConfig
from vllm.config.kernel import KernelConfig
from vllm.config.load import LoadConfig
from vllm.config.lora import LoRAConfig
from vllm.config.mamba import MambaConfig
from vllm.config.model import ModelConfig
from vllm.config.multimodal import MultiModalConfig
from vllm.config.parallel import ParallelConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

from kvservice.connector.config_text import text_of
from kvservice.connector.vllm import identity
from kvservice.connector.vllm import identity_tables as tables
from kvservice.connector.vllm.identity import config_fields
from kvservice.core.block.fingerprint import Fingerprint

CLASSES: dict[str, type] = {
    "model_config": ModelConfig,
    "model_config.multimodal_config": MultiModalConfig,
    "cache_config": CacheConfig,
    "parallel_config": ParallelConfig,
    "load_config": LoadConfig,
    "attention_config": AttentionConfig,
    "attention_config.hisparse_config": HiSparseConfig,
    "engram_config": EngramConfig,
    "mamba_config": MambaConfig,
    "kernel_config": KernelConfig,
    "lora_config": LoRAConfig,
    "diffusion_config": DiffusionConfig,
}
# Names in the tables that vLLM 0.33 has and 0.32 has not.
NEWER = frozenset(
    {
        "watchdog_config",
        "simple_cpu_offload_num_blocks",
        "indexer_tp_shard_min_rows",
        "trtllm_ragged_backend",
        "minimax_m3_indexer_cp",
        "monokernel",
        "transformers",
        "deepseek_vl2",
    }
)
DECIDE = "does it change the bytes of a block? Put it into kvservice/connector/vllm/identity_tables.py"


def names(config: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(config)}


def known_to(found: Set[str], decided: Set[str]) -> Set[str]:
    """What is decided about, without what only a newer vLLM than this one has."""
    return decided - (NEWER - found)


def test_every_section_of_vllms_configuration_is_decided_about() -> None:
    decided = tables.SECTIONS_LEFT_OUT.keys() | tables.SECTIONS_HASHED
    assert names(VllmConfig) == known_to(names(VllmConfig), decided), DECIDE
    assert not tables.SECTIONS_LEFT_OUT.keys() & tables.SECTIONS_HASHED
    assert tables.SECTIONS_HASHED - {"additional_config"} <= CLASSES.keys()


@pytest.mark.parametrize("section", CLASSES)
def test_every_setting_of_vllm_is_decided_about(section: str) -> None:
    left_out, hashed = tables.LEFT_OUT.get(section, {}), tables.HASHED[section]
    assert names(CLASSES[section]) == known_to(names(CLASSES[section]), left_out.keys() | hashed), DECIDE
    assert not left_out.keys() & hashed
    assert all(left_out.values()), "what is left out has a reason"


def test_settings_within_settings_are_decided_about() -> None:
    """A setting that is itself a group of settings, and is hashed, is looked into or hashed whole."""
    for section, config in CLASSES.items():
        for field in dataclasses.fields(config):
            found = re.search(r"\b(MultiModalConfig|HiSparseConfig)\b", str(field.type))
            if found and field.name in tables.HASHED[section]:
                assert f"{section}.{field.name}" in CLASSES


def test_every_environment_variable_of_vllm_is_decided_about() -> None:
    for name in envs.environment_variables:
        hashed = re.fullmatch(tables.ENVIRONMENT_HASHED, name) is not None
        left_out = any(re.fullmatch(pattern, name) for pattern in tables.ENVIRONMENT_LEFT_OUT)
        assert hashed != left_out, f"{name}: {DECIDE}"


@pytest.mark.parametrize(
    ("word", "known"),
    [("max_model_len", tables.LENGTH_MODULES.keys()), ("try_get_generation_config", tables.GENERATION_MODULES)],
)
def test_every_model_that_reads_the_length_is_known(word: str, known: Any) -> None:
    """So is every one that reads the generation config."""
    folder = Path(vllm.model_executor.models.__file__).parent
    readers = {
        path.relative_to(folder).parts[0].removesuffix(".py")
        for path in folder.rglob("*.py")
        if word in path.read_text()
    }
    assert readers - set(known) <= ({"mllama4"} if word == "try_get_generation_config" else set()), DECIDE
    assert known_to(readers, set(known)) - readers <= {"mllama4"}, "a model in the table does not read it any more"


LLAMA: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}
PHI: dict[str, object] = {
    **LLAMA,
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "num_key_value_heads": 4,
    "original_max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.5] * 8},
}
DYNAMIC = {**LLAMA, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}


@pytest.fixture(scope="module")
def resolve(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Fingerprint]:
    folder = tmp_path_factory.mktemp("model")
    done: dict[str, Fingerprint] = {}

    def resolved(hf: dict[str, object], **arguments: Any) -> Fingerprint:
        given = {"max_model_len": 1024, "block_size": 32, "skip_tokenizer_init": True, **arguments}
        what = json.dumps([hf, given, os.environ.get("VLLM_MARLIN_INPUT_DTYPE")])
        if what not in done:
            (folder / "config.json").write_text(json.dumps(hf))
            config = EngineArgs(model=str(folder), **given).create_engine_config()
            done[what] = Fingerprint.of(config_fields(config))
        return done[what]

    return resolved


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (
            {"hf_overrides": {"rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"}}},
            "hf.rope_parameters.rope_theta: 10000.0 there",
        ),
        ({"hf_overrides": {"rms_norm_eps": 1e-6}}, "hf.rms_norm_eps: 1e-06 here, 1e-05 there"),
        ({"hf_overrides": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}}, "max_model_len: 1024 here"),
        ({"hf_overrides": {"attention_chunk_size": 256}}, "hf.attention_chunk_size: 256 here, (absent) there"),
        ({"disable_sliding_window": True}, "model_config.disable_sliding_window: true here"),
        ({"kernel_config": {"linear_backend": "cutlass"}}, "kernel_config.linear_backend"),
        ({"attention_config": {"disable_flashinfer_q_quantization": True}}, "disable_flashinfer_q_quantization: true"),
        ({"kv_cache_dtype_skip_layers": ["0"]}, 'cache_config.kv_cache_dtype_skip_layers: ["0"] here'),
        ({"load_format": "dummy"}, 'load_config.load_format: "dummy" here, (absent) there'),
        ({"model_impl": "transformers"}, "model_impl"),
        ({"additional_config": {"of a platform": 1}}, "additional_config"),
    ],
)
def test_what_may_change_the_bytes_is_named(
    resolve: Callable[..., Fingerprint], change: dict[str, Any], field: str
) -> None:
    difference = resolve(LLAMA, **change).difference(resolve(LLAMA))
    for part in field.split(": ", 1):
        assert part in difference


@pytest.mark.parametrize(
    "change",
    [
        {"max_model_len": 2048},
        {"max_num_seqs": 7},
        {"gpu_memory_utilization": 0.5},
        {"served_model_name": "other"},
        {"max_num_batched_tokens": 4096},
        {"enforce_eager": True},
        {"seed": 7},
        {"num_gpu_blocks_override": 77},
        {"override_generation_config": {"temperature": 0.1}},
        {"enable_prefix_caching": False},
        {"max_logprobs": 3},
        {"disable_log_stats": True},
        {"scheduling_policy": "priority"},
    ],
)
def test_what_cannot_change_the_bytes_costs_no_hits(
    resolve: Callable[..., Fingerprint], change: dict[str, Any]
) -> None:
    """The model is a plain one."""
    assert resolve(LLAMA, **change).difference(resolve(LLAMA)) == ""


def test_a_variable_that_chooses_another_arithmetic_is_named(
    resolve: Callable[..., Fingerprint], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = resolve(LLAMA)
    monkeypatch.setenv("VLLM_MARLIN_INPUT_DTYPE", "fp8")
    monkeypatch.setenv("VLLM_LOGGING_PREFIX", "replica 7")
    assert before.difference(resolve(LLAMA)) == "env.VLLM_MARLIN_INPUT_DTYPE: (absent) here, fp8 there"


@pytest.mark.parametrize("name", ["NVIDIA_TF32_OVERRIDE", "DNNL_DEFAULT_FPMATH_MODE", "ONEDNN_DEFAULT_FPMATH_MODE"])
def test_an_arithmetic_that_is_chosen_below_vllm_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    assert re.fullmatch(tables.ENVIRONMENT_HASHED, name)


def test_what_the_command_line_says_of_images_is_named() -> None:
    """vLLM hashes an image with what its request says of processors, and not with what every request gets."""
    for option in ("mm_processor_kwargs", "media_io_kwargs"):
        path = "model_config.multimodal_config"
        one, other = (
            identity._of_setting(path, MultiModalConfig(**{option: {"image": {"size": n}}}), None) for n in (1, 2)
        )
        assert one != other
        assert [name for name in one if option in name]


def test_a_longer_length_is_another_model_if_it_sets_angles(
    resolve: Callable[..., Fingerprint],
) -> None:
    """Beyond the original context, the length chooses the angles of some models."""
    short = resolve(PHI, max_model_len=512)
    assert resolve(PHI, max_model_len=1024).difference(short) == (
        "rope_context: over 512 tokens here, within 512 tokens there"
    )
    assert resolve(PHI, max_model_len=2048) == resolve(PHI, max_model_len=1024)
    assert resolve(PHI, max_model_len=256) == short


def test_a_length_of_unknown_effect_is_named_itself(resolve: Callable[..., Fingerprint]) -> None:
    one, other = (resolve(DYNAMIC, max_model_len=length) for length in (1024, 2048))
    assert one.difference(other) == "max_model_len: 1024 here, 2048 there"


def test_long_values_are_digests_and_differences_are_named(resolve: Callable[..., Fingerprint]) -> None:
    rope = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0 + i / 7 for i in range(8)]}
    difference = resolve(PHI).difference(resolve({**PHI, "rope_scaling": rope}))
    assert re.fullmatch(r"hf\.rope_parameters\.long_factor: \S.* here, \S.* there", difference)
    assert len(text_of(list(range(1000)))) == len("sha256:") + 32
    assert text_of(list(range(1000))) != text_of(list(range(1001)))
    assert max(len(value) for _, value in resolve(PHI).fields) < 200


def test_the_same_settings_have_the_same_text_in_every_process() -> None:
    assert text_of({"b", "a", "c"}) == '["a", "b", "c"]'
    assert text_of({"b": 1, "a": None}) == '{"a": null, "b": 1}'
    assert text_of(LoadConfig) == '"vllm.config.load.LoadConfig"'
    assert text_of("1") != text_of(1)


@pytest.mark.parametrize(
    "change",
    [
        {"cache_salt": "of a tenant"},
        {"lora_request": SimpleNamespace(lora_name="sql", lora_path="/one")},
        {"lora_request": SimpleNamespace(lora_name="sql", lora_path="/other")},
        {"prompt_embeds": torch.zeros(16, 4)},
        {"prompt_embeds": torch.ones(16, 4)},
        {"mm_features": [SimpleNamespace(identifier="cat", mm_position=SimpleNamespace(offset=2, length=4))]},
        {"mm_features": [SimpleNamespace(identifier="dog", mm_position=SimpleNamespace(offset=2, length=4))]},
    ],
)
def test_what_is_left_to_the_engines_hash_is_in_it(change: dict[str, Any]) -> None:
    """Of one block of equal tokens: what the fingerprint leaves out because vLLM's own hash has it."""
    plain: dict[str, Any] = {"cache_salt": None, "lora_request": None, "prompt_embeds": None, "mm_features": []}

    def hashed(values: dict[str, Any]) -> bytes:
        request: Any = SimpleNamespace(**{**plain, **values}, _prompt_embeds_per_block_hashes={})
        return sha256_cbor((b"parent", tuple(range(16)), generate_block_hash_extra_keys(request, 0, 16, 0)[0]))

    SEEN_HASHES.setdefault(hashed({}), "plain")
    assert SEEN_HASHES.setdefault(hashed(change), str(change)) == str(change)


SEEN_HASHES: dict[bytes, str] = {}
