"""Ours beside Mooncake Store, LMCache, KVCR, Redis, Ray's object store, raw NIXL and memcpy, one after the other.

    make bench-peers          or: python -m benchmarks.peers [--out PATH], once it has installed the peers

Each peer runs in processes of its own, with its data in memory, and is asked for the same blocks and as many keys. What
is ours comes from the benchmarks that measure it alone, run here with fewer rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.peers import lmcache_server
from benchmarks.report import ROOT, default_out, print_table, write_report
from kvservice.testing.eventually import eventually
from kvservice.units import KiB, MiB

HERE = Path(__file__).resolve().parent
VENV = ROOT / ".venv-peers"
SIZES = (64 * KiB, 720 * KiB, 2 * MiB)
LOOKUP_KEYS = (1, 64, 512, 2048, 8192)
START_SECONDS = 30.0
Figures = dict[str, Any]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def environment() -> dict[str, str]:
    deb = VENV / "deb"
    libraries = [str(deb / "usr/lib/x86_64-linux-gnu"), str(deb / "lib/x86_64-linux-gnu")]
    return {**os.environ, "LD_LIBRARY_PATH": ":".join(libraries), "GLOG_minloglevel": "2"}


@contextlib.contextmanager
def server(*command: str, port: int) -> Iterator[None]:
    """Run a program until it listens at this port of loopback."""
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:

        def is_listening() -> bool:
            if process.poll() is not None:
                raise SystemExit(f"{command[0]} ended before it listened")
            return socket.socket().connect_ex(("127.0.0.1", port)) == 0

        eventually(is_listening, f"{command[0]} at port {port}", START_SECONDS)
        yield
    finally:
        process.terminate()
        process.wait(20)


def last_line(output: str) -> Figures:
    found: Figures = json.loads(output.strip().splitlines()[-1])
    return found


def mooncake(options: argparse.Namespace) -> Figures:
    port = free_port()
    program = [str(VENV / "bin/python"), str(HERE / "mooncake_program.py"), f"127.0.0.1:{port}"]
    common = [*map(str, SIZES), "--total", str(options.total)]
    rounds = ["--rounds", str(options.rounds), "--keys", str(options.keys), "--calls", str(options.calls)]
    with server(str(VENV / "bin/mooncake_master"), "--port", str(port), port=port):
        holder = subprocess.Popen(
            [*program, *common, "--hold"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment(),
        )
        try:
            assert holder.stdout is not None
            while "ready" not in (line := holder.stdout.readline()):
                assert line, "Mooncake's holder ended"
            done = subprocess.run(
                [*program, *common, *rounds],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                check=True,
                env=environment(),
            )
        finally:
            holder.kill()
            holder.wait()
    return last_line(done.stdout)


def redis(options: argparse.Namespace) -> Figures:
    port = free_port()
    command = [str(VENV / "deb/usr/bin/redis-server"), "--port", str(port), "--save", "", "--appendonly", "no"]
    program = [str(VENV / "bin/python"), str(HERE / "redis_program.py"), str(port), *map(str, SIZES)]
    program += ["--total", str(options.total), "--keys", str(options.keys), "--calls", str(options.calls)]
    with server(*command, "--bind", "127.0.0.1", port=port):
        return last_line(subprocess.run(program, stdout=subprocess.PIPE, text=True, check=True).stdout)


def ray(options: argparse.Namespace) -> Figures:
    program = [sys.executable, "-m", "benchmarks.peers.ray_program", *map(str, SIZES)]
    program += ["--total", str(options.total), "--rounds", str(options.rounds)]
    variables = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(program, stdout=subprocess.PIPE, text=True, check=True, env=variables, cwd=ROOT)
    return last_line(done.stdout)


def kvcr(options: argparse.Namespace) -> Figures:
    program = [sys.executable, str(HERE / "kvcr_program.py"), str(free_port()), *map(str, SIZES)]
    program += ["--total", str(options.total), "--rounds", str(options.rounds)]
    program += ["--keys", str(options.keys), "--calls", str(options.calls)]
    variables = {**os.environ, "PYTHONPATH": str(VENV / "kvcr"), "NIXL_LOG_LEVEL": "WARN"}
    return last_line(subprocess.run(program, stdout=subprocess.PIPE, text=True, check=True, env=variables).stdout)


def lmcache(options: argparse.Namespace) -> Figures:
    return lmcache_server.measured(SIZES, LOOKUP_KEYS, options.rounds)


def ours(module: str, *arguments: str) -> Figures:
    """The figures of one of our benchmarks."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        command = [sys.executable, "-m", f"benchmarks.{module}", *arguments, "--out", str(out)]
        subprocess.run(command, check=True, cwd=ROOT, stdout=sys.stderr)
        found: Figures = json.loads(out.read_text())["figures"]
        return found


