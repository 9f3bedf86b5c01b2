"""The constants and structs of the CUDA driver against NVIDIA's own binding, where that is installed."""

from __future__ import annotations

import pytest

from benchmarks.gpu.bindings import constants


def test_constants_are_those_of_cuda_bindings() -> None:
    pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    found = constants()
    assert found["checked"] >= 10 and found["wrong"] == {} and found["final errors that it does not know"] == []
