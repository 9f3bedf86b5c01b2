"""One model of a program at one pool: names its blocks, writes them, asks for them. Both faces of the API share it.

All coroutines run on the loop of the pool's thread. Bytes are copied by other threads, so that no copy holds up the
renewal of a lease.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

from kvservice.aio import in_thread
from kvservice.api.hit import HeldBlocks, Hit
from kvservice.api.layout import Array, Arrays, Layout, Tokens, pack_tokens
from kvservice.api.mapped import MappedPool
from kvservice.api.reasons import NO_POOL, TOO_LONG
from kvservice.core.block.fingerprint import Fingerprint
from kvservice.core.block.keys import DEFAULT_TENANT_KEY, KEYS_PER_REQUEST_MAX, block_keys, chain_packed, span_route
from kvservice.core.block.numbers import number_fields
from kvservice.core.explain.records import check_request_id
from kvservice.core.messages import (
    AcquireRequest,
    AcquireResult,
    Attachment,
    EngineSpec,
    MissReason,
    RequestReport,
    SealItem,
    SealStatus,
    WarmRequest,
)
from kvservice.core.segment.digest import digest_payload
from kvservice.core.segment.header import unpack_header
from kvservice.core.segment.refs import BlockRef
from kvservice.errors import InvalidRequest, KVServiceError, Unavailable
from kvservice.pool.port import PoolPort
from kvservice.session.session import Session
from kvservice.units import BlockKey, MiB

Verify: TypeAlias = Literal["sampled", "full", "off"]
T = TypeVar("T")

SAMPLE_ONE_IN = 16  # blocks a digest check, as in engines: it costs little, and memory that goes bad shows soon
# Bytes reserved and sealed at a time. A put holds no more of the pool than this from others, and what it has sealed
# others can read already.
BATCH_BYTES = 64 * MiB
BATCH_BLOCKS_MAX = 1024  # the same for small blocks: a shard reserves at most 4,096 slots a call
TIMEOUT_SECONDS_MAX = 600.0  # as for engines: a request that waits longer is forgotten rather than waited for
FULL = "full"


@dataclass(frozen=True, slots=True)
class PutResult:
    """What became of the blocks of a put, counted in blocks: `stored + present + dropped` is their number.

    Dropped are the last ones, so that what is stored is a prefix. `reason` says why: `full` (no slot could be freed),
    `unavailable` (the shard is away), `too_long` (a prompt is stored up to its 8,192nd block).

    >>> from kvservice import PutResult
    >>> PutResult(stored=3, present=1, dropped=0).is_complete
    True
    """

    stored: int  # new in the pool
    present: int  # in the pool already; nothing changed
    dropped: int  # not stored
    reason: str = ""  # why blocks were dropped; empty when none were

    @property
    def is_complete(self) -> bool:
        """Whether every block is in the pool now."""
        return not self.dropped


class AttachedModel:
    """Made by `PoolThread.attach`."""

    def __init__(
        self,
        open_pool: Callable[[], Awaitable[PoolPort]],
        model: str,
        layout: Layout,
        identity: Mapping[str, object],
        namespace: str,
        verify: Verify,
    ) -> None:
        if verify not in ("sampled", "full", "off"):
            raise InvalidRequest(f"verify is 'sampled', 'full' or 'off', not {verify!r}")
        if not model:
            raise InvalidRequest("a model needs a name: it says which blocks are equal")
        self.model, self.layout = model, layout
        fields = {
            "api": 1,  # of the way in which this module names blocks
            "model": model,
            "block_tokens": layout.block_tokens,
            "shape": layout.shape,
            "dtype": layout.dtype,
            **number_fields(layout.dtype, layout.shape[-1], 0, layout.accept_codec),
            **{f"identity.{name}": value for name, value in identity.items()},
        }
        self._fingerprint = Fingerprint.of(fields)
        self._engine_id = secrets.token_bytes(16)
        spec = EngineSpec(self._engine_id, model, self._fingerprint, layout.slot_layout(), namespace)
        self._session = Session(open_pool, spec, self._may_reattach, stock_min=None, on_end=self._attachment_ended)
        self._verify = verify
        self._looked_at = 0  # blocks handed out, for the sample
        self._mapped: MappedPool | None = None
        self._mapping = asyncio.Lock()
        self._puts: set[asyncio.Task[PutResult]] = set()
        self._serving: asyncio.Task[None] | None = None

    # -- life ----

    async def open(self) -> None:
        """Attach. Raises what the first attempt failed with; later attempts are made in the background."""
        self._serving = asyncio.create_task(self._session.serve())
        if await self._session.wait_for_attempt() is None:
            failure = self._session.failure or Unavailable("the pool did not answer")
            await self.close()
            raise failure

    @property
    def is_attached(self) -> bool:
        return self._session.attachment is not None

    async def close(self) -> None:
        """Wait for the puts under way, and leave. Idempotent."""
        if self._puts:
            await asyncio.wait(self._puts)
        self._session.stop()
        if self._serving is not None:
            await asyncio.wait([self._serving])
        self._attachment_ended()

    def drop_lock(self) -> None:
        """In a forked child."""
        if self._mapped is not None:
            self._mapped.drop_lock()

    # -- the calls ----

    async def get(self, tokens: Tokens, start: int, salt: str, timeout: float, request_id: str) -> Hit:
        keys_of, total = self._chain(tokens, salt)
        _check_timeout(timeout)
        request_id = check_request_id(request_id) or f"py-{secrets.token_hex(6)}"
        if not 0 <= start <= total:
            raise InvalidRequest(f"start is a block of the prompt, 0 to {total}, not {start}")
        if start >= min(total, KEYS_PER_REQUEST_MAX):  # there is nothing to ask for
            return self._miss(start, TOO_LONG if start < total else "", request_id)
        attachment, mapped = await self._pool()
        if attachment is None or mapped is None:
            return self._miss(start, NO_POOL, request_id)
        keys = keys_of(attachment)
        request = AcquireRequest(tuple(keys), start, timeout, request_id=request_id)
        result = await self._ask(attachment, request)
        if result is None:
            return self._miss(start, NO_POOL, request_id)
        try:
            hit = await in_thread(lambda: self._hit(mapped, request, result, total))
        except BaseException:
            self._session.release(attachment.attachment_id, result.lease_id)
            raise
        self._session.report(
            RequestReport(request_id, total, start, len(hit), total - start - len(hit), salted=bool(salt))
        )
        return hit

    async def put(self, tokens: Tokens, arrays: Arrays, start: int, salt: str) -> PutResult:
        """Goes on when its caller is cancelled: a thread may be writing."""
        task = asyncio.create_task(self._put(tokens, arrays, start, salt))
        self._puts.add(task)
        task.add_done_callback(self._puts.discard)
        return await asyncio.shield(task)

    async def warm(self, tokens: Tokens, salt: str, timeout: float, hold: float) -> int:
        """Make the prefix local without reading it, and hold it. Returns how many tokens of it are here."""
        keys_of, total = self._chain(tokens, salt)
        _check_timeout(timeout)
        attachment = self._session.attachment
        if attachment is None or not total:
            return 0
        request = WarmRequest(self._fingerprint.digest, tuple(keys_of(attachment)), timeout, hold)
        try:
            result = await self._session.pool_of(attachment).warm(request)
        except InvalidRequest:
            raise
        except KVServiceError:
            return 0
        here = result.local + sum(count for _, count in result.fetched)
        return here * self.layout.block_tokens

    # -- reading ----

    async def _ask(self, attachment: Attachment, request: AcquireRequest) -> AcquireResult | None:
        """What the pool promises; None when it is not there. Raises InvalidRequest."""
        try:
            return await self._session.ask(attachment, request)
        except InvalidRequest:
            raise
        except KVServiceError:
            return None

    def _hit(self, mapped: MappedPool, request: AcquireRequest, result: AcquireResult, total: int) -> Hit:
        """On a thread. The lease is given back with the hit, or here when there is nothing to read."""
        attachment, start = mapped.attachment, request.skip
        miss = "" if result.miss is MissReason.NONE else result.miss.value
        if not miss and len(request.keys) < total:
            miss = TOO_LONG

        def release() -> None:
            if result.lease_id:
                self._session.release(attachment.attachment_id, result.lease_id)

        wanted = request.keys[start : start + len(result.blocks)]
        headers = mapped.promised(result.blocks, wanted)
        if len(headers) < len(wanted):
            miss = MissReason.STALE.value
        opened = mapped.open_window([ref.slot for ref in result.blocks[: len(headers)]]) if headers else None
        if opened is None:
            release()
            return self._miss(start, miss or NO_POOL if wanted else miss, request.request_id)
        held = HeldBlocks(*opened, headers, release)
        sound = self._sound(held, wanted)
        if sound < len(headers):
            del headers[sound:]
            miss = MissReason.CORRUPT.value
        if not headers:
            held.window.close()
            release()
            return self._miss(start, miss, request.request_id)
        fetched = min(result.fetched_count, len(headers))
        return Hit(self.layout, held, start=start, fetched=fetched, miss=miss, request_id=request.request_id)

    def _sound(self, held: HeldBlocks, keys: Sequence[BlockKey]) -> int:
        """How many of the leading blocks have the digest that they were sealed with, as far as is looked."""
        if self._verify == "off":
            return len(held.headers)
        assert held.window.buffer is not None
        memory = memoryview(held.window.buffer).cast("B")
        for number, header in enumerate(held.headers):
            self._looked_at += 1
            if self._verify == "full" or self._looked_at % SAMPLE_ONE_IN == 0:
                begin = number * held.window.stride
                known = unpack_header(header)
                payload = memory[begin : begin + self.layout.block_bytes]
                if known is None or digest_payload(payload, keys[number]) != known.digest:
                    return number
        return len(held.headers)

    def _miss(self, start: int, miss: str, request_id: str) -> Hit:
        return Hit(self.layout, None, start=start, fetched=0, miss=miss, request_id=request_id)

    # -- writing ----

    async def _put(self, tokens: Tokens, arrays: Arrays, start: int, salt: str) -> PutResult:
        keys_of, total = self._chain(tokens, salt)
        blocks = self.layout.blocks_of(arrays)
        if start < 0 or start + len(blocks) > total:
            raise InvalidRequest(
                f"the prompt has {total} whole blocks, not {len(blocks)} from block {start} on: a part of a block "
                "cannot be stored"
            )
        attachment, mapped = await self._pool()
        if attachment is None or mapped is None:
            return _dropped(blocks, [], NO_POOL)
        keys = keys_of(attachment)
        storable = blocks[: max(len(keys) - start, 0)]
        statuses: list[SealStatus] = []
        reason = TOO_LONG if len(storable) < len(blocks) else ""
        batch = max(1, min(BATCH_BYTES // self.layout.block_bytes, BATCH_BLOCKS_MAX))
        while len(statuses) < len(storable):
            done = len(statuses)
            part = storable[done : done + batch]
            try:
                sealed = await self._store(mapped, keys, start + done, part)
            except KVServiceError:
                reason = NO_POOL
                break
            kept = [status for status in sealed if status in (SealStatus.SEALED, SealStatus.DUPLICATE)]
            statuses += kept
            if len(kept) < len(part):
                reason = FULL if len(kept) == len(sealed) else NO_POOL
                break
        return _dropped(blocks, statuses, reason)

    async def _store(
        self, mapped: MappedPool, keys: Sequence[BlockKey], start: int, blocks: Sequence[Array]
    ) -> list[SealStatus]:
        """Store some blocks, from block `start` of the chain on. Returns what became of those for which there was
        room."""
        attachment = mapped.attachment
        refs = await self._session.reserve(attachment, len(blocks))
        written = 0
        try:
            written = await in_thread(lambda: mapped.write(refs, blocks[: len(refs)]))
        finally:
            if written < len(refs):
                self._session.abort(attachment.attachment_id, refs[written:])
        if written < len(refs):
            raise Unavailable("the slots are not this program's any more")
        if not refs:
            return []
        return await self._session.store(attachment, _items(refs, keys, start))

    # -- inside ----

    def _chain(self, tokens: Tokens, salt: str) -> tuple[Callable[[Attachment], list[BlockKey]], int]:
        """(the keys of the prompt's blocks under an attachment, the number of its whole blocks)."""
        packed = pack_tokens(tokens)
        total = len(packed) // (4 * self.layout.block_tokens)
        hashes = chain_packed(packed, self.layout.block_tokens, salt.encode(), KEYS_PER_REQUEST_MAX)
        digest = self._fingerprint.digest

        def keys_of(attachment: Attachment) -> list[BlockKey]:
            return block_keys(digest, hashes, attachment.tenant_key or DEFAULT_TENANT_KEY)

        return keys_of, total

    async def _pool(self) -> tuple[Attachment | None, MappedPool | None]:
        """The attachment and its memory, mapped at first use. (None, None) while there is none."""
        async with self._mapping:
            attachment, mapped = self._session.attachment, self._mapped
            if attachment is None or (mapped is not None and mapped.attachment is attachment):
                return attachment, mapped if attachment is not None else None
            try:
                made = await in_thread(lambda: MappedPool(attachment, self._engine_id, self.layout))
            except KVServiceError:
                return None, None  # the shard was replaced meanwhile, or takes slots back
            if self._session.attachment is not attachment:
                made.close()
                return None, None
            self._mapped = made
            return attachment, made

    def _attachment_ended(self) -> None:
        if self._mapped is not None:
            self._mapped.close()

    def _may_reattach(self) -> bool:
        """Not while a thread writes: with the next attachment the shard gives the slots to others."""
        return self._mapped is None or not self._mapped.is_written


def _check_timeout(seconds: float) -> None:
    if not 0 <= seconds <= TIMEOUT_SECONDS_MAX:
        raise InvalidRequest(f"timeout is 0 to {TIMEOUT_SECONDS_MAX:g} seconds, not {seconds}")


def _dropped(blocks: Sequence[Any], statuses: Sequence[SealStatus], reason: str) -> PutResult:
    stored = sum(status is SealStatus.SEALED for status in statuses)
    return PutResult(stored, len(statuses) - stored, len(blocks) - len(statuses), reason)


def _items(refs: Sequence[BlockRef], keys: Sequence[BlockKey], start: int) -> list[SealItem]:
    found: list[SealItem] = []
    for position, ref in enumerate(refs, start):
        parent = keys[position - 1] if position else None
        found.append(SealItem(ref, keys[position], parent, position, span_route(keys, position)))
    return found
