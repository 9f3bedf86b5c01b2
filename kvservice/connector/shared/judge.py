"""Compares an engine's K and V with those that the model's own files give: the first layers of it, run by transformers.

Two layers are enough to see an order of bytes, of heads and of layers, a rotation, a type, a scale and an attention:
the second layer's input went through the first one's attention. What is compared is layer 0, where engines differ by
rounding alone, and what the model says next when it goes on from the engine's K and V instead of its own.

docs/howto/share-engines.md has the limits, and what was seen between engines.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import DynamicCache
from transformers.utils import logging as transformers_logging

from kvservice.connector.plan import ProbePlan
from kvservice.connector.shared.gate import AGREES, DIFFERS
from kvservice.connector.worker.page_copier import PageCopier
from kvservice.core.block.pages import PAGE_TOKENS
from kvservice.errors import UnsupportedLayout

log = logging.getLogger("kvservice.connector")

LAYERS = 2  # of the model; the second one has seen the first one's attention
# Norm of the difference by the norm, of K and of V of layer 0. Engines differ by 0.003 in bfloat16; a wrong rotation or
# order by more than 1, and 8-bit weights by some hundredths.
LAYER_0_MAX = 5e-3
# KL divergence of what the model says next, in nats, mean over the positions behind the engine's K and V.
KL_MAX = {"bfloat16": 5e-3, "float16": 5e-3, "float32": 1e-6}


@dataclass(frozen=True, slots=True)
class Difference:
    """Between an engine's K and V and the model's."""

    keys: float  # of layer 0: norm of the difference by the norm
    values: float
    kl: float  # nats

    def refusal(self, dtype: str) -> str:
        """Why these pages do not fit, in words; empty if they do. NaN does not fit."""
        for name, found, limit in (
            ("K of layer 0", self.keys, LAYER_0_MAX),
            ("V of layer 0", self.values, LAYER_0_MAX),
            ("KL", self.kl, KL_MAX[dtype]),
        ):
            if not found <= limit:
                return f"{name} differs by {found:.2g} from the model's files, and at most {limit:.2g} is rounding"
        return ""


class Judge:
    """The first layers of a model, on the CPU."""

    def __init__(self, model: str, dtype: str, revision: str | None = None) -> None:
        """Read the embeddings and the first layers, which takes seconds. Raises UnsupportedLayout if transformers does
        not know the model."""
        self.dtype = dtype
        try:
            config: Any = AutoConfig.from_pretrained(model, revision=revision, local_files_only=True)
            config.num_hidden_layers = min(LAYERS, config.num_hidden_layers)
            if getattr(config, "layer_types", None):
                config.layer_types = config.layer_types[: config.num_hidden_layers]
            with _quietly():  # a report of the layers that are left out
                self._model: Any = AutoModelForCausalLM.from_pretrained(
                    model,
                    config=config,
                    dtype=getattr(torch, dtype),
                    revision=revision,
                    local_files_only=True,
                    use_safetensors=True,
                ).eval()
        except (OSError, ValueError, RuntimeError, AttributeError) as error:
            raise UnsupportedLayout(f"transformers cannot read {model}, which share needs: {error}") from error
        self.layer_count: int = config.num_hidden_layers

    def difference(self, token_ids: Sequence[int], engine: torch.Tensor, heads: range) -> Difference:
        """Blocks for a short forward.

        Args:
            token_ids: a prompt from its beginning.
            engine: `(layer, K|V, token, kv head, element)` of these tokens in the first layers, in host memory.
            heads: the engine's range of the model's kv heads. The others are the model's own.
        """
        tokens = torch.tensor([list(token_ids)])
        own = self._kv(tokens)
        ours, theirs = own[:, :, :, heads.start : heads.stop].float(), engine.float()
        if ours.shape != theirs.shape:
            raise UnsupportedLayout(f"the engine keeps {tuple(theirs.shape)}, the model {tuple(ours.shape)}")
        keys, values = (float((theirs[0, i] - ours[0, i]).norm() / ours[0, i].norm()) for i in (0, 1))
        foreign = own.clone()
        foreign[:, :, :, heads.start : heads.stop] = engine.to(own.dtype)
        half = len(token_ids) // 2
        wanted, found = (self._says(tokens, kv[:, :, :half]) for kv in (own, foreign))
        kl = (wanted.exp() * (wanted - found)).sum(-1).mean()
        return Difference(keys, values, max(float(kl), 0.0) if kl == kl else float("nan"))

    def accepts(self, token_ids: Sequence[int], pages: Callable[[], torch.Tensor], heads: range) -> bool:
        """Whether the engine's pages of a prompt fit; logs what was found. `pages` makes what `difference` compares.
        Raises nothing: an engine whose pages cannot be compared was not seen to fit."""
        try:
            found = self.difference(token_ids, pages(), heads)
            refusal = found.refusal(self.dtype)
        except Exception as error:  # noqa: BLE001  whatever it is, this engine's pages were not seen to fit
            refusal = f"the comparison failed: {type(error).__name__}: {error}"
        if refusal:
            log.error("this engine shares no pages: %s", refusal)
        else:
            log.info("this engine shares pages: K %.1e, V %.1e, KL %.1e", found.keys, found.values, found.kl)
        return not refusal

    def _kv(self, tokens: torch.Tensor) -> torch.Tensor:
        """`(layer, K|V, token, kv head, element)` of these tokens, all heads."""
        with torch.inference_mode():
            cache = self._model(input_ids=tokens, use_cache=True).past_key_values
        pairs = [torch.stack((layer.keys[0], layer.values[0])).transpose(1, 2) for layer in cache.layers]
        return torch.stack(pairs)

    def _says(self, tokens: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """Log-probabilities `(position, vocabulary)` behind each token that follows those of `kv`."""
        cache = DynamicCache()
        for layer, (keys, values) in enumerate(kv.transpose(2, 3)):
            cache.update(keys[None].contiguous(), values[None].contiguous(), layer)
        with torch.inference_mode():
            rest = self._model(input_ids=tokens[:, kv.shape[2] :], past_key_values=cache, use_cache=True)
        return torch.log_softmax(rest.logits[0].double(), -1)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    before, has_bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)
        if has_bars:
            transformers_logging.enable_progress_bar()


class Probation:
    """A worker's half of the gate: looks at one prompt, on a thread of its own, and counts what it found."""

    def __init__(self, judge: Judge, copier: PageCopier, start: Callable[[Callable[[], None]], None] | None = None):
        """`start` runs a function later; by default on a thread."""
        self._judge: Judge | None = judge
        self._copier = copier
        self._start = start or (lambda run: threading.Thread(target=run, name="share-probe", daemon=True).start())
        self._found: deque[str] = deque()  # filled by the other thread

    def look(self, plan: ProbePlan) -> None:
        """The step has computed this prompt. Copies a few pages and returns; what was found is counted later."""
        judge, self._judge = self._judge, None
        if judge is None:
            return
        try:
            pages = self._pages(plan, judge.layer_count)
        except Exception:
            self._found.append(DIFFERS)
            raise
        self._start(lambda: self._compare(judge, plan, pages))

    def take_counters(self) -> dict[str, int]:
        """What was counted since the last call."""
        return dict(Counter(self._found.popleft() for _ in range(len(self._found))))

    def _pages(self, plan: ProbePlan, layer_count: int) -> torch.Tensor:
        of_block = self._copier.pages_of_block
        places = [divmod(page, of_block) for page in range(len(plan.token_ids) // PAGE_TOKENS)]
        return self._copier.pages([(plan.block_ids[block], part) for block, part in places], layer_count)

    def _compare(self, judge: Judge, plan: ProbePlan, pages: torch.Tensor) -> None:
        fits = judge.accepts(plan.token_ids, lambda: pages, self._copier.heads)
        self._found.append(AGREES if fits else DIFFERS)
