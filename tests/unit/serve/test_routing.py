"""The routing decision: rules by example, then over arbitrary holdings and queues."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from kvservice.core.messages import Holder, HolderRun
from kvservice.serve.routing import (
    RANKS_MAX,
    Candidate,
    Decision,
    PeerLink,
    Prompt,
    Reason,
    Speeds,
    blocks_of,
    decide,
    estimate,
)
from kvservice.units import BootEpoch, NodeId

SLOW_LINK = PeerLink(bytes_per_second=1e6, overhead_seconds=10.0)
SPEEDS = Speeds(seconds_per_token=0.001, block_bytes=1000, load_bytes_per_second=1e9, link=PeerLink(1e8, 0.001))
PROMPT = Prompt(tokens=1600, block_tokens=16, block_count=99)


def held(*spans: tuple[int, int, str]) -> tuple[HolderRun, ...]:
    """(start, count, names of nodes such as 'ab')."""
    return tuple(
        HolderRun(start, count, tuple(Holder(NodeId(node), f"{node}:1", BootEpoch(1)) for node in nodes))
        for start, count, nodes in spans
    )


def replica(
    name: str, runs: tuple[HolderRun, ...] = (), wait: float = 0.0, engine: int = 0, speeds: Speeds = SPEEDS
) -> Candidate:
    return Candidate(name, wait, speeds, NodeId(name), engine, runs)


def choose(*candidates: Candidate, prompt: Prompt = PROMPT, draws: Sequence[float] | None = None) -> Decision:
    return decide(prompt, candidates, draws or [0.5] * len(candidates))


def test_the_holder_of_the_prefix_is_chosen_when_nobody_is_busy() -> None:
    runs = held((0, 90, "a"))
    slow = dataclasses.replace(SPEEDS, link=SLOW_LINK)
    decision = choose(replica("b", runs, speeds=slow), replica("a", runs, speeds=slow))
    assert (decision.best.replica, decision.reason, decision.best.node_blocks) == ("a", Reason.HIT, 90)


def test_a_queue_longer_than_the_saving_sends_the_request_away() -> None:
    runs = held((0, 90, "a"))
    slow = dataclasses.replace(SPEEDS, link=SLOW_LINK)
    decision = choose(replica("a", runs, wait=2.0, speeds=slow), replica("b", runs, speeds=slow))
    assert (decision.best.replica, decision.reason) == ("b", Reason.LOAD), "recomputing takes 1.6 s, waiting 2"


def test_cheap_fetching_makes_an_idle_replica_as_good() -> None:
    """It is as good as the holder."""
    runs = held((0, 90, "a"))
    decision = choose(replica("a", runs, wait=0.1), replica("b", runs))
    assert decision.best.replica == "b"
    assert decision.reason is Reason.FETCH
    assert (decision.best.fetched_blocks, decision.best.node_blocks) == (90, 0)


def test_a_conversation_stays_where_most_of_it_lies() -> None:
    """It does so even if fetching costs next to nothing."""
    free = dataclasses.replace(SPEEDS, link=PeerLink(1e12))
    runs = held((0, 9, "ab"), (9, 80, "a"))
    for draws in ((0.1, 0.9), (0.9, 0.1)):
        decision = choose(replica("a", runs, speeds=free), replica("b", runs, speeds=free), draws=draws)
        assert decision.tied == {"a", "b"}
        assert decision.groups == (("a",), ("b",))


def test_prompts_with_a_common_prefix_are_spread() -> None:
    """They do not all go where the first one went."""
    free = dataclasses.replace(SPEEDS, link=PeerLink(1e12))
    runs = held((0, 40, "a"))
    chosen = {
        choose(replica("a", runs, speeds=free), replica("b", runs, speeds=free), draws=draws).best.replica
        for draws in ((0.1, 0.9), (0.9, 0.1))
    }
    assert chosen == {"a", "b"}


def test_nothing_is_fetched_over_a_link_slower_than_recomputing() -> None:
    slow = PeerLink(1000 / 0.5)  # 0.5 s a block, 16 ms to compute it
    speeds = dataclasses.replace(SPEEDS, links={NodeId("a"): slow})
    found = estimate(PROMPT, replica("b", held((0, 90, "a")), speeds=speeds))
    assert (found.fetched_blocks, found.compute_seconds) == (0, 1.6)


def test_the_faster_holder_is_read_and_its_overhead_paid_once() -> None:
    speeds = dataclasses.replace(SPEEDS, links={NodeId("a"): SLOW_LINK, NodeId("c"): PeerLink(1e6, 0.01)})
    found = estimate(PROMPT, replica("b", held((0, 10, "ac"), (10, 10, "c")), speeds=speeds))
    assert found.fetched_blocks == 20
    assert abs(found.move_seconds - (0.01 + 20 * (1000 / 1e6) + 20 * 1e-6)) < 1e-9


def test_gap_in_a_prefix_ends_the_hit() -> None:
    found = estimate(PROMPT, replica("a", held((0, 10, "a"), (11, 50, "a"))))
    assert found.hit_blocks == 10


def test_what_the_engine_holds_is_not_moved_and_closes_a_gap() -> None:
    found = estimate(PROMPT, replica("a", held((0, 10, "a"), (11, 50, "a")), engine=11))
    assert (found.engine_blocks, found.node_blocks) == (11, 50)


def test_local_blocks_behind_a_fetch_count_when_the_fetch_pays() -> None:
    found = estimate(PROMPT, replica("a", held((0, 10, "b"), (10, 50, "a"))))
    assert (found.fetched_blocks, found.node_blocks) == (10, 50)


def test_the_last_token_is_always_computed() -> None:
    assert blocks_of(32, 16, 100) == 1
    assert blocks_of(33, 16, 100) == 2
    assert blocks_of(0, 16, 100) == 0
    found = estimate(Prompt(32, 16, 2), replica("a", held((0, 2, "a"))))
    assert found.compute_seconds == SPEEDS.seconds_per_token


def test_a_full_replica_comes_last_whatever_it_holds() -> None:
    best = dataclasses.replace(replica("a", held((0, 99, "a"))), full=True)
    assert choose(best, replica("b"), replica("c", wait=9.0)).groups[-1] == ("a",)


def test_cold_prompts_reach_every_idle_replica() -> None:
    noise = random.Random(1)
    names = [f"r{i}" for i in range(8)]
    firsts: Counter[str] = Counter()
    for _ in range(2000):
        decision = choose(*[replica(name) for name in names], draws=[noise.random() for _ in names])
        assert decision.reason is Reason.COLD
        firsts[decision.groups[0][0]] += 1
    assert min(firsts[name] for name in names) > 150, "an eighth of 2000 is 250"


def test_a_popular_prefix_does_not_draw_every_request() -> None:
    """Each request adds its own work to the queue of the chosen one."""
    runs = held((0, 90, "a"))
    slow = dataclasses.replace(SPEEDS, link=SLOW_LINK)
    waits = dict.fromkeys("abcd", 0.0)
    sent: Counter[str] = Counter()
    for _ in range(100):
        decision = choose(*[replica(name, runs, wait=waits[name], speeds=slow) for name in "abcd"])
        waits[decision.best.replica] += decision.best.work_seconds
        sent[decision.best.replica] += 1
    assert sent["a"] > 40, "the holder does most"
    assert min(sent.values()) >= 5, "and the others what would wait too long there"


def test_of_many_replicas_only_the_best_are_ranked() -> None:
    decision = choose(*[replica(f"r{i}", wait=float(i)) for i in range(100)])
    assert decision.groups == tuple((f"r{i}",) for i in range(RANKS_MAX))


# -- over everything ----

nodes = st.sampled_from("abc")
spans = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 8), st.sets(nodes, min_size=1)), max_size=5)


@st.composite
def holdings(draw: st.DrawFn) -> tuple[HolderRun, ...]:
    end = 0
    runs: list[tuple[int, int, str]] = []
    for gap, count, names in draw(spans):
        runs.append((end + gap, count, "".join(sorted(names))))
        end += gap + count
    return held(*runs)


links = st.builds(PeerLink, st.sampled_from([1e3, 1e5, 1e7]), st.sampled_from([0.0, 0.01, 1.0]))
speeds = st.builds(
    Speeds,
    st.sampled_from([0.0001, 0.01]),
    st.sampled_from([0, 1000]),
    st.sampled_from([1e6, 1e9]),
    links,
    st.dictionaries(nodes.map(NodeId), links, max_size=3),
)
waits = st.floats(0, 10)


@st.composite
def situations(draw: st.DrawFn) -> tuple[Prompt, list[Candidate], list[float]]:
    runs = draw(holdings())
    names = draw(st.lists(nodes, min_size=1, max_size=3, unique=True))
    candidates = [
        Candidate(
            name,
            draw(waits),
            draw(speeds),
            draw(st.sampled_from([NodeId(name), None])),
            draw(st.integers(0, 12)),
            runs,
            draw(st.booleans()),
        )
        for name in names
    ]
    count = draw(st.integers(0, 30))
    prompt = Prompt(count * 16 + draw(st.integers(1, 40)), 16, count)
    return prompt, candidates, draw(st.lists(st.floats(0, 1), min_size=len(names), max_size=len(names)))


@given(situations())
def test_exactly_the_candidates_are_ranked(situation: tuple[Prompt, list[Candidate], list[float]]) -> None:
    prompt, candidates, draws = situation
    decision = decide(prompt, candidates, draws)
    ranked = [name for group in decision.groups for name in group]
    assert sorted(ranked) == sorted(candidate.replica for candidate in candidates)
    assert decision.best.replica in decision.groups[0]
    assert all(group for group in decision.groups)


@given(situations())
def test_an_estimate_is_never_worse_than_recomputing(situation: tuple[Prompt, list[Candidate], list[float]]) -> None:
    prompt, candidates, _ = situation
    for candidate in candidates:
        found = estimate(prompt, candidate)
        everything = prompt.tokens * candidate.speeds.seconds_per_token
        assert found.work_seconds <= everything + 1e-9
        assert found.hit_blocks <= prompt.block_count
        assert min(found.move_seconds, found.compute_seconds, found.wait_seconds) >= 0


def _with(candidates: list[Candidate], better: Candidate) -> list[Candidate]:
    return [better if candidate.replica == better.replica else candidate for candidate in candidates]


def _everywhere(runs: tuple[HolderRun, ...], node: NodeId) -> tuple[HolderRun, ...]:
    own = Holder(node, f"{node}:1", BootEpoch(1))
    return tuple(HolderRun(run.start, run.count, tuple({*run.holders, own})) for run in runs)


@given(situations(), st.integers(0, 2), st.integers(0, 8))
def test_more_hits_at_equal_load_are_never_worse(
    situation: tuple[Prompt, list[Candidate], list[float]], which: int, more: int
) -> None:
    prompt, candidates, draws = situation
    chosen = candidates[which % len(candidates)]
    better = dataclasses.replace(chosen, engine_blocks=chosen.engine_blocks + more)
    if chosen.node is not None:
        better = dataclasses.replace(better, runs=_everywhere(chosen.runs, chosen.node))
    before, after = decide(prompt, candidates, draws), decide(prompt, _with(candidates, better), draws)
    assert estimate(prompt, better).seconds <= estimate(prompt, chosen).seconds + 1e-9
    if chosen.replica in before.tied:
        assert chosen.replica in after.tied


@given(situations(), st.integers(0, 2), waits)
def test_more_load_at_equal_hits_is_never_better(
    situation: tuple[Prompt, list[Candidate], list[float]], which: int, more: float
) -> None:
    prompt, candidates, draws = situation
    chosen = candidates[which % len(candidates)]
    busier = dataclasses.replace(chosen, wait_seconds=chosen.wait_seconds + more)
    before, after = decide(prompt, candidates, draws), decide(prompt, _with(candidates, busier), draws)
    assert estimate(prompt, busier).seconds >= estimate(prompt, chosen).seconds
    if chosen.replica in after.tied:
        assert chosen.replica in before.tied
