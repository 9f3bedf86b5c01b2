"""The tier of objects against bare obstore, and what reads bring when every request is 50 ms late.

    python -m benchmarks.tier_objects [--rounds 5] [--blocks 64] [--block-bytes 2MiB] [--out PATH]

Stores: obstore's own in memory, a folder, and a real S3 API (moto's server, which is slow). Bare obstore puts the
same bytes under the same names, and copies what it gets into the same memory, without any check. Both have as many
requests under way; rounds alternate, and ratios are medians of neighbours. The store in memory keeps what it is given
without a copy, so puts into it are no comparison and are left out. Gets there show what verifying costs. The late
requests pass a front before the S3 server, which itself limits how fast many of them can be.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import obstore

from benchmarks.report import default_out, print_table, write_report
from kvservice.core.events import BroughtBlock, PullResult
from kvservice.core.segment.blockfile import FILE_HEADER_BYTES, BlockFileHeader, pack_file_header
from kvservice.core.segment.digest import digest_payload
from kvservice.core.tier.tier_block import TierBlock
from kvservice.testing.s3_faults import FaultyStore, StoreFaults
from kvservice.testing.s3_server import S3Server
from kvservice.tier import block_objects
from kvservice.tier.base import TierRead, TierWrite, WriteResult
from kvservice.tier.objects import WRITES_MAX, ObjectTier
from kvservice.units import BlockKey, SpanRoute, format_bytes, parse_bytes

STORES = ("memory", "folder", "s3")
WAYS = ("put", "get")
READS_AT_ONCE = 32
RATIO_GOAL = 0.9
LATE_SECONDS = 0.05
LATE_AT_ONCE = (1, 8, 32, 64)
ANSWER_SECONDS = 300.0  # for all blocks of one round


@dataclass(frozen=True)
class Content:
    """The blocks of a run and their memory. Each round has names of its own, since known objects are not written."""

    payloads: Sequence[memoryview]
    targets: Sequence[memoryview]

    @classmethod
    def of(cls, count: int, size: int) -> Content:
        memory = np.random.default_rng(1).integers(0, 256, count * size, np.uint8)
        room = memoryview(np.ones(count * size, np.uint8))  # touched, so that no page is new when it is copied to
        parts = [slice(place * size, (place + 1) * size) for place in range(count)]
        return cls([memoryview(memory)[part] for part in parts], [room[part] for part in parts])

    @property
    def byte_count(self) -> int:
        return sum(len(payload) for payload in self.payloads)

    def blocks(self, round_number: int) -> list[TierBlock]:
        keys = [
            BlockKey(round_number.to_bytes(8, "big") + place.to_bytes(8, "big")) for place in range(len(self.payloads))
        ]
        return [
            TierBlock(key, len(payload), digest_payload(payload, key), place, SpanRoute(0))
            for place, (key, payload) in enumerate(zip(keys, self.payloads, strict=True))
        ]


class Both:
    """One store, reached through the tier and barely."""

    def __init__(self, url: str, content: Content) -> None:
        self.content = content
        self.tier = ObjectTier(url, "bench")
        self.tier.start()
        self._store = self.tier._objects._store
        self._loop = asyncio.new_event_loop()

    def close(self) -> None:
        self.tier.close()
        self._loop.close()

    def tier_seconds(self, way: str, blocks: Sequence[TierBlock], at_once: int) -> float:
        """One job a block, `at_once` of them under way."""
        slots, results = threading.Semaphore(at_once), list[WriteResult | PullResult]()
        done = threading.Event()

        def answered(_: int, found: tuple[WriteResult | BroughtBlock, ...], _stored: tuple[int, ...] = ()) -> None:
            results.extend(one.result if isinstance(one, BroughtBlock) else one for one in found)
            slots.release()
            if len(results) == len(blocks):
                done.set()

        began = time.perf_counter()
        for number, block in enumerate(blocks):
            slots.acquire()
            if way == "put":
                self.tier.write(TierWrite(number, ((block, self.content.payloads[number]),)), answered)
            else:
                deadline = time.monotonic() + ANSWER_SECONDS
                self.tier.read(TierRead(number, ((block, self.content.targets[number]),), deadline), answered)
        assert done.wait(ANSWER_SECONDS), "not every block was answered"
        seconds = time.perf_counter() - began
        assert set(results) == {WriteResult.OK if way == "put" else PullResult.OK}, results
        return seconds

    def bare_seconds(self, way: str, blocks: Sequence[TierBlock], at_once: int) -> float:
        whole = [
            pack_file_header(BlockFileHeader(block, block.payload_bytes)) + bytes(payload)
            for block, payload in zip(blocks, self.content.payloads, strict=True)
        ]

        async def run() -> float:
            free = asyncio.Semaphore(at_once)

            async def one(place: int) -> None:
                name = f"bare/{blocks[place].key.hex()}"
                async with free:
                    if way == "put":
                        await obstore.put_async(self._store, name, whole[place], use_multipart=False)
                        return
                    data = await (await obstore.get_async(self._store, name)).bytes_async()
                    self.content.targets[place][:] = memoryview(data)[FILE_HEADER_BYTES:]

            began = time.perf_counter()
            await asyncio.gather(*(one(place) for place in range(len(blocks))))
            return time.perf_counter() - began

        return self._loop.run_until_complete(run())

    def forget(self, blocks: Sequence[TierBlock]) -> None:
        """Remove what a round wrote."""
        names = [f"bare/{block.key.hex()}" for block in blocks]
        names += [self.tier._objects._name(block.key) for block in blocks]
        obstore.delete(self._store, names)


def compare(both: Both, rounds: int, shown: Sequence[str] = WAYS) -> list[dict[str, Any]]:
    """Rows by way: GB/s of both, and their ratio."""
    found: dict[tuple[str, str], list[float]] = {(way, kind): [] for way in WAYS for kind in ("tier", "bare")}
    for number in range(rounds + 1):
        blocks = both.content.blocks(number)
        kinds = ("tier", "bare") if number % 2 else ("bare", "tier")
        for way in WAYS:
            at_once = WRITES_MAX if way == "put" else READS_AT_ONCE
            for kind in kinds:
                measure = both.tier_seconds if kind == "tier" else both.bare_seconds
                seconds = measure(way, blocks, at_once)
                if number:  # the first round opens connections
                    found[way, kind].append(seconds)
        both.forget(blocks)
    gigabytes = both.content.byte_count / 1e9
    return [
        {
            "way": way,
            "at_once": WRITES_MAX if way == "put" else READS_AT_ONCE,
            "tier_gb_per_second": gigabytes / median(found[way, "tier"]),
            "bare_gb_per_second": gigabytes / median(found[way, "bare"]),
            "ratio": median(bare / tier for bare, tier in zip(found[way, "bare"], found[way, "tier"], strict=True)),
        }
        for way in shown
    ]


def late(both: Both, front: FaultyStore, rounds: int) -> list[dict[str, Any]]:
    """Reads of the tier, by the number under way, when each request is late."""
    blocks = both.content.blocks(1_000_000)
    both.tier_seconds("put", blocks, WRITES_MAX)
    front.faults = StoreFaults(late_seconds=LATE_SECONDS)
    rows = []
    for at_once in LATE_AT_ONCE:
        some = blocks[: max(2 * at_once, 8)]
        seconds = median(both.tier_seconds("get", some, at_once) for _ in range(rounds))
        byte_count = sum(block.payload_bytes for block in some)
        rows.append({"at_once": at_once, "gb_per_second": byte_count / 1e9 / seconds})
    front.faults = StoreFaults()
    return rows


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)


def measure(rounds: int, count: int, size: int, folder: Path) -> dict[str, Any]:
    content = Content.of(count, size)
    figures: dict[str, Any] = {"block_bytes": size, "blocks": count, "stores": {}}

    def with_store(name: str, url: str, work: Callable[[Both], object]) -> None:
        both = Both(url, content)
        try:
            figures["stores"][name] = work(both)
        finally:
            both.close()

    with_store("memory", "memory:///", lambda both: compare(both, rounds, ["get"]))
    with_store("folder", f"file://{folder}", lambda both: compare(both, rounds))
    with S3Server() as s3:
        with environment(s3.environment()):
            with_store("s3", s3.url, lambda both: compare(both, rounds))
        with FaultyStore(s3.address) as front, environment(s3.environment(front.address)):
            both = Both(s3.url, content)
            try:
                figures["late"] = late(both, front, rounds)
            finally:
                both.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=128)
    parser.add_argument("--block-bytes", type=parse_bytes, default=parse_bytes("2MiB"))
    parser.add_argument("--folder", type=Path, help="for the store that is a folder; a new one by default")
    parser.add_argument("--out", type=Path, default=default_out("tier_objects"))
    given = parser.parse_args()
    # so that a busy server cannot end a request midway
    block_objects.FIRST_BYTE_SECONDS = block_objects.BODY_SECONDS = ANSWER_SECONDS
    with tempfile.TemporaryDirectory(prefix="kvs-objects-", dir=given.folder) as folder:
        figures = measure(given.rounds, given.blocks, given.block_bytes, Path(folder))
    print(f"Blocks of {format_bytes(given.block_bytes)}; goal: {RATIO_GOAL} of bare obstore")
    print_table(
        ("store", "way", "under way", "tier GB/s", "bare GB/s", "ratio"),
        [
            (
                name,
                row["way"],
                row["at_once"],
                f"{row['tier_gb_per_second']:.2f}",
                f"{row['bare_gb_per_second']:.2f}",
                f"{row['ratio']:.2f}",
            )
            for name in STORES
            for row in figures["stores"][name]
        ],
    )
    print_table(
        (f"reads under way, each {LATE_SECONDS * 1000:.0f} ms late", "GB/s"),
        [(row["at_once"], f"{row['gb_per_second']:.3f}") for row in figures["late"]],
    )
    print(write_report("tier_objects", {"rounds": given.rounds, "ratio_goal": RATIO_GOAL, **figures}, given.out))


if __name__ == "__main__":
    main()
