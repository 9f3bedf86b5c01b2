"""Runs of bytes are copied where they belong, with and without a compiler."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvservice.core.segment.digest import digest_payload
from kvservice.core.segment.native import native
from kvservice.memory import runs
from kvservice.units import BlockKey


@pytest.fixture(params=["compiled", "ctypes"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "ctypes":
        monkeypatch.setattr(runs, "_native", None)
    else:
        assert runs._native is not None, "the compiled copy is missing from this installation: make install builds it"


KEY = BlockKey(bytes(range(16)))


def address(memory: np.ndarray) -> int:
    return int(memory.ctypes.data)


@pytest.mark.usefixtures("way")
def test_each_run_is_copied_and_nothing_else_is_touched() -> None:
    noise = np.random.default_rng(1)
    source = noise.integers(0, 256, 10_000, dtype=np.uint8)
    target = np.zeros(10_000, dtype=np.uint8)
    lengths = noise.integers(0, 90, 100)
    sources, targets = noise.permutation(100) * 100, noise.permutation(100) * 100
    expected = target.copy()
    for origin, to, length in zip(sources, targets, lengths, strict=True):
        expected[to : to + length] = source[origin : origin + length]
    runs.copy_runs(address(target), address(source), targets, sources, lengths)
    assert np.array_equal(target, expected)


@pytest.mark.usefixtures("way")
def test_nothing_is_copied_where_the_arrays_do_not_fit() -> None:
    source, target = np.ones(100, dtype=np.uint8), np.zeros(100, dtype=np.uint8)
    two, three = np.array([0, 50]), np.array([0, 50, 60])
    with pytest.raises(ValueError):
        runs.copy_runs(address(target), address(source), three, two, np.array([10, 10, 10]))
    with pytest.raises(ValueError):
        runs.copy_runs(address(target), address(source), two, two, np.array([10, -10]))
    with pytest.raises(ValueError):
        runs.copy_runs(address(target), address(source), two[::-1], two, np.array([10, 10, 10]))
    assert not target.any()


@settings(max_examples=40)
@given(st.integers(0, 1 << 32), st.lists(st.integers(1, 9), min_size=1, max_size=4), st.sampled_from([3, 64, 700]))
def test_each_blocks_digest_is_of_its_runs_in_order(seed: int, runs_of_blocks: list[int], mean_bytes: int) -> None:
    """Runs of any length and alignment, so that a stripe of the digest may lie in several of them."""
    noise = np.random.default_rng(seed)
    count = sum(runs_of_blocks)
    lengths = noise.integers(1, 2 * mean_bytes, count)
    places = np.concatenate(([0], np.cumsum(lengths + noise.integers(0, 70, count))))
    source = noise.integers(0, 256, int(places[-1]) + 64, dtype=np.uint8)
    target = np.zeros_like(source)
    sources, targets = places[:-1], places[:-1] + int(noise.integers(0, 64))
    keys = [BlockKey(noise.bytes(16)) for _ in runs_of_blocks]
    digests = runs.copy_blocks(
        address(target), address(source), targets, sources, lengths, np.cumsum(runs_of_blocks), keys
    )
    run = 0
    for key, here, digest in zip(keys, runs_of_blocks, digests.tolist(), strict=True):
        rows = range(run, run + here)
        block = b"".join(source[sources[i] : sources[i] + lengths[i]].tobytes() for i in rows)
        assert b"".join(target[targets[i] : targets[i] + lengths[i]].tobytes() for i in rows) == block
        assert digest == digest_payload(block, key)
        run += here
    assert np.count_nonzero(target) <= lengths.sum(), "nothing else is touched"


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("total", [0, 1, 240, 241, 65536])
def test_a_block_of_any_length_has_its_digest(total: int) -> None:
    source, target = np.arange(total, dtype=np.uint8), np.zeros(total, dtype=np.uint8)
    one, whole = np.array([0]), np.array([total])
    digests = runs.copy_blocks(address(target), address(source), one, one, whole, np.array([1]), [KEY])
    assert (digests.tolist(), target.tobytes()) == ([digest_payload(source.tobytes(), KEY)], source.tobytes())


@pytest.mark.skipif(native is None, reason="there was no compiler at the installation")
@pytest.mark.parametrize("which", ["copy", "copy_blocks"])
def test_memory_that_is_gone_is_an_error_and_no_signal(which: str) -> None:
    """A file that is cut short under a mapping: the kernel's SIGBUS would end the process."""
    descriptor = os.memfd_create("cut", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, 1 << 20)
    mapped, target = mmap.mmap(descriptor, 1 << 20), np.zeros(1 << 20, np.uint8)
    gone = np.frombuffer(mapped, np.uint8)
    none, whole = np.array([0]), np.array([1 << 20])
    copies: dict[str, Callable[[], object]] = {
        "copy": lambda: runs.copy_runs(address(target), address(gone), none, none, whole),
        "copy_blocks": lambda: runs.copy_blocks(
            address(target), address(gone), none, none, whole, np.array([1]), [KEY]
        ),
    }
    copies[which]()
    os.ftruncate(descriptor, 1 << 16)
    for _ in range(2):
        with pytest.raises(OSError, match="address"):
            copies[which]()
    os.ftruncate(descriptor, 1 << 20)
    copies[which]()
    os.close(descriptor)


BUS_ERROR = """
import faulthandler, mmap, os, signal
from kvservice.core.segment.native import native
def copy():
    native.copy_one(memoryview(bytearray(512)), bytes(512), 0)
{before}
descriptor = os.memfd_create("cut")
os.ftruncate(descriptor, 1 << 16)
mapped = mmap.mmap(descriptor, 1 << 16)
os.ftruncate(descriptor, 0)
mapped[0]
"""


@pytest.mark.skipif(native is None, reason="there was no compiler at the installation")
@pytest.mark.parametrize("before", ["copy()", "faulthandler.enable()", "copy(); faulthandler.enable(); copy()"])
def test_a_bus_error_outside_of_a_copy_ends_the_process(before: str) -> None:
    """faulthandler gives the signal back to whoever was there before it, which are the copies that it stands before."""
    ended = subprocess.run(
        [sys.executable, "-c", BUS_ERROR.format(before=before)], capture_output=True, timeout=30, check=False
    )
    assert ended.returncode == -signal.SIGBUS
    assert ended.stderr.count(b"Fatal Python error") == ("faulthandler" in before)


@pytest.mark.skipif(native is None, reason="there was no compiler at the installation")
def test_a_handler_of_bus_errors_gets_each_that_is_of_no_copy() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGBUS, lambda number, _: seen.append(number))
    try:
        for _ in range(3):
            runs.copy_runs(*[address(np.zeros(8, np.uint8))] * 2, *[np.array([0])] * 3)
            signal.raise_signal(signal.SIGBUS)
            signal.raise_signal(signal.SIGBUS)
    finally:
        signal.signal(signal.SIGBUS, before)
    assert seen == [signal.SIGBUS] * 6
