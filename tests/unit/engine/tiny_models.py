"""Small models with random weights, and a driver that runs one of them over blocks as plainly as possible."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from kvservice.engine.model import PagedModel
from kvservice.engine.paged import TokenSpan
from kvservice.engine.sampling import Generation, Sampling

torch.set_num_threads(1)  # more threads wait for each other longer than these models compute

VOCABULARY = 199
BLOCK_TOKENS = 4
BLOCKS = 64
# Standard deviation of every matrix: wider than at the start of a training, so that the likeliest token depends on the
# whole prompt and leads by more than two ways of computing it differ.
SPREAD = 0.25
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": SPREAD,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
LATENT = {
    "kv_lora_rank": 24,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
WINDOW = 10

KINDS: dict[str, Any] = {
    "all heads": lambda: LlamaForCausalLM(LlamaConfig(**COMMON, num_key_value_heads=4)),
    "grouped heads": lambda: LlamaForCausalLM(LlamaConfig(**COMMON, num_key_value_heads=2)),
    "latent v2": lambda: DeepseekV2ForCausalLM(DeepseekV2Config(**COMMON, **LATENT)),
    "latent v3": lambda: DeepseekV3ForCausalLM(DeepseekV3Config(**COMMON, **LATENT)),
    "window": lambda: MistralForCausalLM(MistralConfig(**COMMON, num_key_value_heads=2, sliding_window=WINDOW)),
    "window in some layers": lambda: Qwen2ForCausalLM(
        Qwen2Config(
            **COMMON, num_key_value_heads=2, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
        )
    ),
}

# More architectures, by their name in transformers: other positions (learned, ALiBi, partly rotated), soft caps and
# sinks in attention, windows and chunks in some layers, layers that share the K and V of others.
FURTHER: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4},
    "bloom": {"n_layer": 2, "n_head": 4},
    "gpt_neox": {},
    "gemma2": {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 16},
    "gpt_oss": {"head_dim": 16, "sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    "llama4_text": {"head_dim": 16, "attention_chunk_size": WINDOW, "num_local_experts": 2, "no_rope_layers": [1, 0]},
    "gemma3n_text": {
        "head_dim": 16,
        "sliding_window": WINDOW,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "laurel_rank": 4,
        "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.0] * 4,
    },
}


def make_further(name: str) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**COMMON, "num_key_value_heads": 2, **FURTHER[name]})
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, SPREAD)
    return model


def make(kind: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return KINDS[kind]().to(dtype).eval()


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def generated(model: Any, tokens: list[int], count: int, **settings: Any) -> list[list[int]]:
    """What transformers' `generate` says behind the prompt, as one list for each sequence that it returns."""
    given = torch.tensor([tokens], device=model.device)
    found = model.generate(
        given,
        attention_mask=torch.ones_like(given),
        max_new_tokens=count,
        **{"do_sample": False, "pad_token_id": VOCABULARY - 1, **settings},
    )
    return [row[len(tokens) :].tolist() for row in found]


class Driver:
    """Tables without sharing, except that a fork shares the full blocks. Ids are scattered, so no table is a range."""

    def __init__(self, model: Any, block_tokens: int = BLOCK_TOKENS) -> None:
        self.model = PagedModel(model, block_tokens=block_tokens)
        self.kv = self.model.allocate(BLOCKS)
        self._free = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(1)).tolist()
        self.block_tokens = block_tokens

    def grow(self, table: list[int], end: int) -> list[int]:
        while len(table) * self.block_tokens < end:
            table.append(self._free.pop())
        return table

    def span(self, tokens: list[int], begin: int, table: list[int], end: int | None = None) -> TokenSpan:
        """Compute tokens[begin:end] of a sequence."""
        end = len(tokens) if end is None else end
        return TokenSpan(tokens[begin:end], begin, self.grow(table, end))

    def prefill(self, tokens: list[int], table: list[int], chunk: int | None = None, begin: int = 0) -> torch.Tensor:
        """Logits after the last token."""
        for start in range(begin, len(tokens), chunk or len(tokens)):
            end = min(len(tokens), start + (chunk or len(tokens)))
            logits = self.model.forward([self.span(tokens, start, table, end)])
        return logits

    def fork(self, table: list[int], count: int) -> list[int]:
        """A second table of a sequence of `count` computed tokens: full blocks are shared, the open one is copied."""
        full = count // self.block_tokens
        child = table[:full]
        if count % self.block_tokens:
            child.append(self._free.pop())
            self.kv.copy_blocks(torch.tensor([(table[full], child[full])]))
        return child

    def run(self, tokens: list[int], sampling: Sampling, eos: frozenset[int] = frozenset()) -> list[list[int]]:
        """All outputs of one request, its sequences computed together."""
        generation = Generation(sampling, eos)
        table: list[int] = []
        logits = self.prefill(tokens, table)
        sequences = [(tokens, table)]
        while True:
            grown = generation.choose(logits)
            taken: set[int] = set()
            after = []
            for growth in grown:
                if growth.ends:
                    continue
                known, table = sequences[growth.parent]
                if growth.parent in taken:
                    table = self.fork(table, len(known))
                taken.add(growth.parent)
                after.append(([*known, growth.token], table))
            sequences = after
            if not sequences:
                return generation.outputs
            logits = self.model.forward([self.span(known, len(known) - 1, table) for known, table in sequences])
