"""What an engine or program is told when no shard fits, or more than one."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvservice import discovery
from kvservice.discovery import ShardRecord, choose_shard, write_record
from kvservice.errors import ConfigError, Unavailable
from kvservice.session.options import PoolOptions
from kvservice.session.pool_choice import find_socket
from kvservice.units import BootEpoch, NodeId


@pytest.fixture(autouse=True)
def machine_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No shard of the real machine shows, and those that a test registers are taken for alive."""
    for name in ("KVSERVICE_SERVICE", "KVSERVICE_NODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KVSERVICE_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(discovery, "is_listening", lambda _: True)


def register(*names: str) -> None:
    for name in names:
        service, node = name.split("/")
        write_record(ShardRecord(service, NodeId(node), f"/nowhere/{name}.sock", "unix:/nowhere", 1, BootEpoch(1)))


@pytest.mark.parametrize(
    ("names", "advice"),
    [
        (("nu7/local", "nu8/local"), "set KVSERVICE_SERVICE, or service in"),
        (("nu7/a", "nu7/b"), "set KVSERVICE_NODE, or node in an engine.* or a program's connect"),
        (("nu7/a", "nu8/a", "nu8/b"), "set KVSERVICE_SERVICE and KVSERVICE_NODE, or service and node in"),
    ],
)
def test_several_shards_are_told_apart_by_what_differs(names: tuple[str, ...], advice: str) -> None:
    register(*names)
    with pytest.raises(ConfigError, match=advice) as caught:
        choose_shard()
    assert ", ".join(names) in caught.value.message


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (PoolOptions(service="nope"), "no shard of service 'nope' is"),
        (PoolOptions(node="b"), "no shard of node 'b' is"),
        (PoolOptions(service="nu7", node="b"), "no shard of node 'b' in service 'nu7' is"),
    ],
)
def test_a_wrong_name_is_told_with_what_is_there(options: PoolOptions, wanted: str) -> None:
    register("nu7/local")
    with pytest.raises(Unavailable, match=f"{wanted} registered on this machine; there is nu7/local"):
        find_socket(options)


def test_without_any_shard_the_service_is_to_be_started() -> None:
    with pytest.raises(Unavailable, match="no shard is registered on this machine; start the service"):
        find_socket(PoolOptions(service="nope"))
