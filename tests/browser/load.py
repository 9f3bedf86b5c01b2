"""`python -m tests.browser.load [--plain] SOCKET…`: engines that store and read prompts at these shards until they are
stopped.

Blocks are real: they are written into the segment, sealed, fetched from the other node, and compared. Names are what a
hostile client would choose, or with --plain an honest one.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys

from kvservice.core.messages import RequestReport
from kvservice.errors import KVServiceError
from tests.integration.engine import Engine, attached, chain, spec

HOSTILE = "<img src=x onerror=window.attacked=1>"
SCRIPT = "-<script>attacked=1</script>"  # at the end of some request ids
MODELS = ("Qwen/Qwen3-8B", f"evil/{HOSTILE}")
PLAIN_MODELS = ("Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B")
DOCUMENTS = 48  # prompts that are asked again and again, some far more often than others
BLOCKS = 24  # of one prompt: 1.5 MiB; the pools of the tests hold a part of all prompts, so blocks are evicted
SPREAD = 12  # the mean number of a document that is asked for: the first ones are asked for most
PAUSE_SECONDS = 0.03  # between two requests of one engine: a load that leaves the machine to the browser


async def use(engine: Engine, model: str, seed: int, *, is_hostile: bool) -> None:
    """One engine's life: ask for a prompt, read what is there, store the rest, report."""
    draw = random.Random(seed)
    while True:
        await asyncio.sleep(PAUSE_SECONDS)
        document = min(int(draw.expovariate(1 / SPREAD)), DOCUMENTS - 1)
        keys = chain(document, BLOCKS, model)
        name = f"chatcmpl-{draw.getrandbits(48):012x}{SCRIPT * (document == 7 and is_hostile)}"
        with contextlib.suppress(KVServiceError):  # the other node may be dead
            result = await engine.read_all(keys, request_id=name, timeout=2.0)
            found = len(result.blocks)
            if found < BLOCKS:
                await engine.store(keys, start=found)
            report = RequestReport(name, BLOCKS, 0, found, BLOCKS - found)
            await engine.pool.renew(engine.attachment.attachment_id, [], [report])


async def main(sockets: list[str], models: tuple[str, ...]) -> None:
    engines = [(await attached(socket, spec(model)), model) for socket in sockets for model in models]
    print("attached", flush=True)
    uses = [
        asyncio.create_task(use(engine, model, seed, is_hostile=models is MODELS))
        for seed, (engine, model) in enumerate(engines)
    ]
    await asyncio.wait(uses, return_when=asyncio.FIRST_EXCEPTION if len(sockets) == 1 else asyncio.ALL_COMPLETED)


if __name__ == "__main__":
    is_plain = sys.argv[1] == "--plain"
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(sys.argv[2:], PLAIN_MODELS) if is_plain else main(sys.argv[1:], MODELS))
