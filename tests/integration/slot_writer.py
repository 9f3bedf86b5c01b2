"""A process that fills, seals, evicts and reuses the slots of a small pool as fast as the pool goes, until its standard
input ends. Contents are a function of the key. `python -m tests.integration.slot_writer <path of the segment>`.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from kvservice.core.block.fingerprint import Fingerprint
from kvservice.core.messages import EngineSpec, SealItem
from kvservice.core.segment.geometry import CONTROL_BYTES, SCRATCH_BYTES, SLAB_BYTES_MIN, Geometry
from kvservice.core.segment.layout import SlotLayout
from kvservice.memory.segment import Segment
from kvservice.pool.runtime import PoolRuntime
from kvservice.pool.runtime_ports import PoolConfig
from kvservice.units import BlockKey, NodeId, SpanRoute
from tests.integration.engine import content

LAYOUT = SlotLayout(layer_count=2, kv_head_count=2, cell_bytes=4096, block_tokens=16)  # 16 KiB a block
GEOMETRY = Geometry(slab_bytes=SLAB_BYTES_MIN, slab_count=1)  # 63 slots
KEYS = [BlockKey(b"torn" + number.to_bytes(12, "big")) for number in range(1024)]
AT_ONCE = 8
assert GEOMETRY.segment_bytes == CONTROL_BYTES + SCRATCH_BYTES + SLAB_BYTES_MIN


async def write_forever(path: Path) -> int:
    """Returns how many blocks were sealed."""
    contents = [content(key, LAYOUT.payload_bytes) for key in KEYS]
    pool = await PoolRuntime.open(PoolConfig(NodeId("n"), path, GEOMETRY))
    segment = Segment.attach(path, GEOMETRY)
    ended = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    try:
        spec = EngineSpec(os.urandom(16), "model", Fingerprint.of({"model": "model"}), LAYOUT)
        attachment = await pool.attach(spec, print)
        written = 0
        print("writing", flush=True)
        while not ended.done():
            refs = await pool.reserve(attachment.attachment_id, AT_ONCE)
            items: list[SealItem] = []
            for ref in refs:
                number = (written + len(items)) % len(KEYS)
                segment.payload(ref.slot, LAYOUT.payload_bytes)[:] = contents[number]
                items.append(SealItem(ref, KEYS[number], None, 0, SpanRoute(0)))
            await pool.seal(attachment.attachment_id, items)
            written += len(items)
        return written
    finally:
        segment.close()
        await pool.close()
        pool.unlink()


if __name__ == "__main__":
    print(asyncio.run(write_forever(Path(sys.argv[1]))), flush=True)
