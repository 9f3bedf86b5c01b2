"""What benchmarks/policy.py says of points follows from what was played, and nobody picks the seeds."""

from __future__ import annotations

import itertools

import pytest

from benchmarks import policy
from benchmarks.policy import Played, Point
from kvservice.replay.policies import POLICIES


def point(share: float, default: float, lru: float, s3_fifo: float) -> Point:
    return Point(share, {"default": default, "lru": lru, "s3-fifo": s3_fifo})


PLAYED = [
    Played(1, "chats", [point(0.1, 0.5, 0.4, 0.49), point(0.4, 0.6, 0.609, 0.2)]),
    Played(2, "loops", [point(0.1, 0.3, 0.325, 0.0), point(0.4, 0.9, 0.5, 0.7)]),
]


def test_points_are_counted_from_the_better_of_the_others() -> None:
    assert [one.points for each in PLAYED for one in each.points] == pytest.approx([1, -0.9, -2.5, 20])
    assert PLAYED[0].row() == ("chats", pytest.approx(-0.9), pytest.approx(0.05), pytest.approx(1))


def test_a_summary_is_of_all_points_and_of_each_size() -> None:
    found = policy.summary(PLAYED)
    assert found["result"] == {
        "mean": 4.4,
        "below_share": 0.5,
        "below_one_share": 0.25,
        "worst": -2.5,
        "best": 20.0,
        "points": 4,
        "hit_rate_default": 0.575,
        "hit_rate_lru": 0.4585,
        "hit_rate_s3-fifo": 0.3475,
    }
    sizes = found["by_size"]
    assert isinstance(sizes, list)
    assert [(row["share"], row["mean"], row["points"]) for row in sizes] == [(0.1, -0.75, 2), (0.4, 9.55, 2)]
    assert found["by_seed"] == [
        {"seed": 1, "traffic": "chats", "points": [1.0, -0.9]},
        {"seed": 2, "traffic": "loops", "points": [-2.5, 20.0]},
    ]


def test_seeds_follow_from_the_commit() -> None:
    assert policy.seed_of("0123456789ab", 0) == policy.seed_of("0123456789ab-dirty", 0)
    pairs = itertools.product(("0123456789ab", "1123456789ab"), range(100))
    assert len({policy.seed_of(*pair) for pair in pairs}) == 200


def test_a_seed_is_played_at_every_size() -> None:
    played = policy.play_seed(2, blocks=500, shares=(0.1, 1.0))
    assert [one.share for one in played.points] == [0.1, 1.0]
    assert set(played.points[0].hit_rates) == {"default", "lru", "s3-fifo"}
    assert played.points[1].points == 0, "with room for everything all find the same"


def test_most_prompts_of_the_cost_return() -> None:
    prompts = list(itertools.islice(policy.conversations(1), 3000))
    known = {chain[0] for chain in prompts}
    assert 1 - len(known) / len(prompts) == pytest.approx(policy.RETURNING, abs=0.03)


@pytest.mark.parametrize("name", policy.COST_POLICIES)
def test_the_cost_is_that_of_a_full_cache(name: str) -> None:
    made = []

    def make() -> policy.EvictionPolicy:
        made.append(POLICIES[name]())
        return made[-1]

    assert 0 < policy.cost(make, slots=500, timed=1000) < 10_000
    assert len(made[0].by_heat()) == 500


def test_memory_counts_keys_and_books_of_gone_blocks_too() -> None:
    """LRU forgets what is gone; the default policy remembers at least 32,768 blocks."""
    found = {name: policy.memory(POLICIES[name], slots=500) for name in policy.COST_POLICIES}
    assert 150 < found["lru"] < 1000 and found["default"] > 1.5 * found["lru"]
