"""Bandwidth of blocks pulled from another process and verified, against the raw NIXL READ of the same runs.

Two ways: `mapped`, as a shard reads a peer of its machine, and `pull`, by NIXL, as it reads all others. The limit, ours
and a memcpy of the same blocks alternate, so that a busy machine slows all down. All have one setting of UCX. What
loads and stores of one node reach is benchmarks.local_bandwidth.

    python -m benchmarks.transfer_bandwidth            all block sizes, UCX's choice and TCP
    python -m benchmarks.transfer_bandwidth --quick    the same in a few seconds, for a look
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.report import print_table, write_report
from kvservice.core.events import PullResult
from kvservice.core.segment.digest import digest_payload
from kvservice.core.segment.geometry import Geometry, plan_geometry, slot_index
from kvservice.core.segment.header import SlotHeader
from kvservice.core.segment.refs import BlockHandle
from kvservice.memory.runs import copy_runs
from kvservice.memory.segment import Segment, segment_path
from kvservice.transfer import mapped
from kvservice.transfer.base import Copy, PeerHandle, TransferOutcome
from kvservice.transfer.job import PullItem, PullJob
from kvservice.transfer.nixl import NixlTransport
from kvservice.transfer.puller import Puller
from kvservice.transfer.ways import pack_ways, unpack_ways
from kvservice.units import BlockKey, BootEpoch, Generation, KiB, MiB, NodeId, SlotIndex, SpanRoute

BLOCK_BYTES = (64 * KiB, 720 * KiB, 2 * MiB)
SLABS = 4
GEOMETRY = plan_geometry((64 * SLABS + 2) * MiB, 64 * MiB)
UCX_MODES = {"shared memory (UCX's choice)": "all", "tcp": "tcp"}
PULL_SECONDS = 60.0
Bytes = npt.NDArray[np.uint8]
Figures = dict[str, float]


def slots_of(geometry: Geometry, block_bytes: int, total_bytes: int) -> list[SlotIndex]:
    count = geometry.slots_per_slab(block_bytes)
    every = [slot_index(slab, index) for slab in range(geometry.slab_count) for index in range(count)]
    return every[: max(1, total_bytes // block_bytes)]


def assign(segment: Segment, block_bytes: int) -> None:
    for slab in range(segment.geometry.slab_count):
        segment.assign_slab(slab, block_bytes)


def key_of(index: int) -> BlockKey:
    return BlockKey(index.to_bytes(16, "big"))


def store(segment: Segment, slot: SlotIndex, block: Bytes, index: int) -> None:
    """What sealing a block costs: the copy, its digest and the header."""
    payload = segment.payload(slot, len(block))
    np.copyto(np.frombuffer(payload, np.uint8), block)
    digest = digest_payload(payload, key_of(index))
    header = SlotHeader(segment.epoch, Generation(2), key_of(index), len(block), SpanRoute(0), digest, index)
    segment.write_header(slot, header)


def seconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def compare(total: int, repeats: int, limit: Callable[[], None], **ways: Callable[[], None]) -> dict[str, Figures]:
    """Of each way the median and best GB/s, and the median of its ratios to the limit of the same round; the limit's
    own median beside it. One round of warm-up is thrown away."""
    rounds = [(seconds(limit), {name: seconds(way) for name, way in ways.items()}) for _ in range(repeats + 1)][1:]
    limit_rate = round(total / statistics.median(bound for bound, _ in rounds) / 1e9, 3)
    return {
        name: {
            "gb_per_second": round(total / statistics.median(own[name] for _, own in rounds) / 1e9, 3),
            "limit_gb_per_second": limit_rate,
            "ratio": round(statistics.median(bound / own[name] for bound, own in rounds), 3),
            "best_gb_per_second": round(total / min(own[name] for _, own in rounds) / 1e9, 3),
        }
        for name in ways
    }


def raw_read(transport: NixlTransport, peer: PeerHandle, copies: list[Copy]) -> None:
    transport.post_read(peer, copies)
    while not (done := transport.poll()):
        time.sleep(0.0001)
    if done[0].outcome is not TransferOutcome.DONE:
        raise RuntimeError(done[0].detail)


def pull(puller: Puller, job: PullJob) -> None:
    ended = threading.Event()
    results: list[PullResult] = []

    def done(_: int, found: tuple[PullResult, ...]) -> None:
        results.extend(found)
        ended.set()

    puller.submit(job, done, lambda _: None)
    ended.wait(PULL_SECONDS)
    if set(results) != {PullResult.OK}:
        raise RuntimeError(f"the pull did not end well: {set(results)}")


def pull_job(source: Segment, description: bytes, slots: list[SlotIndex], block_bytes: int) -> PullJob:
    headers = [source.read_header(slot) for slot in slots]
    handles = [
        BlockHandle(h.key, slot, h.generation, h.length, h.digest, h.position)
        for h, slot in zip(headers, slots, strict=True)
        if h is not None
    ]
    items = tuple(PullItem(handle, handle.slot) for handle in handles)
    deadline = time.monotonic() + 10 * PULL_SECONDS
    epoch = BootEpoch(source.epoch)
    return PullJob(1, NodeId("source"), epoch, description, GEOMETRY, block_bytes, items, deadline)


def source_main(path: Path) -> None:
    """The other process: fills its segment with blocks of the size it is told, one line per answer."""
    segment = Segment.create(path, GEOMETRY, "source")
    transport = NixlTransport(segment, "source")
    ways = {mapped.NAME: mapped.describe(segment), transport.name: transport.describe()}
    print("@" + pack_ways(ways).hex(), flush=True)
    for line in sys.stdin:
        block_bytes, total = map(int, line.split())
        assign(segment, block_bytes)
        block = np.random.default_rng(2).integers(0, 256, block_bytes, dtype=np.uint8)
        for index, slot in enumerate(slots_of(GEOMETRY, block_bytes, total)):
            block[:8] = index % 256
            store(segment, slot, block, index)
        print("@filled", flush=True)
    transport.close()


def answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return next(line[1:].strip() for line in process.stdout if line.startswith("@"))


class Between:
    """A reader in this process, by NIXL alone and by two pullers, and the process that it reads from."""

    def __init__(self, process: subprocess.Popen[str], segment: Segment, source: Segment, description: bytes) -> None:
        self._process, self._segment, self._source, self._description = process, segment, source, description
        self.raw = NixlTransport(segment, "raw")
        self._peer = self.raw.connect(unpack_ways(description)[self.raw.name])
        self.by_nixl = Puller(segment, lambda: NixlTransport(segment, "puller"), maps_peers=False)
        self.mapping = Puller(segment, None)
        for puller in (self.by_nixl, self.mapping):
            puller.start()

    def close(self) -> None:
        for puller in (self.by_nixl, self.mapping):
            puller.close()
        self.raw.close()

    def ways(self, block_bytes: int, total: int) -> tuple[int, Callable[[], None], dict[str, Callable[[], None]]]:
        """Bytes that each way moves, once it is called: the raw read, then ours of the same blocks by name."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{block_bytes} {total}\n")
        self._process.stdin.flush()
        answer(self._process)
        assign(self._segment, block_bytes)
        slots = slots_of(GEOMETRY, block_bytes, total)
        copies = [
            Copy(offset, offset, block_bytes) for offset in (GEOMETRY.payload_offset(s, block_bytes) for s in slots)
        ]
        job = pull_job(self._source, self._description, slots, block_bytes)
        moved = len(slots) * block_bytes
        return (
            moved,
            lambda: raw_read(self.raw, self._peer, copies),
            {
                "pull": lambda: pull(self.by_nixl, job),
                "mapped": lambda: pull(self.mapping, job),
                "memcpy": lambda: self._copy(copies),
            },
        )

    def _copy(self, copies: list[Copy]) -> None:
        """What one core can do, without a look at any byte."""
        places = np.array([copy.remote_offset for copy in copies])
        sizes = np.array([copy.length for copy in copies])
        copy_runs(self._segment.address, self._source.address, places, places, sizes)


