"""An engine whose model is a hash chain: vLLM's scheduler and block manager, both halves of our connector, its session
and an embedded pool are the real ones, and only the forward is a loop of ours.

Attention over a KV cache has one property that matters here: what comes out depends on all that lies there. A chain of
hashes has it too, if each state is hashed from the one before it as it is *read back from the KV memory*. So a block
that was loaded, stored, shared or kept wrongly changes every token behind it, within a millisecond and without floating
point, and `_check_memory` says where. What goes into the pool is compared when it is sealed, so that a wrong block is
found although nobody reads it.

The order of everything is the seed's, but for one thing: in which step an answer of the pool comes is up to the
session's thread. A seed that failed may have to be played some times.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request as VllmRequest
from vllm.v1.request import RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvservice.connector.scheduler.request import EngineRequest
from kvservice.connector.vllm import KVServiceConnector
from kvservice.connector.vllm import connector as connector_module
from kvservice.connector.worker.half import Copying
from kvservice.core.messages import EngineSpec, SealItem
from kvservice.memory.segment import Segment
from kvservice.pool.port import PoolPort
from kvservice.session.options import Mode, PoolOptions
from kvservice.session.pool_choice import PoolChoice
from kvservice.testing.eventually import eventually, patience
from kvservice.units import AttachmentId, BlockKey
from tests.settled import has_slots
from tests.unit.connector.vllm.hash_chain import (
    BLOCK,
    CELL_WORDS,
    HEAD_SIZE,
    LAYER_NAMES,
    LAYERS,
    STEP_TOKENS,
    STOP_TOKEN,
    VOCABULARY,
    EngineSettings,
    Words,
    engine_config,
    first_state,
    next_state,
    sampled,
    true_states,
)

DRAIN_SECONDS = 60.0
OpenPool = Callable[[], Awaitable[PoolPort]]


def _choose(open_pool: OpenPool, options: PoolOptions, spec: EngineSpec) -> PoolChoice:
    return PoolChoice(Mode.EMBEDDED, replace(spec, engine_id=os.urandom(16)), open_pool)


@dataclass(frozen=True, slots=True)
class Row:
    """One request's part of a forward, as the scheduler had it."""

    request: VllmRequest
    start: int  # the position of its first token. With drafts under way: as if all of them were right
    count: int
    tables: Sequence[list[int]]  # one for each KV cache group
    tokens: list[int] | None  # None: those that the worker remembers
    drafts: list[int]  # -1: one that the worker has still to draw

    @property
    def table(self) -> list[int]:
        return self.tables[0]


