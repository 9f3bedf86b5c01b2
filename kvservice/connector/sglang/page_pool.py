"""One host pool of SGLang at the pool of the node: its pages are found, loaded and stored by their hashes. No engine.

SGLang asks first how much of a prompt there is, and reads later, or never. So what is found is fetched to this node and
leased at once: a promise, which ends with the last of its pages that is read, or by itself after a while. Reading is
then a copy.

The calls block, and come from SGLang's own threads; each ends by its own deadline. Nothing is found and nothing is
stored while there is no pool.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf

from kvservice.aio import ask_each
from kvservice.api.loop import LoopThread
from kvservice.api.mapped import MappedPool
from kvservice.api.program import AttachedProgram
from kvservice.api.reasons import NO_POOL, TOO_LONG
from kvservice.api.silence import ShardSilence
from kvservice.connector.options import Verify
from kvservice.connector.sglang.pages import PageForm
from kvservice.core.block.keys import (
    KEYS_PER_REQUEST_MAX,
    block_keys,
    route_of_head,
    span_route,
    term_key,
)
from kvservice.core.bounded_table import BoundedTable
from kvservice.core.messages import AcquireRequest, AcquireResult, MissReason, RequestReport, SealItem, SealStatus
from kvservice.core.segment.digest_sample import DigestSample
from kvservice.core.segment.refs import BlockRef
from kvservice.units import BlockKey

# How long found pages wait for being read. SGLang reads within milliseconds, unless its host memory is full of other
# prefetches; a prefix that it does not want is never read.
PROMISE_SECONDS = 30.0
# Pages asked for at a time where each stands for itself. Those of other nodes should not hold up the rest.
ALONE_MAX = 32
# Longest that a store waits for the shard's answers, which come within milliseconds; SGLang's patience is in `options`.
STORE_SECONDS = 4.0
REFUSED_MAX = 4096  # first pages of prompts that the pool does not want, 0.5 MB; a forgotten one is stored


@dataclass(slots=True)
class PagePromise:
    """Pages of one question, on this node and leased."""

    mapped: MappedPool
    results: list[AcquireResult]  # one a block of a page, each with its lease
    keys: list[Sequence[BlockKey]]  # by block of a page: of the pages found, in their order
    unread: set[str] = field(default_factory=set)
    is_over: bool = False


class PagePool:
    def __init__(
        self,
        loop: LoopThread,
        program: AttachedProgram,
        form: PageForm,
        counters: Counter[str],
        *,
        timeout_seconds: float,
        verify: Verify,
        silence: ShardSilence,
        term: bytes,
    ) -> None:
        """`timeout_seconds`: the longest that a question waits for blocks of other nodes and tiers. `silence`: of the
        shard, for all its pools. `term`: blocks of another one have other names."""
        self._loop = loop
        self._program = program
        self._form = form
        self._counters = counters
        self._timeout_seconds = timeout_seconds
        self._sample = DigestSample(verify.value)
        self._silence = silence
        self._lock = threading.Lock()
        self._promised: dict[str, tuple[PagePromise, int]] = {}  # by page: the youngest promise, and its number in that
        # By first page: prompts that the pool does not want, because nothing like them comes back.
        self._refused: BoundedTable[str, bool] = BoundedTable(REFUSED_MAX)
        self._term = term

    @property
    def form(self) -> PageForm:
        return self._form

    # -- for SGLang's threads ----

    def find(self, before: Sequence[str], pages: Sequence[str], seconds: float = inf) -> int:
        """How many of these pages, which follow the pages `before` in their prompt, are here now, from the first on.
        `seconds`: what is left of the time for a question."""
        return self._loop.wait(self._find(before, pages, min(seconds, self._timeout_seconds)))

    def find_alone(self, pages: Sequence[str], seconds: float = inf) -> list[bool]:
        """Which of these pages are here now. For pools that keep no whole prefix: each page stands for itself."""
        return self._loop.wait(self._find_alone(pages, min(seconds, self._timeout_seconds)))

    def load(self, before: Sequence[str], pages: Sequence[str], addresses: Sequence[Sequence[int]]) -> list[bool]:
        """Copy these pages to the addresses of their pieces. True for the leading ones that came; after the first False
        nothing of use is at the addresses."""
        with self._lock:
            is_promised = all(page in self._promised for page in pages)
        if not is_promised:
            self._counters["asked_again"] += 1
            self.find(before, pages)
        return self._load_promised(pages, addresses)

    def load_alone(self, pages: Sequence[str], addresses: Sequence[Sequence[int]]) -> list[bool]:
        """The same for pages that stand for themselves."""
        with self._lock:
            unknown = [page for page in pages if page not in self._promised]
        if unknown:
            self._counters["asked_again"] += 1
            self.find_alone(unknown)
        return self._load_promised(pages, addresses)

    def store(
        self, before: Sequence[str], pages: Sequence[str], addresses: Sequence[Sequence[int]], term: bytes
    ) -> list[bool]:
        """Store these pages of `term`, which follow the pages `before`. True for the leading ones that the pool holds
        then, or does not want: it said at the last question for this prompt that nothing like it comes back. Returns
        when nothing reads the addresses any more."""
        return self._loop.wait(self._store(list(before), list(pages), addresses, term, alone=False))

    def store_alone(self, pages: Sequence[str], addresses: Sequence[Sequence[int]], term: bytes) -> list[bool]:
        """The same for pages that stand for themselves."""
        return self._loop.wait(self._store([], list(pages), addresses, term, alone=True))

    def begin_term(self, term: bytes) -> None:
        """Pages have other names from now on. Every promise is over, also one whose question is still under way.
        Idempotent."""
        with self._lock:
            if term == self._term:
                return
            self._term = term
            promises = {id(promise): promise for promise, _ in self._promised.values()}
            self._promised.clear()
        for promise in promises.values():
            self._end(promise)

    # -- finding ----

    async def _find(self, before: Sequence[str], pages: Sequence[str], seconds: float) -> int:
        chain = [*before, *pages][:KEYS_PER_REQUEST_MAX]
        self._counters["asked_pages"] += len(pages)
        if len(chain) <= len(before):
            self._miss(TOO_LONG, len(pages))
            return 0
        if (mapped := await self._pool()) is None:
            self._miss(NO_POOL, len(pages))
            return 0
        term = self._term
        keys = self._keys(mapped, chain, term)
        name = f"sgl-{secrets.token_hex(6)}"  # SGLang does not say which request it asks for
        asked = [AcquireRequest(tuple(each), len(before), seconds, request_id=name) for each in keys]
        began = asyncio.get_running_loop().time()
        results = await asyncio.gather(*(self._program.ask(mapped.attachment, each) for each in asked))
        found = min(0 if result is None else len(result.blocks) for result in results)
        leased = [result for result in results if result is not None]
        self._silence.ended(began, seconds, answered=bool(leased))
        if all(result.admitted for result in leased):
            self._refused.pop(chain[0])
        else:
            self._refused.put(chain[0], True)
        found_keys = [each[len(before) : len(before) + found] for each in keys]
        is_kept = found > 0 and self._promise(term, PagePromise(mapped, leased, found_keys), pages[:found])
        if not is_kept:
            self._release(mapped, leased)
        if found and not is_kept:  # cleared meanwhile: by the names of now nobody has them
            found, leased = 0, [replace(result, blocks=(), miss=MissReason.NEVER_STORED) for result in leased]
        self._counters["found_pages"] += found
        self._counters["fetched_pages"] += min(found, max((result.fetched_count for result in leased), default=0))
        if found < len(pages):
            shortest = min(leased, key=lambda result: len(result.blocks), default=None)
            is_cut = found == len(chain) - len(before)
            reason = TOO_LONG if is_cut else NO_POOL if shortest is None else shortest.miss.value
            self._miss(reason, len(pages) - found)
        missed = len(chain) - len(before) - found
        self._program.session.report(RequestReport(name, len(chain), len(before), found, missed))
        return found

    async def _find_alone(self, pages: Sequence[str], seconds: float) -> list[bool]:
        mapped = await self._pool()
        self._counters["asked_pages"] += len(pages)
        if mapped is None:
            self._miss(NO_POOL, len(pages))
            return [False] * len(pages)
        term = self._term
        began = asyncio.get_running_loop().time()

        async def ask(page: str) -> bool:
            keys = self._keys(mapped, [page], term)
            requests = [AcquireRequest((key,), 0, seconds) for (key,) in keys]
            results = [await self._program.ask(mapped.attachment, each) for each in requests]
            self._silence.ended(began, seconds, answered=any(result is not None for result in results))
            held = [result for result in results if result is not None and result.blocks]
            if len(held) == len(results) and self._promise(term, PagePromise(mapped, held, keys), [page]):
                self._counters["found_pages"] += 1
                return True
            self._release(mapped, held)
            self._miss(next((result.miss.value for result in results if result is not None), NO_POOL), 1)
            return False

        return await ask_each(ask, pages, ALONE_MAX)

    # -- promises ----

    def _promise(self, term: bytes, promise: PagePromise, pages: Sequence[str]) -> bool:
        """Promise these pages, in place of what was promised of them before. False if their term has ended since they
        were asked for."""
        promise.unread = set(pages)
        before: dict[int, PagePromise] = {}
        with self._lock:
            if term != self._term:
                return False
            for number, page in enumerate(pages):
                if page in self._promised:
                    other = self._promised[page][0]
                    other.unread.discard(page)
                    before[id(other)] = other
                self._promised[page] = promise, number
            done = [other for other in before.values() if not other.unread]
        for other in done:
            self._end(other)
        asyncio.get_running_loop().call_later(PROMISE_SECONDS, self._end, promise)
        return True

    def _end(self, promise: PagePromise) -> None:
        """Give its leases back. Idempotent."""
        with self._lock:
            if promise.is_over:
                return
            promise.is_over = True
            for page in promise.unread:
                if self._promised.get(page, (None, 0))[0] is promise:
                    del self._promised[page]
        self._release(promise.mapped, promise.results)

    def _release(self, mapped: MappedPool, results: Sequence[AcquireResult]) -> None:
        for result in results:
            self._program.release(mapped.attachment, result)

    def _load_promised(self, pages: Sequence[str], addresses: Sequence[Sequence[int]]) -> list[bool]:
        loaded = 0
        for page, pieces in zip(pages, addresses, strict=True):
            with self._lock:
                promise, number = self._promised.get(page, (None, 0))
            if promise is None or not self._copied(promise, number, pieces):
                self._counters["load_failed"] += len(pages) - loaded
                break
            loaded += 1
            self._was_read(page, promise)
        self._counters["loaded_pages"] += loaded
        return [number < loaded for number in range(len(pages))]

    def _copied(self, promise: PagePromise, number: int, pieces: Sequence[int]) -> bool:
        for block, (result, keys) in enumerate(zip(promise.results, promise.keys, strict=True)):
            is_sound = promise.mapped.read(
                result.blocks[number],
                keys[number],
                self._form.load(pieces, block),
                check_digest=self._sample.has_next(),
            )
            if not is_sound:
                return False
        return True

    def _was_read(self, page: str, promise: PagePromise) -> None:
        with self._lock:
            promise.unread.discard(page)
            if self._promised.get(page, (None, 0))[0] is promise:
                del self._promised[page]
            is_done = not promise.unread
        if is_done:
            self._end(promise)

    # -- storing ----

    async def _store(
        self, before: list[str], pages: list[str], addresses: Sequence[Sequence[int]], term: bytes, *, alone: bool
    ) -> list[bool]:
        """Another term may begin while this waits for the pool; its pages are from before."""
        chain = [*before, *pages][:KEYS_PER_REQUEST_MAX]
        storable = max(len(chain) - len(before), 0)
        if not storable:
            self._counters[f"dropped_{TOO_LONG}"] += len(pages)
            return [False] * len(pages)
        if not alone and self._refused.get(chain[0]):
            # SGLang warns of every page that is not kept. Here nothing went wrong, so it hears that all is done.
            self._counters["dropped_not_admitted"] += len(pages)
            return [True] * len(pages)
        if (mapped := await self._pool()) is None:
            self._counters[f"dropped_{NO_POOL}"] += len(pages)
            return [False] * len(pages)
        keys = self._keys(mapped, chain, term)
        blocks = [(page, block) for page in range(storable) for block in range(len(keys))]

        def items(first: int, refs: Sequence[BlockRef]) -> list[SealItem]:
            found: list[SealItem] = []
            for ref, (page, block) in zip(refs, blocks[first:], strict=False):
                place, row = len(before) + page, keys[block]
                if alone:
                    found.append(SealItem(ref, row[place], None, 0, route_of_head(row[place])))
                else:
                    parent = row[place - 1] if place else None
                    found.append(SealItem(ref, row[place], parent, place, span_route(row, place)))
            return found

        fills = [self._form.store(addresses[page], block) for page, block in blocks]
        began = asyncio.get_running_loop().time()
        statuses, reason = await self._program.write(self._program.store(mapped, fills, items, STORE_SECONDS))
        self._silence.ended(began, STORE_SECONDS, answered=reason != NO_POOL)
        kept = len(statuses) // len(keys)
        known = statuses.count(SealStatus.DUPLICATE) // len(keys)
        self._counters["stored_pages"] += kept - known
        self._counters["known_pages"] += known
        if kept < len(pages):
            self._counters[f"dropped_{reason or TOO_LONG}"] += len(pages) - kept
        return [number < kept for number in range(len(pages))]

    # -- inside ----

    async def _pool(self) -> MappedPool | None:
        """The pool's memory. None while there is no pool, or a silent one that others try. Whoever gets it must ask:
        it may be the one call that tries."""
        mapped = await self._program.memory()
        return None if mapped is None or self._silence.spares(max(self._timeout_seconds, STORE_SECONDS)) else mapped

    def _keys(self, mapped: MappedPool, pages: Sequence[str], term: bytes) -> list[Sequence[BlockKey]]:
        """By block of a page: the keys of these pages. Raises ValueError for what is no hash in hex."""
        tenant = term_key(mapped.attachment.tenant_key, term)
        names = [self._form.names(page) for page in pages]
        digest = self._program.fingerprint.digest
        return [block_keys(digest, [each[block] for each in names], tenant) for block in range(len(self._form.marks))]

    def _miss(self, reason: str, count: int) -> None:
        self._counters[f"missed_{reason}"] += count
