"""The life of a KV block between a device's pool and a host's pool, as public texts tell it with SGLang's names.

A block is allocated on the device, evicted to the host when the device has no room, and comes back into another place.
Each test retells one passage with its numbers. Where the passage is wrong, the test says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvservice.core.segment.header import SlotHeader, unpack_header
from kvservice.engine.blocks import BlockAllocator, PagedMemory, PagedSequence
from kvservice.engine.cache import BothHalves
from kvservice.engine.model import PagedModel
from kvservice.engine.options import EngineOptions
from kvservice.testing.eventually import eventually
from kvservice.units import Generation

DEVICE_BLOCKS, HOST_BLOCKS = 8, 16
OLD, NEW = [11, 12, 13], [21, 22]  # a block holds one token, so the five of them are five blocks
# A model of one layer: only the shape of its cache counts here.
TINY = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}


class Tiers:
    """A device's pool and, behind the connector's halves, an embedded pool of the host."""

    def __init__(self) -> None:
        self.model = PagedModel(LlamaForCausalLM(LlamaConfig(**TINY, num_hidden_layers=1)), block_tokens=1)
        self.kv = self.model.allocate(DEVICE_BLOCKS)
        device = BlockAllocator("device", range(DEVICE_BLOCKS))
        self.memory = PagedMemory(device, BlockAllocator("host", range(HOST_BLOCKS)), 1, watermark=0)
        options = EngineOptions(mode="embedded", memory="4MiB", weights_version="any", verify_load="full")
        self.cache = BothHalves(options, self.model, device)
        self.cache.start([], is_idle=True)

    def allocate(self, tokens: list[int], number: int) -> PagedSequence:
        """A sequence whose K and V are on the device: each block is filled with its token."""
        sequence = PagedSequence(number, tokens)
        self.memory.append(sequence, len(tokens))
        for token, block_id in zip(tokens, sequence.table, strict=True):
            self.kv.storage[block_id] = float(token)
        self.memory.written(sequence, len(tokens))
        return sequence

    def evict(self, sequence: PagedSequence) -> None:
        assert self.cache.swap_out("old", self.memory.swap_out([sequence]))

    def bring_back(self, sequence: PagedSequence) -> set[str]:
        """Returns what is lost: the request, or nothing."""
        return self.cache.start([("old", self.memory.swap_in([sequence]))], is_idle=True)

    def sealed(self) -> list[tuple[int, SlotHeader]]:
        """The slots of the host's pool that hold a block."""
        segment = self.cache._worker._segment
        assert segment is not None
        return [(slot, header) for slot, _, header in segment.scan() if header.generation % 2 == 0]


@pytest.fixture
def tiers() -> Iterator[Tiers]:
    made = Tiers()
    yield made
    made.cache.close()


def test_a_block_goes_to_the_host_and_comes_back(tiers: Tiers) -> None:
    """Eight blocks on the device, sixteen on the host. Five are allocated: three are free. The three oldest are evicted
    to the host: the host has three in use, the device six free. They come back into other places with equal bytes. At
    the end all eight are free.

    The source frees the host's copies with the request. That is right for the engine's books, which have sixteen free
    again; the pool keeps the three blocks until it needs the room, because a cache frees nothing early.
    """
    device, host = tiers.memory.device, tiers.memory.host
    old, new = tiers.allocate(OLD, 0), tiers.allocate(NEW, 1)
    assert (device.free_count, host.free_count) == (3, 16)
    before = list(old.table)

    tiers.evict(old)
    assert (device.free_count, host.count - host.free_count) == (6, 3)
    eventually(lambda: len(tiers.sealed()) == 3, "three blocks in the host's pool")
    tiers.kv.storage[before] = -1.0  # somebody else writes there
    pinned = [device.allocate() for _ in range(3)]  # so the way back leads to other places

    assert tiers.bring_back(old) == set()
    assert set(old.table).isdisjoint(pinned) and not old.on_host
    for token, block_id in zip(OLD, old.table, strict=True):
        assert torch.all(tiers.kv.storage[block_id] == float(token))
    for block_id in pinned:
        device.free(block_id)

    for sequence in (old, new):
        tiers.memory.free(sequence)
    assert (device.free_count, host.free_count) == (8, 16)
    assert len(tiers.sealed()) == 3, "the pool keeps them"


def test_a_slot_that_changes_meanwhile_is_not_loaded(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The source asks for locks around the host's pool ("Synchronization"). There are none here: a reader compares the
    slot's header before and after its copy, so a slot that was given to somebody else meanwhile is a miss."""
    old = tiers.allocate(OLD, 0)
    tiers.evict(old)
    eventually(lambda: len(tiers.sealed()) == 3, "three blocks in the host's pool")
    copier, segment = tiers.cache._worker._copier, tiers.cache._worker._segment
    assert segment is not None
    inner, (slot, _) = copier.run, tiers.sealed()[1]

    def run(*given: object, **named: object) -> object:
        ticket = inner(*given, **named)  # type: ignore[arg-type]
        header = unpack_header(segment.header_bytes(slot))
        assert header is not None
        segment.write_header(
            slot, replace(header, generation=Generation(header.generation + 2))
        )  # another block lies there now
        return ticket

    monkeypatch.setattr(copier, "run", run)
    assert tiers.bring_back(old) == {"old"}
    tiers.cache.end(0, 0.0)
    assert tiers.cache.all_counters()["load_overwritten"] == 1
