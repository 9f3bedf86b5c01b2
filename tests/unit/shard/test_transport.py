"""How a shard chooses the way in which it reads others."""

from __future__ import annotations

import pytest

from kvservice.config import ServiceConfig
from kvservice.shard import server
from kvservice.shard.server_config import ShardServerConfig
from kvservice.units import NodeId


@pytest.mark.parametrize(("host", "warnings"), [("192.0.2.2", ["nixl_missing"]), ("127.0.0.1", [])])
def test_a_shard_beyond_its_machine_warns_without_nixl(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, host: str, warnings: list[str]
) -> None:
    monkeypatch.setattr(server, "nixl_available", lambda: False)
    ways, _ = server._choose_reader(ShardServerConfig(ServiceConfig(), NodeId("n"), peer_host=host))
    assert (ways, [record.getMessage() for record in caplog.records]) == ("shm", warnings)
