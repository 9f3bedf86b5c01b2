"""A model of the reference engine that is a hash chain: what it reads says by itself whether it is right.

The state of a token in a layer is a hash of the state before it, of the token and of the layer. All words of the
token's cell hold it. The next token is drawn from the states of the last one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from kvservice.engine.paged import KVShape, LayerHook, PagedKV, TokenSpan
from kvservice.engine.sampling import Generation, Sampling

LAYERS, VOCABULARY, BEGIN = 2, 13, 7
EOS = frozenset({3})
WORDS_MAX = 128  # of K, and as many of V, of a token in a layer: blocks of some KiB, of which a small pool is soon full


def next_state(state: int, token: int, layer: int) -> int:
    mixed = (state * 6364136223846793005 + token * 1442695040888963407 + layer * 7046029254386353131 + 99) % 2**64
    mixed = ((mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9) % 2**64
    return (mixed ^ mixed >> 32) % 2**62  # fits an int64


def logits_behind(states: Sequence[int]) -> list[float]:
    drawn = states[0] ^ states[1] >> 7
    return [(drawn * (2 * token + 1) * 0x9E3779B97F4A7C15 % 2**64 >> 40) % 997 / 100 for token in range(VOCABULARY)]


def logits_of(tokens: Iterable[int]) -> list[float]:
    """Computed without any cache."""
    states = [BEGIN] * LAYERS
    for token in tokens:
        states = [next_state(state, token, layer) for layer, state in enumerate(states)]
    return logits_behind(states)


def said(tokens: Sequence[int], sampling: Sampling) -> list[list[int]]:
    """The outputs of a request that nothing happens to."""
    generation, sequences = Generation(sampling, EOS), [list(tokens)]
    while True:
        grown = generation.choose(torch.tensor([logits_of(one) for one in sequences]))
        sequences = [[*sequences[growth.parent], growth.token] for growth in grown if not growth.ends]
        if not sequences:
            return generation.outputs


class ChainConfig:
    model_type, vocab_size, max_position_embeddings, _commit_hash = "chain", VOCABULARY, None, None

    def get_text_config(self) -> ChainConfig:
        return self

    def to_dict(self) -> dict[str, object]:
        return {}


class ChainModel:
    """In place of a PagedModel. Wrong bytes raise where they are read, and where they may be read, because a load layer
    by layer is judged behind the forward, they give other tokens."""

    name, device, eos, positions = "", torch.device("cpu"), EOS, None

    def __init__(self, block_tokens: int, words: int, window: int, *, is_layered: bool) -> None:
        self.shape = KVShape(LAYERS, 1, words, words, block_tokens, torch.int64)
        self.config, self.window, self._is_layered = ChainConfig(), window, is_layered
        self._known: dict[tuple[int, int], tuple[int, int]] = {}  # (layer, state): the state before, the position

    def allocate(self, count: int, memory: torch.Tensor | None = None) -> None:
        self.kv = PagedKV(self.shape, count, memory=memory)
        self.kv.storage.fill_(-1)  # no state

    def forward(self, spans: Sequence[TokenSpan], hook: LayerHook | None = None) -> torch.Tensor:
        states: list[list[int]] = [[] for _ in spans]
        for layer in range(LAYERS):
            if hook is not None:
                hook.before(layer)
            for span in spans:
                self._write(layer, span)
            for span, of_span in zip(spans, states, strict=True):
                of_span.append(self._read(layer, span))
            if hook is not None:
                hook.written(layer)
        return torch.tensor([logits_behind(each) for each in states])

    def _cell(self, layer: int, span: TokenSpan, position: int) -> Any:
        block = span.table[position // self.shape.block_tokens]
        assert block >= 0, "a block behind the window is used"
        return self.kv.storage[block, layer, 0, position % self.shape.block_tokens]

    def _write(self, layer: int, span: TokenSpan) -> None:
        state = int(self._cell(layer, span, span.begin - 1)[0]) if span.begin else BEGIN
        for position, token in enumerate(span.tokens, span.begin):
            before, state = state, next_state(state, token, layer)
            self._known[layer, state] = before, position
            self._cell(layer, span, position)[:] = state

    def _read(self, layer: int, span: TokenSpan) -> int:
        """The newest state, if every token that attention reads has the one that follows from those before it."""
        first = max(0, span.begin - self.window + 1) if self.window else 0
        newest = wanted = int(self._cell(layer, span, span.end - 1)[0])
        is_right = span.first <= first
        for position in reversed(range(first, span.end)):
            is_right = is_right and bool((self._cell(layer, span, position) == wanted).all())
            wanted, at = self._known.get((layer, wanted), (BEGIN, position))
            is_right = is_right and at == position
        is_right = is_right and (first > 0 or wanted == BEGIN)
        assert is_right or self._is_layered, f"wrong bytes before token {span.end} in layer {layer}"
        return newest if is_right else 0
