"""What every Copier must do. Subclass, give it a `bench` fixture, and pytest runs the rules against it.

The fixture makes the engine's KV cache with `kv_layers`, a segment of `GEOMETRY`, and a copier that has adopted it. The
rules write and read headers as a shard would, because a copy worker looks at them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvservice.connector.plan import CopyEntry, PoolInfo
from kvservice.connector.worker.copier import Copier, Ticket
from kvservice.copying.message import Direction
from kvservice.core.segment.digest import digest_payload
from kvservice.core.segment.geometry import Geometry, slot_index
from kvservice.core.segment.header import SlotHeader
from kvservice.core.segment.layout import SlotLayout
from kvservice.core.segment.refs import BlockRef
from kvservice.memory.segment import Segment
from kvservice.testing.eventually import eventually
from kvservice.units import BlockKey, Generation, MiB, SlotIndex, SpanRoute

# Small, and all different from 1, so that a stride that is mixed up with another copies wrong bytes.
LAYERS, BLOCKS, HEADS, TOKENS, WIDTH = 2, 6, 2, 256, 128
LAYOUT = SlotLayout(LAYERS, HEADS, TOKENS * WIDTH * 2, 2 * TOKENS, parts=2)
GEOMETRY = Geometry(slab_bytes=4 * MiB, slab_count=1)
CACHE_BYTES = BLOCKS * LAYERS * LAYOUT.part_bytes
ENGINE_ID = bytes(range(16))
SLOTS = [slot_index(0, index) for index in range(4)]
KEYS = [BlockKey(bytes([1 + index]) * 16) for index in range(len(SLOTS))]


def kv_layers(raw: torch.Tensor) -> list[torch.Tensor]:
    """An engine's KV cache over these CACHE_BYTES: a tensor a layer, [block, head, token, width]."""
    return list(raw.view(torch.bfloat16).view(LAYERS, BLOCKS, HEADS, TOKENS, WIDTH).unbind(0))


@dataclass(slots=True)
class CopierBench:
    copier: Copier
    layers: list[torch.Tensor]
    segment: Segment
    pool: PoolInfo

    def fill(self, block: int) -> bytes:
        """Random bytes in this block of every layer. Returns them, layer after layer."""
        for layer in self.layers:
            layer[block] = torch.randn(HEADS, TOKENS, WIDTH).to(torch.bfloat16)
        return self.block(block)

    def block(self, block: int) -> bytes:
        return bytes(torch.stack([layer[block] for layer in self.layers]).view(torch.uint8).numpy())

    def slot(self, slot: SlotIndex) -> bytes:
        return bytes(self.segment.payload(slot, LAYOUT.payload_bytes))

    def reserve(self, slot: SlotIndex) -> BlockRef:
        """As a shard that gives the engine this slot to write."""
        return self._write_header(slot, Generation(1), BlockKey(ENGINE_ID), 0)

    def seal(self, slot: SlotIndex, key: BlockKey) -> BlockRef:
        """As a shard that has digested what was written."""
        digest = digest_payload(self.segment.payload(slot, LAYOUT.payload_bytes), key)
        return self._write_header(slot, Generation(2), key, digest)

    def _write_header(self, slot: SlotIndex, generation: Generation, key: BlockKey, digest: int) -> BlockRef:
        header = SlotHeader(self.segment.epoch, generation, key, LAYOUT.payload_bytes, SpanRoute(0), digest, 0)
        self.segment.write_header(slot, header)
        return BlockRef(slot, generation)

    def run(self, direction: Direction, *entries: CopyEntry) -> Ticket:
        ticket = self.copier.run(direction, entries)
        self.copier.flush()
        return ticket

    def copied(self, direction: Direction, *entries: CopyEntry) -> bool:
        """Whether the copies succeeded, once they have ended."""
        ticket = self.run(direction, *entries)
        ticket.synchronize()
        assert ticket.query(), "copies that were waited for have ended"
        return ticket.succeeded()


