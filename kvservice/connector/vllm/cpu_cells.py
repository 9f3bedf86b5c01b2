"""Which token each element of a head's part of a block is of, in vLLM's kernels for CPUs.

They pack K and V each in its own way, by the instruction set, and no shape shows it. So vLLM's own function that writes
tokens into a block is asked: it writes a block whose elements say a bit of their token's number, and so on.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm.v1.attention.backends import cpu_attn

log = logging.getLogger("kvservice.connector")


def token_of_elements(layer: torch.Tensor, spec: Any, model_dtype: torch.dtype, cache_dtype: str) -> torch.Tensor:
    """`(elements,)` int64 for blocks of this layer, `[block, kv head, token, K‖V]`. What no token writes counts as
    behind all of them. Empty, and logged, where this vLLM does not tell."""
    tokens = int(layer.shape[2])
    numbers = torch.arange(tokens)
    try:
        kernels = cpu_attn._get_attn_isa(model_dtype, tokens, int(spec.head_size), cache_dtype)  # noqa: SLF001
        bits = [
            _written(layer, numbers >> bit & 1, model_dtype, cache_dtype, kernels) << bit
            for bit in range((tokens - 1).bit_length())
        ]
        is_used = _written(layer, torch.ones_like(numbers), model_dtype, cache_dtype, kernels)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError) as error:
        log.warning("partial tails are not stored, because vLLM does not tell how it packs a block: %s", error)
        return torch.empty(0, dtype=torch.int64)
    return torch.where(is_used != 0, sum(bits, torch.zeros_like(is_used)), tokens)


def _written(
    layer: torch.Tensor, of_tokens: torch.Tensor, model_dtype: torch.dtype, cache_dtype: str, kernels: str
) -> torch.Tensor:
    """1 for each element of a head's part of a block that holds a token for which `of_tokens` is 1, else 0."""
    _, heads, tokens, width = layer.shape
    values = of_tokens.to(model_dtype)[:, None, None].expand(tokens, heads, width // 2).contiguous()
    block = torch.zeros(1, heads, 2 * tokens, width // 2, dtype=layer.dtype)
    keys, rest = block.chunk(2, dim=2)
    places = torch.arange(tokens)
    ops.cpu_attn_reshape_and_cache(values, values, keys, rest, places, kernels, kv_cache_dtype=cache_dtype)
    return (block[0, 0].flatten().float() != 0).long()
