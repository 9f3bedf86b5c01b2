"""A model that is a hash chain, and the smallest engine of vLLM's that has its shape.

The state of a token in a layer is a hash of the state before it, of the token, the layer and the weights. All words of
the token's cell in the KV cache hold it. The next token is drawn from the states of the last one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)

BLOCK, LAYERS, HEAD_SIZE = 16, 2, 256
CELL_WORDS = 2 * HEAD_SIZE * 2 // 8  # K and V of a token in a layer, of two bytes each, as words of eight
LAYER_NAMES = [f"model.layers.{index}.self_attn.attn" for index in range(LAYERS)]
VOCABULARY, STOP_TOKEN = 61, 3  # so that many sequences end early
LENGTH_MAX, STEP_TOKENS, REQUESTS_MAX = 256, 64, 8
DRAFTED_MAX = 160  # the draft's longest length: shorter than the model's, as of many heads of EAGLE
BLOCKS_MIN = 2 + LENGTH_MAX // BLOCK  # the null block, and one more than the longest request needs
MODEL: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HEAD_SIZE,
    "intermediate_size": HEAD_SIZE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": HEAD_SIZE,
    "vocab_size": 512,
    "max_position_embeddings": LENGTH_MAX,
}
Words = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Group:
    """One KV cache group of vLLM's."""

    kind: str  # full, sliding, chunk or state
    tokens: int = 0  # of the window or the chunk
    block: int = BLOCK
    layers: int = 1


@dataclass(frozen=True)
class EngineSettings:
    options: Mapping[str, object] = field(default_factory=dict)  # of the connector
    runs_ahead: bool = False  # vLLM's asynchronous scheduling
    drafts: int = 0  # tokens that n-gram speculation proposes in a step
    draft_layer: bool = False  # a draft layer proposes them, as EAGLE's does
    prefix_caching: bool = True
    policy: str = "fcfs"
    role: str = "kv_both"
    ranks: int = 1  # of tensor parallelism
    heads: int = 1  # KV heads, over all ranks
    groups: tuple[Group, ...] = ()  # empty: one of full attention
    failures: float = 0.0  # the share of loads and stores that fail, at each place where they can


def next_state(state: int, token: int, layer: int, weights: int) -> int:
    mixed = state * 6364136223846793005 + token * 1442695040888963407 + layer * 7046029254386353131
    mixed = (mixed + weights * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) % 2**64
    mixed = ((mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9) % 2**64
    return (mixed ^ mixed >> 32) % 2**62  # fits an int64


def first_state(salt: str | None) -> int:
    """What stands before the first token. Prompts of two salts have nothing in common."""
    return int.from_bytes(hashlib.sha256((salt or "").encode()).digest()[:7], "big")


def true_states(tokens: Sequence[int], salt: str | None, weights: int, head: int = 0) -> Words:
    """[layer, position]: what a correct KV cache holds of this head for these tokens."""
    found = np.empty((LAYERS, len(tokens)), dtype=np.int64)
    for layer in range(LAYERS):
        state = first_state(salt)
        for position, token in enumerate(tokens):
            found[layer, position] = state = next_state(state, token, layer + LAYERS * head, weights)
    return found


def sampled(states: Sequence[int] | Words) -> int:
    """The token that follows one with these states, one of each layer."""
    return int(states[0] ^ states[1] >> 7) % VOCABULARY


def write_model(folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(MODEL))
    return folder


def engine_config(model: Path, settings: EngineSettings, block_count: int, rank: int = 0) -> VllmConfig:
    """vLLM's own configuration objects, for the smallest model that it knows."""
    options = {"mode": "embedded", "memory": "8MiB", "weights_version": "first", "verify_load": "full"}
    speculation = None
    if settings.drafts:
        speculation = SpeculativeConfig(
            method="ngram", num_speculative_tokens=settings.drafts, prompt_lookup_min=1, prompt_lookup_max=3
        )
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(model),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=LENGTH_MAX,
            hf_overrides={
                "num_attention_heads": max(settings.ranks, settings.heads),
                "num_key_value_heads": settings.heads,
            },
        ),
        parallel_config=ParallelConfig(tensor_parallel_size=settings.ranks, rank=rank),
        cache_config=CacheConfig(
            block_size=BLOCK, enable_prefix_caching=settings.prefix_caching, prefix_caching_hash_algo="sha256_cbor"
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=REQUESTS_MAX,
            max_num_batched_tokens=STEP_TOKENS,
            max_model_len=LENGTH_MAX,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=False,
            policy=settings.policy,
        ),
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVServiceConnector",
            kv_connector_module_path="kvservice.connector.vllm",
            kv_role=settings.role,
            kv_connector_extra_config={**options, **settings.options},
        ),
        device_config=DeviceConfig("cpu"),
        speculative_config=speculation,
    )
    config.scheduler_config.async_scheduling = settings.runs_ahead  # vLLM refuses it beside n-grams on a CPU
    config.cache_config.num_gpu_blocks = block_count
    if settings.draft_layer:
        assert speculation is not None
        speculation.method = "eagle"
        speculation.draft_model_config, speculation.draft_parallel_config = (
            copy(config.model_config),
            config.parallel_config,
        )
        speculation.draft_model_config.max_model_len = DRAFTED_MAX
    if any(group.kind == "state" for group in settings.groups):
        config.cache_config.mamba_cache_mode = "align"
    return config
