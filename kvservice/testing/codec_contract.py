"""The rules that every Codec must keep. Subclass, give it a `codec` and a `numbers` fixture, and pytest runs the rules
against it.

A codec may leave a block as it is. What it encodes must decode to the same bytes, or to those whose digest it names.
Bytes that it has not made end in CodecError or in any bytes, and never in anything else.
"""

from __future__ import annotations

import random
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache

import pytest

from kvservice.codec.base import EXTRA_BYTES_MAX, Codec, Encoded
from kvservice.codec.coder import Coder
from kvservice.core.block.numbers import Numbers
from kvservice.core.events import PullResult
from kvservice.core.segment.blockfile import BlockFileHeader, pack_file_header, unpack_file_header
from kvservice.core.segment.digest import digest_payload
from kvservice.core.tier.tier_block import TierBlock
from kvservice.errors import CodecError
from kvservice.units import BlockKey, SpanRoute

FENCE = b"\xa5" * 64  # around a target: whoever writes beyond it is seen
ROWS = 64 * 16 * 4  # bytes of a payload: whole rows of 64 numbers of any type


@cache
def payloads() -> dict[str, bytes]:
    """Payloads of every kind that an engine may have, and some that none has."""
    draw = random.Random(1)
    normal = [draw.gauss(0, 1) for _ in range(ROWS // 4)]
    return {
        "normal": struct.pack(f"<{ROWS // 4}f", *normal),
        "normal_bfloat16": b"".join(struct.pack("<f", number)[2:] for number in normal + normal),
        "normal_float16": struct.pack(f"<{ROWS // 2}e", *normal, *normal),
        "random": draw.randbytes(ROWS),
        "zeros": bytes(ROWS),
        "constant": b"\x12\x3f" * (ROWS // 2),
        "smallest": b"\x01\x00\x00\x80" * (ROWS // 4),
        "infinite": b"\x00\x00\x80\x7f" * (ROWS // 4),
        "no_numbers": b"\xff" * ROWS,
        "one_is_no_number": struct.pack(f"<{ROWS // 4}f", *normal[:-1], float("nan")),
        "largest": b"\xff\xff\x7f\x7f" * (ROWS // 4),
        "odd": draw.randbytes(4097),
        "short": b"\x07",
    }


def block_of(payload: bytes) -> TierBlock:
    key = BlockKey(b"k" * 16)
    return TierBlock(key, len(payload), digest_payload(payload, key), 5, SpanRoute(9), 3, b"f" * 16, 1_700_000_000.5)


class CodecContract:
    """`numbers` is what is known of the payloads; it must let the codec encode those of its type."""

    @pytest.fixture
    def coder(self, codec: Codec, numbers: Numbers) -> Coder:
        return Coder([codec], numbers_of=lambda _: numbers)

    @staticmethod
    def encoded(coder: Coder, payload: bytes) -> Encoded:
        kept = bytes(payload)
        done = coder.encode(block_of(payload), memoryview(payload))
        assert done is not None, coder.counters()
        assert payload == kept, "the payload is only read"
        return done

    @staticmethod
    def decode(coder: Coder, done: Encoded) -> tuple[PullResult, bytes]:
        size = done.header.block.payload_bytes
        memory = bytearray(FENCE + bytes(size) + FENCE)
        result = coder.decode(done.header, memoryview(done.data), memoryview(memory)[len(FENCE) : len(FENCE) + size])
        assert memory[: len(FENCE)] == FENCE == memory[len(FENCE) + size :], "nothing beyond the target is written"
        return result, bytes(memory[len(FENCE) : len(FENCE) + size])

    @pytest.mark.parametrize("kind", payloads())
    def test_a_block_comes_back_with_the_digest_of_its_header(self, coder: Coder, kind: str) -> None:
        payload = payloads()[kind]
        done = self.encoded(coder, payload)
        result, found = self.decode(coder, done)
        assert result is PullResult.OK
        assert found == payload or done.header.block.digest != block_of(payload).digest
        assert unpack_file_header(pack_file_header(done.header)) == done.header

    def test_some_payload_is_really_encoded(self, codec: Codec, coder: Coder) -> None:
        codecs = {self.encoded(coder, payload).header.codec.partition("=")[0] for payload in payloads().values()}
        assert any(name.partition(":")[0] == codec.name for name in codecs)

    @pytest.mark.parametrize("kind", payloads())
    def test_a_block_hardly_grows(self, coder: Coder, kind: str) -> None:
        payload = payloads()[kind]
        assert len(self.encoded(coder, payload).data) <= len(payload) + EXTRA_BYTES_MAX

    @pytest.mark.parametrize("seed", range(3))
    def test_damaged_bytes_are_never_a_block(self, coder: Coder, seed: int) -> None:
        draw = random.Random(seed)
        for payload in payloads().values():
            done = self.encoded(coder, payload)
            data = bytearray(done.data)
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
            cut = bytes(done.data)[: draw.randrange(len(data))]
            for damaged in (bytes(data), cut, bytes(done.data) + b"x", draw.randbytes(len(data)), b""):
                result, found = self.decode(coder, Encoded(done.header, damaged))
                # A flipped bit may be one that decoding does not read. What comes is then what was stored.
                if result is PullResult.OK:
                    assert digest_payload(found, done.header.block.key) == done.header.block.digest
        assert "codec_failed" not in coder.counters(), "damage raises CodecError and nothing else"

    def test_an_other_header_is_never_a_block(self, codec: Codec, coder: Coder) -> None:
        payload = next(each for each in payloads().values() if self.encoded(coder, each).header.codec)
        done = self.encoded(coder, payload)
        for parameters in ("", "x", "2", "4", "0", "-1", "9" * 40, "float32:0", "float32:64", ":", "bfloat16:999999"):
            header = replace(done.header, codec=f"{codec.name}:{parameters}={len(payload)}")
            result, found = self.decode(coder, Encoded(header, done.data))
            if result is PullResult.OK:
                assert digest_payload(found, header.block.key) == header.block.digest
        for size in (1, len(payload) - 1, len(payload) + 1, 2 * len(payload)):
            header = replace(done.header, block=replace(done.header.block, payload_bytes=size))
            assert self.decode(coder, Encoded(header, done.data))[0] is PullResult.CORRUPT
        assert "codec_failed" not in coder.counters(), "a header raises CodecError and nothing else"

    def test_a_codec_itself_refuses_what_it_has_not_made(self, codec: Codec) -> None:
        for size in (0, 1, 31):
            header = BlockFileHeader(block_of(bytes(64)), max(size, 1), f"{codec.name}=64")
            with pytest.raises(CodecError):
                codec.decode(header, "", memoryview(b"\x05" * size), memoryview(bytearray(64)))

    def test_many_threads_may_encode_and_decode_at_once(self, coder: Coder) -> None:
        def both_ways(kind: str) -> bool:
            done = self.encoded(coder, payloads()[kind])
            return self.decode(coder, done)[0] is PullResult.OK

        with ThreadPoolExecutor(4) as threads:
            assert all(threads.map(both_ways, [*payloads(), *payloads()]))