class CopierContract:
    def test_a_block_that_was_stored_is_loaded_as_it_was(self, bench: CopierBench) -> None:
        """Into another block of the cache, as in another request."""
        wanted = bench.fill(0)
        assert bench.copied(Direction.STORE, CopyEntry(0, bench.reserve(SLOTS[0]), KEYS[0]))
        ref = bench.seal(SLOTS[0], KEYS[0])
        assert bench.copied(Direction.LOAD, CopyEntry(5, ref, KEYS[0]))
        assert bench.block(5) == wanted

    def test_each_block_goes_to_its_own_slot(self, bench: CopierBench) -> None:
        wanted = [bench.fill(block) for block in range(4)]
        refs = [bench.reserve(slot) for slot in SLOTS]
        entries = [CopyEntry(3 - place, refs[place], KEYS[place]) for place in range(4)]
        assert bench.copied(Direction.STORE, *entries)
        slots = [bench.slot(slot) for slot in SLOTS]
        assert len(set(slots)) == 4
        refs = [bench.seal(slot, key) for slot, key in zip(SLOTS, KEYS, strict=True)]
        entries = [CopyEntry(place, refs[place], KEYS[place]) for place in range(4)]
        assert bench.copied(Direction.LOAD, *entries)
        assert [bench.block(block) for block in range(4)] == wanted[::-1]

    def test_blocks_of_one_slot_lie_side_by_side_in_each_layer(self, bench: CopierBench) -> None:
        """Also those that are neighbours in the engine. They are loaded each on its own."""
        for first, second in ((1, 4), (2, 3)):
            wanted = [bench.fill(block) for block in (first, second)]
            ref = bench.reserve(SLOTS[2])
            entries = [CopyEntry(second, ref, KEYS[2], part=1), CopyEntry(first, ref, KEYS[2], part=0)]
            assert bench.copied(Direction.STORE, *entries)
            size = LAYOUT.part_bytes
            layers = [block[layer * size : (layer + 1) * size] for layer in range(LAYERS) for block in wanted]
            assert bench.slot(SLOTS[2]) == b"".join(layers)
        ref, beside = bench.seal(SLOTS[2], KEYS[2]), bench.block(0)
        assert bench.copied(Direction.LOAD, CopyEntry(5, ref, KEYS[2], part=1))
        assert bench.block(5) == wanted[1] and bench.block(0) == beside
        assert bench.copied(Direction.LOAD, CopyEntry(0, ref, KEYS[2], part=0))
        assert bench.block(0) == wanted[0] and bench.block(5) == wanted[1]

    def test_a_digest_that_a_copy_brings_is_of_its_slot(self, bench: CopierBench) -> None:
        """A copier need not bring any, and never does for a slot of which it read a part."""
        for block in range(3):
            bench.fill(block)
        refs = [bench.reserve(slot) for slot in SLOTS[:2]]
        stored = [CopyEntry(part, refs[0], KEYS[0], part=part) for part in range(2)]
        assert bench.copied(Direction.STORE, *stored, CopyEntry(2, refs[1], KEYS[1], part=1))
        refs = [bench.seal(slot, key) for slot, key in zip(SLOTS[:2], KEYS[:2], strict=True)]
        loaded = [CopyEntry(5 - part, refs[0], KEYS[0], part=part) for part in range(2)]
        ticket = bench.run(Direction.LOAD, *loaded, CopyEntry(3, refs[1], KEYS[1], part=1))
        ticket.synchronize()
        assert ticket.succeeded() and ticket.digests.keys() <= {SLOTS[0]}
        digest = digest_payload(bench.slot(SLOTS[0]), KEYS[0])
        assert ticket.digests.get(SLOTS[0], digest) == digest
        assert [bench.block(block) for block in (5, 4, 3)] == [bench.block(block) for block in range(3)]

    def test_a_copy_changes_nothing_beside_its_target(self, bench: CopierBench) -> None:
        before = [bench.fill(block) for block in range(BLOCKS)]
        for slot in SLOTS:
            bench.segment.payload(slot, LAYOUT.payload_bytes)[:] = bytes(LAYOUT.payload_bytes)
        assert bench.copied(Direction.STORE, CopyEntry(2, bench.reserve(SLOTS[1]), KEYS[1]))
        assert [any(bench.slot(slot)) for slot in SLOTS] == [False, True, False, False]
        assert bench.copied(Direction.LOAD, CopyEntry(4, bench.seal(SLOTS[1], KEYS[1]), KEYS[1]))
        before[4] = before[2]
        assert [bench.block(block) for block in range(BLOCKS)] == before

    def test_copies_of_several_calls_start_with_one_flush(self, bench: CopierBench) -> None:
        wanted = [bench.fill(block) for block in range(2)]
        entries = [CopyEntry(block, bench.reserve(SLOTS[block]), KEYS[block]) for block in range(2)]
        tickets = [bench.copier.run(Direction.STORE, [entry]) for entry in entries]
        bench.copier.flush()
        for ticket in tickets:
            ticket.synchronize()
        assert all(ticket.succeeded() for ticket in tickets)
        refs = [bench.seal(SLOTS[place], KEYS[place]) for place in range(2)]
        assert bench.copied(Direction.LOAD, *(CopyEntry(4 + n, refs[n], KEYS[n]) for n in range(2)))
        assert [bench.block(4), bench.block(5)] == wanted

    def test_a_flush_without_copies_does_nothing(self, bench: CopierBench) -> None:
        bench.copier.flush()
        bench.copier.flush()

    def test_what_was_counted_is_told_once(self, bench: CopierBench) -> None:
        bench.fill(0)
        assert bench.copied(Direction.STORE, CopyEntry(0, bench.reserve(SLOTS[0]), KEYS[0]))
        bench.copier.take_counters()
        assert bench.copier.take_counters() == {}

    def test_blocks_that_are_lent_are_given_back(self, bench: CopierBench) -> None:
        """Or they are not lent, where there is no way to."""
        loan = bench.copier.lend([(0, KEYS[0])])
        if loan is not None:
            loan.recall()
            loan.recall()
            eventually(lambda: loan.is_over, "the end of the loan")