def bandwidth_rows(found: dict[str, Figures]) -> list[tuple[str, str, int, float]]:
    """(what, who, block bytes, GB/s), by what and size."""
    rows: list[tuple[str, str, int, float]] = []
    for size in SIZES:
        local = found["local"][f"{size // KiB} KiB"]
        rows += [
            ("read, same node", "memcpy", size, local["load, verify_load sampled"]["memcpy_gb_per_second"]),
            ("read, same node", "kvservice", size, local["load, verify_load sampled"]["gb_per_second"]),
            ("read, same node", "KVCR", size, found["kvcr"]["get_gb_per_second"][str(size)]),
            ("read, same node", "LMCache server", size, found["lmcache"]["get_gb_per_second"][str(size)]),
            ("read, same node", "Mooncake Store, own segment", size, found["mooncake"]["own_gb_per_second"][str(size)]),
            ("read, same node", "Ray object store", size, found["ray"]["own_gb_per_second"][str(size)]),
            ("read, same node", "Redis", size, found["redis"]["get_gb_per_second"][str(size)]),
            ("write, same node", "memcpy", size, local["store"]["memcpy_gb_per_second"]),
            ("write, same node", "kvservice", size, local["store"]["gb_per_second"]),
            ("write, same node", "kvservice, until sealed", size, local["store, sealed"]["gb_per_second"]),
            ("write, same node", "KVCR", size, found["kvcr"]["put_gb_per_second"][str(size)]),
            ("write, same node", "LMCache server", size, found["lmcache"]["put_gb_per_second"][str(size)]),
            ("write, same node", "Mooncake Store", size, found["mooncake"]["put_gb_per_second"][str(size)]),
            ("write, same node", "Ray object store", size, found["ray"]["put_gb_per_second"][str(size)]),
            ("write, same node", "Redis", size, found["redis"]["put_gb_per_second"][str(size)]),
        ]
        pulled = found["transfer"]["by_ucx_transport"]["tcp"][str(size)]["pull"]
        rows += [
            ("read over TCP", "raw NIXL", size, pulled["limit_gb_per_second"]),
            ("read over TCP", "kvservice, all verified", size, pulled["gb_per_second"]),
            ("read over TCP", "Mooncake Store", size, found["mooncake"]["remote_gb_per_second"][str(size)]),
        ]
        beside = next(iter(found["transfer"]["by_ucx_transport"].values()))[str(size)]
        mapped, remote = beside["mapped"], found["mooncake"]["remote_gb_per_second"][str(size)]
        rows += [
            ("read of a peer, same machine", "memcpy", size, beside["memcpy"]["gb_per_second"]),
            ("read of a peer, same machine", "raw NIXL", size, mapped["limit_gb_per_second"]),
            ("read of a peer, same machine", "kvservice, all verified", size, mapped["gb_per_second"]),
            ("read of a peer, same machine", "Mooncake Store", size, remote),
        ]
    return sorted(rows, key=lambda row: (row[0], row[2]))


def lookup_rows(found: dict[str, Figures]) -> list[tuple[str, int, float, float]]:
    """(who, keys asked, p50, p99 in ms), of lookups from another process."""
    own = found["lookup"]["2 partitions"]
    rows: list[tuple[str, int, float, float]] = []
    for count in LOOKUP_KEYS:
        mirror = own["mirror"]["one_reader"][str(count)]
        rows.append(("kvservice, mirror of the node", count, mirror["p50_us"] / 1e3, mirror["p99_us"] / 1e3))
        for who, figures in (
            ("kvservice, gRPC", own["resolve_by_keys"]),
            ("Mooncake batch_is_exist", found["mooncake"]["lookup"]),
            ("LMCache server", found["lmcache"]["lookup"]),
            ("KVCR query, in one process", found["kvcr"]["lookup"]),
            ("Redis EXISTS, pipelined", found["redis"]["lookup"]),
        ):
            rows.append((who, count, figures[str(count)]["p50_ms"], figures[str(count)]["p99_ms"]))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--total", type=int, default=128 * MiB, help="bytes of each read and write")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--keys", type=int, default=100_000, help="keys that each system knows when it is asked for keys"
    )
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--out", type=Path, default=default_out("peers"))
    options = parser.parse_args()
    if not (VENV / "bin/mooncake_master").exists() or not lmcache_server.is_installed():
        raise SystemExit("the peers are not installed: make bench-peers")
    found: dict[str, Figures] = {}
    found["local"] = ours("local_bandwidth", "--total", str(options.total), "--rounds", str(options.rounds))
    found["transfer"] = ours("transfer_bandwidth")
    known = ["--keys", str(options.keys), "--calls", str(options.calls), "--partitions", "2"]
    found["lookup"] = ours("lookup_latency", *known)
    for peer in (mooncake, lmcache, kvcr, redis, ray):
        print(f"== {peer.__name__}", file=sys.stderr, flush=True)
        found[peer.__name__] = peer(options)
    print_table(
        ["", "who", "block", "GB/s"],
        [[what, who, f"{size // KiB} KiB", f"{rate:.2f}"] for what, who, size, rate in bandwidth_rows(found)],
    )
    asked = [[who, str(count), p50, p99] for who, count, p50, p99 in lookup_rows(found)]
    print_table(["lookup", "keys", "p50 ms", "p99 ms"], asked)
    print(write_report("peers", found, options.out))


if __name__ == "__main__":
    main()
