"""Runs of bytes are copied where they belong, with and without a compiler."""

from __future__ import annotations

import numpy as np
import pytest

from kvservice.memory import runs


@pytest.fixture(params=["compiled", "ctypes"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "ctypes":
        monkeypatch.setattr(runs, "_compiled", None)
    else:
        assert runs._compiled is not None, "the compiled copy is missing from this installation: make install builds it"


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
