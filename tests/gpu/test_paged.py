"""The reference engine's blocks on a GPU: swaps with host memory and inside the device, and how many blocks fit."""

from __future__ import annotations

import pytest
import torch

from kvservice.engine.model import PagedModel
from kvservice.engine.paged import KVShape, PagedKV, swap_blocks
from kvservice.engine.sampling import Sampling
from tests.unit.engine.tiny_models import Driver, generated, make, prompt

pytestmark = pytest.mark.gpu

SHAPE = KVShape(layer_count=3, head_count=2, key_width=5, value_width=3, block_tokens=4, dtype=torch.float32)


def pairs(*found: tuple[int, int]) -> torch.Tensor:
    return torch.tensor(found, dtype=torch.int64)


@pytest.mark.parametrize("pinned", [False, True])
def test_swapped_blocks_come_back_to_other_places(pinned: bool) -> None:
    device, host = PagedKV(SHAPE, 8, "cuda"), PagedKV(SHAPE, 4, pinned=pinned)
    device.storage.normal_()
    before = device.storage.cpu()
    swap_blocks(device, host, pairs((6, 0), (1, 3)))
    torch.cuda.synchronize()
    assert torch.equal(host.storage[[0, 3]], before[[6, 1]])
    device.storage.zero_()
    swap_blocks(host, device, pairs((0, 2), (3, 5)))
    assert torch.equal(device.storage.cpu()[[2, 5]], before[[6, 1]])
    swap_blocks(device, device, pairs((2, 7)))
    assert torch.equal(device.storage.cpu()[7], before[6])
    with pytest.raises(ValueError, match="do not fit"):
        swap_blocks(device, PagedKV(KVShape(3, 2, 5, 3, 8, torch.float32), 4), pairs((0, 1)))


@pytest.mark.parametrize("kind", ["grouped heads", "latent v3", "window"])
def test_four_beams_are_those_of_generate(kind: str) -> None:
    model, tokens = make(kind, seed=3).to("cuda"), prompt(18, 3)
    found = Driver(model).run(tokens, Sampling(max_tokens=10, beams=4, n=4))
    assert found == generated(model, tokens, 10, num_beams=4, num_return_sequences=4)


def test_blocks_leave_room_for_a_step() -> None:
    """Almost all of the free memory is taken, and a forward still runs."""
    model = PagedModel(make("grouped heads").to("cuda"), block_tokens=16)
    free, total = torch.cuda.mem_get_info()
    count = model.count_blocks(fraction=0.9, step_tokens=256)
    assert 0 < count * model.shape.block_bytes <= free - 0.1 * total
