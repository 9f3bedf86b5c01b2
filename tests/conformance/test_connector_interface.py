"""vLLM's KV connectors of version 1: the OffloadingConnector, which keeps blocks in the host's memory, and LMCache's
backend for GPUDirect Storage, which keeps them in files.

Each test retells a passage of the public surveys of them with its numbers. What only vLLM's own code can show, as the
order of calls in a step, is in tests/unit/connector/vllm/test_engine_calls.py.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from kvservice.connector.options import DeferStores
from kvservice.connector.scheduler.ports import Promise
from kvservice.core.segment.blockfile import BlockFileHeader, pack_file_header, unpack_file
from kvservice.core.segment.digest import digest_payload
from kvservice.core.tier.tier_block import TierBlock
from kvservice.errors import TierError
from kvservice.testing.eventually import eventually
from kvservice.tier.mounts import decide_access, parse_mounts
from kvservice.units import BlockKey, SpanRoute
from tests.conformance.walk import Walk

MOUNTS = """\
overlay / overlay rw,relatime 0 0
tmpfs /dev/shm tmpfs rw 0 0
/dev/sda1 /mnt/a ext4 rw 0 0
weka /mnt/weka wekafs rw 0 0
"""


def test_store_is_submitted_in_the_next_step() -> None:
    """Step k computes two blocks and plans their store. Nothing is copied in it, so that its tokens are sampled and
    sent first; the copies run when step k + 1 begins, before its forward.

    The request is preempted in between. The source submits such stores early, before the blocks are used again. Here
    they are pinned until the copy is reported, and a forward that wrote into them in step k + 1 would come too late.
    """
    walk = Walk(DeferStores.ON)
    try:
        walk.arrive("A", range(32))
        assert walk.matched("A", 33) == Promise(0)
        walk.scheduler.allocated("A", [101, 102], 0)
        plan = walk.step({"A": (32, [101, 102])})
        assert [entry.block_id for store in plan.stores for entry in store.entries] == [101, 102]
        assert walk.scheduler.counters["copied_blocks"] == 0
        assert set(walk.pins.pinned) == {101, 102}, "A may lose its blocks, and yet nobody else gets them"
        computed = [layer[101:103].clone() for layer in walk.tensors]
        walk.step(forward=lambda: [layer[101:103].fill_(-1.0) for layer in walk.tensors])
        assert walk.scheduler.counters["copied_blocks"] == 2
        assert not walk.pins.pinned
        eventually(lambda: walk.slots()["sealed"] == 2, "both blocks", detail=walk.slots)
        assert walk.matched("A", 33) == Promise(32), "it asks again, as a preempted request does"
        walk.scheduler.allocated("A", [103, 104, 105], 32)
        walk.step()
        for layer, wanted in zip(walk.tensors, computed, strict=True):
            assert torch.equal(layer[103:105], wanted)
    finally:
        walk.close()


def test_gds_file_format(tmp_path: Path) -> None:
    """A block's file begins with 4,096 bytes: a little-endian 4,088, so many bytes of JSON and blanks, and then the raw
    bytes, so that a device can read them by direct memory access. Any reader of safetensors opens it. A tensor of
    30 x 3 x 16 x 64 numbers of four bytes is a file of 372,736 bytes. A bit that flips anywhere is damage or no block,
    never a hit.

    The source's tensor has the engine's type and shape. Here it is bytes: a slot's, whose order is the engine's.
    """
    tensor = np.arange(30 * 3 * 16 * 64, dtype=np.int32).reshape(30, 3, 16, 64)
    key, payload = BlockKey(bytes(16)), tensor.tobytes()
    block = TierBlock(key, len(payload), digest_payload(payload, key), 0, SpanRoute(0))
    written = pack_file_header(BlockFileHeader(block, len(payload))) + payload
    assert len(written) == 372_736 == 4096 + tensor.nbytes
    assert struct.unpack("<Q", written[:8]) == (4088,)
    header = json.loads(written[8:4096])
    assert written[8:4096].rstrip(b" ").endswith(b"}")
    assert header["kv"] == {"dtype": "U8", "shape": [tensor.nbytes], "data_offsets": [0, tensor.nbytes]}
    path = tmp_path / "block.safetensors"
    path.write_bytes(written)
    with safe_open(path, framework="numpy") as opened:
        assert np.array_equal(opened.get_tensor("kv").view(np.int32).reshape(tensor.shape), tensor)
        assert opened.metadata()["key"] == key.hex()
    assert unpack_file(written) is not None
    for bit in range(0, len(written) * 8, 9973):
        damaged = bytearray(written)
        damaged[bit // 8] ^= 1 << bit % 8
        assert unpack_file(bytes(damaged)) is None, bit


def test_file_system_decides() -> None:
    """ext4 is read directly into device memory; tmpfs and overlayfs are not unless that is forced; wekafs is, with a
    pool of threads, and cannot be switched off. The file system is that of the longest mount point that the path lies
    in, by whole names: the source compares beginnings of strings, and takes /mnt/ab for a folder of /mnt/a."""
    table = parse_mounts(MOUNTS)
    assert decide_access(Path("/mnt/a/blocks"), table).direct
    assert not decide_access(Path("/dev/shm/blocks"), table).direct
    assert not decide_access(Path("/srv"), table).direct
    assert decide_access(Path("/srv"), table, direct=True).direct
    weka = decide_access(Path("/mnt/weka/blocks"), table)
    assert weka.direct and weka.threads > 1
    with pytest.raises(TierError, match="wekafs"):
        decide_access(Path("/mnt/weka/blocks"), table, direct=False)
    assert not decide_access(Path("/mnt/ab/blocks"), table).direct, "it lies in /, an overlay"
