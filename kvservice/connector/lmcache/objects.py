"""LMCache's objects in the pool: stored, looked up and locked, loaded. Imports nothing of LMCache.

An object is a block. Its layout and the weights are part of its name, so an asker finds only what was stored in its own
layout, and each layout has a session of its own. A lock is a lease. What fails is a miss, counted with its reason.

All coroutines run on the loop of the pool's thread; bytes are copied on other threads.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from kvservice.aio import begun, in_thread
from kvservice.api.layout import Layout
from kvservice.api.mapped import MappedPool
from kvservice.api.pool_thread import PoolThread
from kvservice.api.program import BATCH_BYTES, AttachedProgram
from kvservice.api.silence import ShardSilence
from kvservice.connector.lmcache.lent import LentMemory
from kvservice.connector.lmcache.locks import ObjectLocks, PromisedObject, SharedLease
from kvservice.connector.lmcache.names import ObjectKeyPort, ObjectLayout, identity_of, object_hash, rows_of
from kvservice.connector.lmcache.options import AdapterOptions
from kvservice.core.block.keys import KEYS_PER_REQUEST_MAX, block_keys, route_of_head, span_route
from kvservice.core.bounded_table import BoundedTable
from kvservice.core.messages import AcquireRequest, AcquireResult, SealItem
from kvservice.core.segment.digest_sample import DigestSample
from kvservice.core.segment.refs import BlockRef
from kvservice.errors import InvalidRequest, KVServiceError
from kvservice.memory.runs import in_one_pass
from kvservice.units import BlockKey, SpanRoute

log = logging.getLogger("kvservice.lmcache")

# Models and layouts that a server is attached for. One more makes the one leave that was used longest ago. A shard has
# 128 attachments for one tenant.
LAYOUTS_MAX = 64
# Objects whose place in their prompt is remembered from a lookup until they are stored; of 256 tokens, of 8 million.
PLACES_MAX = 1 << 15
# Requests for a row. Every second one goes on behind an object that is found by itself only: sixteen such objects are
# an answer of 4,096 tokens.
ASKS_MAX = 33


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a block is in its prompt. LMCache says so in lookups, and not when it stores."""

    parent: BlockKey | None
    position: int
    route: SpanRoute


@dataclass(frozen=True, slots=True)
class _ObjectPool:
    """The pool for objects of one model and layout, as it is attached now."""

    layout: ObjectLayout
    program: AttachedProgram
    mapped: MappedPool

    def keys_of(self, names: Sequence[ObjectKeyPort]) -> list[BlockKey]:
        hashes = [object_hash(name) for name in names]
        return block_keys(self.program.fingerprint.digest, hashes, self.mapped.attachment.tenant_key)

    async def ask(self, chain: Sequence[BlockKey], skip: int, seconds: float) -> AcquireResult | None:
        """What the pool promises of the chain behind its first `skip` blocks. None: there is nobody to ask."""
        try:
            return await self.program.ask(self.mapped.attachment, AcquireRequest(tuple(chain), skip, max(0.0, seconds)))
        except InvalidRequest as error:  # then the locks of other rows must not be lost
            log.warning("a lookup was refused: %s", error.message)
            return None

    def promised(self, result: AcquireResult, keys: Sequence[BlockKey]) -> list[PromisedObject]:
        """What an answer promises of these keys, under one lease."""
        lease = SharedLease(partial(self.program.release, self.mapped.attachment, result), len(result.blocks))
        pairs = zip(result.blocks, keys, strict=False)
        return [PromisedObject(self.layout, self.mapped, ref, key, lease) for ref, key in pairs]


