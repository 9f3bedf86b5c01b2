"""One process of a crowd: engines without models as coroutines, each with the session that connectors use.

`benchmarks.crowd` starts it and talks to it in lines of JSON: what to do on its standard input, how it goes on its
standard output, every half second. It ends with its input, so it does not outlive whoever started it.

An engine asks for a prompt and waits for the answer as a scheduler does. It compares every byte of what it is promised,
gives it back, and stores the rest in slots of its session's stock. The bytes of a block follow from its key, so any
engine can judge what any other one stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np

from kvservice.aio import end_tasks
from kvservice.api.layout import Array, Layout
from kvservice.api.mapped import MappedPool
from kvservice.core.block.fingerprint import Fingerprint
from kvservice.core.block.keys import block_keys, chain_packed, span_route
from kvservice.core.messages import AcquireRequest, AcquireResult, Attachment, EngineSpec, RequestReport, SealItem
from kvservice.core.segment.refs import BlockRef
from kvservice.errors import KVServiceError
from kvservice.session.options import Mode, PoolOptions
from kvservice.session.pool_choice import open_service
from kvservice.session.session import Session
from kvservice.units import BlockKey

BLOCK_TOKENS = 16
MODEL = "crowd"
STEP_SECONDS = 0.002  # between two looks for an answer, as an engine's step; it doubles up to the next
STEP_SECONDS_MAX = 0.016
LATE_SECONDS = 2.0  # beyond its own timeout. A request that takes longer hangs.
STOPPED_SECONDS = 0.25  # a step that takes longer did not run: this process was stopped, or the machine is busy
SLOTS_SECONDS = 1.0  # for the stock to be filled up; what has no slot by then is not stored, as in an engine
STATUS_SECONDS = 0.5
WALK_TRIES, WALK_PAUSE_SECONDS = 4, 1.0  # the directory may learn of a block a moment after it was stored
FIRST_NEW = 1 << 20  # prompts from here on are drawn once only


@dataclass(frozen=True, slots=True)
class Traffic:
    """What every engine does until it is told otherwise."""

    rate: float = 0.0  # requests a second of each engine; 0 = rest
    prompts: int = 0  # of the corpus
    skew: float = 0.0  # 0 = each prompt as often; else the exponent of a Pareto distribution: smaller is more even
    new_share: float = 0.0  # of requests: prompts that nobody has asked for
    new_prompts: int = 0  # the most of them for each engine, which then begins again; 0 = no bound
    own: bool = False  # only prompts that this engine stored in a walk without a shift: its node has them
    stores: str = "admitted"  # what was missed: "all", "none", only "new" prompts, or what the shard says is worth it
    timeout: float = 1.0


class Content:
    """What is right under each key: no two keys agree in any eight bytes, and neither do two places of a block."""

    def __init__(self, block_bytes: int) -> None:
        self._base = np.random.default_rng(7).integers(0, 1 << 64, (block_bytes // 16, 2), dtype=np.uint64)

    def of(self, key: BlockKey) -> Array:
        """Shape (block_bytes / 8,), uint64."""
        return (self._base ^ np.frombuffer(key, np.uint64)).reshape(-1)


class Seen:
    """What happened since the last `take`. It stays the same object, so a request under way may hold it."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.seconds: list[float] = []  # of each request, until its answer
        self.wrong: list[str] = []
        self.missing: list[str] = []  # of a walk: prompts that were not there in full
        self.lag = 0.0  # the longest that the loop was late

    def take(self) -> dict[str, Any]:
        taken = {
            "counts": dict(self.counts),
            "seconds": [round(one, 4) for one in self.seconds],
            "wrong": self.wrong[:20],
            "missing": list(self.missing),
            "lag": round(self.lag, 3),
        }
        for each in (self.counts, self.seconds, self.wrong, self.missing):
            each.clear()
        self.lag = 0.0
        return taken


