"""Cached blocks reused where they are no prefix: documents computed alone, put together in any order (CacheBlend).

A study to measure with. The output is not that of the model: the tokens of a document have not seen what stands before
it now. The idea is CacheBlend's (Yao et al., EuroSys 2025). Keys are rotated to their new place, some first layers are
computed for every token, and behind them only the tokens whose keys deviate most from the cached ones.

The model is any of transformers' with rotary positions and full attention. Nothing of it is written again here: hooks
at its layers leave tokens out, and a cache layer mixes what was computed with what was cached.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from kvservice.api.attached import PutResult
from kvservice.api.layout import Layout
from kvservice.api.pool import Pool
from kvservice.errors import InvalidRequest, LeaseLost, UnsupportedLayout

# Chunks have names of their own twice over: a fingerprint with NAMING in it, and chains that begin at ROOT. The prefix
# of a prompt has neither. What a blend computes gets no name at all, because nothing here stores it.
NAMESPACE, NAMING, ROOT = "chunks", 1, "kvservice/blend/1"
MOVABLE = ("default", "linear", "llama3", "yarn")  # their angles depend on the position only, not on a prompt's length
PROBE_TOKENS, PROBE_SHIFT = 8, 64  # of the check that a model's keys can be moved
PROBE_ERROR_MAX = 0.05  # relative; a key that was not moved is wrong by about 1, rounding in bfloat16 by about 0.01


@dataclass(frozen=True, slots=True)
class BlendSettings:
    """What is computed of a prompt that is made of chunks. Raises InvalidRequest."""

    enabled: bool = True  # False: no chunk is looked up, all is computed
    # Layers at which cached and computed keys are compared. Up to the last of them at least some cached tokens are
    # computed. With several, tokens are left out step by step: dearer, and the choice is better founded.
    check_layers: tuple[int, ...] = (1,)
    ratio: float = 0.15  # [0, 1], of the cached tokens, computed behind the last check layer. 0: plain reuse. 1: exact

    def __post_init__(self) -> None:
        if not 0 <= self.ratio <= 1:
            raise InvalidRequest(f"ratio is 0 to 1, not {self.ratio}")
        if not self.check_layers or sorted(set(self.check_layers)) != list(self.check_layers):
            raise InvalidRequest(f"check_layers are one or more layers in order, not {self.check_layers}")
        if self.check_layers[0] < 1:
            raise InvalidRequest("the keys of layer 0 depend on token and position alone: begin check_layers at 1")

    def shares(self) -> dict[int, float]:
        """Check layer → the share of the cached tokens that is computed behind it."""
        count = len(self.check_layers)
        return {layer: self.ratio ** (number / count) for number, layer in enumerate(self.check_layers, 1)}


@dataclass(frozen=True, slots=True)
class Blended:
    logits: Any  # [1, tokens of the last piece, vocabulary], of the model's type
    cache: Any  # transformers' Cache with the keys and values of the whole prompt, to go on with
    tokens: int  # of the prompt
    cached: int  # of them, those whose keys and values came from the pool
    computed: int  # of them, those that were computed in every layer
    misses: tuple[str, ...]  # why blocks were missing, one reason for each chunk that was not all there


class Blender:
    """One model, its chunks in a pool, and prompts that are made of them. One caller at a time; every call blocks.

    `name` and `identity` name the weights, as for `Pool.attach`. Raises UnsupportedLayout, naming what stands against
    it, for a model whose keys cannot be moved or whose layers do not all attend to everything; InvalidRequest for
    settings that do not fit the model; and what `Pool.attach` raises.
    """

    def __init__(
        self,
        model: Any,
        pool: Pool,
        name: str,
        settings: BlendSettings | None = None,
        *,
        identity: Mapping[str, object] | None = None,
        block_tokens: int = 16,
    ) -> None:
        self._model, self.settings = model, settings or BlendSettings()
        refuse_by_name(model)
        self._decoder = model.get_decoder()
        self._rotate = sys.modules[type(self._decoder).__module__].apply_rotary_pos_emb
        layers, heads, size = self._probe()
        if self.settings.check_layers[-1] > layers - 2:
            raise InvalidRequest(f"check_layers end at {layers - 2}: behind the last one a layer must be left out")
        versions = {"blend": NAMING, "transformers": transformers.__version__, "torch": torch.__version__}
        self._chunks = pool.attach(
            name,
            Layout(block_tokens, (layers, 2, heads, block_tokens, size), model.dtype),
            identity={**versions, "attention": attention_of(model), **(identity or {})},
            namespace=NAMESPACE,
        )

    def store(self, chunk: Sequence[int]) -> PutResult:
        """Compute a chunk alone, from position 0, and put its whole blocks into the pool, unless they are there."""
        block, whole = self._chunks.layout.block_tokens, len(chunk) // self._chunks.layout.block_tokens
        with self._chunks.get(chunk, salt=ROOT) as hit:
            if len(hit) == whole:
                return PutResult(0, whole, 0)
        cache = self._run(chunk, DynamicCache(), 1).past_key_values
        kv = torch.stack([torch.stack([layer.keys[0], layer.values[0]]) for layer in cache.layers])
        blocks = kv[:, :, :, : whole * block].unflatten(3, (whole, block)).permute(3, 0, 1, 2, 4, 5)
        return self._chunks.put(chunk, blocks, salt=ROOT)

    def prefill(self, pieces: Sequence[Sequence[int]]) -> Blended:
        """The keys and values of a prompt, and the logits of its last piece.

        Every piece but the last is a chunk: its leading blocks that the pool has are used, and the rest is computed, as
        the last piece is, which must not be empty. Raises InvalidRequest for an empty last piece.
        """
        if not pieces or not len(pieces[-1]):
            raise InvalidRequest("the last piece of a prompt is computed, so it cannot be empty")
        tokens = [token for piece in pieces for token in piece]
        kv, is_cached, misses = self._load(pieces, len(tokens))
        work = _Pass(kv, is_cached, self.settings)
        hooks = [layer.register_forward_pre_hook(work.narrow, with_kwargs=True) for layer in self._decoder.layers]
        try:
            mixed = Cache(layers=[_MixedLayer(work, number) for number in range(kv.shape[0])])
            logits = self._run(tokens, mixed, len(pieces[-1])).logits
        finally:
            for hook in hooks:
                hook.remove()
        computed = len(tokens) if work.kept is None else len(work.kept)
        return Blended(logits, mixed, len(tokens), int(is_cached.sum()), computed, tuple(misses))

    def _load(self, pieces: Sequence[Sequence[int]], total: int) -> tuple[Any, Any, list[str]]:
        """([layer, K or V, head, token, size] with keys at their new places, whether a token is cached, misses)."""
        layers, _, heads, block, size = self._chunks.layout.shape
        device = self._model.device
        kv = torch.zeros((layers, 2, heads, total, size), dtype=self._model.dtype, device=device)
        is_cached = torch.zeros(total, dtype=torch.bool, device=device)
        misses: list[str] = []
        begin = 0
        for piece in pieces[:-1] if self.settings.enabled else ():
            try:
                with self._chunks.get(piece, salt=ROOT) as hit:  # a lease of its own, until its bytes are copied
                    end = begin + len(hit) * block
                    if hit:
                        kv[:, :, :, begin:end] = hit.tensor().permute(1, 2, 3, 0, 4, 5).flatten(3, 4)
                kv[:, 0, :, begin:end] = self.move(kv[:, 0, :, begin:end], begin)
                is_cached[begin:end] = True
                misses += [hit.miss] if hit.miss else []
            except LeaseLost as error:
                misses.append(error.reason.lower())
            begin += len(piece)
        return kv, is_cached, misses

    def move(self, keys: Any, by: int) -> Any:
        """Keys `[layer, head, token, size]` as they are `by` positions further on, in the same type."""
        wide = keys.float() if keys.dtype.itemsize < 4 else keys  # one rounding, not two
        rotary = self._decoder.rotary_emb
        cos, sin = rotary(wide, position_ids=torch.tensor([[by]], device=keys.device))
        scaling = rotary.attention_scaling  # the keys have it already
        return self._rotate(wide, wide, cos / scaling, sin / scaling)[1].to(keys.dtype)

    def _probe(self) -> tuple[int, int, int]:
        """(layers, heads, size of a key). A few tokens are computed at two places: keys moved from one to the other
        must be equal in every layer. Raises UnsupportedLayout."""
        tokens = range(PROBE_TOKENS)
        near = self._run(tokens, DynamicCache(), 1).past_key_values.layers
        positions = torch.arange(PROBE_SHIFT, PROBE_SHIFT + PROBE_TOKENS, device=self._model.device)[None]
        far = self._run(tokens, DynamicCache(), 1, position_ids=positions).past_key_values.layers
        for number, (one, other) in enumerate(zip(near, far, strict=True)):
            try:
                moved = self.move(one.keys, PROBE_SHIFT)
            except RuntimeError as error:
                raise UnsupportedLayout(f"the model rotates a part of its keys only: {error}") from error
            if (moved - other.keys).norm() > PROBE_ERROR_MAX * other.keys.norm():
                raise UnsupportedLayout(f"keys of layer {number} are not rotated by their position: they cannot move")
            if not other.keys.shape == other.values.shape == near[0].keys.shape:
                raise UnsupportedLayout(f"keys and values of layer {number} have another shape than the first keys")
        return len(near), near[0].keys.shape[1], near[0].keys.shape[3]

    def _run(self, tokens: Sequence[int], cache: Any, logits: int, **more: Any) -> Any:
        ids = torch.tensor([list(tokens)], device=self._model.device)
        with torch.no_grad():
            return self._model(ids, past_key_values=cache, use_cache=True, logits_to_keep=logits, **more)


class _Pass:
    """One forward pass: which tokens are computed in which layer, and what stands for the others."""

    def __init__(self, kv: Any, is_cached: Any, settings: BlendSettings) -> None:
        self._kv, self._is_cached = kv, is_cached
        self.kept: Any = None  # positions of the tokens that are computed, ascending; None: all of them
        self._rows: Any = None  # of the hidden states, those that the next layer gets; None: all of them
        self._shares = settings.shares()
        if settings.ratio == 0 and is_cached.any():  # nothing to choose, so nothing to check
            self._shares = {}
            self.kept = self._rows = (~is_cached).nonzero()[:, 0]

    def narrow(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before a layer of the model: leave out what is not computed from here on."""
        if self.kept is None:
            return None
        hidden, rows, self._rows = args[0], self._rows, None
        mask = kwargs["attention_mask"]
        if mask is None:  # causal, which the kernel can only mean of all tokens
            whole = torch.arange(self._kv.shape[3], device=hidden.device)
            mask = (whole <= self.kept[:, None])[None, None]
        else:
            mask = mask[..., self.kept, :]
        left = {
            "attention_mask": mask,
            "position_ids": kwargs["position_ids"][:, self.kept],
            "position_embeddings": tuple(each[:, self.kept] for each in kwargs["position_embeddings"]),
        }
        return (hidden if rows is None else hidden[:, rows], *args[1:]), {**kwargs, **left}

    def mix(self, layer: int, keys: Any, values: Any) -> tuple[Any, Any]:
        """The keys and values of all tokens in this layer, from `[1, head, token, size]` of those computed in it."""
        before = self.kept
        if layer in self._shares:
            self._choose(self._shares[layer], self._kv[layer, 0], keys[0])
        if before is None:
            return keys, values
        both = self._kv[layer]
        both[:, :, before] = torch.cat([keys, values])
        return both[:1], both[1:]

    def _choose(self, share: float, cached: Any, keys: Any) -> None:
        """Of the tokens that are computed, go on with those that no block was found for, and this share of the cached
        ones: those whose keys are furthest from the cached keys (L2 distance over all heads)."""
        places = torch.arange(cached.shape[1], device=keys.device) if self.kept is None else self.kept
        deviation = (keys.float() - cached[:, places].float()).square().sum((0, 2))
        deviation[~self._is_cached[places]] = math.inf
        found = int(self._is_cached.sum())
        count = len(self._is_cached) - found + math.ceil(share * found)
        if count < len(places):
            self._rows = deviation.topk(count).indices.sort().values
            self.kept = places[self._rows]


