"""The gather kernel without a GPU: it compiles for one, and Triton's interpreter moves the right bytes with it.

Triton is not in the locked environment, because an engine without a GPU would choose a GPU's path with it. `make
.venv-triton/.installed` puts it beside; without it the two tests skip."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
KERNEL = ROOT / "kvservice" / "copying" / "cuda" / "gather_kernel.py"
SITE = ROOT / ".venv-triton" / "site"

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kvservice.copying.cuda.gather_kernel import BLOCK_WORDS, _move_runs
signature = {"table": "*i64", "block": "constexpr", "wide": "constexpr"}
for wide in (False, True):
    source = ASTSource(fn=_move_runs, signature=signature, constexprs={(1,): BLOCK_WORDS, (2,): wide})
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    print(".target sm_90" in made, "st.global.v4.b32" in made)
"""

INTERPRET = """
import numpy as np, torch
from kvservice.copying.cuda.gather_kernel import BLOCK_WORDS, _move_runs
source = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8)
target, wanted = np.zeros_like(source), np.zeros_like(source)
sizes = np.array([4, 8, 4096, 4100, 20000, 64, 12])  # bytes: less than a block of words, one, and several
begins = np.array([0, 100, 1000, 8000, 20000, 60000, 70000])
to = np.array([500000, 4, 90000, 200000, 300000, 600000, 700000])
table = np.stack([target.ctypes.data + to, source.ctypes.data + begins, sizes // 4], axis=1).astype(np.int64)
_move_runs[(len(sizes),)](torch.from_numpy(table), block=BLOCK_WORDS, wide=False)
for start, begin, size in zip(to, begins, sizes):
    wanted[start : start + size] = source[begin : begin + size]
print(np.array_equal(target, wanted))
table = np.array([[target.ctypes.data, source.ctypes.data, 4100]])  # numpy's memory is aligned to 16 bytes
_move_runs[(1,)](torch.from_numpy(table), block=BLOCK_WORDS, wide=True)
wanted[:16400] = source[:16400]
print(np.array_equal(target, wanted))
"""

LAUNCH = """
import contextlib
from types import SimpleNamespace
import numpy as np, torch
from kvservice.copying.cuda import gather_kernel

class Stream:
    cuda_stream = 5
    def wait_stream(self, other): pass
    def synchronize(self): pass

launched = []
run = gather_kernel._move_runs.run
def noted(*arguments, grid, **settings):
    launched.append((grid[0], settings["wide"]))
    return run(*arguments, grid=grid, **settings)
gather_kernel._move_runs.run = noted
nothing = lambda *_: contextlib.nullcontext()
gather_kernel.torch = SimpleNamespace(
    device=lambda *_: torch.device("cpu"), zeros=torch.zeros, empty=torch.empty, from_numpy=torch.from_numpy,
    int64=torch.int64, int32=torch.int32, uint8=torch.uint8,
    cuda=SimpleNamespace(
        device_count=lambda: 1, get_device_properties=lambda _: SimpleNamespace(uuid="1"), Stream=lambda *_: Stream(),
        ExternalStream=lambda *_, **__: Stream(), device=nothing, stream=nothing, current_stream=lambda *_: Stream()))
torch.Tensor.record_stream = lambda self, stream: None
launch = gather_kernel.launcher("GPU-1")
print(launched)
launched.clear()
source = np.random.default_rng(0).integers(0, 256, 1 << 19, np.uint8)
target, wanted = np.zeros_like(source), np.zeros_like(source)
for to, begins, sizes in (([0, 262144], [131072, 0], [100000, 131072]), ([100004], [4], [12])):
    to, begins, sizes = map(np.array, (to, begins, sizes))
    launch(target.ctypes.data + to, source.ctypes.data + begins, sizes, 5)
    for start, begin, size in zip(to, begins, sizes):
        wanted[start : start + size] = source[begin : begin + size]
print(launched, np.array_equal(target, wanted))
"""


def said_by(program: str, tmp_path: Path, **environment: str) -> str:
    found = [str(SITE)] if SITE.is_dir() else []
    script = tmp_path / "program.py"  # Triton reads the source of a kernel from a file
    script.write_text(program)
    settings = {"PYTHONPATH": os.pathsep.join([str(ROOT), *found]), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, **settings, **environment},
        capture_output=True,
        text=True,
        timeout=200,
    )
    if "No module named 'triton'" in done.stderr:
        pytest.skip("no Triton: make .venv-triton/.installed")
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


@pytest.mark.processes
def test_kernel_compiles_for_a_gpu(tmp_path: Path) -> None:
    """Aligned runs are moved in words of 16 bytes."""
    assert said_by(COMPILE, tmp_path).split("\n") == ["True False", "True True"]


@pytest.mark.processes
def test_kernel_moves_the_right_bytes(tmp_path: Path) -> None:
    assert said_by(INTERPRET, tmp_path, TRITON_INTERPRET="1").split() == ["True", "True"]


@pytest.mark.processes
def test_launcher_cuts_long_runs_and_uses_wide_words(tmp_path: Path) -> None:
    """Both kinds of words are compiled in advance. 100,000 and 131,072 bytes are two pieces each."""
    said = said_by(LAUNCH, tmp_path, TRITON_INTERPRET="1")
    assert said.split("\n") == ["[(1, False), (1, True)]", "[(4, True), (1, False)] True"]


def kernels(source: str) -> list[ast.FunctionDef]:
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    return [node for node in found if any("triton.jit" in ast.unparse(one) for one in node.decorator_list)]


def test_kernel_names_no_types_but_tritons_and_takes_one_pointer() -> None:
    """Triton refuses to compile other annotations, and compiles anew for each alignment of a further argument, which
    depends on the number of runs."""
    [kernel] = kernels(KERNEL.read_text())
    [pointer, *constants] = kernel.args.args
    assert pointer.annotation is None
    assert {ast.unparse(one.annotation) for one in constants if one.annotation is not None} == {"tl.constexpr"}
    assert all(one.annotation is not None for one in constants)
