"""Rules of worker.page_copier: whatever order an engine keeps K and V in, a shared page has one, and every byte of it
comes back. What is expected is built number by number."""

from __future__ import annotations

from typing import TypeAlias

import pytest
import torch

from kvservice.connector.worker.page_copier import PageCopier, column_views, row_views
from kvservice.core.block.pages import PAGE_TOKENS
from kvservice.core.segment.layout import SlotLayout
from kvservice.errors import UnsupportedLayout

LAYERS, BLOCKS, TOKENS, HEADS, SIZE = 3, 4, 32, 2, 8
Truth: TypeAlias = torch.Tensor  # (layer, K|V, block, token, head, element)


def layout(heads: int = HEADS, **changed: int) -> SlotLayout:
    cell_bytes = changed.pop("cell_bytes", PAGE_TOKENS * 2 * SIZE * 2)
    return SlotLayout(changed.pop("layers", LAYERS), heads, cell_bytes, changed.pop("tokens", PAGE_TOKENS))


def truth() -> Truth:
    return torch.randn(LAYERS, 2, BLOCKS, TOKENS, HEADS, SIZE).to(torch.bfloat16)


def rows(kv: Truth) -> list[torch.Tensor]:
    """`[block][head][token][K‖V]`: the reference engine."""
    return list(torch.cat((kv[:, 0], kv[:, 1]), dim=-1).transpose(2, 3).contiguous())


def token_rows(kv: Truth) -> list[torch.Tensor]:
    """The same view of memory `[block][token][head][K‖V]`: kernels of GPUs."""
    return [layer.contiguous().transpose(1, 2) for layer in torch.cat((kv[:, 0], kv[:, 1]), dim=-1)]


def columns(kv: Truth) -> list[torch.Tensor]:
    """Element by element, as vLLM's kernel for CPUs writes: K of one token goes down a column."""
    heads = kv.shape[4]
    cells = torch.zeros(LAYERS, BLOCKS, heads, 2 * TOKENS * SIZE, dtype=kv.dtype)
    for token in range(TOKENS):
        for element in range(SIZE):
            cells[..., element * TOKENS + token] = kv[:, 0, :, token, :, element]
            cells[..., TOKENS * SIZE + token * SIZE + element] = kv[:, 1, :, token, :, element]
    return list(cells.view(LAYERS, BLOCKS, heads, TOKENS, 2 * SIZE))


KINDS = {"rows": (rows, row_views), "token_rows": (token_rows, row_views), "columns": (columns, column_views)}
kinds = pytest.mark.parametrize("kind", KINDS)


def copier(kind: str, kv: Truth, heads: range = range(HEADS), **options: bool) -> PageCopier:
    make, views = KINDS[kind]
    layers = make(kv[:, :, :, :, heads.start : heads.stop])
    return PageCopier(layers, views(layers), heads, **options)


@kinds
@pytest.mark.parametrize("staged", [False, True])
def test_slot_has_layer_kv_token_head_element_in_order(kind: str, staged: bool) -> None:
    kv, segment = truth(), memoryview(bytearray(2 * layout().payload_bytes))
    engine = copier(kind, kv, staged=staged)
    slots = engine.bind(segment, layout())
    engine.store(2, layout().payload_bytes, 1)
    wanted = kv[:, :, 2, PAGE_TOKENS : 2 * PAGE_TOKENS]
    assert torch.equal(slots[layout().payload_bytes :].view(torch.bfloat16), wanted.reshape(-1))
    assert not slots[: layout().payload_bytes].any()


@kinds
@pytest.mark.parametrize("reader", KINDS)
def test_any_kind_of_engine_reads_what_any_other_wrote(kind: str, reader: str) -> None:
    kv, other = truth(), truth()
    segment = memoryview(bytearray(2 * layout().payload_bytes))
    writing, reading = copier(kind, kv), copier(reader, other)
    writing.bind(segment, layout())
    reading.bind(segment, layout())
    for part in (0, 1):
        writing.store(3, part * layout().payload_bytes, part)
        reading.load(part * layout().payload_bytes, 0, part)
    wanted = other.clone()
    wanted[:, :, 0] = kv[:, :, 3]
    for whole, layer in zip(KINDS[reader][0](wanted), reading.layers, strict=True):
        assert torch.equal(whole, layer.squeeze(1))


@kinds
@pytest.mark.parametrize("staged", [False, True])
def test_ranks_write_their_heads_into_one_page(kind: str, staged: bool) -> None:
    kv, segment = truth(), memoryview(bytearray(layout().payload_bytes))
    for rank in (0, 1):
        one = copier(kind, kv, layout().share(rank, 2).heads, staged=staged)
        slots = one.bind(segment, layout())
        one.store(1, 0, 0)
    assert torch.equal(slots.view(torch.bfloat16), kv[:, :, 1, :PAGE_TOKENS].reshape(-1))
    whole = copier("rows", truth())
    whole.bind(segment, layout())
    whole.load(0, 2, 0)
    assert torch.equal(whole.pages([(2, 0)], LAYERS), kv[:, :, 1, :PAGE_TOKENS])


@kinds
def test_layers_in_memory_of_their_own_are_copied_one_by_one(kind: str) -> None:
    kv, segment = truth(), memoryview(bytearray(layout().payload_bytes))
    make, views = KINDS[kind]
    layers = [layer.clone(memory_format=torch.preserve_format) for layer in make(kv)]
    engine = PageCopier(layers, views(layers), range(HEADS))
    slots = engine.bind(segment, layout())
    engine.store(0, 0, 1)
    assert torch.equal(slots.view(torch.bfloat16), kv[:, :, 0, PAGE_TOKENS:].reshape(-1))
    assert torch.equal(engine.pages([(0, 1), (3, 0)], 2)[:, :, :PAGE_TOKENS], kv[:2, :, 0, PAGE_TOKENS:])
    assert not engine.fills_slots


@pytest.mark.parametrize(
    "other",
    [layout(heads=1), layout(layers=2), layout(cell_bytes=1024), layout(tokens=32), SlotLayout(3, 2, 512, 16, 2)],
)
def test_slot_of_another_shape_is_refused(other: SlotLayout) -> None:
    heads = range(other.kv_head_count)
    layers = rows(truth())
    engine = PageCopier(layers, row_views(layers), heads)
    with pytest.raises(UnsupportedLayout, match="the slot has"):
        engine.bind(memoryview(bytearray(other.payload_bytes)), other)


def test_block_that_holds_half_a_page_is_refused() -> None:
    layers = list(torch.zeros(LAYERS, BLOCKS, HEADS, 24, 2 * SIZE))
    with pytest.raises(UnsupportedLayout, match="choose a block size that is a multiple of 16"):
        PageCopier(layers, row_views(layers), range(HEADS))


def test_tensors_that_are_not_k_and_v_are_refused() -> None:
    with pytest.raises(UnsupportedLayout, match="pages are shared of KV tensors"):
        row_views(list(torch.zeros(LAYERS, BLOCKS, HEADS, TOKENS, 7)))
    with pytest.raises(UnsupportedLayout, match="pages are shared of KV tensors"):
        row_views(list(torch.zeros(LAYERS, BLOCKS, 2, HEADS, TOKENS, 8)))
    with pytest.raises(UnsupportedLayout, match="not one run of bytes"):
        column_views(token_rows(truth()))
