"""Redis as a cache of blocks, the way LMCache's connector uses it: a key a block, EXISTS and GET in pipelines. Runs in
the peers' environment, without kvservice. One JSON line at the end."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time

import redis

LOOKUP_KEYS = (1, 64, 512, 2048, 8192)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("sizes", type=int, nargs="+")
    parser.add_argument("--total", type=int, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--keys", type=int, default=100_000)
    parser.add_argument("--calls", type=int, default=100)
    options = parser.parse_args()
    server = redis.Redis(port=options.port)
    found: dict[str, object] = {"lookup": lookups(server, options.keys, options.calls)}
    put: dict[int, float] = {}
    get: dict[int, float] = {}
    for size in options.sizes:
        count = options.total // size
        keys = [f"block-{number}" for number in range(count)]
        block = os.urandom(size)
        started = time.perf_counter()
        pipe = server.pipeline(transaction=False)
        for key in keys:
            pipe.set(key, block)
        pipe.execute()
        put[size] = count * size / (time.perf_counter() - started) / 1e9
        target = bytearray(size)
        seconds = []
        for _ in range(options.rounds):
            started = time.perf_counter()
            for start in range(0, count, 16):
                for value in server.mget(keys[start : start + 16]):
                    target[:] = value
            seconds.append(time.perf_counter() - started)
        get[size] = count * size / statistics.median(seconds) / 1e9
        server.flushdb()
    found |= {"put_gb_per_second": put, "get_gb_per_second": get}
    print(json.dumps(found), flush=True)


def lookups(server: redis.Redis, known: int, calls: int) -> dict[int, dict[str, float]]:
    keys = [f"{number:032x}" for number in range(known)]
    for start in range(0, known, 10_000):
        server.mset(dict.fromkeys(keys[start : start + 10_000], b"x"))
    found = {}
    for count in LOOKUP_KEYS:
        seconds = []
        for call in range(calls):
            start = call * 7919 % max(1, known - count)
            pipe = server.pipeline(transaction=False)
            for key in keys[start : start + count]:
                pipe.exists(key)
            started = time.perf_counter()
            answer = pipe.execute()
            seconds.append(time.perf_counter() - started)
            if sum(answer) != count:
                raise SystemExit(f"{sum(answer)} of {count} keys exist")
        seconds.sort()
        found[count] = {"p50_ms": 1e3 * statistics.median(seconds), "p99_ms": 1e3 * seconds[int(0.99 * len(seconds))]}
    return found


if __name__ == "__main__":
    main()
