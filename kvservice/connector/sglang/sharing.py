"""Pages of SGLang that engines of other kinds read too: their identity, their form, and the gate. Imports no engine.

A storage of SGLang is given hashes and no tokens. So its gate waits for a prompt that it knows by its hash: the first
pages of KNOWN_PROMPT. Whoever runs the engine sends it this prompt once; its K and V are then compared with the model's
files, on the thread of SGLang that stores pages.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvservice.connector.sglang.options import SGLangOptions
from kvservice.connector.sglang.pages import Ranks, SharedPageForm
from kvservice.connector.shared.gate import AGREES, DIFFERS, PROBE_PAGES_MIN, GateState
from kvservice.connector.shared.identity import shared_model
from kvservice.connector.shared.judge import Judge
from kvservice.core.block.pages import KNOWN_PROMPT, PAGE_TOKENS, SharedModel, page_hashes
from kvservice.errors import UnsupportedLayout

log = logging.getLogger("kvservice.connector")

LAYOUT = "page_first_direct"
KNOWN_PAGES = tuple(page.hex() for page in page_hashes(KNOWN_PROMPT))
WAITS_FOR_PROMPT = (
    "this engine shares no pages yet: send it KNOWN_PROMPT of kvservice.core.block.pages once after each start; "
    "docs/howto/share-engines.md has the command"
)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where the files of a model are, and which weights they hold."""

    path: str  # a folder, or a hub's name
    dtype: str  # of the computation, as torch calls it
    kv_heads: int
    revision: str | None = None
    commit: str | None = None


def shared_of(source: ModelSource, pool: Any, ranks: Ranks, options: SGLangOptions) -> SharedModel:
    """What must be equal for sharing, from SGLang's host pool of keys and values. May read all files of the model.

    Raises UnsupportedLayout that names what is not shared, and UnnamedWeights.
    """
    dtype = str(getattr(pool, "dtype", "")).removeprefix("torch.")
    found = {
        f"a page size of {pool.page_size}: choose --page-size {PAGE_TOKENS}": pool.page_size != PAGE_TOKENS,
        f"--hicache-mem-layout {pool.layout}: choose {LAYOUT}": pool.layout != LAYOUT,
        f"{ranks.tp_size} tensor-parallel ranks": ranks.tp_size > 1,
        "latent attention (MLA)": ranks.replicated,
        f"a KV cache of {dtype} for a model in {source.dtype}": dtype != source.dtype,
        f"{getattr(pool, 'head_num', 0)} KV heads here of {source.kv_heads}": pool.head_num != source.kv_heads,
    }
    for name, is_so in found.items():
        if is_so:
            raise UnsupportedLayout(f"share 'engines' is not supported with {name}")
    return shared_model(
        source.path,
        dtype=dtype,
        layer_count=int(pool.layer_num),
        kv_head_count=int(pool.head_num),
        head_size=int(pool.head_dim),
        revision=source.revision,
        commit=source.commit,
        weights=options.weights_name(),
        weights_cache=options.weights_cache,
        accepts=options.accept_codec,
    )


def form_of(model: SharedModel, sizes: Sequence[int]) -> SharedPageForm:
    """`sizes` are the bytes of a page's pieces. Raises UnsupportedLayout if they are not K and V."""
    if len(sizes) != 2 or sum(sizes) != model.layout.payload_bytes or sizes[0] != sizes[1]:
        raise UnsupportedLayout(f"a page of SGLang has pieces of {list(sizes)} bytes, and not K and V of the model")
    return SharedPageForm(tuple(sizes), layer_count=model.layer_count)


class KnownPrompt:
    """The gate of one rank. Until it is open, nothing is found and nothing is stored."""

    def __init__(self, judge: Judge, model: SharedModel, form: SharedPageForm, counters: Counter[str]) -> None:
        self._judge: Judge | None = judge
        self._model = model
        self._form = form
        self._counters = counters
        self._is_reminded = False
        self.state = GateState.WAITING

    @property
    def is_open(self) -> bool:
        return self.state is GateState.OPEN

    def look(self, pages: Sequence[str], addresses: Sequence[Sequence[int]]) -> None:
        """Compare these pages, which SGLang wants to store, if they begin as the known prompt does. Blocks for a short
        forward then. Raises nothing."""
        count = next((i for i, page in enumerate(KNOWN_PAGES) if page not in pages[i : i + 1]), len(KNOWN_PAGES))
        judge = self._judge
        if judge is None or count < PROBE_PAGES_MIN:
            return
        self._judge = None

        def pages_here() -> torch.Tensor:
            return torch.cat([self._first_layers(one, judge.layer_count) for one in addresses[:count]], dim=2)

        tokens, heads = KNOWN_PROMPT[: count * PAGE_TOKENS], range(self._model.kv_head_count)
        fits = judge.accepts(tokens, pages_here, heads)
        self.state = GateState.OPEN if fits else GateState.SHUT
        self._counters[AGREES if fits else DIFFERS] += 1

    def remind(self, pages: Sequence[str]) -> None:
        """Pages were left out. Unless they are of the known prompt, say once what this engine waits for."""
        is_known = bool(pages) and pages[0] == KNOWN_PAGES[0]
        if self.state is GateState.WAITING and not is_known and not self._is_reminded:
            self._is_reminded = True
            log.warning(WAITS_FOR_PROMPT)

    def _first_layers(self, addresses: Sequence[int], layer_count: int) -> torch.Tensor:
        """`(layer, K|V, token, kv head, element)` of one page."""
        halves = [layers[:layer_count] for layers in self._form.layers_at(addresses)]
        found = torch.from_numpy(np.stack(halves, axis=1)).view(getattr(torch, self._model.dtype))
        return found.view(layer_count, 2, PAGE_TOKENS, self._model.kv_head_count, self._model.head_size)
