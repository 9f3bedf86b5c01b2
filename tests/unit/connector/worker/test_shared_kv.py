"""The engine's KV cache in shared memory: the one allocation it is, and no other."""

from __future__ import annotations

import mmap
import os

import numpy as np
import pytest
import torch

from kvservice.connector.options import ConnectorOptions, CopierChoice
from kvservice.connector.worker.block_copier import BlockCopier
from kvservice.connector.worker.copier import InlineCopier
from kvservice.connector.worker.remote_copier import RemoteCopier, copier_for
from kvservice.connector.worker.shared_kv import SharedKV, region_layout
from kvservice.core.segment.copy_runs import CopyTemplate
from kvservice.core.segment.layout import SlotLayout
from kvservice.errors import ConfigError, UnsupportedLayout
from kvservice.units import MiB

LAYERS, BLOCKS, HEADS, TOKENS, WIDTH = 2, 4, 2, 256, 128
SHAPE = (LAYERS, BLOCKS, HEADS, TOKENS, WIDTH)
BYTES = LAYERS * BLOCKS * HEADS * TOKENS * WIDTH * 2


def kv_layers(raw: torch.Tensor) -> list[torch.Tensor]:
    return list(raw.view(torch.bfloat16).view(SHAPE).unbind(0))


def test_the_kv_cache_is_zeroed_memory_that_another_mapping_sees() -> None:
    with SharedKV() as shared:
        raw = torch.zeros(BYTES, dtype=torch.int8, device=torch.device("cpu"))
    assert shared.memory is not None and raw.data_ptr() == shared.memory.address
    assert raw.dtype == torch.int8 and raw.numel() == BYTES and not raw.any()
    layers = kv_layers(raw)
    layers[1][3] = torch.randn(HEADS, TOKENS, WIDTH).to(torch.bfloat16)
    descriptor = os.dup(shared.memory.descriptor)
    seen = np.frombuffer(mmap.mmap(descriptor, BYTES), np.uint8)
    os.close(descriptor)
    layout = region_layout(layers, range(HEADS), shared.memory.address, shared.memory.byte_count)
    template = CopyTemplate(layout, SlotLayout(LAYERS, HEADS, TOKENS * WIDTH * 2, TOKENS))
    runs = template.expand([3], [0])
    found = b"".join(
        seen[start : start + length].tobytes() for start, length in zip(runs.engine, runs.lengths, strict=True)
    )
    assert found == torch.stack([layer[3] for layer in layers]).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    "allocate",
    [
        lambda: torch.zeros(MiB // 2, dtype=torch.int8),
        lambda: torch.zeros(2 * MiB, dtype=torch.float32),
        lambda: torch.zeros(2 * MiB),
        lambda: torch.zeros((2, MiB), dtype=torch.int8),
        lambda: torch.zeros(2 * MiB, dtype=torch.int8, device="meta"),
        lambda: torch.ones(2 * MiB, dtype=torch.int8),
        lambda: torch.empty(2 * MiB, dtype=torch.int8),
    ],
)
def test_other_allocations_are_left_alone(allocate: object) -> None:
    assert callable(allocate)
    with SharedKV() as shared:
        allocate()
    assert shared.memory is None


def test_only_the_first_kv_cache_is_taken() -> None:
    with SharedKV() as shared:
        first = torch.zeros(2 * MiB, dtype=torch.int8)
        second = torch.zeros(2 * MiB, dtype=torch.int8)
    assert shared.memory is not None
    assert first.data_ptr() == shared.memory.address != second.data_ptr()


def test_cache_outside_shared_memory_is_copied_in_process() -> None:
    """This is counted."""
    layers = kv_layers(torch.zeros(BYTES, dtype=torch.int8))
    with SharedKV() as shared:
        torch.zeros(BYTES, dtype=torch.int8)
    for given in (shared, None):
        block_copier = BlockCopier(layers, range(HEADS))
        copier = copier_for(CopierChoice.WORKER, block_copier, layers, range(HEADS), given)
        assert isinstance(copier, InlineCopier)
        assert copier.take_counters() == {"copy_worker_not_shared": 1}
    with pytest.raises(UnsupportedLayout):
        assert shared.memory is not None
        region_layout(layers, range(HEADS), shared.memory.address, shared.memory.byte_count)


@pytest.mark.parametrize("choice", [CopierChoice.AUTO, CopierChoice.IN_PROCESS, CopierChoice.WORKER])
def test_option_says_where_copies_run(choice: CopierChoice) -> None:
    assert ConnectorOptions.parse({"copier": choice.value}).copier is choice
    with SharedKV() as shared:
        layers = kv_layers(torch.zeros(BYTES, dtype=torch.int8))
    copier = copier_for(choice, BlockCopier(layers, range(HEADS)), layers, range(HEADS), shared)
    assert isinstance(copier, RemoteCopier if choice is CopierChoice.WORKER else InlineCopier)
    copier.close()


def test_unknown_place_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="auto, in_process or worker"):
        ConnectorOptions.parse({"copier": "gpu"})
