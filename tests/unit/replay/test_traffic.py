"""Drawn traffic: the same for the same seed, and each source does what it says."""

from __future__ import annotations

import itertools
import random

import pytest

from kvservice.replay.traffic import (
    CHAIN_BLOCKS_MAX,
    SOURCES,
    Draw,
    Prompt,
    Source,
    agents,
    chats,
    loops,
    make_traffic,
    scans,
)

SEEDS = range(20)


def draw(seed: int) -> Draw:
    return Draw(random.Random(seed), itertools.count())


def in_time(prompts: list[Prompt]) -> list[list[int]]:
    return [chain for _, chain in sorted(prompts, key=lambda prompt: prompt[0])]


def test_the_same_seed_gives_the_same_trace() -> None:
    assert make_traffic(7, 2000) == make_traffic(7, 2000)
    assert make_traffic(7, 2000).requests != make_traffic(8, 2000).requests


@pytest.mark.parametrize("seed", SEEDS)
def test_a_trace_is_as_long_as_asked_and_counts_its_blocks(seed: int) -> None:
    trace = make_traffic(seed, 2000)
    keys = [key for request in trace.requests for key in request.keys]
    assert (trace.block_count, trace.unique_count) == (len(keys), len(set(keys)))
    longest = max(len(request.keys) for request in trace.requests)
    assert trace.block_count <= 2000 + 4 * longest, "each of up to four sources ends with the prompt that is too much"
    assert [request.at for request in trace.requests] == sorted(request.at for request in trace.requests)
    assert all(len(set(request.keys)) == len(request.keys) > 0 for request in trace.requests)


def test_traces_are_of_every_sort() -> None:
    names = {name for seed in range(15) for name in make_traffic(seed, 200).name.partition(" ")[0].split("+")}
    assert names == set(SOURCES)


@pytest.mark.parametrize("kind", SOURCES)
def test_each_source_sends_prompts_in_its_time(kind: str) -> None:
    for seed in SEEDS:
        prompts = list(itertools.islice(SOURCES[kind](draw(seed)), 300))
        assert len(prompts) >= 10 and all(at >= 0 and chain for at, chain in prompts)


@pytest.mark.parametrize("source", [agents, chats])
@pytest.mark.parametrize("seed", SEEDS)
def test_conversations_grow_and_end(source: Source, seed: int) -> None:
    prompts = [chain for _, chain in source(draw(seed))]
    pairs = list(itertools.pairwise(prompts))
    assert any(later[: len(earlier)] == earlier and len(later) > len(earlier) for earlier, later in pairs)
    assert max(map(len, prompts)) < 2 * CHAIN_BLOCKS_MAX


@pytest.mark.parametrize("seed", SEEDS)
def test_scans_share_nothing_but_their_template(seed: int) -> None:
    prompts = in_time(list(scans(draw(seed))))
    assert not set(prompts[0][8:]) & {block for chain in prompts[1:] for block in chain}, "a template has 8 at most"
    assert len({chain[-1] for chain in prompts}) == len(prompts)


@pytest.mark.parametrize("seed", SEEDS)
def test_loops_ask_for_the_same_again(seed: int) -> None:
    prompts = [tuple(chain) for chain in in_time(list(loops(draw(seed))))]
    assert len(prompts) >= 2.5 * len(set(prompts))
