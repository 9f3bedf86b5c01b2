"""Which node a replica is on, which engines are like its own, and when addresses of the lookup partitions are used."""

from __future__ import annotations

import dataclasses

import pytest

from kvservice.client.engine_stats import NodeEngineStats
from kvservice.core.block.fingerprint import Fingerprint
from kvservice.core.messages import EngineKind, EngineStats, Holder, PeerSpeed
from kvservice.serve.holdings import Holdings, KnownNodes
from kvservice.serve.options import RouterOptions
from kvservice.serve.router import Place, explain, speeds_of
from kvservice.serve.routing import Candidate, Prompt, decide
from kvservice.testing.builders import make_spec
from kvservice.units import BootEpoch, NodeId

LAYOUT = make_spec().layout


def kind(model: str = "m", seconds_per_block: float = 0.0, namespace: str = "", **fields: object) -> EngineKind:
    return EngineKind(namespace, model, Fingerprint.of({"m": model, **fields}), LAYOUT, 1, seconds_per_block)


def node(name: str, host: str, *engines: EngineKind, peers: tuple[PeerSpeed, ...] = ()) -> NodeEngineStats:
    return NodeEngineStats(Holder(NodeId(name), f"{host}:1", BootEpoch(1)), EngineStats(engines, peers))


def known_nodes(*nodes: NodeEngineStats) -> KnownNodes:
    return KnownNodes({found.node.node_id: found for found in nodes})


def test_a_replica_belongs_to_the_shard_of_its_ray_node() -> None:
    known = known_nodes(node("0123456789ab", "10.0.0.1"), node("ba9876543210", "10.0.0.1"))
    assert known.node_of("0123456789abcdef", "10.0.0.1") == "0123456789ab"


def test_else_to_the_only_shard_of_its_host() -> None:
    known = known_nodes(node("a", "10.0.0.1"), node("b", "10.0.0.2"), node("c", "10.0.0.2"), node("d", "[fd00::1]"))
    assert known.node_of("0123", "10.0.0.1") == "a"
    assert known.node_of("0123", "10.0.0.2") is None, "two: nobody knows which"
    assert known.node_of(None, None) is None
    assert known.node_of(None, "fd00::1") == "d", "it has no brackets where Ray says it"


def test_engines_are_told_apart_by_model_and_namespace() -> None:
    known = known_nodes(node("a", "h", kind("one"), kind("two"), kind("two", namespace="old", dtype="fp16")))
    engines = known.engines_at(NodeId("a"), "org/one", "")
    assert engines is not None
    assert engines.model == "one"
    assert known.engines_at(NodeId("a"), "org/two", "") is None, "two fingerprints"
    assert known.engines_at(NodeId("a"), "org/two", "old") is not None
    assert known.engines_at(NodeId("gone"), "org/one", "") is None


def test_an_engine_of_another_kind_does_not_hide_the_replicas() -> None:
    known = known_nodes(node("a", "h", kind("one", engine="sglang"), kind("one", engine="vllm 0.32.0")))
    engines = known.engines_at(NodeId("a"), "org/one", "")
    assert engines is not None
    assert engines.fingerprint.engine == "vllm"


def test_replicas_of_a_model_are_taken_to_be_alike() -> None:
    options = RouterOptions()
    fast, new = kind(seconds_per_block=0.016), kind()
    known = known_nodes(node("a", "h", fast), node("b", "i", new))
    measured = speeds_of(known, Place(NodeId("a"), fast), options).seconds_per_token
    assert measured == pytest.approx(0.016 / LAYOUT.block_tokens)
    assert speeds_of(known, Place(NodeId("b"), new), options).seconds_per_token == measured
    assert speeds_of(known, Place(None, None), options).seconds_per_token == measured
    slow = kind(seconds_per_block=0.048)
    both = known_nodes(node("a", "h", fast), node("b", "i", slow))
    for name, own in (("a", fast), ("b", slow)):
        found = speeds_of(both, Place(NodeId(name), own), options).seconds_per_token
        assert found == pytest.approx(0.032 / LAYOUT.block_tokens), "who looks slow would get no prompt ever again"
    nobody = speeds_of(known_nodes(node("b", "i", new)), Place(NodeId("b"), new), options)
    assert nobody.seconds_per_token == 1 / options.prefill_tokens_per_second


def test_links_are_those_the_replicas_own_shard_measured() -> None:
    peers = (PeerSpeed(NodeId("b"), 2e9, 0.001), PeerSpeed(NodeId("c"), 0.0, 0.0))
    speeds = speeds_of(known_nodes(node("a", "h", kind(), peers=peers)), Place(NodeId("a"), kind()), RouterOptions())
    assert list(speeds.links) == ["b"], "nothing was read from c yet"
    assert speeds.links[NodeId("b")].bytes_per_second == 2e9
    assert speeds.link.bytes_per_second == RouterOptions().fetch_bytes_per_second


async def test_a_service_that_cannot_be_found_leaves_what_was_known() -> None:
    def fail() -> tuple[str, ...]:
        raise OSError("gone")

    holdings = Holdings(fail, refresh_seconds=1, answer_seconds=1)
    holdings.known = before = known_nodes(node("a", "h"))
    await holdings.refresh()
    assert holdings.known is before
    assert holdings.counters["refresh_failed"] == 1
    assert not holdings.connected
    assert dataclasses.is_dataclass(await holdings.resolve([], 0.1))
    await holdings.close()


def test_a_decision_explains_itself_in_one_line() -> None:
    speeds = speeds_of(known_nodes(), Place(None, None), RouterOptions(prefill_tokens_per_second=1000))
    prompt = Prompt(160, 16, 9)
    decision = decide(prompt, [Candidate("a", 0.05, speeds), Candidate("b", 0.0, speeds, engine_blocks=4)], [0.1, 0.2])
    assert explain(decision, prompt) == (
        "hit of 160 tokens, 9 blocks: "
        "b 96.0 ms (wait 0.0, move 0.0, compute 96.0; blocks 4 engine, 0 node, 0 fetched); "
        "a 210.0 ms (wait 50.0, move 0.0, compute 160.0; blocks 0 engine, 0 node, 0 fetched)"
    )
