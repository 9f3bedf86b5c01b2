"""Two engine processes on one GPU and their worker: one copies the blocks that the other lent it, by CUDA IPC."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvservice.mover.message import CopyRow, Direction
from kvservice.units import Generation, SlotIndex
from tests.gpu.device import KEY, kv_cache, segment
from tests.gpu.test_worker import copy, linked, worker

pytestmark = pytest.mark.gpu

LENDER = """
import sys
from pathlib import Path
from kvservice.core.geometry import Geometry
from kvservice.memory.segment import Segment
from kvservice.mover.message import CopyRow
from kvservice.units import Generation, SlotIndex
from tests.gpu.device import KEY, kv_cache
from tests.gpu.test_worker import linked

made = Segment.attach(Path(sys.argv[2]), Geometry(int(sys.argv[3]), int(sys.argv[4])))
with linked(kv_cache("lbnh", seed=5), Path(sys.argv[1]), made) as (link, mark):
    row = CopyRow(7, SlotIndex(0), Generation(0), KEY)
    lent = link.lend([row], mark())
    lent.synchronize()
    print("lent", lent.succeeded(), flush=True)
    sys.stdin.readline()
    recalled = link.recall([row])
    recalled.synchronize()
    print("recalled", recalled.succeeded(), flush=True)
    sys.stdin.readline()
"""


def test_block_is_copied_from_the_other_engines_memory_until_it_is_recalled() -> None:
    wanted = kv_cache("lbnh", seed=5)[:, 7]
    mine = kv_cache("blhn", seed=6)
    row = CopyRow(20, SlotIndex(0), Generation(0), KEY)
    with worker() as (_, directory), segment() as made, linked(mine, directory, made) as (link, mark):
        geometry = [str(made.geometry.slab_bytes), str(made.geometry.slab_count)]
        lender = subprocess.Popen(
            [sys.executable, "-c", LENDER, str(directory), str(made.path), *geometry],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, cwd=Path(__file__).parents[2],
        )  # fmt: skip
        assert lender.stdin is not None and lender.stdout is not None
        try:
            assert lender.stdout.readline() == "lent True\n"
            ticket = copy(link, mark, Direction.DIRECT, row)
            ticket.synchronize()
            assert ticket.succeeded()
            assert torch.equal(mine[:, 20], wanted)
            lender.stdin.write("\n")
            assert lender.stdout.readline() == "recalled True\n"
            ticket = copy(link, mark, Direction.DIRECT, row)
            ticket.synchronize()
            assert not ticket.succeeded()
        finally:
            lender.stdin.close()
            lender.wait(30)
            lender.stdout.close()