class CrowdEngine:
    """One engine at the shard of one node. Its coroutines run on the loop of the process."""

    def __init__(self, process: CrowdProcess, index: int, node: str) -> None:
        self.index, self.node = index, node
        self._process = process
        self._random = random.Random(index)
        self._asked = self._drawn = 0
        self._mapped: MappedPool | None = None
        self._last_same = True
        self._engine_id = os.urandom(16)
        self._fingerprint = Fingerprint.of({"model": MODEL, "block_bytes": process.layout.block_bytes})
        options = PoolOptions(mode=Mode.SERVICE, service=process.service, node=node)
        spec = EngineSpec(self._engine_id, MODEL, self._fingerprint, process.layout.slot_layout())
        self.session = Session(
            partial(open_service, options),
            spec,
            self._may_reattach,
            stock_min=process.blocks,
            rng=self._random,
            on_end=self._ended,
        )
        self.is_busy = False

    # -- life ----

    async def serve(self) -> None:
        serving = asyncio.create_task(self.session.serve())
        try:
            await self._play()
        finally:
            self.session.stop()
            await asyncio.wait([serving], timeout=5.0)
            await end_tasks([serving])
            self._ended()

    async def _play(self) -> None:
        loop = asyncio.get_running_loop()
        walked, due = 0, loop.time()
        while True:
            process = self._process
            self.is_busy = False
            if process.walk_number > walked:
                self.is_busy = True
                walked = process.walk_number
                await self._walk()
                process.walked += 1
                continue
            traffic = process.traffic
            if not traffic.rate:
                await asyncio.sleep(STATUS_SECONDS / 10)
                due = loop.time() + self._random.random()
                continue
            self.is_busy = True
            await self._turn(self._draw(traffic), traffic)
            self.is_busy = False
            due = max(due + self._random.uniform(0.5, 1.5) / traffic.rate, loop.time() - 1.0)
            await asyncio.sleep(max(due - loop.time(), 0.0))

    async def _walk(self) -> None:
        """Go over the prompts of the corpus that fall to this engine, each once: store them, or look for them."""
        process = self._process
        first = (self.index + process.walk_shift) % process.engine_count
        for prompt in range(first, process.traffic.prompts, process.engine_count):
            for attempt in range(WALK_TRIES):
                if attempt:
                    await asyncio.sleep(WALK_PAUSE_SECONDS)
                found, why = await self._turn(prompt, process.traffic)
                if found == process.blocks or (process.traffic.stores == "all" and why == "stored"):
                    break
            else:
                process.seen.missing.append(f"prompt {prompt} at {self.node}: {found} of {process.blocks}, {why}")
            process.seen.counts["prompts_walked"] += 1

    # -- one request ----

    def _draw(self, traffic: Traffic) -> int:
        if traffic.new_share and self._random.random() < traffic.new_share:
            self._drawn = (self._drawn + 1) % (traffic.new_prompts or FIRST_NEW)
            return FIRST_NEW + (self.index << 24) + self._drawn
        if traffic.skew:
            return min(int(self._random.paretovariate(traffic.skew)) - 1, traffic.prompts - 1)
        if traffic.own:
            return self._random.randrange(self.index, traffic.prompts, self._process.engine_count)
        return self._random.randrange(traffic.prompts)

    async def _turn(self, prompt: int, traffic: Traffic) -> tuple[int, str]:
        """(blocks that were promised and right, why no more)."""
        seen, attachment = self._process.seen, self.session.attachment
        mapped = None if attachment is None else self._memory(attachment)
        if attachment is None or mapped is None:
            seen.counts["requests_without_a_pool"] += 1
            await asyncio.sleep(0.1)
            return 0, "no pool"
        keys = self._process.keys(self._fingerprint.digest, prompt)
        self._asked += 1
        request_id = f"e{self.index}-{self._asked}"
        result = await self._ask(request_id, keys, traffic.timeout)
        if result is None:
            return 0, "no answer"
        found = self._read(mapped, result, keys)
        if result.lease_id:
            self.session.release(attachment.attachment_id, result.lease_id)
        seen.counts["blocks_promised"] += len(result.blocks)
        seen.counts["blocks_fetched"] += result.fetched_count
        seen.counts["blocks_from_a_tier"] += result.tier_count
        seen.counts[f"miss_{result.miss.value}"] += 1
        why, rest = result.miss.value, keys[len(result.blocks) :]
        stores = {"all": True, "none": False, "new": prompt >= FIRST_NEW, "admitted": result.admitted}[traffic.stores]
        if rest and stores:
            sent = await self._store(attachment, mapped, keys, len(result.blocks))
            why = "stored" if sent == len(rest) else why
        self.session.report(RequestReport(request_id, len(keys), 0, found, len(keys) - found))
        return found, why

    async def _ask(self, request_id: str, keys: Sequence[BlockKey], timeout: float) -> AcquireResult | None:
        seen, loop = self._process.seen, asyncio.get_running_loop()
        begun, waited, pause = loop.time(), 0.0, STEP_SECONDS
        request = AcquireRequest(tuple(keys), 0, timeout, request_id=request_id)
        if self.session.acquire(request_id, request) is None:
            seen.counts["requests_without_a_pool"] += 1
            return None
        seen.counts["requests"] += 1
        while True:
            for answer in self.session.answers():
                if answer.request_id == request_id:
                    seen.seconds.append(loop.time() - begun)
                    seen.counts["requests_failed"] += answer.result is None
                    return answer.result
            if waited > timeout + LATE_SECONDS:
                seen.counts["requests_that_hang"] += 1
                seen.wrong.append(
                    f"engine {self.index} at {self.node}: {request_id} has no answer after {waited:.1f} s"
                )
                self.session.abandon(request_id)
                return None
            before = loop.time()
            await asyncio.sleep(pause)
            waited += min(loop.time() - before, STOPPED_SECONDS)
            pause = min(2 * pause, STEP_SECONDS_MAX)

    def _read(self, mapped: MappedPool, result: AcquireResult, keys: Sequence[BlockKey]) -> int:
        """Compare what was promised. Returns how many blocks were there and right."""
        seen, good = self._process.seen, 0
        for ref, key in zip(result.blocks, keys, strict=False):
            if not mapped.read(ref, key, partial(self._compare, key), check_digest=False):
                seen.counts["blocks_gone_before_they_were_read"] += 1
            elif self._last_same:
                good += 1
            else:
                seen.wrong.append(f"engine {self.index} at {self.node}: slot {ref.slot:#x} is not {key.hex()}")
        seen.counts["blocks_compared"] += good
        return good

    def _compare(self, key: BlockKey, block: Array) -> None:
        self._last_same = bool(np.array_equal(block, self._process.content.of(key)))

    async def _store(self, attachment: Attachment, mapped: MappedPool, keys: Sequence[BlockKey], start: int) -> int:
        """Returns how many blocks were sent to be sealed."""
        number, wanted, loop = attachment.attachment_id, len(keys) - start, asyncio.get_running_loop()
        refs: list[BlockRef] = []
        until = loop.time() + SLOTS_SECONDS
        self.session.expect(wanted)
        try:
            while True:
                refs += self.session.take_slots(number, wanted - len(refs))
                if len(refs) == wanted or loop.time() > until or self.session.attachment is not attachment:
                    break
                await asyncio.sleep(STEP_SECONDS)
        finally:
            self.session.expect(-wanted)
        content = self._process.content
        written = mapped.write(refs, [content.of(key) for key in keys[start : start + len(refs)]])
        if written < len(refs):
            self.session.abort(number, refs[written:])
        items = [
            SealItem(ref, keys[place], keys[place - 1] if place else None, place, span_route(keys, place))
            for place, ref in enumerate(refs[:written], start)
        ]
        if items:
            self.session.seal(number, items)
        self._process.seen.counts["blocks_stored"] += len(items)
        self._process.seen.counts["blocks_without_a_slot"] += wanted - len(refs)
        return len(items)

    # -- the memory ----

    def _memory(self, attachment: Attachment) -> MappedPool | None:
        if self._mapped is not None and self._mapped.attachment is attachment:
            return self._mapped
        self._ended()
        try:
            self._mapped = MappedPool(attachment, self._engine_id, self._process.layout, lambda refs: None)
        except KVServiceError:  # the shard was replaced meanwhile, or takes slots back
            return None
        return self._mapped

    def _ended(self) -> None:
        if self._mapped is not None:
            self._mapped.close()
            self._mapped = None

    def _may_reattach(self) -> bool:
        return self._mapped is None or not self._mapped.is_used


