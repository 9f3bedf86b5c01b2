"""Mooncake Store in processes of its own; runs in the peers' environment, without kvservice. One JSON line at the end.

python mooncake_program.py MASTER --hold BYTES SIZE...     holds blocks of these sizes until its input ends
python mooncake_program.py MASTER --measure BYTES SIZE...  reads them from whoever holds them, and asks for keys
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import statistics
import sys
import time
from collections.abc import Callable

from mooncake.store import MooncakeDistributedStore

SEGMENT_BYTES = 1536 << 20
LOOKUP_KEYS = (1, 64, 512, 2048, 8192)


def connect(master: str, segment_bytes: int) -> MooncakeDistributedStore:
    store = MooncakeDistributedStore()
    result = store.setup("127.0.0.1", "P2PHANDSHAKE", segment_bytes, 64 << 20, "tcp", "", master)
    if result:
        raise SystemExit(f"Mooncake's setup ended with {result}")
    return store


def buffer_of(store: MooncakeDistributedStore, size: int) -> int:
    memory = mmap.mmap(-1, size)
    memory[:] = b"\x5a" * size
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    KEPT.append(memory)
    if store.register_buffer(address, size):
        raise SystemExit("Mooncake did not register the buffer")
    return address


KEPT: list[mmap.mmap] = []  # buffers live as long as the process


def names(tag: str, size: int, total: int) -> list[str]:
    return [f"{tag}-{size}-{number}" for number in range(total // size)]


def put_all(store: MooncakeDistributedStore, tag: str, sizes: list[int], total: int) -> dict[int, float]:
    """Seconds of each size's puts, by GB/s."""
    found: dict[int, float] = {}
    address = buffer_of(store, total)
    for size in sizes:
        keys = names(tag, size, total)
        started = time.perf_counter()
        results = store.batch_put_from(keys, [address + i * size for i in range(len(keys))], [size] * len(keys))
        found[size] = len(keys) * size / (time.perf_counter() - started) / 1e9
        if any(results):
            raise SystemExit(f"Mooncake did not store {size}: {set(results)}")
    return found


def hold(options: argparse.Namespace) -> None:
    store = connect(options.master, SEGMENT_BYTES)
    put_all(store, "remote", options.sizes, options.total)
    print("ready", flush=True)
    sys.stdin.read()
    store.close()


def median_seconds(work: Callable[[], object], rounds: int) -> list[float]:
    work()
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return sorted(seconds)


def read_rates(
    store: MooncakeDistributedStore, tag: str, sizes: list[int], total: int, rounds: int
) -> dict[int, float]:
    address = buffer_of(store, total)
    found: dict[int, float] = {}
    for size in sizes:
        keys = names(tag, size, total)
        pointers = [address + i * size for i in range(len(keys))]

        def read(keys: list[str] = keys, pointers: list[int] = pointers, size: int = size) -> None:
            results = store.batch_get_into(keys, pointers, [size] * len(keys))
            if any(result != size for result in results):
                raise SystemExit(f"Mooncake did not read {size}: {set(results)}")

        found[size] = len(keys) * size / statistics.median(median_seconds(read, rounds)) / 1e9
    return found


def lookups(store: MooncakeDistributedStore, known: int, calls: int) -> dict[int, dict[str, float]]:
    """Milliseconds of `batch_is_exist`, for keys that all exist."""
    keys = [f"{number:032x}" for number in range(known)]
    for start in range(0, known, 1000):
        part = keys[start : start + 1000]
        if store.put_batch(part, [b"x"] * len(part)):
            raise SystemExit("Mooncake did not store the small objects")
    found = {}
    for count in LOOKUP_KEYS:
        seconds = []
        for call in range(calls):
            start = call * 7919 % max(1, known - count)
            asked = keys[start : start + count]
            started = time.perf_counter()
            answer = store.batch_is_exist(asked)
            seconds.append(time.perf_counter() - started)
            if sum(answer) != len(asked):
                raise SystemExit(f"{sum(answer)} of {len(asked)} keys exist")
        seconds.sort()
        found[count] = {"p50_ms": 1e3 * statistics.median(seconds), "p99_ms": 1e3 * seconds[int(0.99 * len(seconds))]}
    return found


def measure(options: argparse.Namespace) -> None:
    store = connect(options.master, SEGMENT_BYTES)
    found = {
        "remote_gb_per_second": read_rates(store, "remote", options.sizes, options.total, options.rounds),
        "put_gb_per_second": put_all(store, "own", options.sizes, options.total),
        "own_gb_per_second": read_rates(store, "own", options.sizes, options.total, options.rounds),
        "lookup": lookups(store, options.keys, options.calls),
    }
    print(json.dumps(found), flush=True)
    store.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("master")
    parser.add_argument("sizes", type=int, nargs="+")
    parser.add_argument("--total", type=int, required=True)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--keys", type=int, default=100_000)
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--hold", action="store_true")
    options = parser.parse_args()
    hold(options) if options.hold else measure(options)


if __name__ == "__main__":
    main()
