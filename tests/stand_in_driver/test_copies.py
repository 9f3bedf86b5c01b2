"""Copy engines and the driver's calls on the stand-in: every way of copying gives the same bytes, and every mistake the
error that a GPU gives."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading

import numpy as np
import pytest

from kvservice.copying.cuda.copies import CudaCopies, DirectCopies
from kvservice.copying.cuda.driver import FATAL, ORDER_ANY, ORDER_STREAM, Driver
from kvservice.copying.cuda.pinning import Pinning
from kvservice.core.segment.copy_runs import CopyTemplate, DirectTemplate
from kvservice.core.segment.geometry import slot_index
from kvservice.errors import TransferError, UnsupportedLayout
from kvservice.units import MiB
from tests.gpu.slots import BLOCKS, ORDERS, SLOT, payload, same, segment
from tests.stand_in_driver.engine import Cache, Controls, Count, cache_of, call, gather, stand_in_environment

STORED = (5, 0, 31, 17)


def one(value: int) -> np.ndarray:
    return np.array([value], np.uint64)


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("way", ["batch", "one by one", "gather"])
@pytest.mark.parametrize("order", ORDERS)
def test_every_way_of_copying_gives_the_same_bytes(
    driver: Driver, controls: Controls, order: str, way: str, pinned: bool
) -> None:
    controls.set("DELAY_US", 0 if way == "one by one" else 50, otherwise=200)  # thousands of copies
    pageable, mistakes = controls.count(Count.PAGEABLE_COPIES), controls.count(Count.MISTAKES)
    if way == "one by one":
        driver._batch = None
    with cache_of(driver, order) as cache, segment() as made:
        pin = driver.pin if pinned else lambda address, size: refuse()
        pinning = Pinning(made.address, made.geometry, pin, driver.unpin, driver.bind)
        pinning._thread.join(30)
        kernel, small = (gather, 1 << 30) if way == "gather" else (None, 0)
        copies = CudaCopies(driver, cache.address, made.address, pinning, kernel, small_run_bytes=small)
        slots = [slot_index(0, index) for index in (9, 4, 5, 0)]
        offsets = [made.geometry.payload_offset(slot, SLOT.payload_bytes) for slot in slots]
        runs = CopyTemplate(cache.layout, SLOT).expand(list(STORED), offsets)
        copies.store(runs)
        assert same([payload(made, slot) for slot in slots], [cache.block(block) for block in STORED])
        wanted = cache.get().copy()
        cache.put(np.zeros(cache.layout.region_bytes, np.uint8))
        copies.load(runs)
        found = cache.get()
        for block in range(BLOCKS):
            assert np.array_equal(found[block], wanted[block] if block in STORED else np.zeros_like(wanted[block]))
        copies.close()
        pinning.undo()
    assert (controls.count(Count.PAGEABLE_COPIES) > pageable) is not pinned
    assert controls.count(Count.MISTAKES) == mistakes


def refuse() -> None:
    raise TransferError("not pinned")


def test_stand_in_may_read_a_source_before_its_kernel_wrote_it(driver: Driver) -> None:
    """Else the copy engines could promise ORDER_ANY for everything, and only a GPU would notice."""
    found = {}
    for order in (ORDER_STREAM, ORDER_ANY):
        with cache_of(driver) as cache:
            target = driver.allocate(4096)
            cache.kernel(7, 20_000)
            driver.copy_batch(one(target), one(cache.address), one(4096), order, cache.stream)
            driver.call("cuStreamSynchronize", ctypes.c_void_p(cache.stream))
            data = np.zeros(4096, np.uint8)
            Cache._copy(data.ctypes.data, target, data.nbytes)
            found[order] = bool((data == 7).all())
            driver.free(target)
    assert found == {ORDER_STREAM: True, ORDER_ANY: False}


def test_processor_cannot_touch_device_memory(library_path: str) -> None:
    program = (
        "import ctypes; from kvservice.copying.cuda.driver import Driver; d = Driver.of_device('0'); d.bind();"
        "ctypes.memset(d.allocate(4096), 0, 1)"
    )
    done = subprocess.run([sys.executable, "-c", program], env=stand_in_environment(), capture_output=True, timeout=60)
    assert done.returncode < 0, "a signal ended it"


def test_handle_cannot_be_opened_by_its_own_process(driver: Driver) -> None:
    """A handle names the whole allocation."""
    with cache_of(driver) as cache:
        handle, offset = driver.export(cache.address)
        assert offset == cache.address - cache.base > 0
        with pytest.raises(TransferError, match="201"):
            driver.open(handle)


def test_memory_without_a_handle_is_refused_with_what_to_change(driver: Driver, controls: Controls) -> None:
    with cache_of(driver) as cache:
        controls.set("WITHOUT_IPC", 1)
        with pytest.raises(UnsupportedLayout, match=r"PYTORCH_ALLOC_CONF.*PYTORCH_CUDA_ALLOC_CONF.*sleep"):
            driver.export(cache.address)


def test_batch_that_fails_names_the_copy(driver: Driver) -> None:
    with cache_of(driver) as cache, cache_of(driver) as other:
        end = other.base + driver.allocation_of(other.base)[1]
        targets = np.array([cache.address, cache.address + 4096], np.uint64)
        sources = np.array([other.address, end - 16], np.uint64)
        with pytest.raises(TransferError, match=f"copy 1: 32 bytes from {end - 16:#x} to {cache.address + 4096:#x}"):
            driver.copy_batch(targets, sources, np.array([32, 32], np.uint64), ORDER_STREAM, cache.stream)
        assert not driver.fatal, "only this copy failed"


@pytest.mark.parametrize(("version", "has_batch"), [(12_040, False), (12_080, True), (13_000, True)])
def test_driver_before_cuda_12_8_has_no_batched_copy(library_path: str, version: int, has_batch: bool) -> None:
    program = "from kvservice.copying.cuda.driver import Driver; print(Driver.of_device('0').has_batch_copy)"
    done = subprocess.run(
        [sys.executable, "-c", program], env=stand_in_environment(VERSION=version), capture_output=True, text=True
    )
    assert done.stdout.strip() == str(has_batch), done.stderr


def test_segment_is_pinned_in_pieces_that_no_copy_reaches_over(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvservice.copying.cuda.pinning.PIECE_BYTES", 4 * MiB)
    with segment() as made, cache_of(driver) as cache:
        pinning = Pinning(made.address, made.geometry, driver.pin, driver.unpin, driver.bind)
        pinning._thread.join(30)
        assert pinning.share == 1
        with pytest.raises(TransferError, match="712"):
            driver.pin(made.address, 4096)
        copies = CudaCopies(driver, cache.address, made.address, pinning, None)
        offset = made.geometry.payload_offset(slot_index(0, 3), SLOT.payload_bytes)
        copies.store(CopyTemplate(cache.layout, SLOT).expand([2], [offset]))
        assert same(payload(made, slot_index(0, 3)), cache.block(2))
        copies.close()
        pinning.undo()
        assert pinning.unpin_failures == 0
        driver.pin(made.address, 4096)
        driver.unpin(made.address)


def test_dead_context_stays_dead_and_can_still_be_closed(driver: Driver, library_path: str) -> None:
    """In a process of its own: the context stays dead until its end."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.stand_in_driver.dead_context"],
        env=stand_in_environment(FAULTS_AT=1),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.splitlines() == ["fatal: 700", "closed", "1 piece not unpinned"], done.stderr
    assert 700 in FATAL and 1 not in FATAL and 2 not in FATAL


