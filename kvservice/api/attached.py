"""One model of a program at one pool: names its blocks, writes them, asks for them. Both faces of the API share it.

All coroutines run on the loop of the pool's thread. Bytes are copied by other threads, so that no copy holds up the
renewal of a lease.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from kvservice.aio import in_thread
from kvservice.api.arguments import identity_fields, seconds, text, whole_number
from kvservice.api.hit import HeldBlocks, Hit
from kvservice.api.layout import Arrays, Layout, Tokens, pack_tokens
from kvservice.api.mapped import MappedPool
from kvservice.api.program import AttachedProgram
from kvservice.api.reasons import NO_POOL, TOO_LONG
from kvservice.core.acquire.holds import HOLD_SECONDS_MAX
from kvservice.core.block.keys import KEYS_PER_REQUEST_MAX, block_keys, chain_packed, span_route
from kvservice.core.block.numbers import number_fields
from kvservice.core.explain.records import check_request_id
from kvservice.core.messages import (
    AcquireRequest,
    AcquireResult,
    Attachment,
    MissReason,
    RequestReport,
    SealItem,
    SealStatus,
    WarmRequest,
)
from kvservice.core.segment.digest import digest_payload
from kvservice.core.segment.digest_sample import DigestSample
from kvservice.core.segment.header import unpack_header
from kvservice.core.segment.refs import BlockRef
from kvservice.errors import InvalidRequest, KVServiceError
from kvservice.pool.port import PoolPort
from kvservice.units import BlockKey

Verify: TypeAlias = Literal["sampled", "full", "off"]

TIMEOUT_SECONDS_MAX = 600.0  # as for engines: a request that waits longer is forgotten rather than waited for


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
        self.model, self.layout = model, layout
        fields = {
            "api": 1,  # of the way in which this module names blocks
            "model": model,
            "block_tokens": layout.block_tokens,
            "shape": layout.shape,
            "dtype": layout.dtype,
            **number_fields(layout.dtype, layout.shape[-1], 0, layout.accept_codec),
            **identity_fields(identity),
        }
        self._program = AttachedProgram(open_pool, model, layout, fields, namespace)
        self._verify = verify
        self._sample = DigestSample(verify)

    # -- life ----

    async def open(self) -> None:
        """Attach. Raises what the first attempt failed with; later attempts are made in the background."""
        await self._program.open()

    @property
    def is_attached(self) -> bool:
        return self._program.is_attached

    async def close(self) -> None:
        """Wait for the puts under way, and leave. Idempotent."""
        await self._program.close()

    def drop_lock(self) -> None:
        """In a forked child."""
        self._program.drop_lock()

    # -- the calls ----

    async def get(self, tokens: Tokens, start: int, salt: str, timeout: float, request_id: str) -> Hit:
        keys_of, total = self._chain(tokens, salt)
        timeout = seconds("timeout", timeout, TIMEOUT_SECONDS_MAX)
        start = whole_number("start", start)
        request_id = check_request_id(text("request_id", request_id)) or f"py-{secrets.token_hex(6)}"
        if not 0 <= start <= total:
            raise InvalidRequest(f"start is a block of the prompt, 0 to {total}, not {start}")
        if start >= min(total, KEYS_PER_REQUEST_MAX):  # there is nothing to ask for
            return self._miss(start, TOO_LONG if start < total else "", request_id)
        mapped = await self._program.memory()
        if mapped is None:
            return self._miss(start, NO_POOL, request_id)
        keys = keys_of(mapped.attachment)
        request = AcquireRequest(tuple(keys), start, timeout, request_id=request_id)
        result = await self._program.ask(mapped.attachment, request)
        if result is None:
            return self._miss(start, NO_POOL, request_id)
        try:
            hit = await in_thread(lambda: self._hit(mapped, request, result, total))
        except BaseException:
            self._program.release(mapped.attachment, result)
            raise
        self._program.session.report(
            RequestReport(request_id, total, start, len(hit), total - start - len(hit), salted=bool(salt))
        )
        return hit

    async def put(self, tokens: Tokens, arrays: Arrays, start: int, salt: str) -> PutResult:
        return await self._program.write_for(self._put(tokens, arrays, start, salt))

    async def warm(self, tokens: Tokens, salt: str, timeout: float, hold: float) -> int:
        """Make the prefix local without reading it, and hold it. Returns how many tokens of it are here."""
        keys_of, total = self._chain(tokens, salt)
        timeout = seconds("timeout", timeout, TIMEOUT_SECONDS_MAX)
        hold = seconds("hold", hold, HOLD_SECONDS_MAX)
        attachment = self._program.session.attachment
        if attachment is None or not total:
            return 0
        request = WarmRequest(self._program.fingerprint.digest, tuple(keys_of(attachment)), timeout, hold)
        try:
            result = await self._program.session.pool_of(attachment).warm(request)
        except InvalidRequest:
            raise
        except KVServiceError:
            return 0
        here = result.local + sum(count for _, count in result.fetched)
        return here * self.layout.block_tokens

    # -- reading ----

    def _hit(self, mapped: MappedPool, request: AcquireRequest, result: AcquireResult, total: int) -> Hit:
        """On a thread. The lease is given back with the hit, or here when there is nothing to read."""
        attachment, start = mapped.attachment, request.skip
        miss = "" if result.miss is MissReason.NONE else result.miss.value
        if not miss and len(request.keys) < total:
            miss = TOO_LONG

        def release() -> None:
            self._program.release(attachment, result)

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
            mapped.suspect(result.blocks[sound : sound + 1])
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
            if self._sample.has_next():
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
        start, blocks = whole_number("start", start), self.layout.blocks_of(arrays)
        if start < 0 or start + len(blocks) > total:
            raise InvalidRequest(
                f"the prompt has {total} whole blocks, not {len(blocks)} from block {start} on: a part of a block "
                "cannot be stored"
            )
        mapped = await self._program.memory()
        if mapped is None:
            return _dropped(blocks, [], NO_POOL)
        keys = keys_of(mapped.attachment)
        storable = blocks[: max(len(keys) - start, 0)]
        statuses, reason = await self._program.store(
            mapped, storable, lambda first, refs: _items(refs, keys, start + first)
        )
        if not reason and len(storable) < len(blocks):
            reason = TOO_LONG
        return _dropped(blocks, statuses, reason)

    # -- inside ----

    def _chain(self, tokens: Tokens, salt: str) -> tuple[Callable[[Attachment], list[BlockKey]], int]:
        """(the keys of the prompt's blocks under an attachment, the number of its whole blocks)."""
        packed, root = pack_tokens(tokens), text("salt", salt).encode()
        total = len(packed) // (4 * self.layout.block_tokens)
        hashes = chain_packed(packed, self.layout.block_tokens, root, KEYS_PER_REQUEST_MAX)
        digest = self._program.fingerprint.digest

        def keys_of(attachment: Attachment) -> list[BlockKey]:
            return block_keys(digest, hashes, attachment.tenant_key)

        return keys_of, total


def _dropped(blocks: Sequence[Any], statuses: Sequence[SealStatus], reason: str) -> PutResult:
    stored = sum(status is SealStatus.SEALED for status in statuses)
    return PutResult(stored, len(statuses) - stored, len(blocks) - len(statuses), reason)


def _items(refs: Sequence[BlockRef], keys: Sequence[BlockKey], start: int) -> list[SealItem]:
    found: list[SealItem] = []
    for position, ref in enumerate(refs, start):
        parent = keys[position - 1] if position else None
        found.append(SealItem(ref, keys[position], parent, position, span_route(keys, position)))
    return found
