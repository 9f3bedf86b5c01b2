"""Copy engines on a GPU: the same bytes as a plain copy, for all layouts, pinned or not; pinning with progress."""

from __future__ import annotations

import pytest
import torch

from kvservice.copying.cuda.copies import CudaCopies, gather_launcher
from kvservice.copying.cuda.driver import Driver
from kvservice.copying.cuda.pinning import Pinning
from kvservice.core.segment.copy_runs import CopyTemplate
from kvservice.core.segment.geometry import slot_index
from kvservice.testing.eventually import eventually
from tests.gpu.device import block_bytes, kv_cache, layout_of
from tests.gpu.slots import BLOCKS, ORDERS, SLOT, segment

pytestmark = pytest.mark.gpu

STORED = (5, 0, 31, 17)
WAYS = ("batch", "one by one", "gather")


def driver_of_this_gpu() -> Driver:
    torch.cuda.init()
    driver = Driver.of_device(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
    driver.bind()
    return driver


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("order", ORDERS)
def test_both_copy_engines_give_the_bytes_of_a_plain_copy(order: str, way: str, pinned: bool) -> None:
    driver = driver_of_this_gpu()
    if way == "batch" and not driver.has_batch_copy:
        pytest.skip("a driver before CUDA 12.8")
    if way == "one by one":
        driver._batch = None
    gather = gather_launcher(driver) if way == "gather" else None
    assert way != "gather" or gather is not None, "Triton comes with the CUDA build of torch"
    cache = kv_cache(order)
    with segment() as made:
        pinning = Pinning(
            made.address, made.geometry, driver.pin if pinned else lambda *_: None, driver.unpin, driver.bind
        )
        pinning._thread.join()
        if not pinned:
            pinning._until, pinning._pinned = 0, []
        copies = CudaCopies(
            driver,
            cache.untyped_storage().data_ptr(),
            made.address,
            pinning,
            gather,
            small_run_bytes=1 << 30 if way == "gather" else 0,
        )
        slots = [slot_index(0, index) for index in (9, 4, 5, 0)]
        offsets = [made.geometry.payload_offset(slot, SLOT.payload_bytes) for slot in slots]
        runs = CopyTemplate(layout_of(cache), SLOT).expand(list(STORED), offsets)
        torch.cuda.synchronize()
        copies.store(runs)
        for block, slot in zip(STORED, slots, strict=True):
            assert bytes(made.payload(slot, SLOT.payload_bytes)) == block_bytes(cache, block)
        wanted = cache.clone()
        cache.zero_()
        torch.cuda.synchronize()
        copies.load(runs)
        for block in range(BLOCKS):
            expected = wanted[:, block] if block in STORED else torch.zeros_like(wanted[:, block])
            assert torch.equal(cache[:, block], expected), f"block {block}"
        copies.close()
        pinning.undo()


def test_pinning_shows_progress_and_can_be_undone_and_done_again() -> None:
    driver = driver_of_this_gpu()
    with segment() as made:
        for _ in range(2):
            pinning = Pinning(made.address, made.geometry, driver.pin, driver.unpin, driver.bind)
            seen = [pinning.share]

            def is_pinned() -> bool:
                seen.append(pinning.share)  # noqa: B023  called at once
                return pinning.share == 1  # noqa: B023

            eventually(is_pinned, "every piece pinned")
            assert seen == sorted(seen)
            assert pinning.covers(made.geometry.segment_bytes)
            pinning.undo()


def test_memory_without_ipc_handle_is_refused_with_advice() -> None:
    """Run with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in a process of its own."""
    import os
    import subprocess
    import sys

    program = (
        "import torch\n"
        "from kvservice.errors import UnsupportedLayout\n"
        "from kvservice.copying.cuda.driver import Driver\n"
        "tensor = torch.zeros(1 << 22, device='cuda')\n"
        "driver = Driver.of_device(f'GPU-{torch.cuda.get_device_properties(0).uuid}')\n"
        "driver.bind()\n"
        "try:\n    driver.export(tensor.data_ptr())\n"
        "except UnsupportedLayout as error:\n    print(error.message)\n"
    )
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    assert "expandable_segments" in done.stdout, done.stderr
