"""How long a lookup takes from the node's mirror of the directory, asked from another process than its feeder's.

Part of `benchmarks.lookup_latency`, which starts the lookup partitions; this starts a cache shard beside them, waits
until its mirror knows everything, and reads it from processes of their own:

    python -m benchmarks.mirror_reads SERVICE RUNTIME_ROOT CHAINS CALLS ADDRESS...    (one such reader; prints JSON)
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

from benchmarks.report import cpu_seconds, percentile
from kvservice.core.directory.mirror import Feed
from kvservice.discovery import find_shards
from kvservice.lookup.client import LookupClient
from kvservice.lookup.mirror_reader import NodeMirror, find_mirror
from kvservice.units import BlockKey

CHAIN_KEYS = 2048
SIZES = (1, 64, 512, 2048, 8192)
FEED_SECONDS_MAX = 300.0
CALL_SECONDS = 1.0  # for a lookup partition, which nobody asks here
NODE = "mirror0"


def make_chain(number: int) -> list[BlockKey]:
    """The same keys in every process, so that no process needs all of them."""
    block = random.Random(number).randbytes(16 * CHAIN_KEYS)
    return [BlockKey(block[i : i + 16]) for i in range(0, len(block), 16)]


def measure_mirror(addresses: list[str], key_count: int, calls: int) -> dict[str, object]:
    """Measure with one reader and with eight at once. Blocks."""
    service = f"bench-{uuid.uuid4().hex[:8]}"
    with tempfile.TemporaryDirectory(prefix="kvs-") as root:
        command = [sys.executable, "-m", "kvservice", "shard", "--service", service, "--node", NODE]
        command += ["--pool-bytes", "64MiB", "--transport", "shm", "--mirror-bytes", "2GiB", "--grace", "0"]
        command += [word for address in addresses for word in ("--lookup", address)]
        environment = {
            **os.environ,
            "KVSERVICE_ALLOW_PLAINTEXT": "1",
            "KVSERVICE_RUNTIME_DIR": root,
        }  # the lookups are at ports, as between machines
        shard = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
        try:
            fed = _wait_until_fed(service, Path(root), addresses, key_count, shard)
            return {
                **fed,
                "one_reader": _read(1, service, root, addresses, key_count, calls)[0],
                "eight_readers": _together(_read(8, service, root, addresses, key_count, calls)),
            }
        finally:
            shard.terminate()
            shard.wait(30)


def _wait_until_fed(
    service: str, root: Path, addresses: list[str], key_count: int, shard: subprocess.Popen[bytes]
) -> dict[str, float]:
    deadline = time.monotonic() + FEED_SECONDS_MAX
    begun: float | None = None
    used = 0.0
    while time.monotonic() < deadline:
        if shard.poll() is not None:
            raise RuntimeError(f"the shard ended with {shard.returncode}: see its output above")
        mirror = find_mirror(addresses, service, root) if find_shards(service, root) else None
        now = time.monotonic()
        reader = None if mirror is None else mirror.reader(now)
        if mirror is not None and reader is not None:
            if begun is None:
                begun, used = now, cpu_seconds(shard.pid)
            feeds = [reader.feed(partition, now) for partition in range(len(addresses))]
            if reader.key_count >= key_count and all(feed is Feed.LIVE for feed in feeds):
                seconds, cpu = time.monotonic() - begun, cpu_seconds(shard.pid) - used
                file = (root / service / NODE / "mirror").resolve().stat()
                mirror.close()
                return {
                    "feed_seconds": round(seconds, 2),
                    "fed_keys_per_second": round(key_count / max(seconds, 1e-3)),
                    "fed_keys_per_cpu_second": round(key_count / max(cpu, 1e-3)),
                    "bytes_per_key": round(file.st_blocks * 512 / key_count, 1),
                }
            mirror.close()
        time.sleep(0.02)
    raise TimeoutError(f"the mirror did not learn {key_count} keys in {FEED_SECONDS_MAX} s")


def _read(
    count: int, service: str, root: str, addresses: list[str], key_count: int, calls: int
) -> list[dict[str, dict[str, float]]]:
    chains = max(1, key_count // CHAIN_KEYS)
    arguments = [service, root, str(chains), str(calls), *addresses]
    command = [sys.executable, "-m", "benchmarks.mirror_reads", *arguments]
    readers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    outputs = [reader.communicate(timeout=FEED_SECONDS_MAX)[0] for reader in readers]
    assert all(reader.returncode == 0 for reader in readers)
    return [json.loads(output) for output in outputs]


def _together(readers: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """The median of the readers' medians, and the worst of their tails."""
    return {
        size: {
            "p50_us": percentile([reader[size]["p50_us"] for reader in readers], 0.5),
            "p99_us": max(reader[size]["p99_us"] for reader in readers),
        }
        for size in readers[0]
    }


async def read(
    service: str, root: Path, chain_count: int, calls: int, addresses: list[str]
) -> dict[str, dict[str, float]]:
    """Every lookup asks for other chains, chosen at random out of some hundred that are spread over all."""
    mirror = find_mirror(addresses, service, root)
    assert isinstance(mirror, NodeMirror), "no mirror"
    client = LookupClient(addresses, mirror=mirror)
    noise = random.Random(os.getpid())
    picked = noise.sample(range(chain_count), min(chain_count, 400))
    chains = [make_chain(number) for number in picked]
    figures: dict[str, dict[str, float]] = {}
    for size in SIZES:
        samples: list[float] = []
        for _ in range(calls):
            start = noise.randrange(CHAIN_KEYS - size + 1) if size < CHAIN_KEYS else 0
            parts = [noise.choice(chains) for _ in range(-(-size // CHAIN_KEYS))]
            asked = [key for part in parts for key in part][start : start + size]
            begun = time.perf_counter()
            answer = await client.resolve(asked, 0, CALL_SECONDS)
            samples.append((time.perf_counter() - begun) * 1e6)
            assert answer.complete
            assert sum(run.count for run in answer.runs) == size, "every key is known"
        assert not client.counters.get("lookup_rpcs", 0), "the mirror answers alone"
        figures[str(size)] = {"p50_us": percentile(samples, 0.5), "p99_us": percentile(samples, 0.99)}
    return figures


def main() -> None:
    service, root, chains, calls, *addresses = sys.argv[1:]
    print(json.dumps(asyncio.run(read(service, Path(root), int(chains), int(calls), addresses))))


if __name__ == "__main__":
    main()
