"""An hour of storing, evicting, reading and failing: is memory flat, is nothing held that nobody holds, is every byte
right?

    python -m benchmarks.soak [--minutes 60] [--rate 6] [--seed 1] [--out PATH]

Three shards with a small disk tier and two lookup partitions as processes, and six engines without models in two more
(benchmarks/crowd_engine.py). Pools and disks are so small that they evict all the time. Every byte that an engine is
promised is compared. Faults come one after the other: parts are killed, stopped for some seconds, drained, the disk is
full, the wall clocks of the shards are set an hour back or ahead. n2, lookup partition 1 and engine process 1 are
left alone, so that their memory can be followed for the whole time.

What a shard remembers of evicted blocks is bounded, but an hour would not fill it. So it is filled before the clock
starts, for at most a seventh of the time.

Now and then the engines rest. Then every shard must soon hold for engines exactly the slots that they hold, and no
lease. The books are checked once a second. Exits with 1 when a byte was wrong, books did not balance, a request
hangs, a quiet point was not quiet, or the memory of a process grew by 1 MiB in ten minutes.

The disk tier lies on a tmpfs of this run, which a file fills up when the disk is to be full. It needs a mount
namespace: without one (`unshare -m`, as root or with user namespaces) this fault is left out, and the report says so.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil

from benchmarks.crowd import Crowd
from benchmarks.crowd_engine import Traffic
from benchmarks.report import default_out, percentile, print_table, write_report
from benchmarks.stepped_shard import CLOCK_VARIABLE
from kvservice.cli.progress import Progress
from kvservice.core.explain.evictions import EVICTIONS_MAX
from kvservice.testing.cluster import LocalCluster
from kvservice.units import KiB, MiB

NODES, ENGINES, PROCESSES = 3, 6, 2
BLOCKS, BLOCK_BYTES = 24, 64 * KiB  # of a prompt
POOL_BYTES, SLAB_BYTES = 64 * MiB, 4 * MiB
PROMPTS = 400  # 600 MiB, for pools of 64 MiB and disks of 96
DISK_BYTES = 96 * MiB  # of each node
MOUNT_BYTES = NODES * DISK_BYTES + 64 * MiB  # all of them, and what is being written
SKEW = 0.6  # some prompts are asked for much more often than others
LEASE_SECONDS = 4.0
CLOCK_SECONDS = 3600.0  # a step, there or back
MAX_AGE_SECONDS = 1800.0  # less than a step of the clock, so that steps mean something to the shards
UNTOUCHED = ("n2", "lookup1", "engines1")
FILL_RATE = 100.0  # requests a second of each engine, which makes as many of them as it can
FILL_SHARE = 0.15  # of the soak's time, at most
QUIET_SECONDS_MAX = 45.0  # from the rest of the engines until every book agrees; leases of the killed end first
WARM_SHARE, WARM_SECONDS = 0.25, 60.0  # of a process's life: what it allocates once. The larger one is not judged.
JUDGED_SECONDS = 600.0  # of a life, without that: a shorter one has no slope that says anything
SLOPE_MIB_MAX = 1.0  # in ten minutes
GROWTH_MIB_MAX = 16.0  # of a life that is too short for a slope
IN_NAMESPACE = "KVSERVICE_TEST_SOAK_DISK"  # set for the run in a mount namespace of its own: where its disk is


@dataclass
class Life:
    """The memory of one process: seconds since the soak began, MiB without the pool, open files."""

    samples: list[tuple[float, float, int]] = field(default_factory=list)

    def judged(self) -> list[tuple[float, float, int]]:
        begun, ended = self.samples[0][0], self.samples[-1][0]
        warm = begun + max(WARM_SECONDS, WARM_SHARE * (ended - begun))
        return [sample for sample in self.samples if sample[0] >= warm]

    def row(self) -> dict[str, Any]:
        judged = self.judged()
        row = {
            "seconds": round(self.samples[-1][0] - self.samples[0][0], 1),
            "first_mib": round(self.samples[0][1], 2),
            "last_mib": round(self.samples[-1][1], 2),
            "files_first": self.samples[0][2],
            "files_last": self.samples[-1][2],
        }
        if len(judged) > 1:
            row["growth_mib"] = round(judged[-1][1] - judged[0][1], 2)
            if judged[-1][0] - judged[0][0] >= JUDGED_SECONDS:
                slope = float(np.polyfit([s[0] for s in judged], [s[1] for s in judged], 1)[0])
                row["slope_mib_in_10_minutes"] = round(600 * slope, 3)
        return row

    @property
    def grew(self) -> bool:
        row = self.row()
        if "slope_mib_in_10_minutes" in row:
            return bool(row["slope_mib_in_10_minutes"] >= SLOPE_MIB_MAX)
        return bool(row.get("growth_mib", 0.0) >= GROWTH_MIB_MAX)


def memory_without_the_pool(pid: int) -> float:
    """MiB of a process's resident memory, but for shared memory: the pool has a fixed size, and counts as it is used.

    Raises OSError or KeyError when the process has ended.
    """
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    rows = dict(line.split(":", 1) for line in lines)
    return sum(int(rows[name].split()[0]) for name in ("RssAnon", "RssFile")) / 1024


class Soak:
    def __init__(self, cluster: LocalCluster, crowd: Crowd, disk: Path, options: argparse.Namespace) -> None:
        self._cluster, self._crowd, self._disk, self._options = cluster, crowd, disk, options
        self._clock = disk / "clock"
        self._has_mount = disk.is_mount()
        self._random = random.Random(options.seed)
        self._started = time.monotonic()
        self._down: set[str] = set()  # parts that are stopped or not there on purpose
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.lives: dict[tuple[str, int], Life] = {}
        self.quiet: list[dict[str, Any]] = []

    @property
    def _now(self) -> float:
        return time.monotonic() - self._started

    async def run(self, say: Callable[..., None]) -> None:
        end = 60 * self._options.minutes
        await self._fill(say, FILL_SHARE * end)
        self._started = time.monotonic()
        watching = asyncio.create_task(self._watch(say, end))
        try:
            next_quiet = self._options.quiet_seconds
            self._play()
            while self._now < end:
                await self._wait(min(self._options.fault_seconds, end - self._now))
                if self._now >= next_quiet:
                    await self._quiet_point()
                    next_quiet = self._now + self._options.quiet_seconds
                elif self._now < end:
                    await self._fault()
                if watching.done():
                    watching.result()
            await self._quiet_point()
        finally:
            watching.cancel()
            await asyncio.wait([watching])

    async def _fill(self, say: Callable[..., None], most: float) -> None:
        """Evict as many blocks as a shard remembers, so that the tables of n2 are full before its memory is judged."""
        self._crowd.play(Traffic(FILL_RATE, PROMPTS, new_share=1.0, stores="all"))
        evicted = 0
        while evicted < EVICTIONS_MAX and self._now < most:
            await self._wait(1.0)
            counters = (await asyncio.to_thread(self._cluster.stats, "n2")).counters
            evicted = counters["evicted_primary"] + counters["evicted_secondary"]
            say("filling the tables of n2", min(evicted, EVICTIONS_MAX), EVICTIONS_MAX)
        self.counts["evictions_before"] = evicted

    def _play(self) -> None:
        self._crowd.play(Traffic(self._options.rate, PROMPTS, SKEW, stores="all"))

    async def _wait(self, seconds: float) -> None:
        await asyncio.sleep(max(seconds, 0.0))
        self._crowd.check()

    # -- faults ----

    async def _fault(self) -> None:
        faults: dict[str, Callable[[], Awaitable[None]]] = {
            "kill n0": lambda: self._restart("n0", signal.SIGKILL),
            "kill n1": lambda: self._restart("n1", signal.SIGKILL),
            "stop n0": lambda: self._pause("n0", 8.0),
            "drain n1": lambda: self._restart("n1", signal.SIGTERM),
            "kill lookup0": lambda: self._restart("lookup0", signal.SIGKILL),
            "stop lookup0": lambda: self._pause("lookup0", 8.0),
            "kill engines": self._kill_engines,
            "stop engines": lambda: self._pause("engines0", 3 * LEASE_SECONDS),
            "clocks step": self._step_clocks,
        }
        if self._has_mount:
            faults["full disk"] = self._fill_disk
        # Each once before any comes again, so that a short run has them all, or as many as it has time for.
        counts = {name: self.counts[f"fault: {name}"] for name in faults}
        name = self._random.choice([one for one, count in counts.items() if count == min(counts.values())])
        self.counts[f"fault: {name}"] += 1
        await faults[name]()

    async def _restart(self, name: str, number: signal.Signals) -> None:
        self._down.add(name)
        await asyncio.to_thread(self._cluster.kill, name, number)
        await asyncio.sleep(self._random.uniform(0.5, 4.0))
        if name.startswith("lookup"):
            await asyncio.to_thread(self._cluster.start_lookup, int(name.removeprefix("lookup")))
        else:
            await asyncio.to_thread(self._cluster.start_shard, name)
        self._down.discard(name)

    async def _pause(self, name: str, most: float) -> None:
        pid = self._pids()[name]
        self._down.add(name)
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(self._random.uniform(1.0, most))
        finally:
            os.kill(pid, signal.SIGCONT)
        self._down.discard(name)

    async def _kill_engines(self) -> None:
        await self._crowd.kill(0)
        await asyncio.sleep(self._random.uniform(0.5, 4.0))
        await self._crowd.start(0)

    async def _step_clocks(self) -> None:
        """Set the wall clocks wrong, start a shard anew that believes them, and after a while set them right."""
        self._clock.write_text(str(self._random.choice((-CLOCK_SECONDS, CLOCK_SECONDS))))
        await self._restart("n0", signal.SIGKILL)
        await asyncio.sleep(self._random.uniform(2.0, 10.0))
        self._clock.unlink()
        await self._restart("n0", signal.SIGKILL)

    async def _fill_disk(self) -> None:
        filler = self._disk / "filler"

        def fill() -> None:
            with filler.open("wb") as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(MiB))
                    file.flush()

        try:
            await asyncio.to_thread(fill)
            await asyncio.sleep(self._random.uniform(4.0, 12.0))
        finally:
            filler.unlink(missing_ok=True)

    # -- quiet points ----

    async def _quiet_point(self) -> None:
        self._crowd.play(Traffic(prompts=PROMPTS))
        begun = time.monotonic()
        unequal = ["nobody has looked"]
        while unequal and time.monotonic() < begun + QUIET_SECONDS_MAX:
            await asyncio.sleep(1.0)
            unequal = await asyncio.to_thread(self._unequal)
        took = round(time.monotonic() - begun, 1)
        self.quiet.append({"at": round(self._now), "seconds": took, "unequal": unequal})
        self.wrong += [f"quiet point at {self._now:.0f} s: {line}" for line in unequal]
        self._play()

    def _unequal(self) -> list[str]:
        """Where shards and engines disagree about what engines hold."""
        if not self._crowd.is_resting or self._crowd.attached < ENGINES:
            return [f"{self._crowd.attached} of {ENGINES} engines are attached, and not all of them rest"]
        found = []
        for node in self._cluster.nodes:
            try:
                books = self._cluster.accounting(node)
            except (grpc.RpcError, IndexError) as error:
                found.append(f"{node} does not answer: {error}")
                continue
            writing, held = books.slots["writing"], self._crowd.held(node)
            if writing != held:
                found.append(f"{node}: {writing} slots are being written, its engines hold {held}")
            if books.leases or books.slots["leased"]:
                found.append(f"{node}: {books.leases} leases, {books.slots['leased']} blocks leased")
        return found

    # -- memory and books ----

    def _pids(self) -> dict[str, int]:
        lookups = [f"lookup{index}" for index in range(len(self._cluster.lookup_addresses))]
        return {name: self._cluster.pid(name) for name in (*self._cluster.nodes, *lookups)} | self._crowd.pids()

    async def _watch(self, say: Callable[..., None], end: float) -> None:
        while True:
            await asyncio.sleep(1.0)
            faults = sum(count for name, count in self.counts.items() if name.startswith("fault: "))
            tally = self._crowd.tally
            seen = f"{tally.counts['requests']} requests, {faults} faults, {len(self.quiet)} quiet points"
            say(f"{seen}, {len(tally.wrong) + len(self.wrong)} wrong", min(self._now, end), end)
            for node in self._cluster.nodes:
                if node in self._down:
                    continue
                try:
                    books = await asyncio.to_thread(self._cluster.accounting, node)
                except (grpc.RpcError, IndexError):
                    continue  # being killed, stopped or restarted
                self.counts["books_looked_at"] += 1
                if not books.balanced:
                    self.wrong.append(f"{node}: {books.violation}")
            for name, pid in self._pids().items():
                with contextlib.suppress(OSError, psutil.Error, KeyError):
                    sample = (self._now, memory_without_the_pool(pid), psutil.Process(pid).num_fds())
                    self.lives.setdefault((name, pid), Life()).samples.append(sample)

    def figures(self) -> dict[str, Any]:
        tally = self._crowd.tally
        lives = [(name, life) for (name, _), life in self.lives.items()]
        return {
            "minutes": round(self._now / 60, 2),
            "requests": tally.counts["requests"],
            "request_seconds": {f"p{p}": percentile(tally.seconds, p / 100) for p in (50, 99, 100)},
            "requests_that_hang": tally.counts["requests_that_hang"],
            "longest_lag_of_engines_seconds": tally.lag,
            "wrong": [*tally.wrong, *self.wrong],
            "counts": dict(sorted((self.counts + tally.counts).items())),
            "left_out": [] if self._has_mount else ["full disk: a tmpfs cannot be mounted here"],
            "quiet_points": self.quiet,
            "memory": [{"process": name, **life.row()} for name, life in lives],
            "grew": [name for name, life in lives if life.grew],
        }


def show(figures: dict[str, Any]) -> None:
    print_table(("what", "figure"), sorted(figures["counts"].items()))
    print_table(
        ("memory without the pool, MiB", "seconds", "first", "last", "growth", "in 10 min", "files"),
        [
            (
                row["process"],
                row["seconds"],
                row["first_mib"],
                row["last_mib"],
                row.get("growth_mib", ""),
                row.get("slope_mib_in_10_minutes", ""),
                row["files_last"],
            )
            for row in figures["memory"]
            if row["process"] in UNTOUCHED or row["seconds"] >= JUDGED_SECONDS
        ],
    )
    for line in [*figures["left_out"], *figures["wrong"]][:20]:
        print(line)
    quiet = figures["quiet_points"]
    print(
        f"{figures['requests']} requests, {figures['requests_that_hang']} hang, {len(figures['wrong'])} wrong; "
        f"{len(quiet)} quiet points, the slowest after {max((q['seconds'] for q in quiet), default=0)} s; "
        f"memory of {figures['grew'] or 'nothing'} grew"
    )


async def soak(
    cluster: LocalCluster, disk: Path, options: argparse.Namespace, say: Callable[..., None]
) -> dict[str, Any]:
    crowd = Crowd(
        cluster.service,
        cluster.root,
        cluster.nodes,
        engines=ENGINES,
        processes=PROCESSES,
        blocks=BLOCKS,
        block_bytes=BLOCK_BYTES,
    )
    async with crowd:
        say("attaching engines")
        await crowd.wait_until_attached()
        running = Soak(cluster, crowd, disk, options)
        await running.run(say)
        return running.figures()


def in_namespace(disk: Path) -> int | None:
    """Run this program again in a mount namespace of its own, which ends with its last process whatever happens.
    Returns its status; None where namespaces are not permitted."""
    ways = [["unshare", "--mount"], ["unshare", "--mount", "--map-root-user"]]
    for way in ways:
        tried = [*way, "mount", "-t", "tmpfs", "tmpfs", str(disk)]
        if shutil.which("unshare") and not subprocess.run(tried, capture_output=True, check=False).returncode:
            again = [*way, sys.executable, "-m", "benchmarks.soak", *sys.argv[1:]]
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the run itself, which ends in order
            return subprocess.run(again, env={**os.environ, IN_NAMESPACE: str(disk)}, check=False).returncode
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=6.0, help="requests a second of each of the six engines")
    parser.add_argument("--fault-seconds", type=float, default=30.0, help="from one fault to the next")
    parser.add_argument("--quiet-seconds", type=float, default=240.0, help="from one quiet point to the next")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=default_out("soak"))
    options = parser.parse_args()
    if IN_NAMESPACE in os.environ:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # who started this ignores it, and that is inherited
        disk = Path(os.environ[IN_NAMESPACE])
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={MOUNT_BYTES}", "tmpfs", str(disk)], check=True)
        return run(disk, options)
    with tempfile.TemporaryDirectory(prefix="kvs-disk-") as folder:
        status = in_namespace(Path(folder))
        return run(Path(folder), options) if status is None else status


def run(disk: Path, options: argparse.Namespace) -> int:
    settings = {
        "KVSERVICE_DISK_PATH": str(disk / "blocks"),
        "KVSERVICE_DISK_BYTES": str(DISK_BYTES),
        "KVSERVICE_MAX_AGE_SECONDS": str(MAX_AGE_SECONDS),
        CLOCK_VARIABLE: str(disk / "clock"),
    }
    (disk / "blocks").mkdir(mode=0o700)
    with ExitStack() as stack, Progress("soak") as progress:
        try:
            progress.update("starting shards")
            cluster = stack.enter_context(
                LocalCluster(
                    NODES,
                    pool_bytes=POOL_BYTES,
                    slab_bytes=SLAB_BYTES,
                    lease_seconds=LEASE_SECONDS,
                    drain_seconds=3.0,
                    environment=settings,
                    shard_module="benchmarks.stepped_shard",
                )
            )
            figures = asyncio.run(soak(cluster, disk, options, progress.update))
        except KeyboardInterrupt:
            progress.update("ending what runs")
            print("interrupted: nothing was written", file=sys.stderr)
            return 130
    show(figures)
    print(f"written to {write_report('soak', figures, options.out)}")
    return 1 if figures["wrong"] or figures["requests_that_hang"] or figures["grew"] else 0


if __name__ == "__main__":
    sys.exit(main())
