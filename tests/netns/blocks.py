"""`python -m tests.netns.blocks store|read SOCKET SEED COUNT`: a small engine on the host this runs on.

Prints one JSON line: how many blocks were sealed, or promised (each byte checked) and fetched from elsewhere.
"""

from __future__ import annotations

import asyncio
import json
import sys

from kvservice.client.shard import ShardClient
from kvservice.core.messages import SealStatus
from tests.integration.engine import Engine, chain


async def work(verb: str, socket: str, seed: int, count: int) -> dict[str, int]:
    client = ShardClient(socket)
    engine = await Engine.attach(client)
    keys = chain(seed, count)
    try:
        if verb == "store":
            return {"sealed": (await engine.store(keys)).count(SealStatus.SEALED)}
        result = await engine.read_all(keys)
        return {"promised": len(result.blocks), "fetched": result.fetched_count}
    finally:
        engine.let_go()
        await client.close()


if __name__ == "__main__":
    print(json.dumps(asyncio.run(work(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))))
