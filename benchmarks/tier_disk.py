"""The disk tier against plain reads and writes of the same files by the same threads, and against two other back ends.

    python -m benchmarks.tier_disk [--folder PATH] [--threads N] [--total BYTES] [--rounds N] [--out PATH]

Blocks go between memory of /dev/shm, as slots do, and one file a block. `plain` is one pwritev or preadv a file, with
O_DIRECT, and no header, digest, index or rename. `NIXL POSIX` is NIXL's plug-in by itself, `LMCache` its disk back end
in C++ (benchmarks/peers/lmcache_disk.py), where they are installed. All ways take turns; ratios are medians of rounds.
Everything passes the page cache by (O_DIRECT), so it does not matter how much of the files it could hold; files are
dropped from it before they are read all the same. `seconds of CPU per GB` is what the process took, of all threads.
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.peers.lmcache_disk import is_installed as lmcache_is_installed
from benchmarks.peers.lmcache_disk import lmcache_disk
from benchmarks.report import ROOT, default_out, print_table, write_report
from kvservice.core.events import BroughtBlock
from kvservice.core.segment.digest import digest_payload
from kvservice.core.tier.tier_block import TierBlock
from kvservice.tier.base import TierRead, TierWrite, WriteResult
from kvservice.tier.disk import DiskTier
from kvservice.tier.disk_io import DiskIO
from kvservice.tier.mounts import file_system_of, mounts_here
from kvservice.transfer.nixl import load_nixl, make_storage_agent, nixl_available
from kvservice.units import BlockKey, GiB, KiB, MiB, SpanRoute, format_bytes, parse_bytes

BLOCK_BYTES = (720 * KiB, 2 * MiB, 4 * MiB)
MEMORY_BYTES = 256 * MiB  # of slots; blocks use them in turns, so that a large file set needs no large memory
IN_FLIGHT = 32  # blocks that the tier and NIXL are given at once
DEADLINE_SECONDS = 600.0
Blocks = list[tuple[TierBlock, memoryview]]
Transfer = Callable[[Blocks, bool], None]  # (blocks, whether they are written and not read)
Way = Callable[[Path, int], AbstractContextManager[Transfer]]  # (folder, threads)


@dataclass(slots=True)
class Run:
    gb_per_second: float
    cpu_seconds_per_gb: float


@contextmanager
def slots() -> Iterator[memoryview]:
    """Memory as the pool has it, with bytes that no drive can compress."""
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(MEMORY_BYTES)
        memory = mmap.mmap(file.fileno(), MEMORY_BYTES)
        view = memoryview(memory)
        for start in range(0, MEMORY_BYTES, MiB):
            view[start : start + MiB] = os.urandom(MiB)
        yield view


def blocks_of(memory: memoryview, size: int, total: int) -> Blocks:
    at_once, made = len(memory) // size, Blocks()
    for number in range(max(1, total // size)):
        start = number % at_once * size
        payload = memory[start : start + size]
        key = BlockKey(number.to_bytes(16, "little"))
        made.append((TierBlock(key, size, digest_payload(payload, key), number, SpanRoute(0)), payload))
    return made


@contextmanager
def plain(folder: Path, threads: int) -> Iterator[Transfer]:
    def transfer(blocks: Blocks, writes: bool) -> None:
        flags = os.O_DIRECT | (os.O_WRONLY | os.O_CREAT if writes else os.O_RDONLY)

        def one(item: tuple[TierBlock, memoryview]) -> None:
            block, payload = item
            descriptor = os.open(folder / block.key.hex(), flags, 0o600)
            done = os.pwritev(descriptor, [payload], 0) if writes else os.preadv(descriptor, [payload], 0)
            os.close(descriptor)
            assert done == len(payload)

        list(pool.map(one, blocks))

    with ThreadPoolExecutor(threads) as pool:
        yield transfer


@contextmanager
def tier(folder: Path, threads: int, io: DiskIO = DiskIO.DIRECT) -> Iterator[Transfer]:
    disk = DiskTier(folder, io=io, threads=threads)
    disk.start()
    assert disk.describe()["disk_io"] == io.value, f"{io.value} does not work here: {disk.describe()}"

    def transfer(blocks: Blocks, writes: bool) -> None:
        room, wrong = threading.Semaphore(IN_FLIGHT), list[object]()

        def ended(_: int, found: tuple[WriteResult | BroughtBlock, ...], _stored: tuple[int, ...] = ()) -> None:
            results = (one.result if isinstance(one, BroughtBlock) else one for one in found)
            wrong.extend(result for result in results if result.value != "ok")
            room.release()

        for number, item in enumerate(blocks):
            room.acquire()
            if writes:
                disk.write(TierWrite(number, (item,)), ended)
            else:
                disk.read(TierRead(number, (item,), time.monotonic() + DEADLINE_SECONDS), ended)
        for _ in range(IN_FLIGHT):
            room.acquire()
        assert not wrong, wrong[:3]

    try:
        yield transfer
    finally:
        disk.close()


@contextmanager
def nixl(folder: Path, threads: int) -> Iterator[Transfer]:
    """NIXL's POSIX plug-in by itself, on the same files: batches of IN_FLIGHT blocks, and no thread of its own."""
    api, _ = load_nixl()
    agent = make_storage_agent(api, "benchmark", "POSIX")

    def transfer(blocks: Blocks, writes: bool) -> None:
        flags = os.O_DIRECT | (os.O_RDWR | os.O_CREAT if writes else os.O_RDONLY)
        for start in range(0, len(blocks), IN_FLIGHT):
            batch = blocks[start : start + IN_FLIGHT]
            files = [os.open(folder / block.key.hex(), flags, 0o600) for block, _ in batch]
            memory = [(np.frombuffer(payload, np.uint8).ctypes.data, len(payload), 0) for _, payload in batch]
            places = [(0, length, file) for (_, length, _), file in zip(memory, files, strict=True)]
            held = agent.register_memory([(*one, "") for one in {place: place for place in memory}], "DRAM")
            opened = agent.register_memory([(*one, "") for one in places], "FILE")
            local, remote = agent.get_xfer_descs(memory, "DRAM"), agent.get_xfer_descs(places, "FILE")
            handle = agent.initialize_xfer("WRITE" if writes else "READ", local, remote, "benchmark")
            state = agent.transfer(handle)
            while state == "PROC":
                state = agent.check_xfer_state(handle)
            assert state == "DONE", state
            agent.release_xfer_handle(handle)
            agent.deregister_memory(opened)
            agent.deregister_memory(held)
            for file in files:
                os.close(file)

    yield transfer


