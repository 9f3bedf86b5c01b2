"""Tests that need a GPU are collected everywhere and skipped, with a reason that is counted, where there is none."""

from __future__ import annotations

import functools

import pytest

from kvservice.copying.cuda.driver import is_present


@functools.cache
def missing() -> str:
    """What is not here; empty when the tests can run."""
    if not is_present():
        return "no CUDA device"
    import torch

    return "" if torch.cuda.is_available() else "a CUDA device, but a torch without CUDA"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") is not None and missing():
            item.add_marker(pytest.mark.skip(reason=missing()))
