"""What a HiCache storage back end does, for all host pools of one rank. Imports no engine: the pools are SGLang's.

SGLang names a page by the SHA-256 chain of its tokens, seeded with the request's salt and adapter, and asks in batches:
how many of these pages are there, copy these in, store these. The pool of the keys and values holds every page of a
prefix. Others beside it (states of recurrent layers, sliding windows) may hold only the last pages of some prefixes;
the storage says how long a prefix all of them can serve.

Nothing raises into SGLang's threads: a failure is counted, logged once per kind, and answered as if nothing was there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from kvservice.api.layout import Layout
from kvservice.api.pool_thread import PoolThread
from kvservice.api.silence import ShardSilence
from kvservice.connector.failures import Failures, guarded
from kvservice.connector.sglang.clears import ClearTerms, random_name
from kvservice.connector.sglang.options import SGLangOptions
from kvservice.connector.sglang.page_pool import ALONE_MAX, PagePool
from kvservice.connector.sglang.pages import PageForm, Ranks, cut_heads
from kvservice.connector.sglang.sharing import KnownPrompt, ModelSource, form_of, shared_of
from kvservice.connector.shared.identity import shared_name
from kvservice.connector.shared.judge import Judge
from kvservice.core.block.numbers import number_fields
from kvservice.errors import ConfigError, KVServiceError, UnsupportedLayout

log = logging.getLogger("kvservice.connector")

KV = "kv"  # SGLang's name of the pool of keys and values
STATES = "mamba"  # of that of recurrent layers, which ranks hold parts of also where they hold the same keys and values
ALL_LAYERS = "all"  # an engine without pipeline stages has them
ALL_PAGES, TRAILING_PAGES = "all_pages", "trailing_pages"  # SGLang's words for which pages of a prefix a pool holds
PASS_PREFIX_KEYS = (
    'add "hicache_storage_pass_prefix_keys": true to --hicache-storage-backend-extra-config: without it SGLang does '
    "not say where in its prompt a page is, and other nodes could not find it"
)


class Indices(Protocol):
    """A tensor of token places in a host pool."""

    def __len__(self) -> int: ...


class HostPool(Protocol):
    """What is read of SGLang's host pools."""

    page_size: int
    layout: str

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        """(addresses, bytes) of the pieces of these pages, page by page."""
        ...


@dataclass(frozen=True, slots=True)
class Identity:
    """What an engine computes, and which rank of it asks."""

    model: str  # for people
    fields: Mapping[str, object]  # of the fingerprint: everything that changes the bytes of a page
    kv_heads: int  # of the whole model; 0 = not known
    ranks: Ranks
    layers: str = ALL_LAYERS  # of this pipeline stage
    source: ModelSource | None = None  # of the model that is shared with engines of other kinds


@dataclass(frozen=True, slots=True)
class PageTransfer:
    """Pages of one pool that are asked for, read or stored with others."""

    pool: str
    pages: Sequence[str]
    places: Indices | None  # of their tokens in the host pool
    policy: str = ALL_PAGES


@dataclass(frozen=True, slots=True)
class FoundPrefix:
    """A prefix that all pools can serve."""

    pages: int
    by_pool: dict[str, int]  # the longest prefix that each can serve for itself
    restorable: list[int]  # every length up to `pages` that all of them can serve, as far as is known


def _left(until: float) -> float:
    return max(0.0, until - time.monotonic())


