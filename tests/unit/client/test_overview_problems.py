"""What the overview of a service calls a problem though every part answers."""

from __future__ import annotations

from kvservice.client.overview import _NodeAnswer, _overview
from kvservice.wire.v1 import shard_pb2


def problems(*nodes: tuple[str, str]) -> list[str]:
    """Of a service with shards on these machines, each with this transport."""
    answers = [
        _NodeAnswer(f"n{index}", "10.0.0.1:7401", shard_pb2.StatsReply(host=host, transport=transport))
        for index, (host, transport) in enumerate(nodes)
    ]
    return list(_overview("s", [], answers, {}).problems)


def test_a_machine_without_nixl_among_others_is_a_problem() -> None:
    """Its engines would miss whatever others have, and nothing would say why."""
    (said,) = problems(("a", "shm+nixl"), ("b", "shm"))
    assert said.startswith("node b (n1) reads no blocks of other machines by shm: that takes NIXL")


def test_on_one_machine_shared_memory_is_enough() -> None:
    assert problems(("a", "shm"), ("a", "shm")) == problems(("a", "shm")) == []


def test_a_tier_that_only_takes_nothing_is_told_as_still_read() -> None:
    rows = [
        shard_pb2.TierNumbers(name="objects", state="open", detail="no space"),
        shard_pb2.TierNumbers(name="disk", state="failed", detail="not yours"),
    ]
    answer = _NodeAnswer("n0", "10.0.0.1:7401", shard_pb2.StatsReply(host="a", tiers=rows))
    assert _overview("s", [], [answer], {}).problems == (
        "tier disk of node a (n0) is not used: not yours",
        "tier objects of node a (n0) does not take every block, and is still read: no space",
    )
