"""Rules of the replay's nodes: they decide as a shard does, lose nothing, and count right."""

from __future__ import annotations

import random

import pytest

from kvservice.core import events as ev
from kvservice.core.messages import LocateResult
from kvservice.errors import InvalidRequest
from kvservice.replay.cluster import Cluster
from kvservice.replay.node import ReplayNode
from kvservice.replay.optimum import belady_hits
from kvservice.replay.policies import POLICIES
from kvservice.replay.study import Plan, play_all, report
from kvservice.replay.synthetic import Workload, make_trace
from kvservice.replay.trace import Request, Trace, key_of, trace_of
from kvservice.testing.builders import CoreHarness, make_holder, run_of
from kvservice.units import AttachmentId, BlockKey

WORKLOAD = Workload(
    seconds=240,
    conversations_rate=0.3,
    think_seconds_mean=20,
    first_blocks_mean=3,
    turn_blocks_mean=2,
    system_prompts=3,
    system_blocks=2,
    scan_rate=0.1,
    scan_blocks_mean=6,
    chain_blocks_max=16,
)


@pytest.fixture(scope="module")
def trace() -> Trace:
    return make_trace(WORKLOAD, seed=5)


class Shard:
    """The real shard, asked and answered as in production; only time stands still."""

    def __init__(self, slabs: int, has_directory: bool) -> None:
        self.core = CoreHarness(slabs, has_directory=has_directory)
        self.attachment: AttachmentId = self.core.attach()

    def serve(self, keys: tuple[BlockKey, ...], peer: Shard | None) -> tuple[int, int]:
        op = self.core.acquire(self.attachment, keys)
        if self.core.open(op) and peer is not None:
            held = peer.core.keys_held()
            missing = self.core.resolves[-1].start
            runs = [run_of(i, 1, make_holder()) for i in range(missing, len(keys)) if keys[i] in held]
            self.core.resolved(op, *runs)
            assert not self.core.open(op) or self.core.locates
            while self.core.open(op):
                locate = self.core.locates.pop(0)
                asked = peer.core.next_op()
                peer.core.send(ev.PeerLocate(asked, self.core.state.node_id, peer.core.state.epoch, locate.keys))
                found = peer.core.reply(asked)
                assert isinstance(found, LocateResult)
                self.core.located(locate, found)
                if self.core.pulls:
                    self.core.pulled(self.core.pulls.pop(), ev.PullResult.OK)
                done = peer.core.next_op()
                release = ev.PeerRelease(done, self.core.state.node_id, peer.core.state.epoch, found.lease_id)
                peer.core.send(release)
        result = self.core.result(op)
        if result.blocks:
            self.core.release(self.attachment, result.lease_id)
        if len(result.blocks) < len(keys):
            self.core.store(self.attachment, keys, len(result.blocks))
        return len(result.blocks) - result.fetched_count, result.fetched_count


def test_a_replay_node_decides_as_the_shard_does(trace: Trace) -> None:
    shard = Shard(8, has_directory=False)
    node = ReplayNode("alone", 32, POLICIES["default"]())
    hits = 0
    for request in trace.requests:
        shard.core.now = 100.0 + request.at
        found = node.serve(request.keys, 100.0 + request.at)
        assert found[:2] == shard.serve(request.keys, None)
        assert {block.key for block in node._store.blocks()} == shard.core.keys_held()
        hits += found[0]
    assert hits > 100 and node.counted()["evicted_primary"] > 100, "the trace does not try the policy"


def test_two_replay_nodes_fetch_from_each_other_as_two_shards_do(trace: Trace) -> None:
    shards = [Shard(6, has_directory=True) for _ in range(2)]
    cluster = Cluster(2, 48, POLICIES["default"])
    fetched = 0
    for number, request in enumerate(trace.requests):
        place = number % 2
        for shard in shards:
            shard.core.now = 100.0 + request.at
        node = cluster.engines[place].node
        found = node.serve(request.keys, 100.0 + request.at)
        assert found[:2] == shards[place].serve(request.keys, shards[1 - place])
        assert {block.key for block in node._store.blocks()} == shards[place].core.keys_held()
        fetched += found[1]
    assert fetched > 100, "the trace does not try fetching"
    cluster.check_invariants()


def brute_lru_hits(trace: Trace, capacity: int) -> int:
    """Leaf first, then the oldest use, then the end of the chain: with lists, by looking at everything."""
    used: dict[BlockKey, tuple[int, int]] = {}  # when, minus position
    parents: dict[BlockKey, BlockKey | None] = {}
    hits = 0
    for now, request in enumerate(trace.requests):
        keys = request.keys
        end = next((i for i, key in enumerate(keys) if key not in used), len(keys))
        hits += end
        for position, key in enumerate(keys):
            if key in used:
                used[key] = (now, -position)
        room = capacity - len(used)
        for _ in range(len(keys) - end - room):
            leaves = used.keys() - {parents[key] for key in used}
            gone = min(leaves, key=lambda key: (used[key], key))
            del used[gone], parents[gone]
        for position, key in enumerate(keys[end:], end):
            used[key] = (now, -position)
            parents[key] = keys[position - 1] if position else None
        for position, key in enumerate(keys):
            if key in used:
                used[key] = (now, -position)
    return hits


