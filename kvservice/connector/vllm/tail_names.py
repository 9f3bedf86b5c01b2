"""Hashes of short blocks of a vLLM request, made as vLLM makes those of whole ones: for partial tails.

vLLM names only whole blocks, and takes up hits that end within one: with connectors that hand prompts over it does so
every day. Its own hook for partial tails offers states of hybrid models and no blocks of attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, hash_block_tokens

from kvservice.units import BlockHash

if TYPE_CHECKING:
    from vllm.v1.request import Request


class TailNames:
    """Call it with (request, first token, end). `live` has the requests that are not finished."""

    def __init__(self, live: Mapping[str, Request], algorithm: str, block_tokens: int) -> None:
        self._live = live
        self._hash = get_hash_fn_by_name(algorithm)
        self._block_tokens = block_tokens

    def __call__(self, request_id: str, begin: int, end: int) -> BlockHash | None:
        """The hash of a short block of these tokens. None for a request or a token that is not known."""
        request, before = self._live.get(request_id), begin // self._block_tokens
        if request is None or end > request.num_tokens or len(request.block_hashes) < before:
            return None
        parent = request.block_hashes[before - 1] if before else None
        # Images from the first on: it finds those within these tokens.
        extra, _ = generate_block_hash_extra_keys(request, begin, end, 0)
        return BlockHash(hash_block_tokens(self._hash, parent, request.all_token_ids[begin:end], extra))
