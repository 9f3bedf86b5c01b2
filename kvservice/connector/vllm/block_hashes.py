"""Names the blocks of a prompt as a vLLM engine elsewhere names them, from token ids and the engine's fingerprint. Of
the engine's blocks that share a slot, the last one names it.

For routers, which have the prompt but no engine. It uses vLLM's own hash functions, so only the chaining could differ,
and a test compares that. Everything else that enters the hash (LoRA, images, prompt embeddings) is not covered.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm.utils.hashing import get_hash_fn_by_name

from kvservice.connector.vllm.draft_layers import DRAFT_LAYERS, HashesBehind
from kvservice.core.block.pages import PAGE_HASH, page_hashes, salted
from kvservice.errors import UnsupportedLayout
from kvservice.units import BlockHash

Namer = Callable[[Sequence[int]], list[BlockHash]]


def block_namer(fields: Mapping[str, str], cache_salt: str = "") -> Namer:
    """A function from token ids to the hashes of their full slots, for engines whose fingerprint has these fields.

    Raises UnsupportedLayout if this process cannot make the same hashes.
    """
    algorithm, seed = fields.get("hash", ""), fields.get("hash_seed", "")
    if algorithm == PAGE_HASH:  # engines of several kinds share pages, which vLLM's hashes do not name
        before = salted(cache_salt.encode()) if cache_salt else None
        return lambda token_ids: page_hashes(token_ids, before)
    block_tokens = int(fields.get("block_tokens", "0"))
    slot_tokens = int(fields.get("slot_tokens", block_tokens))
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    if fields.get("hash_python", python) != python:
        raise UnsupportedLayout(
            f"the engines name blocks with {algorithm!r} on Python {fields['hash_python']}, but this is {python}; use "
            "the same Python, or start vLLM with --prefix-caching-hash-algo sha256_cbor"
        )
    try:
        function = get_hash_fn_by_name(algorithm)
        root = function(seed)
    except (ValueError, ModuleNotFoundError) as error:
        raise UnsupportedLayout(f"the engines name blocks with {algorithm!r}: {error}") from error
    if block_tokens < 1 or not seed:
        raise UnsupportedLayout("the engines' fingerprint says nothing of block size or hash seed")
    stride, rest = divmod(slot_tokens, block_tokens)
    if rest or not stride:
        raise UnsupportedLayout(f"the engines' slots of {slot_tokens} tokens are no multiple of their blocks")

    def name(token_ids: Sequence[int]) -> list[BlockHash]:
        parent = root
        extra: tuple[Any, ...] | None = (("cache_salt", cache_salt),) if cache_salt else None
        names: list[BlockHash] = []
        for start in range(0, len(token_ids) - block_tokens + 1, block_tokens):
            parent = function((parent, tuple(token_ids[start : start + block_tokens]), extra))
            names.append(BlockHash(parent))
            extra = None  # only the first block has a salt
        named: Sequence[BlockHash] = HashesBehind(names) if DRAFT_LAYERS in fields else names
        return list(named[stride - 1 :: stride])

    return name


def template_wants_parts(chat_template: str) -> bool:
    """Whether this template reads a message's content as a list of parts. vLLM then gives it lists instead of text."""
    from vllm.renderers import hf

    detect = getattr(hf, "_detect_content_format", None)
    return detect is not None and detect(chat_template, default="string") == "openai"