WAYS: dict[str, Way] = {
    "plain": plain,
    "disk tier": tier,
    **(
        {"disk tier, NIXL POSIX": lambda folder, threads: tier(folder, threads, DiskIO.NIXL_POSIX), "NIXL POSIX": nixl}
        if nixl_available()
        else {}
    ),
    **({"LMCache": lmcache_disk} if lmcache_is_installed() else {}),
}


def measured(transfer: Transfer, blocks: Blocks, writes: bool) -> Run:
    gigabytes = sum(len(payload) for _, payload in blocks) / 1e9
    cpu, started = time.process_time(), time.perf_counter()
    transfer(blocks, writes)
    seconds = time.perf_counter() - started
    return Run(gigabytes / seconds, (time.process_time() - cpu) / gigabytes)


def one_round(folder: Path, blocks: Blocks, threads: int, ways: Mapping[str, Way] = WAYS) -> dict[tuple[str, str], Run]:
    """Each way writes and then reads the blocks, in a folder of its own that is removed."""
    found: dict[tuple[str, str], Run] = {}
    for name, way in ways.items():
        place = Path(tempfile.mkdtemp(dir=folder))
        try:
            with way(place, threads) as transfer:
                found[name, "write"] = measured(transfer, blocks, True)
                drop_cached(place)
                found[name, "read"] = measured(transfer, blocks, False)
        finally:
            shutil.rmtree(place)
    return found


def drop_cached(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def ratio(of_round: dict[tuple[str, str], Run], name: str, kind: str) -> float:
    """To the plain way in the same round."""
    return of_round[name, kind].gb_per_second / of_round["plain", kind].gb_per_second


def summary(rounds: list[dict[tuple[str, str], Run]]) -> dict[str, dict[str, dict[str, float]]]:
    """way → "write", "read" → medians."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name, kind in rounds[0]:
        runs = [each[name, kind] for each in rounds]
        ratios = [ratio(each, name, kind) for each in rounds]
        found.setdefault(name, {})[kind] = {
            "gb_per_second": round(statistics.median(run.gb_per_second for run in runs), 2),
            "ratio": round(statistics.median(ratios), 3),
            "cpu_seconds_per_gb": round(statistics.median(run.cpu_seconds_per_gb for run in runs), 3),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "build", help="on the disk that is measured")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--total", type=parse_bytes, default=2 * GiB, help="bytes of files for each size of block")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=default_out("tier_disk"))
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    sizes: dict[str, object] = {}
    rows: list[list[str]] = []
    with slots() as memory:
        for size in BLOCK_BYTES:
            blocks = blocks_of(memory, size, options.total)
            one_round(options.folder, blocks[:IN_FLIGHT], options.threads)  # the first touches memory and modules
            found = summary([one_round(options.folder, blocks, options.threads) for _ in range(options.rounds)])
            sizes[str(size)] = found
            rows += [
                [
                    format_bytes(size),
                    name,
                    *(str(kinds[kind][figure]) for kind in ("write", "read") for figure in kinds[kind]),
                ]
                for name, kinds in found.items()
            ]
    kind = file_system_of(options.folder.resolve(), mounts_here())
    columns = [f"{kind}: {figure}" for kind in ("write", "read") for figure in ("GB/s", "ratio", "CPU s/GB")]
    print_table(["block", "way", *columns], rows)
    figures = {"file_system": kind, "threads": options.threads, "total_bytes": options.total, "sizes": sizes}
    print(write_report("tier_disk", {**figures, "rounds": options.rounds}, options.out))


if __name__ == "__main__":
    main()