@pytest.mark.parametrize("capacity", [40, 80])
def test_a_replay_with_lru_finds_what_a_brute_force_lru_finds(trace: Trace, capacity: int) -> None:
    assert Cluster(1, capacity, POLICIES["lru"], pooled=False).play(trace).local_hits == brute_lru_hits(trace, capacity)


@pytest.mark.parametrize("policy", POLICIES)
def test_blocks_are_conserved_and_the_optimum_is_never_beaten(trace: Trace, policy: str) -> None:
    cluster = Cluster(3, 100, POLICIES[policy])
    found = cluster.play(trace)
    cluster.check_invariants()
    assert found.asked == trace.block_count
    kept = [len(engine.node) for engine in cluster.engines]
    assert sorted(kept) == [33, 33, 34], "a full node holds exactly its share"
    counted = [engine.node.counted() for engine in cluster.engines]
    sealed = sum(one["blocks_sealed"] for one in counted)
    assert sealed == found.evicted + sum(kept)
    assert 0 < found.local_hits + found.remote_hits <= belady_hits(trace, 100)
    assert found.remote_hits > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_with_room_for_everything_only_first_times_miss(trace: Trace, policy: str) -> None:
    found = Cluster(1, trace.unique_count, POLICIES[policy], pooled=False).play(trace)
    assert found.local_hits == trace.block_count - trace.unique_count and found.evicted == 0


def test_a_pool_finds_more_than_the_same_room_apart(trace: Trace) -> None:
    """Routing by holdings moves less."""
    alone = Cluster(4, 400, POLICIES["default"], pooled=False).play(trace)
    pooled = Cluster(4, 400, POLICIES["default"]).play(trace)
    aware = Cluster(4, 400, POLICIES["default"], routing="kv-aware").play(trace)
    assert alone.remote_hits == 0
    assert pooled.hit_rate > 1.5 * alone.hit_rate
    assert aware.hit_rate > 0.95 * pooled.hit_rate and 2 * aware.remote_hits < pooled.remote_hits


def test_a_scan_does_not_flush_what_is_used_again_and_again() -> None:
    noise = random.Random(1)
    popular = [tuple(key_of(100 * i + j) for j in range(4)) for i in range(10)]
    rows: list[tuple[BlockKey, ...]] = []
    for number in range(3000):
        again = number % 4 == 0
        rows.append(popular[noise.randrange(10)] if again else tuple(key_of(10_000 + 4 * number + j) for j in range(4)))
    scan = trace_of("scan", [Request(float(at), keys, 4 * 512, 0) for at, keys in enumerate(rows)])
    default, lru = (Cluster(1, 100, POLICIES[name], pooled=False).play(scan, 500) for name in ("default", "lru"))
    assert default.hit_rate > 1.5 * lru.hit_rate


def test_a_change_of_what_is_popular_is_followed() -> None:
    """What was used often does not stay for ever: an eighth of the room is enough for it after a while."""
    node = ReplayNode("node", 64, POLICIES["default"]())
    for at in range(40):
        for prompt in range(16):
            node.serve(tuple(key_of(4 * prompt + j) for j in range(4)), float(at))
    for at in range(40, 60):
        hits = sum(node.serve(tuple(key_of(5000 + 4 * p + j) for j in range(4)), float(at))[0] for p in range(16))
    assert hits == 64


def test_the_warm_up_is_in_no_figure_of_a_replay() -> None:
    """The last of sixteen prompts comes twice more: first where it must be fetched, then where it lies."""
    chains = [tuple(key_of(100 * n + j) for j in range(4)) for n in range(16)]
    trace = trace_of("t", [Request(float(n), chain, 2048, 1) for n, chain in enumerate([*chains, *chains[-1:] * 2])])
    found = [Cluster(2, 16, POLICIES["lru"]).play(trace, count_from) for count_from in (0, 16, 17)]
    assert [one.evicted for one in found] == [48 + 4, 4, 0], "what is fetched evicts a prompt of its node"
    assert [one.busiest_share for one in found] == [1.0, 1.0, 2.0], "one of two nodes served the only counted prompt"


@pytest.mark.processes
def test_processes_answer_what_one_thread_answers(trace: Trace) -> None:
    """A wrong policy is named."""
    plan = Plan([50, 200], ("default", "belady"), nodes=2)
    found = play_all(trace, plan)
    assert [run.label for run, _ in found][:2] == ["default", "belady"]
    rows = report(trace, plan, found)["runs"]
    assert isinstance(rows, list) and {row["routing"] for row in rows} == {"round-robin", "kv-aware"}
    with pytest.raises(InvalidRequest, match="there is no policy 'fifo'; choose from: default"):
        Plan([50], ("fifo",)).runs()
