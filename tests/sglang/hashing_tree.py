"""An engine whose model is a hash chain, on SGLang's own radix tree, cache controller and host memory: a program, since
SGLang is not in the environment. Only the forward and the scheduler's order of calls are written here.

    python -m tests.sglang.hashing_tree MODEL '[{"settings": {"page_size": 8}, "options": {}, "failures": 0.05}]'

plays requests at random for each of these engines and prints a line of JSON: of each what was counted, or what was
wrong. Each state is hashed from the one before it as it is read back from the KV memory, so a page that was loaded,
stored or named wrongly is seen at once. The order is the seed's, but for when SGLang's threads end their work.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import sys
import time
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sglang.srt import runtime_context
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import (
    CacheRequestHandle,
    EvictParams,
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.server_args import ServerArgs

from examples.demo.sglang_engine import settings
from kvservice.api.mapped import MappedPool
from kvservice.connector.sglang import page_pool
from kvservice.errors import Unavailable
from kvservice.session.session import Session
from kvservice.testing.eventually import eventually
from tests.sim.mutation import Mutant, planted

LAYERS, HEADS, DIM = 3, 2, 24
DEVICE_PAGES, PROMPT_PAGES = 24, 18  # the memory holds little more than one prompt
STEPS, WAITING_MAX = 200, 8
MASKS = torch.from_numpy(np.random.default_rng(0).integers(2**60, size=(2, LAYERS, HEADS, DIM)))  # no two cells alike
POOL: dict[str, object] = {"mode": "embedded", "memory": "4MiB", "weights_version": "a", "verify_load": "full"}
ONE_RANK = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1}


def next_state(state: int, word: object) -> int:
    return int.from_bytes(hashlib.blake2b(f"{state} {word}".encode(), digest_size=8).digest(), "little") >> 1


class HashingTree:
    """One engine. Raises AssertionError from any call as soon as something is wrong; `end` also when something was left
    behind."""

    def __init__(self, server: ServerArgs) -> None:
        self.counters: Counter[str] = Counter()
        self.page = int(server.page_size)
        self.waiting: dict[str, Any] = {}
        self._weights = 1
        size = DEVICE_PAGES * self.page
        self._kv = MHATokenToKVPool(size, self.page, torch.int64, HEADS, DIM, LAYERS, "cpu", False)
        self._places = PagedTokenToKVPoolAllocator(size, self.page, torch.int64, "cpu", self._kv, False)
        given = CacheInitParams(
            disable=False,
            req_to_token_pool=ReqToTokenPool(1, size, "cpu", False),
            token_to_kv_pool_allocator=self._places,
            page_size=self.page,
            tree_components=(ComponentType.FULL,),
        )
        self.tree = UnifiedRadixCache(given)
        self.tree.init_hicache(server, given)
        self.storage = self.tree.cache_controller.storage_backend._storage

    # -- what a test does ----

    def add(self, name: str, tokens: list[int], salt: str | None) -> None:
        """As SGLang's scheduler, which asks the storage for what lies behind its own memories."""
        request = SimpleNamespace(rid=name, tokens=tokens, salt=salt, handle=CacheRequestHandle(name, 0))
        self.waiting[name] = request
        match, last = self._match(request), len(tokens) - 1
        begin, node = match.device_prefix_len + match.host_hit_length, match.last_host_node
        if self.tree.is_backuped(node) or self.tree.is_root(node):
            self.tree.prefetch_from_storage(
                request.handle,
                node,
                array("q", tokens[begin:last]),
                self.tree.get_last_hash_value(node),
                self.tree.get_prefix_hash_values(node),
                array("q", tokens[:begin]),
                cache_salt=salt,
            )

    def abort(self, name: str) -> None:
        self.tree.release_aborted_request(self.waiting.pop(name).handle)

    def step(self) -> None:
        self.tree.check_hicache_events()
        for name, request in list(self.waiting.items()):
            if self.tree.check_prefetch_progress(request.handle) and self._run(request):
                del self.waiting[name]
        self.tree.flush_pending_backups()

    def settle(self) -> None:
        """Step until nothing is under way."""
        tree = self.tree

        def is_idle() -> bool:
            self.step()
            return not (self.waiting or tree.ongoing_write_through or tree.ongoing_backup or tree.ongoing_prefetch)

        eventually(is_idle, "nothing is under way", 60)

    def flush(self, *, new_weights: bool) -> None:
        self.settle()
        self.tree.reset()
        self._places.clear()
        if new_weights:
            self._weights += 1
            assert self.tree.clear_storage_backend()

    def end(self) -> None:
        self.settle()
        self.tree.sanity_check()
        (program,), pool = self.storage._thread.attached, self.storage._pools["kv"]
        eventually(lambda: not program.session._leases and not pool._promised, "nothing is promised any more", 60)
        failed = [name for name in self.storage.counters if name.startswith("failed")]
        assert not failed, f"wrong: {failed}"

    # -- the model ----

    def _match(self, request: Any) -> Any:
        key = RadixKey(array("q", request.tokens[:-1]), cache_salt=request.salt)
        return self.tree.match_prefix(MatchPrefixParams(key=key))

    def _run(self, request: Any) -> bool:
        """Take what is known of the prompt, check it, and compute the rest. False: there is no room now."""
        tree, match = self.tree, self._match(request)
        node, known = match.last_device_node, match.device_prefix_len
        lock = tree.lock(node)
        try:
            if match.host_hit_length:
                request.last_node, request.kv = node, SimpleNamespace(mamba_pool_idx=None)
                request.swa_host_hit_length = request.mamba_host_hit_length = 0
                back = InitLoadBackParams(match.best_match_node, match.host_hit_length, req=request)
                loaded, node = tree.init_load_back(back)
                tree.unlock(lock)
                lock = tree.lock(node)
                known += loaded
                tree.ready_to_load_host_cache()
                eventually(lambda: tree.check_hicache_events() or not tree.ongoing_load_back, "the load", 60)
            places, state = tree.path_device_indices(node)[:known], next_state(self._weights, request.salt)
            for number in range(known):
                state = next_state(state, request.tokens[number])
                self._check(places[number], state, f"token {number} of {known}")
            return self._compute(request, places, state)
        finally:
            tree.unlock(lock)

    def _check(self, place: Any, state: int, where: str) -> None:
        cells = torch.stack([torch.stack([part[place] for part in kind]) for kind in self._buffers]) ^ MASKS
        assert (cells == state).all(), f"wrong: {where}"
        self.counters["tokens_checked"] += 1

    @property
    def _buffers(self) -> tuple[Any, Any]:
        return self._kv.k_buffer, self._kv.v_buffer

    def _compute(self, request: Any, known: Any, state: int) -> bool:
        tokens = request.tokens[: len(request.tokens) // self.page * self.page]
        need = len(tokens) - len(known)
        if need > 0:
            if need > self._places.available_size():
                self.tree.evict(EvictParams(num_tokens=need - self._places.available_size()))
            places = self._places.alloc(need)
            if places is None:
                return False
            for place, token in zip(places, tokens[len(known) :], strict=True):
                state = next_state(state, token)
                for kind, masks in zip(self._buffers, MASKS, strict=True):
                    for layer in range(LAYERS):
                        kind[layer][place] = masks[layer] ^ state
            key = RadixKey(array("q", tokens), cache_salt=request.salt)
            values = torch.cat([known, places])
            self.tree.insert(InsertParams(key=key, value=values, prev_prefix_len=len(known)))
        self.counters["requests"] += 1
        return True


@contextlib.contextmanager
def failing(share: float, draw: random.Random) -> Iterator[None]:
    """Calls of the pool fail before or behind their work, and slots are damaged."""
    ask, store, read = Session.ask, Session.store, MappedPool._read

    async def fail_first(self: Session, *arguments: Any) -> Any:
        if draw.random() < share:
            raise Unavailable("the pool is gone")
        return await ask(self, *arguments)

    async def fail_last(self: Session, *arguments: Any) -> Any:
        done = await store(self, *arguments)
        if draw.random() < share:
            raise Unavailable("the answer was lost")
        return done

    def damage(self: MappedPool, ref: Any, *arguments: Any) -> bool:
        if draw.random() < share:
            self._segment.payload(ref.slot, 64)[draw.randrange(64)] ^= 1
        return read(self, ref, *arguments)

    setattr(Session, "ask", fail_first)  # noqa: B010  not methods of their own to mypy, as the next ones
    setattr(Session, "store", fail_last)  # noqa: B010
    setattr(MappedPool, "_read", damage)  # noqa: B010
    try:
        yield
    finally:
        Session.ask, Session.store, MappedPool._read = ask, store, read  # type: ignore[method-assign]


def play(model: str, engine: Mapping[str, Any], seed: int) -> Counter[str]:
    """Play requests that begin alike, with aborts, evictions, flushes and new weights."""
    draw = random.Random(seed)
    page = int(engine["settings"]["page_size"])
    storage = {**POOL, "prefetch_threshold": page, **engine.get("options", {})}
    server = ServerArgs(**settings({"model_path": model, "storage": storage, **engine["settings"]}))
    runtime_context.publish(server, role="scheduler")
    made = HashingTree(server)
    beginnings = [draw.choices(range(200), k=PROMPT_PAGES * page) for _ in range(4)]
    try:
        with failing(engine.get("failures", 0.0), random.Random(seed)):
            for number in range(STEPS):
                event, pages = draw.random(), draw.randrange(1, 12)
                if event < 0.4 and len(made.waiting) < WAITING_MAX:
                    beginning = draw.choice(beginnings)[: draw.randrange(2, PROMPT_PAGES * page)]
                    more = draw.choices(range(200), k=draw.choice([0, 0, 1, page, 2 * page + 1]))
                    made.add(f"{seed}/{number}", beginning + more, draw.choice([None, None, "salt"]))
                elif event < 0.45 and made.waiting:
                    made.abort(draw.choice(list(made.waiting)))
                elif event < 0.5:
                    made.flush(new_weights=event < 0.46)
                elif event < 0.55:
                    made.tree.evict(EvictParams(num_tokens=pages * page))
                    made.tree.evict_host(pages * page)
                made.step()
                time.sleep(draw.choice([0, 0, 0.003]))
            made.end()
        return made.counters + Counter(made.storage.counters)
    finally:
        made.tree.shutdown()


def found(model: str, engine: Mapping[str, Any]) -> dict[str, int] | str:
    counted: Counter[str] = Counter()
    for seed in engine["seeds"]:
        try:
            with planted(Mutant(**engine["bug"])) if "bug" in engine else contextlib.nullcontext():
                counted += play(model, engine, seed)
        except AssertionError as error:
            return f"seed {seed}: {error}"
    return dict(counted)


if __name__ == "__main__":
    torch.set_num_threads(1)
    page_pool.PROMISE_SECONDS = 1.0
    with runtime_context.get_parallel().override(**ONE_RANK):
        print(json.dumps([found(sys.argv[1], engine) for engine in json.loads(sys.argv[2])]))
