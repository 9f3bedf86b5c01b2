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


def make_llama(folder: Path, tokenizer: Path, *, attention_heads: int, kv_heads: int) -> Path:
    """Two layers and SmolLM2's tokenizer, copied from its folder. Returns `folder`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
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


def saved(model: Any, folder: Path, tokenizer: Path) -> Path:
    """Write the model, with the tokenizer's files beside it. Returns `folder`."""
    model.save_pretrained(folder)
    for name in TOKENIZER:
        shutil.copy(tokenizer / name, folder / name)
    return folder
