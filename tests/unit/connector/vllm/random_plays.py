"""Requests at random on vLLM's own scheduler, for the engines of hashing_engine.py and hashing_groups.py."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvservice.connector.vllm import compat
from kvservice.session import session
from kvservice.units import MiB
from tests.sim.mutation import Mutant, planted
from tests.unit.connector.vllm.hash_chain import EngineSettings, write_model
from tests.unit.connector.vllm.hashing_engine import OpenPool
from tests.unit.connector.vllm.hashing_groups import blocks_min, engine_of
from tests.unit.connector.vllm.two_nodes import NODES, TwoNodes

STEPS = 200
TERMS: tuple[tuple[Mapping[str, object] | None, int], ...] = (  # of requests, and how often they come
    (None, 70),
    ({"kvservice": {"version": 1, "load": False}}, 8),
    ({"kvservice": {"version": 1, "store": False}}, 5),
    ({"do_remote_decode": True}, 12),
    ({"kvservice": {"version": 1, "role": "prefill", "handoff": "ab" * 16}}, 5),
    ({"kvservice": {"version": 1, "role": "prefill", "handoff": "cd" * 16, "load": False}}, 5),
)
WAITING_MAX = 12  # requests; more would only wait
SEARCHED = range(1, 31)  # seeds, behind the one that found the bug before


@pytest.fixture(autouse=True)
def plain_cells(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The elements of a token lie together here, not as vLLM's kernels for CPUs have them. And vLLM says less."""
    monkeypatch.setattr(compat, "token_of_elements", lambda *arguments: None)
    log = logging.getLogger("vllm")
    level = log.level
    log.setLevel(logging.ERROR)
    yield
    log.setLevel(level)


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine whose shard was lost tries again soon."""
    monkeypatch.setattr(session, "RETRY_SECONDS_FIRST", 0.02)
    monkeypatch.setattr(session, "RETRY_SECONDS_MAX", 0.2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@dataclass(frozen=True, slots=True)
class Arrival:
    prompt: list[int]
    length: int
    salt: str | None
    priority: int
    params: Mapping[str, object] | None


def arrivals(draw: random.Random, beginnings: Sequence[Sequence[int]]) -> list[Arrival]:
    """Requests that come together and begin alike, so that one may share what another has just got."""
    beginning, found = draw.choice(beginnings), []
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        prompt = [*beginning[: draw.randrange(1, 200)], *draw.choices(range(200), k=draw.choice([0, 0, 1, 3, 17, 40]))]
        (params,) = draw.choices(*zip(*TERMS, strict=True))
        salt = draw.choice([None, None, None, "salt"])
        found.append(Arrival(prompt, draw.choice([1, 2, 5, 20, 60]), salt, draw.randrange(3), params))
    return found


class Play:
    """One engine with requests of few common beginnings, with aborts and changes of the weights. Everything is drawn in
    each step, whether it happens or not, so that the session's thread changes when and not what."""

    def __init__(self, folder: Path, settings: EngineSettings, seed: int, open_pool: OpenPool | None = None) -> None:
        self._draw = draw = random.Random(seed)
        least = blocks_min(settings)
        block_count = draw.choice([least, least + 2, least + 8, least + 22])  # few, so that requests are preempted
        self.engine = engine_of(folder, settings, seed, block_count, open_pool)
        self.beginnings = [draw.choices(range(200), k=200) for _ in range(3)]
        self._names: list[str] = []
        self._has_new_weights = False

    def step(self) -> None:
        draw, engine, names = self._draw, self.engine, self._names
        event, which, coming = draw.random(), draw.random(), arrivals(draw, self.beginnings)
        if event < 0.12 and engine.request_count < WAITING_MAX:
            for it in coming:
                names.append(f"request-{len(names)}")
                engine.add(names[-1], it.prompt, it.length, salt=it.salt, priority=it.priority, params=it.params)
        elif 0.12 <= event < 0.15 and names:
            engine.abort(names[-1 - int(which * min(8, len(names)))])
        elif 0.15 <= event < 0.16:
            self._has_new_weights = True
        if self._has_new_weights:  # until the engine takes them
            self._has_new_weights = not engine.change_weights()
        engine.step()


def play(folder: Path, settings: EngineSettings, seed: int) -> Counter[str]:
    """Returns what was counted."""
    it = Play(folder, settings, seed)
    try:
        for _ in range(STEPS):
            it.step()
        it.engine.drain()
        return it.engine.counters + Counter(it.engine.connector.counters())
    except Exception as error:
        error.add_note(f"{settings}, seed {seed}")
        raise
    finally:
        it.engine.close()


def play_together(folder: Path, place: Path, settings: EngineSettings, seed: int) -> Counter[str]:
    """Two engines at one shard, each with changes of weights of its own. The shard is lost and comes back."""
    draw = random.Random(seed)
    nodes = TwoNodes(place, 8 * MiB, 2.0, 0.0, seed)
    plays = [Play(folder, settings, 2 * seed + which, nodes.opener(NODES[0])) for which in range(2)]
    plays[1].beginnings = plays[0].beginnings
    found: Counter[str] = Counter()
    try:
        for number in range(STEPS):
            if number == STEPS // 2:
                nodes.lose(NODES[0])
                nodes.start(NODES[0])
            draw.choice(plays).step()
            draw.choice(plays).step()
        for it in plays:
            it.engine.drain()
            found += it.engine.counters + Counter(it.engine.connector.counters())
        nodes.check_quiet()
        return found
    except Exception as error:
        error.add_note(f"{settings}, seed {seed}")
        raise
    finally:
        for it in plays:
            it.engine.close()
        nodes.close()


def check_shows(found: Mapping[str, int], *more: str) -> None:
    """Something was checked, or the test shows nothing."""
    for needed in ("requests_checked", "blocks_checked", "loaded_blocks", *more):
        assert found[needed], f"no {needed}: the test shows nothing"


def check_no_byte_is_wrong(folder: Path, settings: EngineSettings, seeds: Sequence[int]) -> None:
    """Neither in the engine nor in the pool, and nobody holds anything when all requests have ended."""
    found: Counter[str] = Counter()
    for seed in seeds:
        found += play(folder, settings, seed)
    check_shows(found)


def check_bug_shows(folder: Path, settings: EngineSettings, bug: Mutant) -> None:
    """As a wrong byte, with the seed that found it before or one of thirty more."""
    with planted(bug):
        found = next(filter(None, (fault(folder, settings, seed) for seed in (bug.seed, *SEARCHED))), "")
    assert "wrong" in found, f"{found or 'nothing'} was found"


def fault(folder: Path, settings: EngineSettings, seed: int) -> str:
    try:
        play(folder, settings, seed)
    except AssertionError as error:
        return str(error)
    return ""
