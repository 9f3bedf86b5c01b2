"""What the supervisor does about calls that fail, on a Ray that does as the test says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError, RayError

from kvservice.actors import supervisor as module
from kvservice.actors.supervisor import SILENT_ROUNDS_MAX, Supervisor, _Part
from kvservice.config import ServiceConfig
from kvservice.errors import Unavailable
from kvservice.testing.eventually import eventually

Call = Callable[[], Any]


def hang() -> None:
    raise AssertionError("nobody may wait for this call")


def fail() -> None:
    raise ActorUnavailableError("as the test says", None)


class FakeRay:
    """A call is what it does when its answer is taken."""

    def __init__(self) -> None:
        self.nodes: Call = list

    def wait(self, calls: list[Call], num_returns: int, timeout: float) -> tuple[list[Call], list[Call]]:
        return [call for call in calls if call is not hang], [call for call in calls if call is hang]

    def get(self, call: Call, timeout: float) -> Any:
        return call()


class Method:
    def __init__(self, call: Call) -> None:
        self._call = call
        self.calls = 0

    def remote(self, *_: object) -> Call:
        self.calls += 1
        return self._call


class Lookup:
    def __init__(self, call: Call) -> None:
        self.ready = Method(call)


class Shard:
    def __init__(self, call: Call) -> None:
        self.ready = Method(lambda: {"epoch": 1})
        self.set_lookup_addresses, self.leave = Method(call), Method(call)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setattr(module, "ray", fake)
    monkeypatch.setattr(module, "ROUND_SECONDS", 0.01)
    monkeypatch.setattr(module, "keep_tables", lambda: None)
    return fake


@pytest.fixture
def supervisor(fake: FakeRay) -> Iterator[Supervisor]:
    supervisor = Supervisor(ServiceConfig(lookup_partitions=1))
    yield supervisor
    supervisor.stop()
    supervisor._thread.join(10)


def test_an_unexpected_error_does_not_end_the_rounds(fake: FakeRay, supervisor: Supervisor) -> None:
    def broken() -> None:
        raise TypeError("no such field")

    fake.nodes = broken
    eventually(lambda: supervisor._problems.get("ray") == "no such field", "the error to be noted")
    fake.nodes = list
    eventually(lambda: not supervisor._problems, "a round that succeeds")


@pytest.mark.parametrize("call", [fail, hang], ids=["fails", "hangs"])
def test_a_shard_that_fails_keeps_no_other_from_hearing(supervisor: Supervisor, call: Call) -> None:
    supervisor.stop()
    bad, good = Shard(call), Shard(lambda: None)
    supervisor._lookups = {0: _Part("lookup", None, "r0", answer={"address": "h:1"})}
    supervisor._shards = {"r1": _Part("bad", bad, "r1"), "r2": _Part("good", good, "r2")}
    draining = {"r1": 60.0, "r2": 60.0}
    for _ in range(2):
        supervisor._ask_shards()
        supervisor._drain_shards(draining)
    for shard, calls in ((bad, 2), (good, 1)):
        assert (shard.set_lookup_addresses.calls, shard.leave.calls) == (calls, calls), "told until it has heard"
    assert len(supervisor._failed) == 4 and all(isinstance(error, RayError) for error in supervisor._failed)


def refuse() -> None:
    raise Unavailable("cannot listen on h:1: Address already in use")


@pytest.mark.parametrize(("port", "call", "again"), [(0, refuse, True), (7000, refuse, False), (0, fail, False)])
def test_a_lookup_partition_leaves_a_port_that_is_taken(fake: FakeRay, port: int, call: Call, again: bool) -> None:
    supervisor = Supervisor(ServiceConfig(lookup_partitions=1, lookup_port=port))
    supervisor.stop()
    part = _Part("lookup", Lookup(call), "r0", answer={"address": "h:1", "ray_node": "r0"})
    supervisor._lookups = {0: part}
    for _ in range(SILENT_ROUNDS_MAX - 1):
        supervisor._ask_lookups()
    assert not part.dead
    supervisor._ask_lookups()
    assert part.dead == again, "one that Ray restarts, or whose port was chosen, stays"


def test_a_part_of_the_lookup_partitions_is_not_named(fake: FakeRay) -> None:
    supervisor = Supervisor(ServiceConfig(lookup_partitions=2))
    supervisor.stop()
    supervisor._lookups = {1: _Part("lookup", None, "r1", answer={"address": "h:2"})}
    assert supervisor.lookup_addresses() == [], "partition 1 would be taken for the only one"
    supervisor._lookups[0] = _Part("lookup", None, "r0", answer={"address": "h:1"})
    assert supervisor.lookup_addresses() == ["h:1", "h:2"]
