"""Rules of the replay's second level: a disk is as good as more memory, and each setting writes what it says."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvservice.cli.exits import ExitCode
from kvservice.cli.main import app
from kvservice.replay.cluster import Below, Cluster, ReplayOutcome
from kvservice.replay.node import Hits, ReplayNode
from kvservice.replay.policies import POLICIES
from kvservice.replay.synthetic import Workload, make_trace
from kvservice.replay.tiers import WRITES, ReplayTier
from kvservice.replay.trace import Trace, key_of, read_trace, trace_of
from kvservice.units import BlockKey
from tests.unit.replay.test_cluster import WORKLOAD

REAL = Path(os.environ.get("KVSERVICE_TEST_TRACES", "traces")) / "mooncake_conversation.jsonl"


@pytest.fixture(scope="module")
def trace() -> Trace:
    return make_trace(WORKLOAD, seed=5)


def played(trace: Trace, nodes: int, memory: int, below: Below, **options: object) -> ReplayOutcome:
    cluster = Cluster(nodes, memory, POLICIES["lru"], below=below, **options)  # type: ignore[arg-type]
    found = cluster.play(trace)
    cluster.check_invariants()
    return found


def chain(first: int, count: int = 4) -> tuple[BlockKey, ...]:
    return tuple(key_of(first + i) for i in range(count))


def node_with(disk: int, write: str, memory: int = 8) -> tuple[ReplayNode, ReplayTier]:
    tier = ReplayTier("disk", disk, POLICIES["lru"](), write)
    return ReplayNode("n0", memory, POLICIES["lru"](), disk=tier), tier


def test_what_memory_evicts_is_found_on_the_disk() -> None:
    node, disk = node_with(100, "evicted")
    for at in range(3):
        assert node.serve(chain(10 * at), float(at)) == (0, 0, 0, 0)
    assert len(disk) == 4 and disk.counters["written"] == 4
    assert node.serve(chain(0), 3.0) == Hits(0, 0, disk=4)
    assert node.serve(chain(0), 4.0) == Hits(4, 0)
    assert len(disk) == 8, "bringing back evicted four others; what the disk has is not written again"
    node.check_invariants()


@pytest.mark.parametrize(("write", "after_store", "after_use"), [("stored", 4, 4), ("reused", 0, 4), ("evicted", 0, 0)])
def test_each_setting_writes_at_its_moment(write: str, after_store: int, after_use: int) -> None:
    node, disk = node_with(100, write)
    node.serve(chain(0), 0.0)
    assert len(disk) == after_store
    node.serve(chain(0), 1.0)
    assert len(disk) == after_use


def test_nothing_is_written_while_nothing_comes_back() -> None:
    node, disk = node_with(4000, "stored", memory=64)
    for number in range(800):
        node.serve(chain(10 * number), float(number))
    assert disk.counters["written"] < 2500 and node.counters["not_admitted"] > 500


def test_a_disk_finds_what_as_much_memory_would_find(trace: Trace) -> None:
    alone = played(trace, 1, 40, Below())
    tiered = played(trace, 1, 40, Below(disk=trace.unique_count))
    assert tiered.hit_rate == pytest.approx(1 - trace.unique_count / trace.block_count)
    assert tiered.local_hits == alone.local_hits > 0 and tiered.disk_hits > 0
    assert tiered.disk_written <= trace.unique_count
    small = played(trace, 1, 40, Below(disk=60))
    assert alone.hit_rate < small.hit_rate < tiered.hit_rate and small.disk_written > tiered.disk_written / 2


def test_what_is_written_when_reused_is_a_part_of_the_rest(trace: Trace) -> None:
    found = {write: played(trace, 1, 40, Below(trace.unique_count, write)) for write in WRITES}
    written = [found[write].disk_written for write in ("reused", "evicted", "stored")]
    assert written == sorted(written) and written[0] < written[2] / 2
    assert found["reused"].hit_rate < found["evicted"].hit_rate


def test_nodes_read_what_only_another_disk_has(trace: Trace) -> None:
    apart = played(trace, 2, 40, Below(disk=trace.unique_count * 2), pooled=False)
    pooled = played(trace, 2, 40, Below(disk=trace.unique_count * 2))
    shared = played(trace, 2, 40, Below(objects=trace.unique_count))
    assert pooled.hit_rate > apart.hit_rate
    assert pooled.remote_hits > 0 and shared.objects_hits > 0
    assert shared.objects_written <= trace.unique_count, "an object that is there is not written again"


def test_replay_prints_tiers_and_their_writes(tmp_path: Path) -> None:
    path = tmp_path / "made-up.jsonl"
    numbers: dict[bytes, int] = {}
    with path.open("w") as file:
        for request in make_trace(Workload(seconds=100), 1).requests:
            ids = [numbers.setdefault(key, len(numbers)) for key in request.keys]
            row = {"timestamp": int(request.at * 1000), "input_length": request.tokens, "hash_ids": ids}
            file.write(json.dumps(row) + "\n")
    base = ["replay", str(path), "--capacity", "60", "--nodes", "2", "--policy", "default", "--disk", "300"]
    done = CliRunner().invoke(app, [*base, "--disk-write", "evicted", "--disk-write", "reused", "--objects"])
    assert done.exit_code == 0 and "Tiers below the memory" in done.stdout and "objects" in done.stdout
    rows = json.loads(CliRunner().invoke(app, [*base, "-o", "json", "--token-bytes", "1KiB"]).stdout)["runs"]
    (tiered,) = (row for row in rows if row["disk"] and row["nodes"] == 1)
    written = tiered["disk_written_bytes"]
    assert written > 0 and written % (512 << 10) == 0
    days = 100 / 86_400
    assert tiered["drive_writes_a_day"] == pytest.approx(written / (300 * 512 << 10) / days, rel=0.1)
    for options, words in ((["--disk-write", "now"], "evicted, stored or reused"), (["--token-bytes", "x"], "x")):
        refused = CliRunner().invoke(app, [*base, *options])
        assert refused.exit_code == ExitCode.USAGE and words in refused.stderr


@pytest.mark.skipif(not REAL.is_file(), reason="no trace in the folder of KVSERVICE_TEST_TRACES")
def test_the_real_trace_begins_as_it_did() -> None:
    """A part of it; the whole is in benchmarks/results/disk_worth.json."""
    whole = read_trace(REAL, limit=1500)
    alone, disk = (played(whole, 1, 1000, below) for below in (Below(), Below(disk=whole.unique_count)))
    assert disk.hit_rate == pytest.approx(whole.hit_rate_max) and alone.hit_rate < disk.hit_rate
    assert trace_of("part", list(whole.requests)).unique_count == whole.unique_count
