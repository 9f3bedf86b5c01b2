"""Which bytes of a block belong to which token, as vLLM's own kernels for CPUs tell, and what a tail's slot holds."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm import _custom_ops as ops
from vllm.v1.attention.backends import cpu_attn

from kvservice.connector.vllm import cpu_cells
from kvservice.connector.vllm.cpu_cells import token_of_elements
from kvservice.connector.worker.block_copier import BlockCopier
from kvservice.core.segment.layout import SlotLayout

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

LAYERS, HEADS, SIZE = 2, 2, 32


def blocks(tokens: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Layers of one block that a request before left full, as vLLM's kernels wrote them."""
    layers = [torch.zeros(1, HEADS, tokens, 2 * SIZE, dtype=dtype) for _ in range(LAYERS)]
    write(layers, range(tokens), 1.0)
    return layers


def write(layers: list[torch.Tensor], places: range, base: float) -> None:
    """Tokens of other values for every layer, head and element."""
    for number, layer in enumerate(layers):
        tokens = layer.shape[2]
        keys, values = layer.view(1, HEADS, 2 * tokens, SIZE).chunk(2, dim=2)
        new = base + number + torch.rand(len(places), HEADS, SIZE).to(layer.dtype)
        kernels = cpu_attn._get_attn_isa(layer.dtype, tokens, SIZE, "auto")
        ops.cpu_attn_reshape_and_cache(new, new + 1, keys, values, torch.tensor(places), kernels)


@pytest.mark.parametrize("tokens", [16, 32, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_behind_a_tail_nothing_of_another_request_is_stored(tokens: int, dtype: torch.dtype) -> None:
    """The slot of a tail in a used block is that of the same tail in an empty one: with every way of packing."""
    used = blocks(tokens, dtype)
    empty = [torch.zeros_like(layer) for layer in used]
    layout = SlotLayout(LAYERS, HEADS, tokens * 2 * SIZE * used[0].element_size(), tokens)
    for length in (1, 5, tokens - 1):
        slots = []
        for layers in (used, empty):
            torch.manual_seed(length)
            write(layers, range(length), 5.0)
            slot = memoryview(bytearray(layout.payload_bytes))
            token_of = token_of_elements(layers[0], SimpleNamespace(head_size=SIZE), dtype, "auto")
            copier = BlockCopier(layers, range(HEADS), token_of=token_of)
            copier.bind(slot, layout)
            copier.store(0, 0)
            before = bytes(slot)
            assert copier.blank(0, length)
            copier.unbind()
            slots.append((before, bytes(slot)))
        (dirty, blanked), (_, clean) = slots
        assert dirty != clean, "else this tests nothing"
        assert blanked == clean
        empty = [torch.zeros_like(layer) for layer in used]


def test_a_vllm_that_does_not_tell_stores_no_tails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(cpu_cells.ops, "cpu_attn_reshape_and_cache")
    layers = [torch.zeros(1, HEADS, 32, 2 * SIZE) for _ in range(LAYERS)]
    token_of = token_of_elements(layers[0], SimpleNamespace(head_size=SIZE), torch.float32, "auto")
    layout = SlotLayout(LAYERS, HEADS, 32 * 2 * SIZE * 4, 32)
    copier = BlockCopier(layers, range(HEADS), token_of=token_of)
    copier.bind(memoryview(bytearray(layout.payload_bytes)), layout)
    assert not copier.blank(0, 5)
    copier.unbind()