class HashingEngine:
    """One engine of one worker. Raises AssertionError from any call as soon as something is wrong; `drain` also when
    something was left behind."""

    ahead = 0  # tokens behind a block that its bytes depend on

    def __init__(
        self, model: Path, settings: EngineSettings, seed: int, block_count: int, open_pool: OpenPool | None = None
    ) -> None:
        """`open_pool` opens the pool that it uses in place of one of its own."""
        self.counters: Counter[str] = Counter()  # what was checked, so that a test can see that something was
        self.answers: dict[str, dict[str, Any] | None] = {}  # by request that ended: its kv_transfer_params
        self._settings = settings
        self._draw = random.Random(seed)
        self._seed, self._weights = seed, 1
        self._tokens: dict[str, list[int]] = {}  # what the worker remembers of each request
        self._forwards: deque[tuple[SchedulerOutput, list[Row]]] = deque()  # scheduled and not computed
        self._named: dict[str, tuple[EngineRequest, VllmRequest]] = {}  # the half's requests, until they are ended
        self._contents: dict[BlockKey, tuple[list[int], str | None, int]] = {}  # tokens up to its end, salt, weights
        self._wrong: list[str] = []  # found where an exception would be counted and forgotten
        configs = [engine_config(model, settings, block_count, rank) for rank in range(settings.ranks)]
        config, cache = configs[0], self._lay_out(block_count, seed)
        self._workers = [KVServiceConnector(each, KVConnectorRole.WORKER, cache) for each in configs]
        for rank, worker in enumerate(self._workers):
            worker.register_kv_caches(self._tensors(rank))
        self._together = KVOutputAggregator(settings.ranks)
        make = AsyncScheduler if settings.runs_ahead else Scheduler
        with (
            contextlib.nullcontext()
            if open_pool is None
            else mock.patch.object(connector_module, "choose_pool", partial(_choose, open_pool))
        ):
            self._scheduler = make(
                config,
                cache,
                StructuredOutputManager(config),
                block_size=self._block_tokens,
                hash_block_size=BLOCK,
                log_stats=True,
            )
        connector = self._scheduler.connector
        assert isinstance(connector, KVServiceConnector) and connector._session and connector._scheduler
        self.connector, self._session, self._half = connector, connector._session, connector._scheduler
        self._seal = self._session.seal
        setattr(self._session, "seal", self._seal_checked)  # noqa: B010  not a method of its own to mypy
        if settings.failures:
            self._fail_at_random(settings.failures)
        eventually(lambda: has_slots(self._session), "slots")

    def _lay_out(self, block_count: int, seed: int) -> KVCacheConfig:
        """Make the memory of all ranks. Returns what vLLM knows of it."""
        settings, heads = self._settings, max(self._settings.heads // self._settings.ranks, 1)
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=heads, head_size=HEAD_SIZE, dtype=torch.bfloat16)
        # (rank, its head, head of the model): further ranks hold copies
        self._heads = [
            (rank, head, (rank * heads + head) * settings.heads // (settings.ranks * heads))
            for rank in range(settings.ranks)
            for head in range(heads)
        ]
        self._layer_names, self._block_tokens = LAYER_NAMES, BLOCK
        groups = [KVCacheGroupSpec(LAYER_NAMES, spec)]
        cache = KVCacheConfig(num_blocks=block_count, kv_cache_tensors=[], kv_cache_groups=groups)
        cache.hash_block_size = BLOCK
        shape = (settings.ranks, LAYERS, block_count, heads, BLOCK, CELL_WORDS)
        self._memory: Words = np.random.default_rng(seed).integers(2**60, size=shape)  # nothing is zero by chance
        return cache

    def _tensors(self, rank: int) -> dict[str, torch.Tensor]:
        return dict(zip(LAYER_NAMES, torch.from_numpy(self._memory[rank]).view(torch.bfloat16), strict=True))

    @cached_property
    def _block_hasher(self) -> Callable[[VllmRequest], list[Any]]:
        init_none_hash(sha256_cbor)
        return get_request_block_hasher(BLOCK, sha256_cbor)

    def _fail_at_random(self, share: float) -> None:
        """A load may fail when it is planned, before its copy and behind it; a store before its copy."""
        loads: Any = self._half._loads

        def failing(real: Callable[..., Any], fail: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *arguments: (fail if self._draw.random() < share else real)(*arguments)

        loads.plan = failing(loads.plan, self._refuse)
        for rank, connector in enumerate(self._workers):
            worker: Any = connector._worker
            worker._promised_slots = failing(worker._promised_slots, lambda load: None)
            worker._is_sound = failing(worker._is_sound, partial(self._garble, rank))
            worker._may_write = failing(worker._may_write, lambda store: False)

    def _refuse(self, *arguments: object) -> None:
        raise OSError("a load that cannot be planned")

    def _garble(self, rank: int, load: Copying) -> bool:
        """What came was something else."""
        for entry in load.plan.entries:
            self._memory[rank, :, entry.block_id] += 1
        return False

    # -- what a test does ----

    @property
    def request_count(self) -> int:
        return len(self._scheduler.requests)

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        salt: str | None = None,
        priority: int = 0,
        params: Mapping[str, object] | None = None,
    ) -> None:
        sampling = SamplingParams(
            max_tokens=max_tokens,
            stop_token_ids=[STOP_TOKEN],
            ignore_eos=True,
            extra_args={"kv_transfer_params": dict(params)} if params else None,
        )
        request = VllmRequest(
            name,
            list(prompt),
            sampling,
            None,
            cache_salt=salt,
            block_hasher=self._block_hasher,
            arrival_time=time.time(),
            priority=priority,
        )
        self._scheduler.add_request(request)

    def abort(self, name: str) -> None:
        """No matter whether it has ended, or was never there."""
        self._scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)

    def change_weights(self) -> bool:
        """All requests are preempted, and all caches reset. Returns whether the engine took it; if not, the weights are
        the old ones still."""
        while self._forwards:
            self._finish_step()
        self._note_names()
        try:
            done = self._scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        except RuntimeError:  # vLLM's word for a load under way
            return False
        self.counters["resets"] += done
        if done:
            self._weights = (self._seed << 16) + 1 + self.counters["resets"]  # as no other engine has them
        return done

    def step(self) -> None:
        """Schedule a step, and compute the one before it if the scheduler runs ahead."""
        if self._scheduler.has_requests():
            self._forwards.append(self._schedule())
        if len(self._forwards) > self._settings.runs_ahead or not self._scheduler.has_requests():
            self._finish_step()
        assert not self._wrong, self._wrong

    @property
    def is_busy(self) -> bool:
        return self._scheduler.has_requests() or bool(self._forwards)

    def drain(self) -> None:
        """Let all requests end. Then nobody may hold anything of the engine or the pool any more."""
        end = time.monotonic() + DRAIN_SECONDS * patience()
        while self.is_busy:
            self.step()
            assert time.monotonic() < end, f"hangs: {self.waiting()}"
        self.check_quiet()

    def waiting(self) -> list[tuple[str, RequestStatus]]:
        return [(name, request.status) for name, request in self._scheduler.requests.items()]

    def has_slots_in_stock(self) -> bool:
        """Enough for a step, as far as its requests are known. True without a pool."""
        with self._session._lock:
            expected, have = self._session._stock._expected, len(self._session._stock._slots[0])
            is_enough: bool = have >= min(expected, STEP_TOKENS // BLOCK + expected // 2)
            return is_enough or self._session._attachment is None

    def check_quiet(self) -> None:
        """All requests have ended: nobody may hold anything of the engine or the pool."""
        half, session, blocks = self._half, self._session, self._scheduler.kv_cache_manager.block_pool
        half.check_invariants()
        assert blocks.get_num_free_blocks() == blocks.num_gpu_blocks - 1, "blocks of the engine are held by nobody"
        assert not half._requests and not half._loads._leases and half._stores.is_empty and half._ended.is_empty
        assert not half._handoffs._open, "open hand-offs of no request"

        def is_idle() -> bool:
            half.take_answers()
            with session._lock:
                in_stock = sum(map(len, session._stock._slots))
                idle = not session._leases and not session._pending and not session._stock._expected
                return idle and in_stock == len(session._ledger.slots)

        eventually(is_idle, "the end of every lease and slot", detail=self.connector.counters)

    def close(self) -> None:
        self._scheduler.shutdown()
        for worker in self._workers:
            worker.shutdown()

    # -- a step ----

    def _schedule(self) -> tuple[SchedulerOutput, list[Row]]:
        self._note_names()
        output = self._scheduler.schedule()
        self._note_names()
        cached = output.scheduled_cached_reqs
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        told = set(starts) | set(cached.resumed_req_ids) if self._settings.runs_ahead else output.num_scheduled_tokens
        starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        rows: list[Row] = []
        for name, count in output.num_scheduled_tokens.items():
            request = self._scheduler.requests[name]
            tables = [list(ids) for ids in self._scheduler.kv_cache_manager.get_block_ids(name)]
            tokens = list(request.all_token_ids) if name in told else None
            drafts = list(output.scheduled_spec_decode_tokens.get(name, ()))
            rows.append(Row(request, starts[name], count, tables, tokens, drafts))
        return output, rows

    def _finish_step(self) -> None:
        if not self._forwards:
            return
        output, rows = self._forwards.popleft()
        found = self._forward(output, rows)
        for told in self._scheduler.update_from_output(output, found).values():
            for it in told.outputs:
                if it.finish_reason is not None:
                    self.answers[it.request_id] = it.kv_transfer_params
        if self._settings.drafts and not self._settings.runs_ahead:
            names = [name for name in found.req_ids if name in self._scheduler.requests]
            drafts = [self._drafts(self._scheduler.requests[name]) for name in names]
            self._scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))
        self.counters["steps"] += 1

    def _drafts(self, request: VllmRequest) -> list[int]:
        """Proposals for what follows. Most are right, which is what takes an engine far ahead of its tokens."""
        tokens = list(self._tokens[request.request_id])
        for _ in range(self._settings.drafts):
            right = sampled(true_states(tokens, request.cache_salt, self._weights)[:, -1])
            tokens.append(right if self._draw.random() < 0.7 else self._draw.randrange(VOCABULARY))
        return tokens[-self._settings.drafts :]

    def _forward(self, output: SchedulerOutput, rows: Sequence[Row]) -> ModelRunnerOutput:
        """What vLLM's workers do in a step."""
        inputs = [self._inputs(row) for row in rows]
        checks: list[tuple[Row, list[int]]] = []
        names = [row.request.request_id for row in rows]
        places = {name: place for place, name in enumerate(names)}
        outputs: list[ModelRunnerOutput | None] = [None] * len(self._workers)
        sampled_ids: list[list[int]] = []
        order = list(range(1, len(self._workers)))
        self._draw.shuffle(order)
        for rank in (0, *order):
            told = self._forward_of(rank, output, rows, inputs, checks, sampled_ids)
            outputs[rank] = ModelRunnerOutput(names, places, sampled_token_ids=sampled_ids, kv_connector_output=told)
        found = self._together.aggregate(outputs)
        assert found is not None and found.kv_connector_output is not None
        for row, known in checks:
            if found.kv_connector_output.invalid_block_ids.isdisjoint(row.table):  # or vLLM drops what it sampled
                self._check_memory(row, known)
        return found

    def _forward_of(
        self,
        rank: int,
        output: SchedulerOutput,
        rows: Sequence[Row],
        inputs: Sequence[tuple[list[int], int]],
        checks: list[tuple[Row, list[int]]],
        sampled_ids: list[list[int]],
    ) -> KVConnectorOutput:
        """The step of one worker, with the connector's calls where vLLM has them. Rank 0 samples."""
        worker = self._workers[rank]
        assert output.kv_connector_metadata is not None
        worker.bind_connector_metadata(output.kv_connector_metadata)
        self._begin_forward(output, rows)
        if output.has_sync_kv_loads:
            worker.start_load_kv(None)
        for layer, name in enumerate(self._layer_names):
            if output.has_sync_kv_loads:
                worker.wait_for_layer_load(name)
            for row, (tokens, start) in zip(rows, inputs, strict=True):
                self._compute(rank, layer, row, tokens, start)
            worker.save_kv_layer(name, torch.empty(0), None)
        for row, (tokens, _) in zip(rows, inputs, strict=True) if rank == 0 else ():
            new, known = self._sample(row, tokens)
            sampled_ids.append(new)
            checks += [(row, known)] if new else []
        self._draft(rank, rows, inputs)
        if not output.has_sync_kv_loads:
            worker.start_load_kv(None)
        worker.wait_for_save()
        results = worker.get_transfer_results(output.finished_req_ids)
        told = KVConnectorOutput(
            finished_sending=results.finished_sending or None,
            finished_recving=results.finished_recving or None,
            failed_recving=results.failed_recving,
            invalid_block_ids=worker.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
        worker.clear_connector_metadata()
        return told

    def _draft(self, rank: int, rows: Sequence[Row], inputs: Sequence[tuple[list[int], int]]) -> None:
        """What vLLM's worker does between sampling and its word to the connector that the step is over."""

    def _begin_forward(self, output: SchedulerOutput, rows: Sequence[Row]) -> None:
        """What vLLM's worker does before it tells the connector of the step."""

    def _inputs(self, row: Row) -> tuple[list[int], int]:
        """The request's tokens with its drafts, and the position of the first that is computed."""
        name, start = row.request.request_id, row.start
        if row.tokens is None:
            start = min(start, len(self._tokens[name]) - 1)  # drafts that the scheduler counted on were wrong
        else:
            self._tokens[name] = row.tokens
        drafts = row.drafts
        if -1 in drafts:
            drafts = self._drafts(row.request)[: len(drafts)]
        tokens = self._tokens[name] + drafts
        assert start + row.count <= len(tokens), f"{name}: computes tokens that nobody knows"
        assert not drafts or start + row.count == len(tokens), f"{name}: drafts that are not computed"
        return tokens, start

    def _compute(self, rank: int, layer: int, row: Row, tokens: Sequence[int], start: int) -> None:
        table, before = row.table, start - 1
        for _, head, of_model in [each for each in self._heads if each[0] == rank]:
            memory, state = self._memory[rank, layer, :, head], first_state(row.request.cache_salt)
            if start:
                state = int(memory[table[before // BLOCK], before % BLOCK, 0])
            for position in range(start, start + row.count):
                state = next_state(state, tokens[position], layer + LAYERS * of_model, self._weights)
                memory[table[position // BLOCK], position % BLOCK] = state

    def _sample(self, row: Row, tokens: Sequence[int]) -> tuple[list[int], list[int]]:
        """The new tokens, and those whose states are in the memory now. There are none while a prompt is computed."""
        known = self._tokens[row.request.request_id]
        new: list[int] = []
        end = min(row.start, len(known) - 1) + row.count if row.tokens is None else row.start + row.count
        for position in range(len(known) - 1, end):
            new.append(sampled(self._states_at(row, position)))
            if position + 1 < end and tokens[position + 1] != new[-1]:
                break  # the draft was wrong
        self._tokens[row.request.request_id] = known + new
        return new, (known + new)[:-1]

    def _states_at(self, row: Row, position: int) -> Words:
        """In the memory, of each layer."""
        found: Words = self._memory[0, :, row.table[position // BLOCK], 0, position % BLOCK, 0]
        return found

    # -- what is true ----

    def _check_memory(self, row: Row, tokens: Sequence[int]) -> None:
        """All that the engine has of this request is the model's."""
        positions = np.arange(len(tokens))
        for rank, head, of_model in self._heads:
            cells = self._memory[rank, :, np.array(row.table)[positions // BLOCK], head, positions % BLOCK].swapaxes(
                0, 1
            )
            true = true_states(tokens, row.request.cache_salt, self._weights, of_model)
            wrong = (cells != true[..., None]).any(axis=(0, 2))
            first = int(wrong.argmax())
            assert not wrong.any(), (
                f"wrong KV of {row.request.request_id}, which was preempted {row.request.num_preemptions} times, in "
                f"rank {rank}: {int(wrong.sum())} of {len(tokens)} positions, the first is {first} in block "
                f"{row.table[first // BLOCK]}"
            )
        self.counters["requests_checked"] += 1

    def _note_names(self) -> None:
        """Remember what each of the half's names stands for, before and after it is used."""
        for name, mine in self._half._requests.items():
            self._named[name] = (mine, self._scheduler.requests[name])
        for name, (mine, request) in list(self._named.items()):
            tokens = list(request.all_token_ids)
            for index, key in enumerate(mine.keys, 1):
                end = index * self._half._block_tokens
                if key not in self._contents and end <= len(tokens):
                    self._contents[key] = (tokens[: end + self.ahead], request.cache_salt, self._weights)
            if name not in self._half._requests:
                del self._named[name]

    def _seal_checked(self, attachment: AttachmentId, items: Sequence[SealItem]) -> None:
        self._note_names()
        worker, current = self._workers[0]._worker, self._session.attachment
        assert worker is not None and worker._segment is not None
        if current is None or current.attachment_id != attachment or worker._segment.epoch != current.epoch:
            self._seal(attachment, items)
            return  # the pool was lost, and this seal goes nowhere
        block_tokens = self._half._block_tokens
        for item in items:
            if item.key not in self._contents:
                self.counters["tails_sealed"] += 1  # who reads them is checked
                continue
            tokens = self._contents[item.key][0]
            if not self._is_true(worker._segment, item):
                self._wrong.append(
                    f"a wrong block was stored for the tokens {len(tokens) - block_tokens} to {len(tokens)}"
                )
            self.counters["blocks_checked"] += 1
        self._seal(attachment, items)

    def _is_true(self, segment: Segment, item: SealItem) -> bool:
        """Whether the slot holds what the name says."""
        tokens, salt, weights = self._contents[item.key]
        words = np.frombuffer(segment.payload(item.ref.slot, self.connector._spec.layout.payload_bytes), dtype=np.int64)
        heads = range(self._settings.heads)
        block_tokens = self._half._block_tokens
        true = np.stack([true_states(tokens, salt, weights, head)[:, -block_tokens:] for head in heads], axis=1)
        wanted = true.reshape(LAYERS, len(heads), -1, BLOCK).swapaxes(1, 2)[..., None]  # [layer, part, head, token]
        return bool((words.reshape(LAYERS, -1, len(heads), BLOCK, CELL_WORDS) == wanted).all())
