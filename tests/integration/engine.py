"""A minimal engine for tests: writes and reads blocks whose bytes are a function of their key, so that every read
judges itself. Uses only what a real connector uses: PoolPort, the mapped segment and the liveness lock."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvservice.client.shard import ShardClient
from kvservice.core.block.fingerprint import Fingerprint
from kvservice.core.block.keys import block_keys, chain_hashes, span_route
from kvservice.core.messages import AcquireRequest, AcquireResult, Attachment, EngineSpec, Handoff, SealItem, SealStatus
from kvservice.core.segment.layout import SlotLayout
from kvservice.core.segment.refs import BlockRef
from kvservice.errors import Unavailable
from kvservice.memory.liveness import LivenessLock, hold
from kvservice.memory.segment import Segment
from kvservice.pool.port import PoolPort
from kvservice.testing.eventually import eventually_async
from kvservice.units import BlockKey

LAYOUT = SlotLayout(layer_count=4, kv_head_count=2, cell_bytes=8192, block_tokens=16)  # 64 KiB a block


def content(key: BlockKey, length: int = LAYOUT.payload_bytes) -> bytes:
    seed = int.from_bytes(hashlib.sha256(key).digest()[:8], "big")
    return np.random.default_rng(seed).bytes(length)


def spec(model: str = "test-model", engine_id: bytes | None = None, **fields: object) -> EngineSpec:
    fingerprint = Fingerprint.of({"model": model, "dtype": "bfloat16", **fields})
    return EngineSpec(engine_id or os.urandom(16), model, fingerprint, LAYOUT)


def chain(seed: int, count: int, model: str = "test-model") -> tuple[BlockKey, ...]:
    tokens = np.random.default_rng(seed).integers(0, 50_000, count * LAYOUT.block_tokens).tolist()
    return tuple(block_keys(spec(model).fingerprint.digest, chain_hashes(tokens, LAYOUT.block_tokens)))


class Engine:
    """Attached to one pool. `lost` collects the reasons the pool gave for ending the attachment."""

    def __init__(self, pool: PoolPort, engine_id: bytes, attachment: Attachment, lost: list[str]) -> None:
        self.engine_id = engine_id
        self.pool = pool
        self.attachment = attachment
        self.lost = lost
        self.segment = Segment.attach(Path(attachment.segment_path), attachment.geometry)
        self.lock: LivenessLock | None = hold(self.segment, engine_id, attachment.epoch)

    @classmethod
    async def attach(cls, pool: PoolPort, engine_spec: EngineSpec | None = None) -> Engine:
        lost: list[str] = []
        engine_spec = engine_spec or spec()
        return cls(pool, engine_spec.engine_id, await pool.attach(engine_spec, lost.append), lost)

    @property
    def id(self) -> int:
        return self.attachment.attachment_id

    async def store(self, keys: Sequence[BlockKey], start: int = 0) -> list[SealStatus]:
        """Write the blocks of this chain from `start` on; fewer when the pool is full."""
        refs = await self.pool.reserve(self.attachment.attachment_id, len(keys) - start)
        items: list[SealItem] = []
        for position, ref in enumerate(refs, start):
            self.segment.payload(ref.slot, LAYOUT.payload_bytes)[:] = content(keys[position])
            parent = keys[position - 1] if position else None
            items.append(SealItem(ref, keys[position], parent, position, span_route(keys, position)))
        return await self.pool.seal(self.attachment.attachment_id, items)

    async def acquire(
        self,
        keys: Sequence[BlockKey],
        *,
        skip: int = 0,
        timeout: float = 5.0,
        handoff: Handoff | None = None,
        request_id: str = "",
    ) -> AcquireResult:
        request = AcquireRequest(tuple(keys), skip, timeout, handoff=handoff, request_id=request_id)
        return await self.pool.acquire(self.attachment.attachment_id, request)

    def read(self, ref: BlockRef, key: BlockKey) -> bool:
        """True when the slot holds exactly the bytes of this key, under the promised generation, before and after."""
        before = self.segment.read_header(ref.slot)
        data = bytes(self.segment.payload(ref.slot, LAYOUT.payload_bytes))
        after = self.segment.read_header(ref.slot)
        if before is None or after is None or {before.generation, after.generation} != {ref.generation}:
            return False
        assert data == content(key), "a wrong block was promised"
        return True

    async def read_all(
        self,
        keys: Sequence[BlockKey],
        *,
        skip: int = 0,
        timeout: float = 5.0,
        handoff: Handoff | None = None,
        request_id: str = "",
    ) -> AcquireResult:
        """Acquire, check every promised byte, release."""
        result = await self.acquire(keys, skip=skip, timeout=timeout, handoff=handoff, request_id=request_id)
        for ref, key in zip(result.blocks, keys[skip:], strict=False):
            assert self.read(ref, key)
        if result.lease_id:
            await self.pool.release(self.attachment.attachment_id, [result.lease_id])
        return result

    def let_go(self) -> None:
        """Unmap and drop the liveness lock, as the end of the process would."""
        self.segment.close()
        if self.lock is not None:
            self.lock.release()


async def attached(socket: str, engine_spec: EngineSpec | None = None, seconds: float = 10.0) -> Engine:
    """An engine at the shard behind this socket, also right after its start: gRPC remembers for a second that nobody
    listened there."""

    async def attach() -> Engine | None:
        client = ShardClient(socket)
        try:
            return await Engine.attach(client, engine_spec)
        except Unavailable:
            await client.close()
            return None

    return await eventually_async(attach, f"a shard that answers at {socket}", seconds)


def with_engine(socket: str, work: Callable[[Engine], Awaitable[Any]]) -> Any:
    """What this returns of an engine that is attached meanwhile. Blocks."""

    async def run() -> Any:
        client = ShardClient(socket)
        engine = await Engine.attach(client)
        try:
            return await work(engine)
        finally:
            engine.let_go()
            await client.close()

    return asyncio.run(run())
