"""The main job between two hosts with addresses of their own: what replica A computed is a remote hit at replica B."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvservice.transfer.nixl import nixl_available
from tests.netns.hosts import Host, Hosts, why_not
from tests.netns.service import running, socket_on
from tests.vllm.replica import Replica, close_all

REASON = why_not() or (None if nixl_available() else "NIXL is not installed")
pytestmark = [
    pytest.mark.netns,
    pytest.mark.vllm,
    pytest.mark.nixl,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]

TOKEN_BYTES = 30 * 3 * 2 * 64 * 4  # layers, kv heads, K and V, head size, float32
PROMPT = "The lighthouse keeper writes in the log every evening what the sea was like. " * 60 + "Tonight the sea was"


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    with Hosts() as pair:
        yield pair


def received_bytes(host: Host) -> int:
    return int(host.output(["cat", f"/sys/class/net/{host.device}/statistics/rx_bytes"]))


def test_prefix_computed_on_one_host_is_a_remote_hit_on_the_other(
    hosts: tuple[Host, Host], tmp_path: Path, model_path: Path
) -> None:
    replicas: list[Replica] = []
    with running(hosts, tmp_path, "--pool", "256MiB"):
        try:
            for index, host in enumerate(hosts):
                extra: dict[str, object] = {"mode": "service", "socket": socket_on(index)}
                replicas.append(Replica(model_path, extra, tmp_path / f"replica{index}.log", host.pid))
            a, b = (replica.ready() for replica in replicas)
            cold = a.ask(PROMPT)
            before = received_bytes(hosts[1])
            warm = b.ask(PROMPT)
            crossed = received_bytes(hosts[1]) - before
            assert warm["token_ids"] == cold["token_ids"]
            assert warm["cached_tokens"] >= 600, f"no remote hit: {warm}"
            assert crossed >= warm["cached_tokens"] * TOKEN_BYTES, "the blocks did not cross the wire"
        finally:
            close_all(replicas)