class PageStorage:
    """One rank's storage. Only a wrong option raises, at the start."""

    def __init__(
        self,
        options: SGLangOptions,
        identity: Identity,
        thread: PoolThread | None = None,
        clears: ClearTerms | None = None,
    ) -> None:
        """Opens the pool when the first host pool is registered. `thread`: the one to use, which this closes. `clears`:
        those of this rank's process, if other ranks read what it stores. Raises ConfigError if several shards fit."""
        self._options = options
        self._clears = clears or ClearTerms(random_name())
        self._identity = identity
        self._thread = thread or PoolThread(options)
        self._pools: dict[str, PagePool] = {}
        self._host_pools: dict[str, HostPool] = {}
        self.counters: Counter[str] = Counter()  # pages by what became of them, and failures
        self._taken: dict[str, int] = {}  # of the counters
        self.failures = Failures(self.counters)
        self._gate: KnownPrompt | None = None  # with the option share
        self._silence = ShardSilence()
        self._changes = self._clears.changes()  # of the weights, for which the pools have names
        self._scheduler = threading.current_thread()
        self._began: dict[threading.Thread, int] = {}  # by thread: the changes of the weights that were before it
        self._lock = threading.Lock()  # of _began

    # -- host pools ----

    def register(self, name: str, pool: HostPool, sample: Indices) -> None:
        """Attach one kind of pages. `sample` are the places of the tokens of a page. Blocks until the first attempt to
        attach has ended. Raises ConfigError if the options do not fit the pages. Pages that no pool can keep are
        computed each time."""
        if name in self._pools:
            return
        try:
            made = self._page_pool(name, pool, sample)
        except ConfigError:
            raise
        except (KVServiceError, NotImplementedError, ValueError, TypeError) as error:
            self.counters[f"unsupported_{name}"] += 1
            log.error("pages of the pool %s are not cached: %s", name, error)
            return
        self._host_pools[name] = pool
        self._pools[name] = made

    def _page_pool(self, name: str, pool: HostPool, sample: Indices) -> PagePool:
        """Where pages of this kind are kept. Raises SegmentError, for one, where a pool in this process has no room."""
        form, fields = self._form_of(name, pool, sample)
        options, identity = self._options, self._identity
        model = identity.model if self._gate is None else shared_name(identity.model)
        layout = Layout(pool.page_size, (form.block_bytes,), "uint8")
        # What only this rank or stage can read has a namespace of its own: else a shard would refuse all but the first.
        own = (str(fields.get("ranks", "")), "" if identity.layers == ALL_LAYERS else identity.layers)
        below = [part for part in ("" if name == KV else name, *own) if part]
        namespace = "/".join([options.namespace, *below])  # below an empty one, too: a clear of it includes these
        if self._gate is None:
            fields = {**identity.fields, **fields}
        attaching = self._thread.attach_program(model, layout, fields, namespace)
        program = self._thread.loop.wait(attaching)
        return PagePool(
            self._thread.loop,
            program,
            form,
            self.counters,
            timeout_seconds=options.fetch_timeout_seconds,
            verify=options.verify_load,
            silence=self._silence,
            term=self._clears.term,
        )

    def _form_of(self, name: str, pool: HostPool, sample: Indices) -> tuple[PageForm, dict[str, object]]:
        _, sizes = pool.get_page_buffer_meta(sample)
        if self._identity.source is not None:
            return self._shared_form(self._identity.source, name, pool, sizes)
        ranks, heads = self._identity.ranks, getattr(pool, "head_num", 0)
        if ranks.replicated and ranks.tp_size > 1 and heads and name not in (KV, STATES):
            # A draft model without latent attention. SGLang has the first rank alone store here: others would read it.
            raise UnsupportedLayout(
                "each rank holds other heads, and none but the first stores: this engine finds nothing"
            )
        dtype, width = str(getattr(pool, "dtype", "uint8")).removeprefix("torch."), getattr(pool, "head_dim", 0)
        fields: dict[str, object] = {
            "pages": 1,  # of the way in which this module names blocks
            "pool": name,
            "host_pool": type(pool).__name__,
            "host_layout": pool.layout,
            "page_tokens": pool.page_size,
            "pieces": ",".join(map(str, sizes)),
            "layers": self._identity.layers,
            **number_fields(dtype, width, 0, self._options.accept_codec),
        }
        by_heads = name == KV and not ranks.replicated and heads and heads * ranks.tp_size == self._identity.kv_heads
        if not by_heads:
            if self._options.head_group is not None and name == KV:
                raise ConfigError(
                    f"head_group: the pages of {self._identity.model} do not divide by KV heads: leave it out"
                )
            mark = (replace(ranks, replicated=False) if name == STATES else ranks).mark
            return PageForm(tuple(sizes), (mark,)), {**fields, "ranks": mark.decode()}
        rows = pool.page_size * (1 if pool.layout == "layer_first" else getattr(pool, "layer_num", 1))
        cut = cut_heads(heads, self._identity.kv_heads, rows, ranks, self._options.head_group)
        if len(cut.marks) > 1 and pool.layout == "page_head":
            raise ConfigError(
                "head_group: pages in the layout page_head lie by heads already: choose page_first_direct"
            )
        per_head = ",".join(str(size // heads) for size in sizes)
        fields |= {"pieces": per_head, "head_group": cut.group, "kv_heads": cut.total}
        return PageForm(tuple(sizes), cut.marks, cut.rows), fields

    def _shared_form(
        self, source: ModelSource, name: str, pool: HostPool, sizes: Sequence[int]
    ) -> tuple[PageForm, dict[str, object]]:
        if name != KV:
            raise UnsupportedLayout("share 'engines' is for keys and values alone")
        model = shared_of(source, pool, self._identity.ranks, self._options)
        form = form_of(model, sizes)
        self._gate = KnownPrompt(Judge(source.path, model.dtype, source.revision), model, form, self.counters)
        return form, dict(model.fingerprint.fields)

    # -- the calls ----

    @guarded(lambda before, pages: 0)
    def find(self, before: Sequence[str] | None, pages: Sequence[str]) -> int:
        """How many of these pages are there, from the first on."""
        pool = None if self._term_of_thread() is None else self._pools.get(KV)
        if self._gate is not None and not self._gate.is_open:
            self.counters[f"share_left_out_gate_{self._gate.state.value}"] += 1
            self._gate.remind(pages)
            return 0
        return 0 if pool is None or not pages else pool.find(before or (), pages)

    @guarded(lambda before, pages, others: FoundPrefix(0, {}, []))
    def find_all(
        self, before: Sequence[str] | None, pages: Sequence[str], others: Sequence[PageTransfer]
    ) -> FoundPrefix:
        """How long a prefix all pools can serve. A pool that states no policy known here has no say, and is empty. All
        together have the time of one question."""
        if self._term_of_thread() is None:
            return FoundPrefix(0, {}, [])
        until = time.monotonic() + self._options.fetch_timeout_seconds
        count = self.find(before, pages) if KV in self._pools else len(pages)
        by_pool = {KV: count} if count and KV in self._pools else {}
        lengths = list(range(1, count + 1))
        for wanted in others:
            if not lengths:
                break
            if wanted.policy not in (ALL_PAGES, TRAILING_PAGES):
                continue
            here = self._lengths(wanted, before or (), pages[: lengths[-1]], until)
            if here:
                by_pool[wanted.pool] = here[-1]
            known = set(here)
            lengths = [length for length in lengths if length in known]
        return FoundPrefix(lengths[-1] if lengths else 0, by_pool, lengths)

    def _lengths(self, wanted: PageTransfer, before: Sequence[str], pages: Sequence[str], until: float) -> list[int]:
        """The lengths of prefixes of `pages` that one pool can serve. Of one that holds only the last pages of a
        prefix: the longest ones, found from the end."""
        pool = self._pools.get(wanted.pool)
        if pool is None:
            return []
        if wanted.policy == ALL_PAGES:
            return list(range(1, pool.find(before, pages, _left(until)) + 1))
        window = max(1, len(wanted.pages))
        here: dict[int, bool] = {}
        end = len(pages)
        while end > 0:
            begin = max(0, end - ALONE_MAX)
            here |= zip(range(begin, end), pool.find_alone(pages[begin:end], _left(until)), strict=True)
            served = [
                length
                for length in range(begin + 1, len(pages) + 1)
                if all(here.get(number, False) for number in range(max(0, length - window), length))
            ]
            if served:
                return served
            end = begin
        return []

    @guarded(lambda before, wanted: [False] * len(wanted.pages))
    def load(self, before: Sequence[str] | None, wanted: PageTransfer) -> list[bool]:
        """Copy pages into the host pool: True for the leading ones that came."""
        if (pool := self._pools.get(wanted.pool)) is None or self._term_of_thread() is None:
            return [False] * len(wanted.pages)
        addresses = self._addresses(wanted)
        if wanted.policy == TRAILING_PAGES:
            return pool.load_alone(wanted.pages, addresses)
        return pool.load(before or (), wanted.pages, addresses)

    @guarded(lambda before, wanted: [False] * len(wanted.pages))
    def store(self, before: Sequence[str] | None, wanted: PageTransfer) -> list[bool]:
        """Store pages of the host pool: True for the leading ones that the pool holds then, or does not want. `before`
        is None if SGLang does not say it."""
        pool, term = self._pools.get(wanted.pool), self._term_of_thread()
        if pool is None or term is None:
            return [False] * len(wanted.pages)
        addresses = self._addresses(wanted)
        if self._gate is not None and not self._gate.is_open:
            if not before:
                self._gate.look(wanted.pages, addresses)
            if not self._gate.is_open:
                self._gate.remind(wanted.pages)
                return [False] * len(wanted.pages)
        if wanted.policy == TRAILING_PAGES:
            return pool.store_alone(wanted.pages, addresses, term)
        if before is None:
            raise ConfigError(PASS_PREFIX_KEYS)
        return pool.store(before, wanted.pages, addresses, term)

    def clear(self) -> None:
        """From now on this rank neither finds nor stores what it knew by the same names, and what it was promised is
        over. The blocks stay, for others, until they are evicted."""
        self._begin_term(self._clears.next())
        with self._lock:
            self._began = {}  # the operator says that no thread holds pages of before

    def close(self) -> None:
        """Leave the pool. Blocks until the copies under way have ended. Idempotent."""
        if self._thread.loop.is_usable:
            self._thread.end()
            log.info("storage_closed", extra={"pages": dict(self.counters)})

    def take_counts(self) -> dict[str, int]:
        """What was counted since the last call."""
        now = dict(self.counters)
        before, self._taken = self._taken, now
        return {name: count - before.get(name, 0) for name, count in now.items() if count > before.get(name, 0)}

    # -- inside ----

    def _term_of_thread(self) -> bytes | None:
        """What this thread's pages are called, whatever begins meanwhile; None if they are of earlier weights. A change
        of the weights in place begins a term. SGLang empties its memories behind one and starts its threads anew, so an
        earlier thread may hold pages of before."""
        if (changes := self._clears.changes()) != self._changes:
            log.info("the weights were changed in place: after a flush this engine finds what it stores from then on")
            self._begin_term(self._clears.term)
            self._changes = changes  # not before, so that no other thread goes on with names of before
        return self._clears.term_of(changes) if self._began_behind(changes) == changes else None

    def _began_behind(self, changes: int) -> int:
        """Behind how many changes of the weights this thread began; `changes` are those of now. SGLang starts its
        storage threads together, so one that calls for the first time is as old as those that live. Its scheduler holds
        no pages."""
        thread = threading.current_thread()
        if thread is self._scheduler:
            return changes
        with self._lock:
            if thread not in self._began:
                living = {each: began for each, began in self._began.items() if each.is_alive()}
                self._began = {**living, thread: min(living.values(), default=changes)}
            return self._began[thread]

    def _begin_term(self, term: bytes) -> None:
        for pool in self._pools.values():
            pool.begin_term(term)

    def _addresses(self, wanted: PageTransfer) -> list[list[int]]:
        """By page: the addresses of its pieces. Raises ValueError for places that are not whole pages."""
        pool, form = self._host_pools[wanted.pool], self._pools[wanted.pool].form
        places = 0 if wanted.places is None else len(wanted.places)
        if places != len(wanted.pages) * pool.page_size:
            raise ValueError(f"{places} places for {len(wanted.pages)} pages of {pool.page_size} tokens")
        addresses, sizes = pool.get_page_buffer_meta(wanted.places)
        count = len(form.pieces)
        if tuple(sizes) != form.pieces * len(wanted.pages):
            raise ValueError(f"pieces of {sizes[:count]} bytes, not {form.pieces} as at the start")
        return [addresses[at : at + count] for at in range(0, len(addresses), count)]
