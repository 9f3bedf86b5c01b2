"""Random draft layers for tiny models: heads of EAGLE and EAGLE-3 for a Llama, and a model with MTP of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.vllm.tiny_model import SPREAD, saved


def make_eagle(folder: Path, model: Path, *, version: int) -> Path:
    """One draft layer for the Llama in the folder `model`; `version` is 1 or 3. Returns `folder`."""
    config = json.loads((model / "config.json").read_text())
    heads, head = config["num_attention_heads"], config["head_dim"]
    hidden, kv = config["hidden_size"], config["num_key_value_heads"] * head
    # EAGLE-3 reads the hidden states of three layers, and its attention the token beside them.
    wide, read = (3 * hidden, 2 * hidden) if version == 3 else (2 * hidden, hidden)
    shapes = _layer(hidden, config["intermediate_size"], read, heads * head, kv) | {"fc.weight": (hidden, wide)}
    if version == 3:
        shapes |= {"layers.0.hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
        shapes |= {"lm_head.weight": (config["vocab_size"], hidden)}
        shapes = {name.replace("layers.0.", "midlayer."): shape for name, shape in shapes.items()}
    else:
        del shapes["layers.0.input_layernorm.weight"]
    changes: dict[str, Any] = {"num_hidden_layers": 1}
    if version == 3:
        changes["architectures"] = ["LlamaForCausalLMEagle3"]
        changes["eagle_aux_hidden_state_layer_ids"] = [0, 1, 2]
    return _write(folder, {**config, **changes}, shapes)


def make_mimo(folder: Path, tokenizer: Path) -> Path:
    """A model with two layers and one MTP module, with SmolLM2's tokenizer. Returns `folder`."""
    from safetensors.torch import load_file, save_file
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(5)
    config = Qwen2Config(
        vocab_size=49152,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        initializer_range=SPREAD,
    )
    saved(Qwen2ForCausalLM(config), folder, tokenizer)
    shapes: dict[str, tuple[int, ...]] = {f"{name}_layernorm.weight": (128,) for name in ("token", "hidden", "final")}
    shapes["input_proj.weight"] = (128, 256)
    for name, shape in _layer(128, 256, 128, 128, 64).items():
        shapes[name.removeprefix("layers.0.")] = shape
    for name, size in (("q", 128), ("k", 64), ("v", 64)):
        shapes[f"self_attn.{name}_proj.bias"] = (size,)
    weights = load_file(folder / "model.safetensors")
    weights |= {f"model.mtp_layers.0.{name}": tensor for name, tensor in _random(shapes).items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    written = json.loads((folder / "config.json").read_text())
    written |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(written))
    return folder


def _layer(hidden: int, inner: int, read: int, heads: int, kv: int) -> dict[str, tuple[int, ...]]:
    """The shapes of one layer's weights, whose attention reads vectors of the size `read`."""
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (heads, read),
        "self_attn.k_proj": (kv, read),
        "self_attn.v_proj": (kv, read),
        "self_attn.o_proj": (hidden, heads),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    return {f"layers.0.{name}.weight": shape for name, shape in shapes.items()}


def _random(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    torch.manual_seed(13)
    return {
        name: torch.ones(shape) if "norm" in name else torch.randn(shape) * SPREAD for name, shape in shapes.items()
    }


def _write(folder: Path, config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> Path:
    from safetensors.torch import save_file

    (folder / "config.json").write_text(json.dumps(config))
    save_file(_random(shapes), folder / "model.safetensors", {"format": "pt"})
    return folder
