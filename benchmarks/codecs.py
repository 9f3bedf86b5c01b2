"""Codecs on the K and V of a real model: how small they make a block, and how fast, on one thread.

    python -m benchmarks.codecs [--model PATH] [--rounds 5] [--out PATH]

The prompt is the first page of the demo's documents that is long enough. Its blocks are those of the reference engine,
in the order in which slots hold them. Each rate is of the block's own bytes, the median of rounds in which the codecs
take turns. `zstd` is Blosc2 without sorting the bytes of numbers first, which shows what the sorting is worth. zipnn is
measured when it can be imported, for example after

    pip install --no-deps --target build/zipnn zipnn==0.5.4; export PYTHONPATH=build/zipnn

`pays below` is the speed of a tier under which reading the smaller block and decoding it takes less time than reading
the whole one.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import ROOT, default_out, print_table, write_report
from examples.prepare_model import DEFAULT_PATH
from kvservice.codec.aesgcm import AesGcm
from kvservice.codec.base import Codec
from kvservice.codec.int8 import Int8
from kvservice.codec.keys import KeyRing
from kvservice.codec.planes import Planes
from kvservice.core.block.numbers import Numbers
from kvservice.core.segment.blockfile import BlockFileHeader
from kvservice.core.segment.digest import digest_payload
from kvservice.core.tier.tier_block import TierBlock
from kvservice.units import BlockKey, SpanRoute, format_bytes

DOCUMENTS = ROOT / "examples" / "documents"
PROMPT_TOKENS, BLOCK_TOKENS = 2048, 32
TYPES = ("bfloat16", "float32")
Payloads = list[bytes]
Pack, Unpack = Callable[[bytes], Any], Callable[[Any, bytearray], None]


@dataclass(frozen=True, slots=True)
class Way:
    """One thing that can be done to a block: `size` of the packed form, in bytes; whether the bytes come back."""

    pack: Pack
    unpack: Unpack
    size: Callable[[Any], int] = len
    is_exact: bool = True


def blocks_of(model_path: Path, kind: str) -> tuple[Payloads, Numbers]:
    """The blocks of a prompt of PROMPT_TOKENS. Blocks for a forward of it."""
    import torch

    from kvservice.engine.model import PagedModel
    from kvservice.engine.paged import TokenSpan

    model = PagedModel.open(model_path, dtype=kind, block_tokens=BLOCK_TOKENS)
    text = "\n".join(path.read_text() for path in sorted(DOCUMENTS.glob("*.md")))
    tokens = model.encode(text)[:PROMPT_TOKENS]
    count = len(tokens) // BLOCK_TOKENS
    kv, table = model.allocate(count), list(range(count))
    model.forward([TokenSpan(tokens[: count * BLOCK_TOKENS], 0, table)])
    payloads = [kv.storage[block].contiguous().view(torch.uint8).flatten().numpy().tobytes() for block in table]
    shape = model.shape
    return payloads, Numbers(kind, shape.dtype.itemsize, shape.key_width, BLOCK_TOKENS, "int8")


def of_codec(codec: Codec, numbers: Numbers, *, is_exact: bool = True) -> Way:
    """A codec as a tier calls it, without the header of the file."""
    headers: dict[int, BlockFileHeader] = {}

    def pack(payload: bytes) -> Any:
        header = headers.setdefault(id(payload), _header(payload))
        coded = codec.encode(header, memoryview(payload), numbers)
        assert coded is not None, f"{codec.name} does not take these blocks"
        return header, coded

    def unpack(packed: Any, target: bytearray) -> None:
        header, coded = packed
        stored = BlockFileHeader(header.block, len(coded.data), codec.name, coded.key_id, coded.nonce)
        codec.decode(stored, coded.parameters, memoryview(coded.data), memoryview(target))

    return Way(pack, unpack, lambda packed: len(packed[1].data), is_exact)


def _header(payload: bytes) -> BlockFileHeader:
    key = BlockKey(bytes(16))
    digest = digest_payload(memoryview(payload), key)
    return BlockFileHeader(TierBlock(key, len(payload), digest, 0, SpanRoute(0)), len(payload))


def ways_for(numbers: Numbers) -> dict[str, Way]:
    import blosc2

    def copy(packed: bytes, target: bytearray) -> None:
        target[:] = packed

    def unzip(packed: bytes, target: bytearray) -> None:
        blosc2.decompress2(packed, dst=target)

    def zstd(payload: bytes) -> bytes:
        filters = [blosc2.Filter.NOFILTER]
        found: bytes = blosc2.compress2(
            payload, codec=blosc2.Codec.ZSTD, clevel=1, typesize=1, filters=filters, nthreads=1
        )
        return found

    ways = {
        "memcpy": Way(lambda payload: bytearray(payload), copy),
        "planes": of_codec(Planes(), numbers),
        "zstd": Way(zstd, unzip),
        "int8": of_codec(Int8(), numbers, is_exact=False),
        "aesgcm": of_codec(AesGcm(KeyRing(bytes(range(32)))), numbers),
    }
    try:
        from zipnn import ZipNN
    except ImportError:
        return ways
    zipnn = ZipNN(bytearray_dtype=numbers.type, input_format="byte", threads=1)

    def unpack(packed: bytes, target: bytearray) -> None:
        target[:] = zipnn.decompress(packed)

    # It sorts the bytes of what it is given in place, so it needs a copy. The copy is a part of what it costs.
    return {**ways, "zipnn": Way(lambda payload: zipnn.compress(bytearray(payload)), unpack)}


def measure(ways: dict[str, Way], payloads: Payloads, rounds: int) -> Iterator[tuple[str, dict[str, float]]]:
    total = sum(map(len, payloads))
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    stored: dict[str, int] = {}
    for _ in range(rounds):
        for name, way in ways.items():
            target = bytearray(len(payloads[0]))
            began = time.perf_counter()
            packed = [way.pack(payload) for payload in payloads]
            between = time.perf_counter()
            for one in packed:
                way.unpack(one, target)
            rates[name].append((total / (between - began) / 1e9, total / (time.perf_counter() - between) / 1e9))
            stored[name] = sum(map(way.size, packed))
            assert not way.is_exact or target == payloads[-1], f"{name} lost something"
    for name in ways:
        encode, decode = (statistics.median(each) for each in zip(*rates[name], strict=True))
        share = stored[name] / total
        yield (
            name,
            {"stored_share": share, "encode": encode, "decode": decode, "pays_below": max(0.0, 1 - share) * decode},
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEFAULT_PATH)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=default_out("codecs"))
    given = parser.parse_args()
    figures: dict[str, Any] = {"rounds": given.rounds, "prompt_tokens": PROMPT_TOKENS, "types": {}}
    rows: list[Sequence[object]] = []
    for kind in TYPES:
        payloads, numbers = blocks_of(given.model, kind)
        found = dict(measure(ways_for(numbers), payloads, given.rounds))
        figures["types"][kind] = {"block_bytes": len(payloads[0]), "ways": found}
        rows += [(kind, format_bytes(len(payloads[0])), name, *each.values()) for name, each in found.items()]
    columns = ("numbers", "block", "codec", "stored share", "encode GB/s", "decode GB/s", "pays below GB/s")
    print_table(columns, rows)
    print(write_report("codecs", figures, given.out))


if __name__ == "__main__":
    main()
