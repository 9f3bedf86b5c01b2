"""Blocks that are found by a name alone, for engines whose storage interface hands over one hash a block and no prompt.

A block stands for itself here: it has no place in a chain, and its own key says which lookup partition knows it. So a
name alone is enough to find it on any node. What a chain gives is given up: blocks are asked for one by one, and a
prefix may lose its first block before its last.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from kvservice.aio import ask_each, in_thread
from kvservice.api.attached import Verify
from kvservice.api.layout import Array, Layout
from kvservice.api.mapped import MappedPool
from kvservice.api.pool_thread import PoolThread
from kvservice.api.silence import ShardSilence
from kvservice.core.block.keys import block_key, route_of_head, term_key
from kvservice.core.messages import AcquireRequest, AcquireResult, SealItem
from kvservice.core.segment.digest_sample import DigestSample
from kvservice.core.segment.refs import BlockRef
from kvservice.memory.runs import in_one_pass
from kvservice.session.options import PoolOptions
from kvservice.units import BlockHash, BlockKey

# Blocks asked for at a time. A shard on this node answers each in a fraction of a millisecond, and one that comes from
# another node should not hold up the rest.
ASKED_MAX = 32


@dataclass(frozen=True, slots=True)
class PromisedBlock:
    """One block on this node, leased until `NamedBlocks.release`."""

    mapped: MappedPool
    key: BlockKey
    ref: BlockRef
    result: AcquireResult  # with its lease


class NamedBlocks:
    """Blocks of one shape in a pool. Calls return at once, with a future where there is something to wait for; any
    thread may call. While the pool is away nothing is found and nothing is stored; it is attached again by itself."""

    def __init__(
        self,
        options: PoolOptions,
        model: str,
        layout: Layout,
        identity: Mapping[str, object],
        *,
        namespace: str,
        verify: Verify = "sampled",
    ) -> None:
        """Opens the pool. `identity` must name everything that changes the bytes of a block and is not in its name.
        `verify` says which blocks are checked against their digest when they are read, as in `Pool.attach`.

        Blocks until the first attempt to attach has ended; `failure` says how. Raises what a pool in this process is
        refused with: SegmentError, or ConfigError."""
        self._thread = PoolThread(options)
        fields = {
            "named": 1,  # of the way in which this module names blocks
            "model": model,
            "block_tokens": layout.block_tokens,
            "shape": layout.shape,
            "dtype": layout.dtype,
            **identity,
        }
        self._sample = DigestSample(verify)
        self._silence = ShardSilence()
        self.term = b""  # of the weights, where they are changed in place: blocks of another term have other names
        try:
            attaching = self._thread.attach_program(model, layout, fields, namespace)
            self._program = self._thread.loop.wait(attaching)
        except BaseException:
            self._thread.end()
            raise

    @property
    def mode(self) -> str:
        """`service` or `embedded`."""
        return self._thread.mode.value

    @property
    def is_attached(self) -> bool:
        return self._program.is_attached

    @property
    def failure(self) -> str:
        """Why the last attempt to attach failed; empty while attached."""
        failure = self._program.session.failure
        return "" if failure is None else failure.message

    def hold(self, names: Sequence[bytes], seconds: float) -> Future[list[PromisedBlock | None]]:
        """Bring these blocks to this node and lease them; None for those that are not found within `seconds`. The
        caller releases what it is promised. It does not cancel the future: that would lose promises."""
        return self._thread.loop.submit(self._hold(names, seconds, self.term))

    def load(
        self, names: Sequence[bytes], held: Mapping[bytes, PromisedBlock], targets: Sequence[Array], seconds: float
    ) -> Future[list[bool]]:
        """Copy block by block into its target, and give `held` back, which are promises about some of them. The others
        are asked for first, as `hold` does. False for a block that was not found or not as promised; its target then
        holds nothing of use."""
        return self._thread.loop.submit(self._program.write(self._load(names, held, targets, seconds, self.term)))

    def put(self, names: Sequence[bytes], blocks: Sequence[Array], seconds: float | None = None) -> Future[list[bool]]:
        """Store blocks under their names. The result says which of them are in the pool then. The arrays must not
        change until it is there. It waits for the pool's answers for `seconds` at most, if they are given."""
        return self._thread.loop.submit(self._program.write(self._put(names, blocks, self.term, seconds)))

    def release(self, promises: Sequence[PromisedBlock]) -> None:
        """Give promised blocks back, each once."""
        for promise in promises:
            self._program.release(promise.mapped.attachment, promise.result)

    def close(self) -> None:
        """Leave the pool. Blocks until the writes under way have ended. Idempotent."""
        self._thread.end()

    # -- on the loop ----

    async def _hold(self, names: Sequence[bytes], seconds: float, term: bytes) -> list[PromisedBlock | None]:
        mapped = await self._program.memory()
        if mapped is None or not names or self._silence.spares(seconds):
            return [None] * len(names)
        clock, is_silent = asyncio.get_running_loop().time, False
        began = clock()
        until = began + seconds

        async def hold(name: bytes) -> PromisedBlock | None:
            nonlocal is_silent
            if is_silent:
                return None
            key = self._key(mapped, name, term)
            result = await self._program.ask(mapped.attachment, AcquireRequest((key,), 0, max(0.0, until - clock())))
            is_silent = is_silent or result is None
            if result is None or not result.blocks:
                return None
            return PromisedBlock(mapped, key, result.blocks[0], result)

        found = await ask_each(hold, names, ASKED_MAX)
        self._silence.ended(began, seconds, answered=not is_silent)
        return found

    async def _load(
        self,
        names: Sequence[bytes],
        held: Mapping[bytes, PromisedBlock],
        targets: Sequence[Array],
        seconds: float,
        term: bytes,
    ) -> list[bool]:
        promises = dict(held)
        try:
            others = [name for name in names if name not in promises]
            for name, promise in zip(others, await self._hold(others, seconds, term), strict=True):
                if promise is not None:
                    promises[name] = promise
            return await in_thread(
                lambda: [self._read(promises.get(name), row) for name, row in zip(names, targets, strict=True)]
            )
        finally:
            self.release(list(promises.values()))

    def _read(self, promise: PromisedBlock | None, target: Array) -> bool:
        """On a thread."""
        if promise is None:
            return False
        is_checked = self._sample.has_next(is_free=in_one_pass())
        return promise.mapped.read(promise.ref, promise.key, target, check_digest=is_checked)

    async def _put(
        self, names: Sequence[bytes], blocks: Sequence[Array], term: bytes, seconds: float | None
    ) -> list[bool]:
        mapped = await self._program.memory()
        if mapped is None:
            return [False] * len(names)
        keys = [self._key(mapped, name, term) for name in names]

        def items(first: int, refs: Sequence[BlockRef]) -> list[SealItem]:
            return [
                SealItem(ref, key, None, 0, route_of_head(key)) for ref, key in zip(refs, keys[first:], strict=False)
            ]

        statuses, _ = await self._program.store(mapped, blocks, items, seconds)
        return [number < len(statuses) for number in range(len(names))]

    def _key(self, mapped: MappedPool, name: bytes, term: bytes) -> BlockKey:
        tenant_key = term_key(mapped.attachment.tenant_key, term)
        return block_key(self._program.fingerprint.digest, BlockHash(name), tenant_key)
