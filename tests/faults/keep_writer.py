"""An engine's process that is stopped in the middle of a copy: `python -m tests.faults.keep_writer <socket>`."""

from __future__ import annotations

import asyncio
import sys

from kvservice.client.shard import ShardClient
from tests.faults.test_writer_fence import PausedCopy
from tests.integration.engine import Engine


async def main() -> None:
    engine = await Engine.attach(ShardClient(sys.argv[1]))
    refs = await engine.pool.reserve(engine.id, 4)
    copy = PausedCopy(engine.segment, engine.attachment.epoch, refs)
    print("paused", flush=True)
    sys.stdin.readline()
    copy.go_on()
    print("wrote", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    asyncio.run(main())
