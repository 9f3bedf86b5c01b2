"""Models smaller than SmolLM2: some of its layers, or random weights where other shapes are wanted."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

# Standard deviation of every matrix: wider than at the start of a training, so that the likeliest token depends on the
# whole prompt and leads by far more than the rounding of two engines differs.
SPREAD = 0.2


TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def make_shallow(folder: Path, model: Path, *, layers: int) -> Path:
    """The first layers of the model in that folder, with its weights and tokenizer. Returns `folder`."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
    with safe_open(model / "model.safetensors", framework="pt") as weights:
        numbers = {name: re.search(r"\.layers\.(\d+)\.", name) for name in weights.keys()}  # noqa: SIM118  no mapping
        kept = [name for name, number in numbers.items() if number is None or int(number[1]) < layers]
        save_file({name: weights.get_tensor(name) for name in kept}, folder / "model.safetensors", {"format": "pt"})
    for name in (*TOKENIZER, "generation_config.json"):
        shutil.copy(model / name, folder / name)
    return folder


def make_llama(folder: Path, tokenizer: Path, *, attention_heads: int, kv_heads: int, seed: int = 7) -> Path:
    """Two layers and SmolLM2's tokenizer, copied from its folder. Returns `folder`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        head_dim=32,
        num_attention_heads=attention_heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        initializer_range=SPREAD,
    )
    return saved(LlamaForCausalLM(config), folder, tokenizer)


def make_phi3(folder: Path, tokenizer: Path, *, original_context: int) -> Path:
    """LongRoPE: beyond that context all angles are others. SmolLM2's tokenizer. Returns `folder`."""
    import torch
    from transformers import Phi3Config, Phi3ForCausalLM

    torch.manual_seed(0)
    half = 32  # of a head
    config = Phi3Config(
        vocab_size=49152,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        original_max_position_embeddings=original_context,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        tie_word_embeddings=False,
        sliding_window=None,
        initializer_range=SPREAD,
        rope_theta=10000.0,
        rope_scaling={
            "type": "longrope",
            "short_factor": [1.0] * half,
            "long_factor": [1.0 + 0.5 * i for i in range(half)],
        },
    )
    return saved(Phi3ForCausalLM(config), folder, tokenizer)


def make_gemma3(folder: Path, tokenizer: Path, *, window: int, layers: int = 7) -> Path:
    """Every fourth layer sees all tokens and the others a window of so many: vLLM makes several cache groups of them,
    the last of which has fewer layers than the others. SmolLM2's tokenizer. Returns `folder`."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(11)
    kinds = ["full_attention" if index % 4 == 1 else "sliding_attention" for index in range(layers)]
    config = Gemma3TextConfig(
        vocab_size=49152,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        head_dim=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        query_pre_attn_scalar=32,
        sliding_window=window,
        layer_types=kinds,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        initializer_range=SPREAD,
        tie_word_embeddings=False,
    )
    return saved(Gemma3ForCausalLM(config), folder, tokenizer)


# Shapes of every model with states: two layers of attention at most, and states of some kilobytes.
STATES: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "initializer_range": SPREAD,
    "num_hidden_layers": 4,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1}
# name -> (class of its configuration, its fields)
WITH_STATES: dict[str, tuple[str, dict[str, Any]]] = {
    "granite4": (
        "GraniteMoeHybridConfig",
        {
            **STATES,
            **MAMBA,
            "layer_types": ["mamba", "attention", "mamba", "mamba"],
            "shared_intermediate_size": 256,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_chunk_size": 64,
            "position_embedding_type": "rope",
        },
    ),
    "falcon_h1": (
        "FalconH1Config",
        {**STATES, **MAMBA, "num_hidden_layers": 3, "head_dim": 32, "mamba_d_ssm": 256, "mamba_chunk_size": 64},
    ),
    "zamba2": (
        "Zamba2Config",
        {
            **STATES,
            "num_key_value_heads": 4,
            "mamba_d_state": 16,
            "mamba_ngroups": 1,
            "n_mamba_heads": 8,
            "mamba_headdim": 32,
            "mamba_expand": 2,
            "chunk_size": 64,
            "num_mem_blocks": 1,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
            "adapter_rank": 8,
            "use_mem_rope": True,
        },
    ),
    "mamba2": (
        "Mamba2Config",
        {
            **STATES,
            "num_hidden_layers": 2,
            "num_heads": 8,
            "head_dim": 32,
            "state_size": 16,
            "n_groups": 1,
            "conv_kernel": 4,
            "expand": 2,
            "chunk_size": 64,
        },
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {
            **{name: value for name, value in STATES.items() if name != "num_hidden_layers"},
            **EXPERTS,
            "layers_block_type": ["mamba", "attention", "mlp", "mamba"],
            "head_dim": 32,
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "ssm_state_size": 16,
            "n_groups": 1,
            "conv_kernel": 4,
            "chunk_size": 64,
            "n_routed_experts": 4,
            "moe_shared_expert_intermediate_size": 64,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            **STATES,
            **EXPERTS,
            "head_dim": 32,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "num_experts": 4,
            "shared_expert_intermediate_size": 64,
        },
    ),
    "qwen3_5": (
        "Qwen3_5TextConfig",
        {
            **STATES,
            "head_dim": 32,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
        },
    ),
}


def make_with_states(folder: Path, tokenizer: Path, *, name: str) -> Path:
    """A model of WITH_STATES with random weights and SmolLM2's tokenizer. Returns `folder`."""
    import torch
    import transformers

    torch.manual_seed(7)
    kind, fields = WITH_STATES[name]
    config = getattr(transformers, kind)(**fields)
    return saved(transformers.AutoModelForCausalLM.from_config(config), folder, tokenizer)


def saved(model: Any, folder: Path, tokenizer: Path) -> Path:
    """Write the model, with the tokenizer's files beside it. Returns `folder`."""
    model.save_pretrained(folder)
    for name in TOKENIZER:
        shutil.copy(tokenizer / name, folder / name)
    return folder