@contextmanager
def two_processes() -> Iterator[Between]:
    service = f"bandwidth{uuid.uuid4().hex[:6]}"
    paths = [segment_path(service, node, Path("/dev/shm")) for node in ("reader", "source")]
    command = [sys.executable, "-m", "benchmarks.transfer_bandwidth", "--source", str(paths[1])]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        description = bytes.fromhex(answer(process))
        segment = Segment.create(paths[0], GEOMETRY, "reader")
        made = Between(process, segment, Segment.attach(paths[1], GEOMETRY), description)
        yield made
        made.close()
    finally:
        process.kill()
        process.wait()
        for path in paths:
            path.unlink(missing_ok=True)


def reader_main(total: int, repeats: int) -> None:
    """Prints one JSON line: figures by block size, under the UCX_TLS that it was started with."""
    figures: dict[str, object] = {}
    with two_processes() as between:
        for block_bytes in BLOCK_BYTES:
            moved, limit, ours = between.ways(block_bytes, total)
            figures[str(block_bytes)] = compare(moved, repeats, limit, **ours)
    print("@" + json.dumps(figures), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="64 MiB and 3 repeats instead of 240 MiB and 9")
    parser.add_argument("--out", type=Path, help="where the JSON goes; default benchmarks/results/")
    parser.add_argument("--source", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--reader", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that a stopped run removes its segments
    total, repeats = (64 * MiB, 3) if options.quick else (240 * MiB, 9)
    if options.source is not None:
        source_main(options.source)
        return
    if options.reader:
        reader_main(total, repeats)
        return
    figures: dict[str, object] = {
        "bytes_per_run": total,
        "repeats": repeats,
        "host": f"{os.cpu_count()}-core {platform.machine()}",
    }
    figures["load_average_before"] = round(os.getloadavg()[0], 2)
    by_transport: dict[str, object] = {}
    rows: list[list[object]] = []
    for mode, tls in UCX_MODES.items():
        command = [sys.executable, "-m", "benchmarks.transfer_bandwidth", "--reader", *sys.argv[1:]]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "UCX_TLS": tls})
        try:
            found = json.loads(answer(child))
            child.wait()  # it removes its segments
        finally:
            child.terminate()
            child.wait()
        by_transport[mode] = found
        for block_bytes, by_way in found.items():
            for way, values in by_way.items():
                rows.append([f"{way} {int(block_bytes) // KiB} KiB, {mode}", *values.values()])
    figures["by_ucx_transport"] = by_transport
    print_table(["way", "GB/s", "raw NIXL GB/s", "ratio", "best GB/s"], rows)
    print(write_report("transfer_bandwidth", figures, options.out))


if __name__ == "__main__":
    main()