class _MixedLayer(DynamicLayer):
    """A layer of a cache that is filled by a pass, and grows like any other from then on."""

    def __init__(self, work: _Pass, number: int) -> None:
        super().__init__()
        self._work, self._number = work, number

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        if self.is_initialized:
            return super().update(key_states, value_states, *args, **kwargs)
        self.lazy_initialization(key_states, value_states)
        self.keys, self.values = self._work.mix(self._number, key_states, value_states)
        return self.keys, self.values


def attention_of(model: Any) -> str:
    return str(model.config.get_text_config()._attn_implementation)  # noqa: SLF001  transformers has no other name for it


def refuse_by_name(model: Any) -> None:
    """Raises UnsupportedLayout for what is known not to work, and says what it is."""
    config = model.config.get_text_config()
    others = {kind for kind in getattr(config, "layer_types", None) or () if kind != "full_attention"}
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind, decoder = rope.get("rope_type", "default"), model.get_decoder()
    if getattr(config, "kv_lora_rank", None):
        why = "multi-head latent attention (MLA) keeps no keys that could be rotated"
    elif getattr(config, "sliding_window", None) or others:
        why = f"layers that do not attend to every token: {', '.join(sorted(others)) or 'sliding window'}"
    elif "mrope_section" in rope:
        why = "positions in several dimensions (M-RoPE)"
    elif kind not in MOVABLE:
        why = f"rope scaling {kind!r}: only {', '.join(MOVABLE)} give a position the same angles in every prompt"
    elif not hasattr(getattr(decoder, "rotary_emb", None), "attention_scaling") or not hasattr(decoder, "layers"):
        why = "positions that are not rotary, or layers that transformers calls otherwise"
    elif attention_of(model) not in ("sdpa", "eager"):
        why = f"attention {attention_of(model)!r}, which takes no mask of ours: load it with attn_implementation='sdpa'"
    else:
        return
    raise UnsupportedLayout(f"{type(model).__name__} cannot reuse what is no prefix: it has {why}")
