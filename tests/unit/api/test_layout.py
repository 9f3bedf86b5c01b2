"""What a block is: types, shapes and tokens that do not fit are refused before anything is written."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from kvservice import InvalidRequest, Layout
from kvservice.api.layout import DType, pack_tokens


@pytest.mark.parametrize("kind", ["float32", np.float32, np.dtype("<f4"), torch.float32, "torch.float32"])
def test_a_type_has_one_name_however_it_is_given(kind: DType) -> None:
    assert Layout(4, (2,), kind) == Layout(4, [2], "float32")


@pytest.mark.parametrize("kind", ["object", ">f4", "U5", "nothing", "datetime64[s]", None, 7])
def test_what_is_no_type_of_numbers_is_refused(kind: object) -> None:
    with pytest.raises(InvalidRequest):
        Layout(4, (2,), kind)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tokens", "shape"), [(0, (2,)), (4, ()), (4, (2, 0)), (-1, (2,)), (4, (2.5,)), (4.0, (2,)), (4, 2), (4, None)]
)
def test_sizes_that_are_not_positive_are_refused(tokens: Any, shape: Any) -> None:
    with pytest.raises(InvalidRequest):
        Layout(tokens, shape)


def test_bfloat16_goes_by_its_bits() -> None:
    layout = Layout(4, (2, 3), torch.bfloat16)
    tensor = torch.arange(12, dtype=torch.bfloat16).reshape(2, 2, 3)
    first, second = layout.blocks_of(tensor)
    assert (first.dtype, layout.block_bytes) == (np.uint16, 12)
    assert second.tobytes() == tensor[1].view(torch.int16).numpy().tobytes()


@pytest.mark.parametrize(
    ("dtype", "given"),
    [("float8_e4m3fn", torch.float8_e5m2), ("uint16", torch.bfloat16), ("uint8", torch.float8_e4m3fn)],
)
def test_bits_of_another_type_are_no_blocks(dtype: str, given: torch.dtype) -> None:
    """NumPy has one type for both, so that their numbers would be taken for others."""
    for arrays in (torch.zeros((2, 3), dtype=given), [torch.zeros(3, dtype=given)]):
        with pytest.raises(InvalidRequest, match=f"not of {given}"):
            Layout(4, (3,), dtype).blocks_of(arrays)


@pytest.mark.parametrize(
    "arrays",
    [
        np.zeros((2, 2, 3), "float64"),
        np.zeros((2, 3), "float32"),
        [np.zeros((3, 2), "float32")],
        [np.zeros((2, 3), "float32"), np.zeros((2, 3), "int32")],
        torch.zeros((2, 3, 2)),
        [[[1.0] * 3] * 2],
        None,
        7,
    ],
)
def test_blocks_of_another_shape_or_type_are_refused(arrays: object) -> None:
    with pytest.raises(InvalidRequest, match=r"blocks are|arrays is a row of blocks"):
        Layout(4, (2, 3)).blocks_of(arrays)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "arrays",
    [[[[1.0, 2.0], [3.0]]], torch.zeros((1, 2, 3), device="meta"), torch.zeros((1, 2, 3)).to_sparse()],
    ids=["ragged", "meta", "sparse"],
)
def test_what_has_no_array_is_refused_as_blocks(arrays: Any) -> None:
    with pytest.raises(InvalidRequest, match="no array"):
        Layout(4, (2, 3)).blocks_of(arrays)


def test_the_name_of_a_codec_is_text() -> None:
    with pytest.raises(InvalidRequest, match="accept_codec"):
        Layout(4, (2,), accept_codec=5)  # type: ignore[arg-type]


def test_tokens_have_the_same_bytes_in_every_form() -> None:
    forms = [[1, 2, 300], (1, 2, 300), np.array([1, 2, 300]), torch.tensor([1, 2, 300]), np.array([1, 2, 300], "u4")]
    assert {pack_tokens(form) for form in forms} == {b"\1\0\0\0\2\0\0\0\x2c\1\0\0"}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "tokens",
    [
        *([-1], [1 << 32], ["a"], [1.5], np.array([[1]]), np.array([1.0]), np.array([-1]), torch.tensor([[1]])),
        *({1, 2}, frozenset([1]), {1: "a"}, {1: "a"}.keys()),
        torch.ones(3, dtype=torch.bfloat16),
        torch.ones(3, dtype=torch.float8_e5m2),
        torch.ones(3, dtype=torch.int64, device="meta"),
    ],
)
def test_what_is_no_row_of_tokens_is_refused(tokens: object) -> None:
    with pytest.raises(InvalidRequest):
        pack_tokens(tokens)  # type: ignore[arg-type]


@pytest.mark.processes
def test_arrays_are_taken_while_another_thread_imports_torch() -> None:
    """For seconds torch is there and has no tensors."""
    program = (
        "import sys, threading, numpy, kvservice\n"
        "from kvservice.api.layout import DType, pack_tokens\n"
        "layout, blocks = kvservice.Layout(4, (3,)), numpy.zeros((2, 3), 'float32')\n"
        "thread = threading.Thread(target=__import__, args=('torch',))\n"
        "thread.start()\n"
        "while thread.is_alive():\n"
        "    layout.blocks_of(blocks), pack_tokens(range(8))\n"
        "assert 'torch' in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert not done.returncode, done.stderr[-1000:]
