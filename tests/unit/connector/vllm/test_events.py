"""What routers read of the pool in vLLM's event stream, by the two public indexers' own rules.

Both decode msgpack as vLLM's publisher encodes it. Dynamo (`lib/kv-router/src/zmq_wire`) hashes the tokens of an event
itself and drops a stored block that comes without them. llm-d (`pkg/kvevents`) hangs blocks below a parent that it
knows, one entry a medium, and looks up a block without tokens among those it has heard of.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from kvservice.connector.scheduler.ports import StoredBlock
from kvservice.connector.vllm.events import StoredEvents, block_removed

BLOCK = 16


@pytest.fixture(autouse=True)
def _hashes() -> None:
    init_none_hash(sha256_cbor)


def request(tokens: Iterable[int], name: str = "r", **changes: Any) -> Request:
    return Request(
        name,
        list(tokens),
        SamplingParams(max_tokens=1),
        None,
        block_hasher=get_request_block_hasher(BLOCK, sha256_cbor),
        **changes,
    )


def stored(one: Request, events: StoredEvents | None = None) -> list[BlockStored]:
    events = events or StoredEvents(BLOCK, BLOCK)
    events.note(one)
    events.end(one)
    hashes = one.block_hashes
    return [events.stored(StoredBlock(h, hashes[i - 1] if i else None)) for i, h in enumerate(hashes)]


def wire(events: list[Any]) -> list[dict[str, Any]]:
    """As a router decodes what vLLM's publisher sends: the batch is an array, each event a map with a tag."""
    _, decoded, *_ = msgspec.msgpack.decode(msgspec.msgpack.encode(KVEventBatch(ts=1.0, events=events)))
    assert all(isinstance(event, dict) for event in decoded)
    return list(decoded)


class DynamoIndex:
    """Blocks by the tokens before and in them, as far as its rules let an event in."""

    TIERS = {"GPU": "device", "CPU": "host"}

    def __init__(self) -> None:
        self.prefixes: dict[tuple[str, Any], tuple[int, ...]] = {}  # (tier, engine's hash) → all tokens up to its end

    def apply(self, event: dict[str, Any]) -> None:
        tier = self.TIERS[event["medium"]]
        assert event.get("locality") in (None, "LOCAL")
        if event["type"] == "BlockRemoved":
            for block in event["block_hashes"]:
                self.prefixes.pop((tier, block), None)
            return
        (block,) = event["block_hashes"]
        if event["block_size"] != BLOCK or len(event["token_ids"]) < BLOCK:
            return  # "Block not published"
        parent = event["parent_block_hash"]
        before: tuple[int, ...] = () if parent is None else self.prefixes[tier, parent]
        self.prefixes[tier, block] = (*before, *event["token_ids"])

    def overlap(self, tokens: Iterable[int], tier: str) -> int:
        prompt = tuple(tokens)
        ends = [len(p) for (t, _), p in self.prefixes.items() if t == tier and prompt[: len(p)] == p]
        return max(ends, default=0)


def test_an_index_that_hashes_tokens_finds_the_pools_blocks() -> None:
    one, index = request(range(50)), DynamoIndex()
    for event in wire(stored(one)):
        index.apply(event)
    assert index.overlap(range(100), "host") == 48 and index.overlap(range(100), "device") == 0
    for event in wire([block_removed(one.block_hashes[2])]):
        index.apply(event)
    assert index.overlap(range(100), "host") == 32


def test_an_event_has_what_llm_d_reads() -> None:
    """The type, hashes, parent, tokens, size and medium, by name."""
    first, second, third = wire(stored(request(range(50))))
    assert [event["parent_block_hash"] for event in (second, third)] == [
        event["block_hashes"][0] for event in (first, second)
    ]
    assert first["parent_block_hash"] is None and first["block_size"] == BLOCK
    for event in (first, second, third):
        assert event["type"] == "BlockStored" and event["medium"] == "CPU"
        assert isinstance(event["block_hashes"][0], int | bytes) and all(isinstance(t, int) for t in event["token_ids"])
    (gone,) = wire([block_removed(request(range(16)).block_hashes[0])])
    assert gone == {"type": "BlockRemoved", "block_hashes": first["block_hashes"], "medium": "CPU"}


def test_names_are_those_of_the_engines_own_events() -> None:
    """A block of the pool is the engine's block in another medium: both have one hash."""
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    one = request(range(32))
    assert [event.block_hashes for event in stored(one)] == [[maybe_convert_block_hash(h)] for h in one.block_hashes]


def test_salts_and_adapters_are_told() -> None:
    """Without them an index would take the block for that of every prompt with these tokens."""
    salted = stored(request(range(32), cache_salt="s"))
    assert [event.extra_keys for event in salted] == [[("s",)], None]
    adapted = stored(request(range(16), lora_request=LoRARequest("poet", 3, "/adapters/poet")))
    assert [(event.lora_name, event.lora_id, event.extra_keys) for event in adapted] == [("poet", 3, [("poet",)])]


def test_generated_blocks_are_told_with_their_tokens() -> None:
    one, events = request(range(20)), StoredEvents(BLOCK, BLOCK)
    events.note(one)
    one.append_output_token_ids(list(range(20, 40)))
    assert [event.token_ids for event in stored(one, events)] == [list(range(16)), list(range(16, 32))]


def test_a_block_of_several_hashes_has_all_its_tokens() -> None:
    """With several KV cache groups a position is larger than what vLLM hashes; its last hash names it."""
    one, events = request(range(64)), StoredEvents(2 * BLOCK, BLOCK)
    events.end(one)
    told = events.stored(StoredBlock(one.block_hashes[3], one.block_hashes[1]))
    assert told.token_ids == list(range(32, 64)) and told.block_size == 32


def test_a_block_of_a_request_not_known_is_told_without_tokens() -> None:
    told = StoredEvents(BLOCK, BLOCK).stored(StoredBlock(b"h" * 32, None))
    assert isinstance(told, BlockStored) and told.token_ids == [] and told.medium == "CPU"
    assert isinstance(block_removed(b"h" * 32), BlockRemoved)
