"""Real processes of two protocol versions in one service: what the older one refuses is said, and no more is lost."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator

import pytest

from kvservice.cli import check, drain
from kvservice.cli.output import Format
from kvservice.core.messages import MissReason
from kvservice.testing.cluster import LocalCluster
from kvservice.testing.eventually import eventually
from kvservice.units import MiB
from kvservice.wire.versions import PROTOCOL_VERSION
from tests.integration.engine import Engine, chain, with_engine


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCluster]:
    """The shard of n1 was upgraded before the lookup service, which is the wrong order."""
    with LocalCluster(nodes=2, lookup_partitions=1, transport="shm", pool_bytes=8 * MiB) as running:
        monkeypatch.setenv("KVSERVICE_RUNTIME_DIR", str(running.root))
        running.kill("n1", signal.SIGTERM)
        running._shard_module = "tests.integration.next_version"
        running.start_shard("n1")
        refusal = f"version {PROTOCOL_VERSION + 1}, and this process knows version {PROTOCOL_VERSION}"
        eventually(lambda: refusal in running.log("n1").read_text(), "the refusal of the newer shard")
        yield running


def test_a_refused_hand_over_is_told_as_refused(cluster: LocalCluster, capsys: pytest.CaptureFixture[str]) -> None:
    both, own = chain(1, 8), chain(2, 4)
    with_engine(cluster.socket("n0"), lambda engine: engine.store(both))
    cluster.wait_until_known(both)
    for prompt in (both, own):
        with_engine(cluster.socket("n1"), lambda engine, prompt=prompt: engine.store(prompt))
    assert drain.run(cluster.service, None, "n1", False, 20.0, True, False, Format.JSON)
    (said,) = json.loads(capsys.readouterr().out)
    assert said["note"].startswith("node n0 refused: node n1 in epoch"), said["note"]
    assert (said["blocks_elsewhere"], said["blocks_lost"]) == (8, 4), "a peer that refuses holds what it held"


def test_a_shard_that_the_directory_refuses_is_missing(cluster: LocalCluster) -> None:
    problems, seen = check.run(None, (), 1, 0.0, cluster.service)
    assert seen.startswith("1 lookup partition, 2 cache shards"), seen
    assert len(problems) == 1 and "knows 1 node, but 2 cache shards answered" in problems[0], problems


def test_a_peer_that_refuses_each_request_is_logged_once(cluster: LocalCluster) -> None:
    keys = chain(3, 8)
    with_engine(cluster.socket("n0"), lambda engine: engine.store(keys))
    cluster.wait_until_known(keys)

    async def ask_often(engine: Engine) -> list[MissReason]:
        return [(await engine.acquire(keys)).miss for _ in range(5)]

    assert with_engine(cluster.socket("n1"), ask_often) == [MissReason.PEER_FAILED] * 5
    assert cluster.log("n1").read_text().count("locate_failed") == 1
