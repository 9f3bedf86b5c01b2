"""The reference engine's part in shared pages: their names, their place in its blocks, and the comparison at attach."""

from __future__ import annotations

from collections.abc import Sequence

from kvservice.connector.shared.identity import shared_model, sharing
from kvservice.connector.shared.judge import Judge
from kvservice.connector.worker.page_copier import PageCopier, row_views
from kvservice.core.block.pages import KNOWN_PROMPT, PAGE_TOKENS, page_hashes, salted
from kvservice.core.messages import EngineSpec
from kvservice.engine.model import PagedModel
from kvservice.engine.options import EngineOptions
from kvservice.engine.paged import TokenSpan
from kvservice.errors import UnsupportedLayout
from kvservice.units import BlockHash


def name_pages(tokens: Sequence[int], block_tokens: int, root: bytes, after: BlockHash | None) -> list[BlockHash]:
    """As `chain_hashes`, for blocks that are pages. `root` is the request's salt."""
    assert block_tokens == PAGE_TOKENS, "options refuse other blocks"
    return page_hashes(tokens, after or (salted(root) if root else None))


def shared_spec(model: PagedModel, options: EngineOptions, exact: EngineSpec) -> EngineSpec:
    """The engine's identity when it shares pages. Raises UnsupportedLayout that names what is not shared."""
    shape = model.shape
    if not model.name:
        raise UnsupportedLayout("a model made in memory is not shared between engines: save it to a folder first")
    if shape.key_width != shape.value_width:
        raise UnsupportedLayout("K and V of different sizes are not shared between engines")
    shared = shared_model(
        model.name,
        dtype=str(shape.dtype),
        layer_count=shape.layer_count,
        kv_head_count=shape.head_count,
        head_size=shape.key_width,
        commit=getattr(model.config, "_commit_hash", None),
        weights=options.weights_name(),
        weights_cache=options.weights_cache,
        accepts=options.accept_codec,
    )
    return sharing(exact, shared)


def page_copier(model: PagedModel) -> PageCopier:
    layers = model.kv.layers
    return PageCopier(layers, row_views(layers), range(model.shape.head_count))


def check_pages(model: PagedModel, copier: PageCopier) -> None:
    """Compute the known prompt in the engine's first blocks, and compare its K and V with the model's files. Blocks for
    a forward. No block may be in use. Raises UnsupportedLayout if they do not fit."""
    pages = min(len(KNOWN_PROMPT) // PAGE_TOKENS, model.kv.block_count)
    tokens = KNOWN_PROMPT[: pages * PAGE_TOKENS]
    model.forward([TokenSpan(tokens, 0, list(range(pages)))], None)
    judge = Judge(model.name, str(model.shape.dtype).removeprefix("torch."))
    engine = copier.pages([(block_id, 0) for block_id in range(pages)], judge.layer_count)
    if refusal := judge.difference(tokens, engine, copier.heads).refusal(judge.dtype):
        raise UnsupportedLayout(f"this engine shares no pages: {refusal}")