@pytest.mark.parametrize("way", ["kernel", "batch", "one by one"])
def test_direct_copy_reads_the_other_engines_layout(driver: Driver, way: str) -> None:
    if way == "one by one":
        driver._batch = None
    with cache_of(driver, "lbnh", seed=1) as source, cache_of(driver, "blhn", seed=2) as target:
        copies = DirectCopies(driver, target.address, source.address, gather if way == "kernel" else None)
        template = DirectTemplate(CopyTemplate(source.layout, SLOT), CopyTemplate(target.layout, SLOT))
        copies.load(template.expand([4, 1], [0, 5]))
        assert same([target.block(0), target.block(5)], [source.block(4), source.block(1)])
        copies.close()


def test_kernel_on_host_memory_makes_the_context_unusable(library_path: str) -> None:
    program = (
        "import numpy as np\n"
        "from kvservice.copying.cuda.driver import Driver\n"
        "from tests.stand_in_driver.engine import gather\n"
        "d = Driver.of_device('0'); d.bind(); s = d.stream(); host = np.zeros(64, np.uint8)\n"
        "at = np.array([d.allocate(4096)])\n"
        "try:\n    gather(at, np.array([host.ctypes.data]), np.array([64]), s)\n"
        "except RuntimeError as error:\n    print(error)\n"
        "try:\n    d.allocate(4096)\n"
        "except Exception as error:\n    print(d.fatal)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=stand_in_environment(), capture_output=True, text=True, timeout=60
    )
    first, second = done.stdout.splitlines()
    assert "700" in first and "cuMemAlloc_v2" in second and "700" in second


def test_call_of_a_missing_context_is_an_error(controls: Controls) -> None:
    found = []

    def elsewhere() -> None:
        try:
            call("cuStreamSynchronize", None)
        except RuntimeError as error:
            found.append(str(error))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(10)
    assert found == ["cuStreamSynchronize: CUDA error 201"]