class CrowdProcess:
    """`plan` is the first line of the input."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.service: str = plan["service"]
        self.blocks: int = plan["blocks"]
        self.engine_count: int = plan["engine_count"]
        self.layout = Layout(BLOCK_TOKENS, (plan["block_bytes"] // 8,), "uint64")
        self.content = Content(plan["block_bytes"])
        self.traffic = Traffic()
        self.traffic_number = 0
        self.walk_number = self.walk_shift = self.walked = 0
        self.seen = Seen()
        self.engines = [CrowdEngine(self, index, node) for index, node in plan["engines"]]
        self.keys = lru_cache(maxsize=4096)(self._keys)

    def _keys(self, digest: bytes, prompt: int) -> tuple[BlockKey, ...]:
        tokens = np.random.default_rng(prompt).integers(0, 50_000, self.blocks * BLOCK_TOKENS, dtype="<u4").tobytes()
        return tuple(block_keys(digest, chain_packed(tokens, BLOCK_TOKENS, b"", self.blocks)))

    async def run(self) -> None:
        playing = [asyncio.create_task(engine.serve()) for engine in self.engines]
        telling = [asyncio.create_task(self._tell()), asyncio.create_task(self._measure_lag())]
        try:
            await self._listen()
        finally:
            await end_tasks([*telling, *playing])

    async def _listen(self) -> None:
        """Until the end of the input."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := await reader.readline():
            told = json.loads(line)
            self.traffic = Traffic(**told["traffic"])
            self.traffic_number = told["number"]
            if "walk" in told:
                self.walk_shift, self.walked = told["walk"], 0
                self.walk_number += 1

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(STATUS_SECONDS)
            held: Counter[str] = Counter()
            for engine in self.engines:
                held[engine.node] += len(engine.session.held)
            status = {
                "number": self.traffic_number,
                "busy": sum(engine.is_busy for engine in self.engines),
                "attached": sum(engine.session.attachment is not None for engine in self.engines),
                "walked": self.walked,
                "held": held,
                **self.seen.take(),
                "failures": [e.session.failure.message for e in self.engines if e.session.failure is not None][:3],
            }
            print(json.dumps(status), flush=True)

    async def _measure_lag(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            begun = loop.time()
            await asyncio.sleep(0.5)
            self.seen.lag = max(self.seen.lag, loop.time() - begun - 0.5)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever started this; then the input ends
    plan = json.loads(sys.stdin.buffer.raw.readline())
    with contextlib.suppress(BrokenPipeError):
        asyncio.run(CrowdProcess(plan).run())


if __name__ == "__main__":
    main()
