"""The engine of hashing_engine.py before a model of several KV cache groups: full attention, sliding windows, chunks,
and states as Mamba has them.

The cell of a token in a layer with a window is hashed from the cells of the window as they are *read back*, and from
the token. A layer with a state hashes the token into the state, which lies where vLLM's mode `align` has it. All groups
have their blocks in the same bytes, as vLLM's have, so an id that is taken for one of another group shows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import RequestStatus

from kvservice.connector.vllm.group_rules import stored_groups
from kvservice.connector.worker.half import Copying
from kvservice.core.block.window_groups import group_key
from kvservice.core.messages import SealItem
from kvservice.memory.segment import Segment
from kvservice.units import BlockKey
from tests.unit.connector.vllm.hash_chain import (
    BLOCK,
    BLOCKS_MIN,
    LENGTH_MAX,
    STEP_TOKENS,
    VOCABULARY,
    EngineSettings,
    Group,
    Words,
    first_state,
    next_state,
)
from tests.unit.connector.vllm.hashing_drafts import DraftingEngine
from tests.unit.connector.vllm.hashing_engine import HashingEngine, OpenPool, Row

PAGE_WORDS = 512  # of a block in a layer, in words of eight bytes
STATE_WORDS = 200  # of a state; the rest of its page is padding
NULL_BLOCK = 0
MULTIPLIER = 0x9E3779B97F4A7C15  # odd, so that no cell of a window is lost


def engine_of(
    model: Path, settings: EngineSettings, seed: int, block_count: int, open_pool: OpenPool | None = None
) -> HashingEngine:
    kind = GroupsEngine if settings.groups else DraftingEngine if settings.draft_layer else HashingEngine
    return kind(model, settings, seed, block_count, open_pool)


def blocks_min(settings: EngineSettings) -> int:
    """The null block, one to spare, and what the longest request needs at the same time."""
    if not settings.groups:
        return BLOCKS_MIN
    lengths = {"sliding": 2 * STEP_TOKENS, "chunk": 2 * STEP_TOKENS, "full": LENGTH_MAX}
    return 2 + sum(
        4 if group.kind == "state" else min(group.tokens + lengths[group.kind], LENGTH_MAX) // group.block + 1
        for group in settings.groups
    )


def first_read(group: Group, position: int) -> int:
    """The first position that the token at this one reads."""
    if group.kind == "sliding":
        return max(position - group.tokens + 1, 0)
    if group.kind == "chunk":
        return position // group.tokens * group.tokens
    return max(position - 1, 0)


def next_cell(
    group: Group, layer: int, cells: Sequence[int], position: int, token: int, salt: str | None, weights: int
) -> int:
    """The cell of the token, from those that it reads, which end before it."""
    mixed = first_state(salt) if first_read(group, position) == position else 0
    for cell in cells:
        mixed = (mixed * MULTIPLIER + cell) % 2**64
    return next_state(mixed, token, layer, weights)


@lru_cache(maxsize=20_000)
def _true(group: Group, layer: int, tokens: tuple[int, ...], salt: str | None, weights: int) -> tuple[int, ...]:
    whole = (len(tokens) - 1) // BLOCK * BLOCK
    cells = list(_true(group, layer, tokens[:whole], salt, weights)) if whole > 0 else []
    for position in range(len(cells), len(tokens)):
        read = cells[first_read(group, position) :]
        cells.append(next_cell(group, layer, read, position, tokens[position], salt, weights))
    return tuple(cells)


@dataclass(frozen=True, slots=True)
class Layer:
    index: int  # in the model
    engine_group: int
    group: Group
    cells: Words  # [block, token, word] in the memory; of a state [block, word]


def _spec(group: Group) -> KVCacheSpec:
    if group.kind == "state":
        page = PAGE_WORDS * 8
        return MambaSpec(
            block_size=group.block,
            shapes=((STATE_WORDS * 8,),),
            dtypes=(torch.int8,),
            page_size_padded=page,
            mamba_cache_mode="align",
        )
    size = {"block_size": group.block, "num_kv_heads": 1, "head_size": PAGE_WORDS * 2 // group.block}
    if group.kind == "sliding":
        return SlidingWindowSpec(**size, dtype=torch.bfloat16, sliding_window=group.tokens)
    if group.kind == "chunk":
        return ChunkedLocalAttentionSpec(**size, dtype=torch.bfloat16, attention_chunk_size=group.tokens)
    return FullAttentionSpec(**size, dtype=torch.bfloat16)


class GroupsEngine(HashingEngine):
    """One rank of one head, without drafts."""

    def _lay_out(self, block_count: int, seed: int) -> KVCacheConfig:
        groups = self._settings.groups
        depth = max(group.layers for group in groups)
        self._memory = np.random.default_rng(seed).integers(2**60, size=(depth, block_count, PAGE_WORDS))
        self._layers: list[Layer] = []
        specs: list[KVCacheGroupSpec] = []
        for number, group in enumerate(groups):
            names = [f"model.layers.{len(self._layers) + at}.mixer" for at in range(group.layers)]
            for at in range(group.layers):
                shape = (block_count, PAGE_WORDS) if group.kind == "state" else (block_count, group.block, -1)
                cells = self._memory[at].reshape(shape)
                if group.kind == "state":
                    cells = cells[:, :STATE_WORDS]
                self._layers.append(Layer(len(self._layers), number, group, cells))
            specs.append(KVCacheGroupSpec(names, _spec(group)))
        self._layer_names = [name for spec in specs for name in spec.layer_names]
        self._block_tokens = math.lcm(*(group.block for group in groups))
        self._groups_of: dict[BlockKey, int] = {}  # keys of window groups
        self._seen = 0  # contents that have their names
        self._state_at: dict[str, int] = {}  # by request: where in its table its state was when its last step ended
        cache = KVCacheConfig(num_blocks=block_count, kv_cache_tensors=[], kv_cache_groups=specs)
        cache.hash_block_size = BLOCK
        self._stored = stored_groups(cache)
        return cache

    def _tensors(self, rank: int) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for layer, name in zip(self._layers, self._layer_names, strict=True):
            cells = torch.from_numpy(layer.cells)
            if layer.group.kind == "state":
                found[name] = cells.view(torch.int8)[:, None, None, :]
            else:
                found[name] = cells.view(torch.bfloat16)[:, None]
        return found

    def _garble(self, rank: int, load: Copying) -> bool:
        for entry in load.plan.entries:
            if entry.block_id != NULL_BLOCK:
                self._memory[:, entry.block_id] += 1
        return False

    # -- a step ----

    def step(self) -> None:
        super().step()
        self._end_stall()

    def _end_stall(self) -> None:
        """vLLM reserves too few blocks for a request whose hit ends behind a window: it takes the null blocks of its
        table for blocks that the request has. Then the first of several loaded requests may not fit, and vLLM asks no
        other. Such a one is ended here, as somebody who waits for it would."""
        scheduler = self._scheduler
        head = next(iter(scheduler.kv_holding_waiting), None)
        if head is None or scheduler.running or self._forwards or head.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            return
        manager, computed = scheduler.kv_cache_manager, head.num_computed_tokens
        end = min(computed + STEP_TOKENS, head.num_tokens)
        next_step = sum(
            one.get_num_blocks_to_allocate(head.request_id, end, (), computed, computed, end)
            for one in manager.coordinator.single_type_managers
        )
        free = manager.block_pool.get_num_free_blocks()
        if scheduler._request_remaining_blocks(head) <= free < next_step:
            self.counters["stalls_of_vllm"] += 1
            self.abort(head.request_id)
            self.answers.setdefault(head.request_id, None)

    def _begin_forward(self, output: SchedulerOutput, rows: Sequence[Row]) -> None:
        """As vLLM's preprocess_mamba: a state that the step goes on from is copied to the block that it ends in."""
        again = output.scheduled_cached_reqs.resumed_req_ids
        for name in (*output.finished_req_ids, *(output.preempted_req_ids or ()), *again):
            self._state_at.pop(name, None)
        for row in rows:
            name = row.request.request_id
            before = self._state_at.get(name, (row.start - 1) // BLOCK)
            now = self._state_at[name] = (row.start + row.count - 1) // BLOCK
            for layer in self._layers if before not in (-1, now) else ():
                if layer.group.kind == "state":
                    table = row.tables[layer.engine_group]
                    assert NULL_BLOCK not in (table[before], table[now]), f"{name}: wrong, no block for its state"
                    layer.cells[table[now]] = layer.cells[table[before]]

    def _compute(self, rank: int, layer: int, row: Row, tokens: Sequence[int], start: int) -> None:
        it, salt, end = self._layers[layer], row.request.cache_salt, row.start + row.count
        group, table = it.group, row.tables[it.engine_group]
        if group.kind == "state":
            block = table[(end - 1) // BLOCK]
            read = [int(it.cells[block, 0])] if start else []
            for position in range(start, end):
                read = [next_cell(group, layer, read, position, tokens[position], salt, self._weights)]
            it.cells[block] = read[0]
            return
        first = first_read(group, start)
        found = [int(it.cells[self._block(row, it, at), at % group.block, 0]) for at in range(first, start)]
        for position in range(start, end):
            read = found[first_read(group, position) - first :]
            found.append(next_cell(group, layer, read, position, tokens[position], salt, self._weights))
            it.cells[self._block(row, it, position), position % group.block] = found[-1]

    def _block(self, row: Row, layer: Layer, position: int) -> int:
        block = row.tables[layer.engine_group][position // layer.group.block]
        assert block != NULL_BLOCK, f"wrong: {row.request.request_id} has no block for position {position}"
        return block

    def _states_at(self, row: Row, position: int) -> Words:
        """Two words, of all layers."""
        mixed = 0
        for it in self._layers:
            block = self._block(row, it, position)
            cell = it.cells[block, 0] if it.group.kind == "state" else it.cells[block, position % it.group.block, 0]
            mixed = (mixed * MULTIPLIER + int(cell)) % 2**62
        return np.array([mixed % VOCABULARY, mixed >> 20])

    # -- what is true ----

    def _check_memory(self, row: Row, tokens: Sequence[int]) -> None:
        known = tuple(tokens)
        for it in self._layers:
            group, table = it.group, np.array(row.tables[it.engine_group])
            true = np.array(_true(group, it.index, known, row.request.cache_salt, self._weights))
            positions = np.arange(len(known))
            if group.kind == "state":
                found, positions = it.cells[table[[positions[-1] // BLOCK]]], positions[-1:]
            else:
                positions = positions[table[positions // group.block] != NULL_BLOCK]
                found = it.cells[table[positions // group.block], positions % group.block]
            wrong = positions[(found != true[positions, None]).any(axis=1)]
            assert not len(wrong), (
                f"wrong KV of {row.request.request_id}, which was preempted {row.request.num_preemptions} times, in "
                f"layer {it.index}, {group}: {len(wrong)} of {len(known)} positions, the first is {wrong[0]}"
            )
        self.counters["requests_checked"] += 1

    def _note_names(self) -> None:
        super()._note_names()
        for key, content in list(self._contents.items())[self._seen :]:
            for group in range(1, len(self._stored.groups)):
                self._contents.setdefault(name := group_key(key, group), content)
                self._groups_of[name] = group
        self._seen = len(self._contents)

    def _is_true(self, segment: Segment, item: SealItem) -> bool:
        tokens, salt, weights = self._contents[item.key]
        begin = len(tokens) - self._block_tokens
        spec, number = self.connector._spec, self._groups_of.get(item.key, 0)
        layout = spec.window_groups[number - 1].layout if number else spec.layout
        words = np.frombuffer(segment.payload(item.ref.slot, layout.payload_bytes), dtype=np.int64)
        if number == 0 and self._stored.has_signposts:
            return not words.any()
        indices = self._stored.groups[number].engine_groups
        layers = [it for it in self._layers if it.engine_group in indices]
        true = np.array([_true(it.group, it.index, tuple(tokens), salt, weights)[begin:] for it in layers])
        if layers[0].group.kind == "state":
            true = true[:, -1:]
        return bool((words.reshape(*true.shape, -1) == true[..., None]).all())
