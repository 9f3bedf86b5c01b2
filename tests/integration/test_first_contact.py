"""What two fresh shards have done before the first fetch: they know each other, and their memory is mapped."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from kvservice.testing.cluster import LocalCluster
from kvservice.testing.eventually import eventually
from kvservice.transfer.nixl import nixl_available
from kvservice.units import MiB

POOL = 64 * MiB
NIXL = pytest.param("nixl", marks=[pytest.mark.nixl, pytest.mark.skipif(not nixl_available(), reason="NIXL absent")])


def mapped_bytes(pid: int, name: str) -> int:
    """What a process has mapped of the file with this end of its name."""
    found, is_it = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]:
            is_it = line.endswith(name)
        elif is_it and line.startswith("Rss:"):
            found += 1024 * int(line.split()[1])
    return found


@pytest.mark.parametrize("transport", ["shm", NIXL])
def test_fresh_shards_meet_and_map_before_anybody_asks(transport: str) -> None:
    with LocalCluster(nodes=2, lookup_partitions=1, pool_bytes=POOL, transport=transport) as cluster:
        for node in cluster.nodes:
            eventually(lambda node=node: cluster.stats(node).counters["peers_met"] >= 1, f"{node} to meet", 30)
            assert cluster.stats(node).counters["transfer_connects"] == 1
            pid, name = cluster.pid(node), f"kvservice-{cluster.service}-{node}"
            eventually(lambda pid=pid, name=name: mapped_bytes(pid, name) > 0.9 * POOL, f"{node} to map its pool", 30)
            libraries = Path(f"/proc/{pid}/maps").read_text()
            assert "torch" not in libraries, "it takes 180 MiB and two seconds of the start"
            assert transport == "shm" or "nixl" in libraries


def test_they_may_open_as_many_files_as_the_system_allows() -> None:
    """1,024 are a common limit, and a lookup partition has connections of every node."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))  # which the processes inherit
    try:
        with LocalCluster(nodes=1, lookup_partitions=1, pool_bytes=POOL) as cluster:
            for name in (*cluster.nodes, "lookup0"):
                assert resource.prlimit(cluster.pid(name), resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_who_only_places_shards_imports_none() -> None:
    """`kvservice up` and the supervisor start a second sooner each."""
    code = "import sys, kvservice.actors.deploy; print([name for name in sys.modules if name.startswith('kvservice.')])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "kvservice.actors.cache_shard" in found
    assert not any(name in found for name in ("shard.server'", "pool.runtime", "lookup.server", "copying.worker"))
