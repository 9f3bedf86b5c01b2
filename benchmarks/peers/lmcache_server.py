"""`lmcache server` and its own bench client, for `benchmarks.peers`. Installed by `make .venv-lmcache/.installed`.

The client shares its KV cache with the server, which copies to and from its level 1 in memory: chunks of the size of
one block, 32 MiB a request. Its bench client compares checksums. A request that finds less than all is an error here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from benchmarks.report import ROOT
from kvservice.testing.cluster import free_port
from kvservice.testing.eventually import eventually
from kvservice.units import KiB, MiB

SITE = ROOT / ".venv-lmcache" / "site"
REQUEST_BYTES = 32 * MiB
START_SECONDS = 120.0  # it imports torch and more
BENCH_SECONDS = 300.0
# Tokens of a chunk, heads, numbers of a head and layers, in bfloat16: together K and V of one block.
SHAPES = {64 * KiB: (16, 8, 128, 1), 720 * KiB: (32, 3, 64, 30), 2 * MiB: (16, 8, 128, 32)}
SMALL = (16, 1, 16, 1)  # of a chunk that is only looked up
Figures = dict[str, Any]


def is_installed() -> bool:
    return SITE.is_dir()


def measured(sizes: Sequence[int], lookup_keys: Sequence[int], rounds: int) -> Figures:
    """GB/s of stores and retrieves by block bytes, and milliseconds of a lookup by its number of chunks."""
    found: Figures = {"put_gb_per_second": {}, "get_gb_per_second": {}, "lookup": {}}
    for size in sizes:
        times = _bench(SHAPES[size], REQUEST_BYTES // size, rounds)
        moved = REQUEST_BYTES // size * size / 1e6
        found["put_gb_per_second"][str(size)] = moved / times["cold_store"]["cold_store_p50"]
        found["get_gb_per_second"][str(size)] = moved / times["warm_retrieve"]["warm_retrieve_p50"]
    for count in lookup_keys:
        times = _bench(SMALL, count, rounds)["warm_lookup"]
        found["lookup"][str(count)] = {"p50_ms": times["warm_lookup_p50"], "p99_ms": times["warm_lookup_p99"]}
    return found


def _bench(shape: tuple[int, int, int, int], chunks: int, rounds: int) -> Figures:
    tokens, heads, width, layers = shape
    blocks = (rounds + 2) * chunks  # a request takes the next ones; the first would hold block 0, which is no data
    with _server(tokens) as (port, http), tempfile.TemporaryFile("w+") as output:
        options = {
            "rpc-url": f"tcp://127.0.0.1:{port}",
            "url": f"http://127.0.0.1:{http}",
            "mode": "cpu",
            "transfer-mode": "lmcache_driven",
            "num-tokens": tokens * chunks,
            "block-size": tokens,
            "num-blocks": blocks,
            "kvcache-shape-spec": f"(2,{blocks},{tokens},{heads},{width}):bfloat16:{layers}",
            "start": 1,
            "end": rounds + 1,
            "interval": 0.2,
            "format": "json",
        }
        command = [*_program("bench"), "server", *(part for item in options.items() for part in _option(*item))]
        subprocess.run(command, env=_environment(), stdout=output, check=True, timeout=BENCH_SECONDS)
        output.seek(0)
        said = output.read()
    found: Figures = json.loads(said[said.index("\n{") : said.rindex("}") + 1])["metrics"]
    if found["results"]["checksum_ok"] != rounds:
        raise SystemExit(f"LMCache did not give back all that it stored:\n{said}")
    return found


@contextmanager
def _server(chunk_tokens: int) -> Iterator[tuple[int, int]]:
    """Its port and that of its HTTP server, until the end of the block."""
    port, http = free_port(), free_port()
    options = {
        "host": "127.0.0.1",
        "port": port,
        "http-port": http,
        "prometheus-port": free_port(),
        "l1-size-gb": 1,
        "l1-init-size-gb": 1,
        "eviction-policy": "LRU",
        "chunk-size": chunk_tokens,
        "supported-transfer-mode": "auto",
    }
    command = [*_program("server"), *(part for item in options.items() for part in _option(*item))]
    process = subprocess.Popen(command, env=_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def answers() -> bool:
        if process.poll() is not None:
            raise SystemExit("lmcache server ended before it answered")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{http}/healthcheck", timeout=5) as reply:
                return bool(reply.status == 200)
        except OSError:
            return False

    try:
        eventually(answers, "lmcache server is up", START_SECONDS)
        yield port, http
    finally:
        process.terminate()
        process.wait(60)


def _program(command: str) -> list[str]:
    return [sys.executable, "-m", "lmcache.cli.main", command]


def _option(name: str, value: object) -> tuple[str, str]:
    return f"--{name}", str(value)


def _environment() -> dict[str, str]:
    quiet = {"LMCACHE_DISABLE_BANNER": "1", "LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "ERROR"}
    return {**os.environ, "PYTHONPATH": str(SITE), **quiet}
