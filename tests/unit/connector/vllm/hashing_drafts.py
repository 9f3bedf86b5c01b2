"""The engine of hashing_engine.py with a draft layer, as EAGLE and MTP have: what it keeps of a token is hashed from
the model's state and the token behind it, after the model has sampled that. As in vLLM, nothing is drafted in a step
with a request near the draft's longest length.

What goes into the pool is compared in all layers. What a request has at its end may be wrong in the draft layer if
nothing was drafted in a step of it, or with vLLM's prefix cache: of two prompts that part behind a block, that may give
a third one the block of the wrong one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from kvservice.core.messages import SealItem
from kvservice.memory.segment import Segment
from tests.unit.connector.vllm.hash_chain import (
    BLOCK,
    CELL_WORDS,
    DRAFTED_MAX,
    HEAD_SIZE,
    LAYER_NAMES,
    LAYERS,
    Words,
    next_state,
    true_states,
)
from tests.unit.connector.vllm.hashing_engine import HashingEngine, Row

DRAFT_LAYER = 97  # its number in the hash chain


class DraftingEngine(HashingEngine):
    ahead = 1

    @cached_property
    def _undrafted(self) -> set[str]:
        """Requests that were in a step without drafts."""
        return set()

    def _lay_out(self, block_count: int, seed: int) -> KVCacheConfig:
        super()._lay_out(block_count, seed)
        self._layer_names = [*LAYER_NAMES, "draft.layers.0.self_attn.attn"]
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=HEAD_SIZE, dtype=torch.bfloat16)
        cache = KVCacheConfig(
            num_blocks=block_count, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(self._layer_names, spec)]
        )
        cache.hash_block_size = BLOCK
        shape = (1, LAYERS + 1, block_count, 1, BLOCK, CELL_WORDS)
        self._memory = np.random.default_rng(seed).integers(2**60, size=shape)
        return cache

    def _tensors(self, rank: int) -> dict[str, torch.Tensor]:
        tensors = torch.from_numpy(self._memory[rank]).view(torch.bfloat16)
        return dict(zip(self._layer_names, tensors, strict=True))

    def _compute(self, rank: int, layer: int, row: Row, tokens: Sequence[int], start: int) -> None:
        if layer < LAYERS:
            super()._compute(rank, layer, row, tokens, start)

    def _draft(self, rank: int, rows: Sequence[Row], inputs: Sequence[tuple[list[int], int]]) -> None:
        """Of drafts that were wrong it keeps what is wrong, until they are computed again."""
        if max((row.start + row.count for row in rows), default=0) + self._settings.drafts > DRAFTED_MAX:
            self._undrafted.update(row.request.request_id for row in rows)
            return
        states, memory = self._memory[rank, LAYERS - 1, :, 0], self._memory[rank, LAYERS, :, 0]
        for row, (tokens, start) in zip(rows, inputs, strict=True):
            known, table = self._tokens[row.request.request_id], row.table
            for position in range(start, start + row.count):
                behind = (known if position + 1 < len(known) else [*tokens, 0])[position + 1]
                place = table[position // BLOCK], position % BLOCK
                memory[place] = next_state(int(states[place][0]), behind, DRAFT_LAYER, self._weights)

    def _sample(self, row: Row, tokens: Sequence[int]) -> tuple[list[int], list[int]]:
        new, known = super()._sample(row, tokens)
        return new, [*known, new[-1]] if new else known

    def _states_at(self, row: Row, position: int) -> Words:
        return super()._states_at(row, position)[:LAYERS]

    def _check_memory(self, row: Row, tokens: Sequence[int]) -> None:
        positions = np.arange(len(tokens) - 1)
        cells = self._memory[0, :, np.array(row.table)[positions // BLOCK], 0, positions % BLOCK].swapaxes(0, 1)
        is_exact = not self._settings.prefix_caching and row.request.request_id not in self._undrafted
        layers = LAYERS + 1 if is_exact else LAYERS
        wrong = (cells[:layers] != self._true(tokens, row.request.cache_salt, self._weights)[:layers, :, None]).any(-1)
        assert not wrong.any(), (
            f"wrong KV of {row.request.request_id}, preempted {row.request.num_preemptions} times: layers and "
            f"positions {np.argwhere(wrong)[:5].tolist()} of {len(tokens)} tokens"
        )
        self.counters["requests_checked"] += 1

    def _true(self, tokens: Sequence[int], salt: str | None, weights: int) -> Words:
        """[layer, position], of all tokens but the last."""
        states = true_states(tokens[:-1], salt, weights)
        pairs = zip(states[LAYERS - 1].tolist(), tokens[1:], strict=True)
        drafted = [next_state(state, token, DRAFT_LAYER, weights) for state, token in pairs]
        return np.vstack([states, np.array(drafted, dtype=np.int64)])

    def _is_true(self, segment: Segment, item: SealItem) -> bool:
        tokens, salt, weights = self._contents[item.key]
        words = np.frombuffer(segment.payload(item.ref.slot, self.connector._spec.layout.payload_bytes), dtype=np.int64)
        block_tokens = self._half._block_tokens
        wanted = self._true(tokens, salt, weights)[:, -block_tokens:]
        found = words.reshape(LAYERS + 1, block_tokens, CELL_WORDS)
        return bool((found == wanted[:, :, None]).all())
