"""A program at one pool: its session, the pool's memory as the program maps it, and writing blocks into slots.

All coroutines run on the loop of the pool's thread. Bytes are copied by other threads, so that no copy holds up the
renewal of a lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from itertools import takewhile
from typing import Any, TypeVar

from kvservice.aio import begun, in_thread, in_thread_to_its_end, to_its_end, within
from kvservice.api.arguments import name_of
from kvservice.api.layout import Array, Layout
from kvservice.api.mapped import Copy, MappedPool
from kvservice.api.reasons import NO_POOL
from kvservice.core.block.fingerprint import Fingerprint
from kvservice.core.messages import AcquireRequest, AcquireResult, Attachment, EngineSpec, SealItem, SealStatus
from kvservice.core.segment.refs import BlockRef
from kvservice.errors import InvalidRequest, KVServiceError, Unavailable
from kvservice.pool.port import PoolPort
from kvservice.session.session import Session
from kvservice.units import MiB

T = TypeVar("T")

# Bytes reserved and sealed at a time. A put holds no more of the pool than this from others, and what it has sealed
# others can read already.
BATCH_BYTES = 64 * MiB
BATCH_BLOCKS_MAX = 1024  # the same for small blocks: a shard reserves at most 4,096 slots a call
FULL = "full"


class AttachedProgram:
    """What the blocks are called is its caller's."""

    def __init__(
        self,
        open_pool: Callable[[], Awaitable[PoolPort]],
        model: str,
        layout: Layout,
        fields: Mapping[str, object],
        namespace: str,
    ) -> None:
        """`fields` are those of the fingerprint. Raises InvalidRequest."""
        if not name_of("model", model):
            raise InvalidRequest("a model needs a name: it says which blocks are equal")
        self.layout = layout
        self._engine_id = secrets.token_bytes(16)
        namespace = name_of("namespace", namespace)
        self.fingerprint = Fingerprint.of(fields).within(namespace)
        spec = EngineSpec(self._engine_id, model, self.fingerprint, layout.slot_layout(), namespace)
        self.session = Session(open_pool, spec, self._may_reattach, stock_min=None, on_end=self._attachment_ended)
        self._mapped: MappedPool | None = None
        self._mapping = asyncio.Lock()
        self._writes: set[asyncio.Task[Any]] = set()
        self._serving: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    # -- life ----

    async def begin(self) -> KVServiceError | None:
        """Attach, and go on trying in the background. Returns what the first attempt failed with."""
        self._loop = asyncio.get_running_loop()
        self._serving = self._loop.create_task(self.session.serve())
        if await self.session.wait_for_attempt() is None:
            return self.session.failure or Unavailable("the pool did not answer")
        return None

    async def open(self) -> None:
        """Attach. Raises what the first attempt failed with; later attempts are made in the background."""
        try:
            failure = await self.begin()
            if failure is not None:
                raise failure
        except BaseException:  # who gave up has nothing to close
            await self.close()
            raise

    @property
    def is_attached(self) -> bool:
        return self.session.attachment is not None

    async def close(self) -> None:
        """Wait for the writes under way, and leave. Idempotent."""
        if self._writes:
            await asyncio.wait(self._writes)
        self.session.stop()
        if self._serving is not None:
            await asyncio.wait([self._serving])
        self._attachment_ended()

    def drop_lock(self) -> None:
        """In a forked child."""
        if self._mapped is not None:
            self._mapped.drop_lock()

    # -- the pool ----

    async def memory(self) -> MappedPool | None:
        """The memory of the current attachment, mapped at first use. None while there is no pool."""
        attachment, mapped = self.session.attachment, self._mapped
        if attachment is None:
            return None
        if mapped is not None and mapped.attachment is attachment:
            return mapped
        return await self.write(self._map())  # on a thread, whose mapping nobody would close after a cancellation

    async def _map(self) -> MappedPool | None:
        async with self._mapping:
            attachment, mapped = self.session.attachment, self._mapped
            if attachment is None or (mapped is not None and mapped.attachment is attachment):
                return mapped if attachment is not None else None
            try:
                made = await in_thread(
                    lambda: MappedPool(attachment, self._engine_id, self.layout, self.session.suspect)
                )
            except KVServiceError:
                return None  # the shard was replaced meanwhile, or takes slots back
            if self.session.attachment is not attachment:
                made.close()
                return None
            self._mapped = made
            return made

    async def ask(self, attachment: Attachment, request: AcquireRequest) -> AcquireResult | None:
        """What the pool promises; None when it is not there. Raises InvalidRequest."""
        try:
            return await self.session.ask(attachment, request)
        except InvalidRequest:
            raise
        except KVServiceError:
            return None

    def release(self, attachment: Attachment, result: AcquireResult) -> None:
        """Give back what was promised. Any thread may call, wherever the garbage collector interrupts it: it takes no
        lock, which its thread may hold."""
        if result.lease_id and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and the lease with it
                self._loop.call_soon_threadsafe(self.session.release, attachment.attachment_id, result.lease_id)

    async def write(self, work: Coroutine[Any, Any, T]) -> T:
        """Await a write, which goes on when its caller is cancelled: a thread may be writing."""
        return await to_its_end(work, self._writes)

    async def write_for(self, work: Coroutine[Any, Any, T]) -> T:
        """Await a write, which ends with its caller: when that is cancelled, no thread reads its arrays any more."""
        return await within(None, begun(work, self._writes))

    async def store(
        self,
        mapped: MappedPool,
        blocks: Sequence[Array | Copy],
        items: Callable[[int, Sequence[BlockRef]], list[SealItem]],
        seconds: float | None = None,
    ) -> tuple[list[SealStatus], str]:
        """Write the blocks, batch by batch, and seal them. `items(first, refs)` names the slots of the blocks from
        number `first` on. Returns what became of the leading ones, which are in the pool, and why of no more. It waits
        for the pool's answers for `seconds` at most, by default as long as its calls may take."""
        clock = asyncio.get_running_loop().time
        began = clock()

        def left() -> float | None:
            return None if seconds is None else max(0.0, began + seconds - clock())

        statuses: list[SealStatus] = []
        batch = max(1, min(BATCH_BYTES // self.layout.block_bytes, BATCH_BLOCKS_MAX))
        while len(statuses) < len(blocks):
            first = len(statuses)
            part = blocks[first : first + batch]
            try:
                refs = await self._written(mapped, part, left())
                sealed = []
                if refs:
                    sealed = await within(left(), self.session.store(mapped.attachment, items(first, refs)))
            except (KVServiceError, asyncio.TimeoutError):
                return statuses, NO_POOL
            kept = list(takewhile(lambda status: status in (SealStatus.SEALED, SealStatus.DUPLICATE), sealed))
            statuses += kept
            if len(kept) < len(part):
                return statuses, FULL if len(kept) == len(sealed) else NO_POOL
        return statuses, ""

    # -- inside ----

    async def _written(
        self, mapped: MappedPool, blocks: Sequence[Array | Copy], seconds: float | None
    ) -> list[BlockRef]:
        """Slots with the leading blocks, as many as there was room for. Raises KVServiceError, and TimeoutError if
        there is no answer in time. A copy is never cut short."""
        attachment = mapped.attachment
        reserving = asyncio.ensure_future(self.session.reserve(attachment, len(blocks)))
        try:
            refs = await within(seconds, reserving)
        except asyncio.CancelledError:
            if not reserving.cancelled() and reserving.exception() is None:  # the slots came in the same moment
                self.session.abort(attachment.attachment_id, reserving.result())
            raise
        written = 0
        try:
            written = await in_thread_to_its_end(lambda: mapped.write(refs, blocks[: len(refs)]))
        finally:
            if written < len(refs):
                self.session.abort(attachment.attachment_id, refs[written:])
        if written < len(refs):
            raise Unavailable("the slots are not this program's any more")
        return refs

    def _attachment_ended(self) -> None:
        if self._mapped is not None:
            self._mapped.close()

    def _may_reattach(self) -> bool:
        """Not while a thread copies: with the next attachment the shard gives the slots to others."""
        return self._mapped is None or not self._mapped.is_used
