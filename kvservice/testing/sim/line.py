"""The connection between a session and the pool of its node: a PoolPort over calls that misbehave.

It does what client.shard and shard.engine_socket do for real processes: deadlines, the connection whose end is the end
of an attachment, on both sides, and that a call belongs to the boot which its connection was made to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from kvservice.aio import is_set_within
from kvservice.client.engine_link import SILENCE_SECONDS
from kvservice.client.shard import ACQUIRE_SLACK_SECONDS, ATTACH_SECONDS, CALL_SECONDS, SEAL_SECONDS
from kvservice.core.messages import (
    AcquireRequest,
    AcquireResult,
    Attachment,
    EngineSpec,
    Removed,
    RequestReport,
    SealItem,
    SealStatus,
    Statement,
    WarmRequest,
    WarmResult,
)
from kvservice.core.segment.refs import BlockRef
from kvservice.errors import NotAttached
from kvservice.pool.runtime import PoolRuntime
from kvservice.testing.sim.calls import SimCaller
from kvservice.testing.sim.parts import EngineParts
from kvservice.units import AttachmentId, BootEpoch, HandoffId, LeaseId

T = TypeVar("T")
HEARTBEAT_SECONDS = 2.0  # Heartbeats of the connection, at the interval that shard.engine_socket has.


@dataclass(slots=True, eq=False)
class _AttachmentStream:
    """The connection of one attachment, with both ends."""

    on_lost: Callable[[str], None]
    attachment: Attachment | None = None  # once the engine has heard of it
    heard_at: float = 0.0
    is_over: bool = False


class Line:
    def __init__(self, engine: EngineParts) -> None:
        self._engine = engine
        self._node = engine.node
        self._world = engine.world
        self._caller = SimCaller(engine, engine.name)
        self._streams: dict[AttachmentId, _AttachmentStream] = {}

    # -- PoolPort ----

    async def attach(self, spec: EngineSpec, on_lost: Callable[[str], None]) -> Attachment:
        stream = _AttachmentStream(on_lost)

        async def serve(runtime: PoolRuntime) -> Attachment:
            return await self._serve_attach(runtime, spec, stream)

        try:
            stream.attachment = await self._caller.call(self._node, ATTACH_SECONDS, serve)
        except BaseException:
            stream.is_over = True
            raise
        stream.heard_at = self._engine.clock()
        self._streams[stream.attachment.attachment_id] = stream
        self._engine.loop.start(self._follow(stream))
        return stream.attachment

    async def detach(self, attachment: AttachmentId) -> None:
        stream = self._streams.get(attachment)
        if stream is not None:
            try:
                await self._ask(attachment, CALL_SECONDS, lambda runtime: runtime.detach(attachment))
            finally:
                self._close(stream)

    async def acquire(self, attachment: AttachmentId, request: AcquireRequest) -> AcquireResult:
        async def serve(runtime: PoolRuntime) -> AcquireResult:
            clears, asked_at = self._node.clears, self._world.now
            cleared = tuple(clears.applied)
            result = await runtime.acquire(attachment, request)
            self._engine.check_promised(request, result)
            start = request.skip if request.tail_at is None else result.tail_index
            promised = request.keys[start:][: len(result.blocks)]
            clears.check_promised(promised, cleared)
            self._node.ages.check_promised(promised, asked_at)
            return result

        seconds = request.timeout_seconds + ACQUIRE_SLACK_SECONDS
        result = await self._ask(attachment, seconds, serve)
        self._engine.promised(result)
        return result

    async def reserve(self, attachment: AttachmentId, count: int, group: int = 0, call: int = 0) -> list[BlockRef]:
        async def serve(runtime: PoolRuntime) -> list[BlockRef]:
            with self._node.quotas_kept(attachment):
                return await runtime.reserve(attachment, count, group, call)

        return await self._ask(attachment, CALL_SECONDS, serve)

    async def seal(self, attachment: AttachmentId, items: Sequence[SealItem]) -> list[SealStatus]:
        async def serve(runtime: PoolRuntime) -> list[SealStatus]:
            self._computed(items)
            result = await runtime.seal(attachment, items)
            self._computed(items)
            return result

        return await self._ask(attachment, SEAL_SECONDS, serve)

    def _computed(self, items: Sequence[SealItem]) -> None:
        self._world.computed.update((item.key, self._world.now) for item in items)

    async def abort(self, attachment: AttachmentId, refs: Sequence[BlockRef]) -> None:
        await self._ask(attachment, CALL_SECONDS, lambda runtime: runtime.abort(attachment, refs))

    async def release(self, attachment: AttachmentId, lease_ids: Sequence[LeaseId]) -> None:
        await self._ask(attachment, CALL_SECONDS, lambda runtime: runtime.release(attachment, lease_ids))

    async def renew(
        self,
        attachment: AttachmentId,
        lease_ids: Sequence[LeaseId],
        reports: Sequence[RequestReport] = (),
        statement: Statement | None = None,
        suspects: Sequence[BlockRef] = (),
    ) -> Removed:
        removed: Removed = await self._ask(
            attachment, CALL_SECONDS, lambda runtime: runtime.renew(attachment, lease_ids, reports, statement, suspects)
        )
        return removed

    async def open_handoff(self, attachment: AttachmentId, handoff: HandoffId, call: int = 0) -> None:
        await self._ask(attachment, CALL_SECONDS, lambda runtime: runtime.open_handoff(attachment, handoff, call))

    async def close_handoff(self, attachment: AttachmentId, handoff: HandoffId) -> None:
        await self._ask(attachment, CALL_SECONDS, lambda runtime: runtime.close_handoff(attachment, handoff))

    async def warm(self, request: WarmRequest) -> WarmResult:
        seconds, tenant = request.timeout_seconds + ACQUIRE_SLACK_SECONDS, self._engine.tenant
        return await self._caller.call(self._node, seconds, lambda runtime: runtime.warm(request, tenant))

    async def close(self) -> None:
        for attachment in list(self._streams):
            await self.detach(attachment)

    # -- calls ----

    async def _ask(self, attachment: AttachmentId, seconds: float, work: Callable[[PoolRuntime], Awaitable[T]]) -> T:
        stream = self._streams.get(attachment)
        epoch = BootEpoch(0) if stream is None or stream.attachment is None else stream.attachment.epoch

        async def serve(runtime: PoolRuntime) -> T:
            if runtime.epoch != epoch:
                raise NotAttached(f"{self._node.name} restarted: it is in epoch {runtime.epoch}, the call of {epoch}")
            return await work(runtime)

        return await self._caller.call(self._node, seconds, serve)

    # -- the connection ----

    async def _serve_attach(self, runtime: PoolRuntime, spec: EngineSpec, stream: _AttachmentStream) -> Attachment:
        engine, node, life = self._engine, self._node, self._engine.life
        lost: asyncio.Event = asyncio.Event()
        given = await runtime.attach(spec, lambda reason: lost.set(), engine.tenant)
        attachment = replace(given, tenant_key=engine.tenant_key, quota_bytes=node.quota_of(engine.tenant))

        async def tell() -> None:
            """Send heartbeats until either side is gone."""
            while not lost.is_set() and not stream.is_over and engine.life == life:
                self._world.send(node.name, engine.name, self._hear, life, stream, attachment)
                await is_set_within(HEARTBEAT_SECONDS / 4, lost)
            runtime.attachment_lost(attachment.attachment_id)
            self._world.send(node.name, engine.name, self._hear_end, life, stream, attachment)

        node.loop.start(tell())
        return attachment

    def _hear(self, life: int, stream: _AttachmentStream, attachment: Attachment) -> None:
        if self._engine.life == life and stream.attachment is attachment:
            stream.heard_at = self._engine.clock()

    def _hear_end(self, life: int, stream: _AttachmentStream, attachment: Attachment) -> None:
        if self._engine.life == life and stream.attachment is attachment:
            self._engine.receive(self._lose, stream, "the shard closed the connection")

    async def _follow(self, stream: _AttachmentStream) -> None:
        """Give up a connection on which nothing was heard for too long."""
        while not stream.is_over:
            silent = self._engine.clock() - stream.heard_at
            if silent >= SILENCE_SECONDS:
                self._lose(stream, f"no heartbeat for {silent:.0f} s")
                return
            await asyncio.sleep(SILENCE_SECONDS - silent + 0.001)

    def node_died(self) -> None:
        """The node died: every connection to it broke."""
        self._caller.cut(self._node)
        for stream in list(self._streams.values()):
            self._lose(stream, "the connection broke")

    def _lose(self, stream: _AttachmentStream, reason: str) -> None:
        if not stream.is_over:
            self._close(stream)
            stream.on_lost(reason)

    def _close(self, stream: _AttachmentStream) -> None:
        stream.is_over = True
        if stream.attachment is not None:
            self._streams.pop(stream.attachment.attachment_id, None)
