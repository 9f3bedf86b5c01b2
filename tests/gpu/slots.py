"""The sizes of the KV cache of these tests, and a segment with slots for its blocks. Without torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvservice.core.segment.digest import digest_payload
from kvservice.core.segment.geometry import plan_geometry
from kvservice.core.segment.header import SlotHeader
from kvservice.core.segment.layout import SlotLayout
from kvservice.memory.segment import Segment
from kvservice.testing.unique import unique_name
from kvservice.units import BlockKey, BootEpoch, Generation, MiB, SlotIndex, SpanRoute

LAYERS, HEADS, TOKENS, WIDTH, BLOCKS = 4, 8, 16, 128, 32
CELL = 2 * WIDTH  # bytes of one token and head
SLOT = SlotLayout(LAYERS, HEADS, TOKENS * CELL, TOKENS)
KEY = BlockKey(b"a key of 16 byte")
# Physical order of the dimensions, outermost first.
ORDERS = ("lbhn", "lbnh", "blhn", "blnh", "lhbn")
SIZES = {"l": LAYERS, "b": BLOCKS, "h": HEADS, "n": TOKENS}


@contextmanager
def segment() -> Iterator[Segment]:
    path = Path(f"/dev/shm/kvservice-test{unique_name()}-n")
    made = Segment.create(path, plan_geometry(64 * MiB), "n")
    made.assign_slab(0, SLOT.payload_bytes)
    try:
        yield made
    finally:
        made.close()
        made.unlink()


def write_header(made: Segment, slot: SlotIndex, generation: int) -> None:
    digest = digest_payload(made.payload(slot, SLOT.payload_bytes), KEY)
    epoch = BootEpoch(made.epoch)
    made.write_header(slot, SlotHeader(epoch, Generation(generation), KEY, SLOT.payload_bytes, SpanRoute(0), digest, 0))


def payload(made: Segment, slot: SlotIndex) -> bytes:
    return bytes(made.payload(slot, SLOT.payload_bytes))


def same(found: object, wanted: object) -> bool:
    """For blocks: in CI pytest spells out each difference of an assertion that fails, which takes it minutes here."""
    return found == wanted
