"""A million damaged blocks: flipped bits, exchanged payloads, flipped and exchanged headers. Each one is noticed.

Most payloads are small, so that there can be many; their sizes go through every way that the digest takes (up to 16,
128 and 240 bytes, and more). Above, it is one loop over blocks of 1 KiB, whatever the length.
"""

from __future__ import annotations

import random

from kvservice.core.segment.digest import digest_payload
from kvservice.core.segment.header import SlotHeader, pack_header, unpack_header
from kvservice.core.segment.header_checks import is_as_located, is_as_promised
from kvservice.core.segment.refs import BlockHandle, BlockRef
from kvservice.units import BlockKey, BootEpoch, Generation, SlotIndex, SpanRoute

PAYLOADS, HEADERS = 560, 260
FLIPS = {1: 8, 3: 24, 4096: 10_000, 65_536: 2000}  # bytes of the payload -> how many
FLIPS |= dict.fromkeys((8, 16, 17, 128, 129, 240, 241, 1024, 1025), 58_000)
DAMAGED = sum(FLIPS.values()) + PAYLOADS * (PAYLOADS - 1) + HEADERS * 512 + 2 * HEADERS * (HEADERS - 1)
EPOCH = BootEpoch(7)


def test_a_million_damaged_blocks_are_asked_about() -> None:
    assert DAMAGED >= 1_000_000


def test_every_flipped_bit_of_a_payload_is_noticed() -> None:
    draw, missed = random.Random(1), 0
    for size, count in FLIPS.items():
        key, payload = BlockKey(draw.randbytes(16)), bytearray(draw.randbytes(size))
        whole = digest_payload(payload, key)
        for bit in draw.choices(range(8 * size), k=count):
            payload[bit >> 3] ^= 1 << (bit & 7)
            missed += digest_payload(payload, key) == whole
            payload[bit >> 3] ^= 1 << (bit & 7)
        assert digest_payload(payload, key) == whole
    assert missed == 0


def test_every_payload_in_the_place_of_another_is_noticed() -> None:
    """Whole and sound in itself, under the key of another block."""
    draw = random.Random(2)
    blocks = [(BlockKey(draw.randbytes(16)), draw.randbytes(64)) for _ in range(PAYLOADS)]
    missed = 0
    for key, payload in blocks:
        whole = digest_payload(payload, key)
        missed += sum(digest_payload(other, key) == whole for _, other in blocks) - 1
    assert missed == 0


def test_the_same_bytes_under_another_key_are_noticed() -> None:
    draw, payload = random.Random(3), bytes(4096)  # two blocks of zeros: what a copy that never ran leaves
    digests = {digest_payload(payload, BlockKey(draw.randbytes(16))) for _ in range(10_000)}
    assert len(digests) == 10_000


def headers(draw: random.Random) -> list[SlotHeader]:
    return [
        SlotHeader(
            EPOCH,
            Generation(2 * draw.randrange(1, 4)),
            BlockKey(draw.randbytes(16)),
            4096,
            SpanRoute(1),
            draw.getrandbits(64),
            index,
        )
        for index in range(HEADERS)
    ]


def test_every_flipped_bit_of_a_header_is_noticed() -> None:
    accepted = 0
    for header in headers(random.Random(4)):
        data = bytearray(pack_header(header))
        for bit in range(512):
            data[bit >> 3] ^= 1 << (bit & 7)
            accepted += unpack_header(data) is not None
            data[bit >> 3] ^= 1 << (bit & 7)
        assert unpack_header(data) == header
    assert accepted == 0


def test_every_header_in_the_place_of_another_is_noticed() -> None:
    """By the engine that was promised the block, and by the node that located it."""
    found, accepted = headers(random.Random(5)), 0
    packed = [pack_header(header) for header in found]
    for index, one in enumerate(found):
        ref = BlockRef(SlotIndex(index), one.generation)
        handle = BlockHandle(one.key, SlotIndex(index), one.generation, one.length, one.digest, one.position)
        accepted += sum(is_as_promised(data, EPOCH, ref, one.key, one.length) for data in packed) - 1
        accepted += sum(is_as_located(data, handle, EPOCH) for data in packed) - 1
    assert accepted == 0
