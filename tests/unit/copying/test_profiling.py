"""NVTX ranges: off unless a profiler watches the process, and closed whatever happens inside."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvservice.copying import profiling
from kvservice.copying.profiling import SET_BY_PROFILERS, profiled


class Ranges:
    def __init__(self) -> None:
        self.said: list[str] = []

    def range_push(self, name: str) -> None:
        self.said.append(name)

    def range_pop(self) -> None:
        self.said.append("end")


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranges]:
    made = Ranges()
    for name in SET_BY_PROFILERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "nvtx", made)
    profiling._nvtx.cache_clear()
    yield made
    profiling._nvtx.cache_clear()


def test_no_range_is_marked_without_a_profiler(ranges: Ranges) -> None:
    with profiled("load"):
        pass
    assert ranges.said == []


@pytest.mark.parametrize("variable", SET_BY_PROFILERS)
def test_profiler_sees_a_range_by_its_name(ranges: Ranges, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "1")
    with pytest.raises(KeyError), profiled("load"):
        raise KeyError
    assert ranges.said == ["kvservice", "end", "kvservice load", "end"]


def test_torch_without_ranges_copies_without_them(ranges: Ranges, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise RuntimeError("NVTX functions not installed. Are you sure you have a CUDA build?")

    monkeypatch.setenv(SET_BY_PROFILERS[0], "1")
    monkeypatch.setattr(ranges, "range_push", refuse)
    with profiled("load"):
        pass
    assert ranges.said == []