class PooledObjects:
    """Made on any thread."""

    def __init__(self, options: AdapterOptions, thread: PoolThread, packing: str) -> None:
        self._options = options
        self._thread = thread
        self._packing = packing
        self._attaching: BoundedTable[tuple[str, ObjectLayout], asyncio.Task[AttachedProgram | None]]
        self._attaching = BoundedTable(LAYOUTS_MAX, self._leave)
        self._leaving: set[asyncio.Task[None]] = set()
        self._locks = ObjectLocks()
        self._forgetting: asyncio.TimerHandle | None = None  # while there are locks
        self._places: BoundedTable[BlockKey, _Place] = BoundedTable(PLACES_MAX)
        # By model and group, as stored last.
        self._last_layout: BoundedTable[tuple[str, int], ObjectLayout] = BoundedTable(LAYOUTS_MAX)
        self._silence = ShardSilence()
        self._sample = DigestSample(options.verify_load.value)
        self.counters: Counter[str] = Counter()

    @property
    def lock_count(self) -> int:
        return len(self._locks)

    @property
    def is_attached(self) -> bool:
        """Whether each of its sessions has a pool now."""
        return all(one.is_attached for one in self._thread.attached)

    # -- what LMCache asks for ----

    async def store(
        self, keys: Sequence[ObjectKeyPort], layouts: Sequence[ObjectLayout], lent: Sequence[LentMemory]
    ) -> list[bool]:
        """Copy these objects into the pool. Returns of each whether it is there now."""
        stored = [False] * len(keys)
        groups: dict[tuple[str, ObjectLayout], list[int]] = {}
        for index, (key, layout, memory) in enumerate(zip(keys, layouts, lent, strict=True)):
            if memory.array.nbytes != layout.size_bytes:
                self.counters["dropped_size"] += 1
                continue
            self._last_layout.put((key.model_name, key.object_group_id), layout)
            groups.setdefault((key.model_name, layout), []).append(index)
        for (model, layout), indices in groups.items():
            count = await self._store(model, layout, [keys[i] for i in indices], [lent[i] for i in indices])
            for index in indices[:count]:
                stored[index] = True
        return stored

    async def lock(self, keys: Sequence[ObjectKeyPort], layouts: Mapping[int, ObjectLayout | None]) -> list[bool]:
        """Look these objects up in the layout that their group has in `layouts`, bring them to this node and lock them.

        Returns of each whether it is found and locked. An asker that says no layout is taken to mean what was stored
        last: what it then loads must have the size and layout of its own memory all the same.
        """
        found = [False] * len(keys)
        rows = rows_of(keys)
        hits = await asyncio.gather(*(self._lock_row([keys[index] for index in row], layouts) for row in rows))
        for row, count in zip(rows, hits, strict=True):
            for index in row[:count]:
                found[index] = True
        self.counters["objects_found"] += found.count(True)
        self.counters["objects_missed"] += found.count(False)
        return found

    async def unlock(self, keys: Sequence[ObjectKeyPort]) -> None:
        """Take back one lock on each of these objects. What is not locked is left alone."""
        self.counters["unlocked_twice"] += [self._locks.remove(key) for key in keys].count(False)

    async def load(
        self, keys: Sequence[ObjectKeyPort], layouts: Sequence[ObjectLayout], lent: Sequence[LentMemory]
    ) -> list[bool]:
        """Copy these objects out of the pool. Returns of each whether it was loaded.

        An object that is not locked in this layout is looked up now.
        """
        fits = [one.array.nbytes == layout.size_bytes for one, layout in zip(lent, layouts, strict=True)]
        self._count_misses("size", fits.count(False))
        locked = [self._locks.find(key, layout) for key, layout in zip(keys, layouts, strict=True)]
        missing = [index for index, (fit, one) in enumerate(zip(fits, locked, strict=True)) if fit and one is None]
        asked = await asyncio.gather(*(self._promise_alone(keys[index], layouts[index]) for index in missing))
        try:
            promised = dict(zip(missing, asked, strict=True)) | {i: one for i, one in enumerate(locked) if one}
            work = [(index, one, lent[index]) for index, one in promised.items() if one is not None and fits[index]]
            loaded = [False] * len(keys)
            for index, is_loaded in await self._copy_all(work):
                loaded[index] = is_loaded
            failed = [memory.is_lent() for index, _, memory in work if not loaded[index]]
            self._count_misses("broken_promise", failed.count(True))
            self._count_misses("taken_back", failed.count(False))
        finally:
            for one in asked:
                if one is not None:
                    one.lease.let_go()
        self.counters["objects_loaded"] += loaded.count(True)
        return loaded

    async def close(self) -> None:
        """Take back every lock. The sessions end with the pool's thread."""
        self._locks.clear()
        if self._forgetting is not None:
            self._forgetting.cancel()
        if self._leaving:
            await asyncio.wait(self._leaving)

    # -- storing ----

    async def _store(
        self, model: str, layout: ObjectLayout, names: Sequence[ObjectKeyPort], lent: Sequence[LentMemory]
    ) -> int:
        """Store objects of one layout. Returns how many of the first of them are in the pool now."""
        pool = await self._pool_of(model, layout)
        if pool is None:
            return 0
        keys = pool.keys_of(names)

        def items(first: int, refs: Sequence[BlockRef]) -> list[SealItem]:
            return [self._item(ref, key) for ref, key in zip(refs, keys[first:], strict=False)]

        copies = [memory.copy_to for memory in lent]
        statuses, why = await pool.program.write(pool.program.store(pool.mapped, copies, items))
        self.counters.update(f"objects_{status.value}" for status in statuses)
        if why:
            reason = why if all(memory.is_lent() for memory in lent) else "taken_back"
            self.counters[f"dropped_{reason}"] += len(names) - len(statuses)
        return len(statuses)

    def _item(self, ref: BlockRef, key: BlockKey) -> SealItem:
        place = self._places.get(key) or _Place(None, 0, route_of_head(key))
        return SealItem(ref, key, place.parent, place.position, place.route)

    # -- looking up ----

    async def _lock_row(self, row: Sequence[ObjectKeyPort], layouts: Mapping[int, ObjectLayout | None]) -> int:
        """Lock the longest run of a row's first objects. Returns its length."""
        model, group = row[0].model_name, row[0].object_group_id
        layout = layouts.get(group) or self._last_layout.get((model, group))
        if layout is None:
            self._count_misses("no_layout", len(row))
            return 0
        pool = await self._pool_of(model, layout)
        if pool is None:
            self._count_misses("unavailable", len(row))
            return 0
        keys = pool.keys_of(row[:KEYS_PER_REQUEST_MAX])
        self._learn_places(keys)
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._options.fetch_timeout_seconds
        hits, alone, miss = 0, False, "unavailable"
        for _ in range(ASKS_MAX):
            # By itself the directory knows an object that was stored before its place was known, because it was
            # generated and not prompted. Behind it the prompt goes on.
            chain, skip = ([keys[hits]], 0) if alone else (keys, hits)
            result = await self._ask(pool, chain, skip, deadline - clock())
            if result is None:
                break
            promised = pool.promised(result, keys[hits:])
            for name, one in zip(row[hits:], promised, strict=False):
                self._locks.add(name, one, clock())
            self._forget_in_time()
            hits, miss = hits + len(promised), result.miss.value
            if hits >= len(keys) or (alone and not promised):
                break
            alone = not alone
        self._count_misses(miss, len(row) - hits)
        return hits

    async def _ask(
        self, pool: _ObjectPool, chain: Sequence[BlockKey], skip: int, seconds: float
    ) -> AcquireResult | None:
        """As the pool's `ask`; None at once while the shard is silent, but for one that tries it."""
        began = asyncio.get_running_loop().time()
        if self._silence.spares(self._options.fetch_timeout_seconds):
            self.counters["lookups_spared"] += 1
            return None
        result = await pool.ask(chain, skip, seconds)
        self._silence.ended(began, seconds, answered=result is not None)
        return result

    def _forget_in_time(self) -> None:
        """End the oldest locks when it is time, also if no lookup ever comes again."""
        if self._forgetting is None and (ends_at := self._locks.next_end) is not None:
            self._forgetting = asyncio.get_running_loop().call_at(ends_at, self._forget)

    def _forget(self) -> None:
        self._forgetting = None
        self.counters["locks_expired"] += self._locks.expire(asyncio.get_running_loop().time())
        self._forget_in_time()

    def _learn_places(self, keys: Sequence[BlockKey]) -> None:
        for position, key in enumerate(keys):
            parent = keys[position - 1] if position else None
            self._places.put(key, _Place(parent, position, span_route(keys, position)))

    async def _promise_alone(self, name: ObjectKeyPort, layout: ObjectLayout) -> PromisedObject | None:
        """The object by itself; the caller gives its lease back."""
        pool = await self._pool_of(name.model_name, layout)
        keys = [] if pool is None else pool.keys_of([name])
        result = None if pool is None else await self._ask(pool, keys, 0, self._options.fetch_timeout_seconds)
        found = [] if pool is None or result is None else pool.promised(result, keys)
        if not found:
            self._count_misses("unavailable" if result is None else result.miss.value, 1)
        return found[0] if found else None

    # -- loading ----

    async def _copy_all(self, work: Sequence[tuple[int, PromisedObject, LentMemory]]) -> list[tuple[int, bool]]:
        """(index, whether it was copied) of each; several threads copy."""
        portions: list[list[tuple[int, PromisedObject, LentMemory]]] = []
        size = BATCH_BYTES
        for item in work:
            if size >= BATCH_BYTES:
                portions.append([])
                size = 0
            portions[-1].append(item)
            size += item[2].array.nbytes
        done = await asyncio.gather(*(in_thread(partial(self._copy, part)) for part in portions))
        return [result for part in done for result in part]

    def _copy(self, work: Sequence[tuple[int, PromisedObject, LentMemory]]) -> list[tuple[int, bool]]:
        return [(index, self._copy_one(one, memory)) for index, one, memory in work]

    def _copy_one(self, one: PromisedObject, memory: LentMemory) -> bool:
        if not memory.is_lent():
            return False
        is_checked = self._sample.has_next(is_free=in_one_pass())
        return one.mapped.read(one.ref, one.key, memory.array, check_digest=is_checked) and memory.is_lent()

    # -- inside ----

    async def _pool_of(self, model: str, layout: ObjectLayout) -> _ObjectPool | None:
        """The pool for this model and layout; None while there is none."""
        attaching = self._attaching.get((model, layout))
        if attaching is None:
            attaching = self._attaching.put((model, layout), asyncio.create_task(self._attach(model, layout)))
        if not attaching.done():
            await asyncio.wait([attaching], timeout=self._options.fetch_timeout_seconds)
        program = attaching.result() if attaching.done() else None
        mapped = None if program is None else await program.memory()
        return None if program is None or mapped is None else _ObjectPool(layout, program, mapped)

    async def _attach(self, model: str, layout: ObjectLayout) -> AttachedProgram | None:
        fields = identity_of(model, layout, self._options.weights_version, self._packing)
        # A namespace of its own: else the engines of one model in two types of numbers would refuse each other.
        namespace = f"{self._options.namespace}/{layout}"
        try:
            slot = Layout(layout.tokens, (layout.size_bytes,), "uint8")
            return await self._thread.attach_program(model, slot, fields, namespace)
        except KVServiceError as error:
            self.counters["layout_refused"] += 1
            log.warning("objects of %s in %s are not cached: %s", model, layout, error.message)
            return None

    def _leave(self, attaching: asyncio.Task[AttachedProgram | None]) -> None:
        """Give up a session. Its locks end with it, and what is loaded through it now is a miss."""

        async def leave() -> None:
            program = await attaching
            if program is not None:
                await self._thread.detach(program)

        self.counters["layout_left"] += 1
        begun(leave(), self._leaving)

    def _count_misses(self, reason: str, count: int) -> None:
        if count:
            self.counters[f"miss_{reason}"] += count
