"""A transformers causal language model whose K and V lie in paged blocks.

The model is any `AutoModelForCausalLM` whose layers are all attention: its code computes everything, and only its cache
is ours. A step is given as spans of tokens, each with its block table, and comes back as logits. Which spans those
are, and what is done with the logits, is decided elsewhere.

Adapters, encoders and layers that keep something else than K and V are refused by name. One thread uses a model.
"""

from __future__ import annotations

import inspect
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from kvservice.engine.paged import Batch, KVShape, LayerHook, PagedKV, TokenSpan, paged_cache
from kvservice.errors import UnsupportedLayout

# Cache layers of transformers that hold K and V and nothing else. One with a window holds its end only; in blocks it
# is kept whole.
PAGED_TYPES = (DynamicLayer, DynamicSlidingWindowLayer)
PROBE_TOKENS = 2  # of the forward that finds the shape of the cache; a model may treat a single one in another way


class PagedModel:
    """A model, its tokenizer and its pool of blocks."""

    def __init__(self, model: Any, *, block_tokens: int = 16, tokenizer: Any = None, name: str = "") -> None:
        """Blocks for one short forward, which finds the shape of the model's cache.

        Args:
            model: as `AutoModelForCausalLM` returns it, on its device.
            block_tokens: tokens of a block.
            tokenizer: as `AutoTokenizer` returns it; None if requests are tokens.
            name: the folder, or the name at the hub, of files that hold these very weights. Without it nothing names
                them: a model remembers its folder also when an adapter was merged into it since.

        Raises:
            UnsupportedLayout: the model keeps something else than K and V of one shape in every layer.
        """
        if block_tokens < 1:
            raise ValueError(f"a block has at least one token, not {block_tokens}")
        self._model = model.eval()
        self.name, self.loaded_at = name, time.time()  # in seconds since 1970: files that change later are others
        self._tokenizer = tokenizer
        taken = inspect.signature(model.forward).parameters
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in taken else {}
        self._takes_positions = "position_ids" in taken
        self.eos = _eos_tokens(model)
        self.shape, self.window = self._find_shape(block_tokens)
        self._kv: PagedKV | None = None

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | str = "auto",
        block_tokens: int = 16,
    ) -> PagedModel:
        """Load model and tokenizer from a folder, or by a name that Hugging Face knows. Blocks. `dtype` is by default
        the one that the weights are stored in. Only safetensors are read: other files of weights can run code.

        Raises ValueError for a device or type that torch cannot use here, before a weight is read."""
        if isinstance(dtype, str) and dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise ValueError(f"torch has no type of numbers {dtype!r}; give one such as bfloat16, or auto")
        try:
            torch.empty(0, device=device)
        except (AssertionError, RuntimeError) as error:  # an assertion where torch was built without CUDA
            raise ValueError(f"device {device} cannot be used here: {str(error).splitlines()[0]}") from error
        begun = time.time()
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, use_safetensors=True).to(device)
        tokenizer = AutoTokenizer.from_pretrained(path)
        opened = cls(model, block_tokens=block_tokens, tokenizer=tokenizer, name=str(path))
        opened.loaded_at = begun
        return opened

    @property
    def config(self) -> Any:
        """The model's configuration, as transformers knows it."""
        return self._model.config

    @property
    def positions(self) -> int | None:
        """The most tokens that a text may have; None if the model does not say. With LongRoPE the keys of all tokens
        are others once the text is longer than these, and a block has one set of keys for all texts."""
        config = self.config.get_text_config()
        rope = getattr(config, "rope_parameters", None) or {}
        parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]  # one of each type of layer
        kept = [part["original_max_position_embeddings"] for part in parts if part.get("rope_type") == "longrope"]
        known = [*kept, getattr(config, "max_position_embeddings", None)]
        return min((count for count in known if count is not None), default=None)

    @property
    def device(self) -> torch.device:
        device: torch.device = self._model.device
        return device

    @property
    def kv(self) -> PagedKV:
        """The pool of blocks, once it is allocated."""
        assert self._kv is not None, "allocate() comes first"
        return self._kv

    def count_blocks(self, *, memory_bytes: int | None = None, fraction: float = 0.9, step_tokens: int = 2048) -> int:
        """How many blocks there is memory for. Blocks for one forward on a GPU.

        Args:
            memory_bytes: memory for blocks. By default, on a GPU, what is free after a forward of `step_tokens` tokens,
                whose working memory torch keeps for the next one.
            fraction: of the GPU's memory may be in use in the end, by everybody. As vLLM's `gpu_memory_utilization`.
            step_tokens: the most tokens of one step.

        Raises:
            ValueError: not even one block fits, or the model is not on a GPU and no `memory_bytes` is given.
        """
        if memory_bytes is None and self.device.type != "cuda":
            raise ValueError(f"say how much memory blocks may take on {self.device}: memory_bytes")
        if memory_bytes is None:
            self._compute(torch.zeros((1, step_tokens), dtype=torch.int64), use_cache=False)
            torch.cuda.synchronize(self.device)
            free, total = torch.cuda.mem_get_info(self.device)
            memory_bytes = free - int((1 - fraction) * total)
        count: int = memory_bytes // self.shape.block_bytes
        if count < 1:
            raise ValueError(
                f"{memory_bytes} bytes hold no block of {self.shape.block_bytes} bytes: give more memory, a larger "
                "fraction, or fewer tokens per block"
            )
        return count

    def allocate(self, block_count: int, memory: torch.Tensor | None = None) -> PagedKV:
        """Allocate the pool that `forward` uses from now on, on the model's device or in the given memory there."""
        self._kv = PagedKV(self.shape, block_count, self.device, memory=memory)
        return self._kv

    def forward(self, spans: Sequence[TokenSpan], hook: LayerHook | None = None) -> torch.Tensor:
        """Compute one step: write the K and V of all spans to their blocks, and return what follows each span.

        Spans of equally many tokens are one batch, so all decodes are computed together. No two spans may write to one
        block.

        Returns:
            `(span, vocabulary)` float32 logits after each span's last token, on the model's device.
        """
        assert spans, "a step without work is no step"
        rows_of: dict[int, list[int]] = defaultdict(list)
        for row, span in enumerate(spans):
            rows_of[len(span.tokens)].append(row)
        found: dict[int, torch.Tensor] = {}
        for turn, rows in enumerate(rows_of.values(), 1):
            group = [spans[row] for row in rows]
            batch = Batch.of(group, self.shape.block_tokens, self.device)
            output = self._compute(
                torch.tensor([list(span.tokens) for span in group]),
                attention_mask=batch.mask,
                past_key_values=paged_cache(self.kv, batch, hook, first=turn == 1, last=turn == len(rows_of)),
                use_cache=True,
                **({"position_ids": batch.positions} if self._takes_positions else {}),
            )
            found.update(zip(rows, output.logits[:, -1].float(), strict=True))
        return torch.stack([found[row] for row in range(len(spans))])

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt, with what the tokenizer puts before it. Raises ValueError without a tokenizer."""
        tokens: list[int] = self._text()(text)["input_ids"]
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special ones. Raises ValueError without a tokenizer."""
        text: str = self._text().decode(tokens, skip_special_tokens=True)
        return text

    def _compute(self, tokens: torch.Tensor, **settings: Any) -> Any:
        """A forward over tokens `(row, token)` int64. Computes only the logits of each row's last token if it can."""
        with torch.inference_mode():
            return self._model(input_ids=tokens.to(self.device), **settings, **self._last_only)

    def _text(self) -> Any:
        if self._tokenizer is None:
            raise ValueError("this model was opened without a tokenizer: give tokens, not text")
        return self._tokenizer

    def _find_shape(self, block_tokens: int) -> tuple[KVShape, int]:
        """The shape of a block, and the sliding window that all layers have, or 0.

        What the model itself puts into a cache says more than its configuration, whose names differ by model."""
        name = type(self._model).__name__
        if getattr(self._model.config, "is_encoder_decoder", False):
            raise UnsupportedLayout(f"{name} has an encoder: only models that go on with a text are paged")
        if getattr(self._model, "peft_config", None):
            raise UnsupportedLayout(f"{name} has an adapter: merge it into the weights first")
        output = self._compute(torch.zeros((1, PROBE_TOKENS), dtype=torch.int64), use_cache=True)
        cache: Any = getattr(output, "past_key_values", None)
        if type(cache) is not DynamicCache:
            found = "no cache" if cache is None else type(cache).__name__
            raise UnsupportedLayout(f"{name} keeps {found}: only transformers' DynamicCache can be paged")
        layers = cache.layers
        others = sorted({type(layer).__name__ for layer in layers if type(layer) not in PAGED_TYPES})
        if others:
            raise UnsupportedLayout(f"{name} keeps {', '.join(others)}: only K and V can be paged")
        shapes = {(*layer.keys.shape, *layer.values.shape[1:], layer.keys.dtype) for layer in layers}
        if len(shapes) > 1:
            raise UnsupportedLayout(f"the layers of {name} keep K and V of {len(shapes)} shapes: a block has one")
        _, heads, _, key_width, value_heads, _, value_width, dtype = shapes.pop()
        if heads != value_heads:
            raise UnsupportedLayout(f"{name} has {heads} heads of K and {value_heads} of V: a block has equally many")
        windows = {getattr(layer, "sliding_window", 0) for layer in layers}
        # Attention in chunks has such layers too, but forgets at places in the sequence and not at a distance.
        slides = len(windows) == 1 and not getattr(self._model.config, "attention_chunk_size", None)
        return KVShape(len(layers), heads, key_width, value_width, block_tokens, dtype), windows.pop() if slides else 0


def _eos_tokens(model: Any) -> frozenset[int]:
    """The tokens that end a text. Empty if the model names none."""
    for config in (getattr(model, "generation_config", None), model.config):
        found = getattr(config, "eos_token_id", None)
        if found is not None:
            return frozenset([found] if isinstance(found, int) else found)
    return frozenset()
