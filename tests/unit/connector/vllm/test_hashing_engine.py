"""Requests at random on vLLM's own scheduler, before a model that shows every wrong byte: see hashing_engine.py.

A failure names its settings and its seed, and `-k "layerwise and 7"` plays them again. `make test-all` plays more seeds
than the gate.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvservice.connector.vllm import compat
from tests.sim.mutation import Mutant, planted
from tests.unit.connector.vllm.hash_chain import BLOCKS_MIN, EngineSettings, write_model
from tests.unit.connector.vllm.hashing_engine import HashingEngine

STEPS = 200
GATE_SEEDS, SLOW_SEEDS = range(1, 3), range(3, 13)
SETTINGS = {
    "plain": EngineSettings(),
    "ahead": EngineSettings(runs_ahead=True),
    "ahead failing": EngineSettings(runs_ahead=True, failures=0.15),
    "lazy": EngineSettings({"offload": "lazy"}, runs_ahead=True),
    "lazy with a small pool": EngineSettings({"offload": "lazy", "memory": "4MiB"}),
    "small pool failing": EngineSettings({"memory": "4MiB"}, runs_ahead=True, failures=0.1),
    "evicting": EngineSettings({"offload": "evicting"}, runs_ahead=True),
    "evicting failing": EngineSettings({"offload": "evicting"}, failures=0.1),
    "tails": EngineSettings({"tails": True}, runs_ahead=True),
    "tails failing": EngineSettings({"tails": True}, failures=0.1),
    "layerwise": EngineSettings({"layerwise": "both"}),
    "layerwise failing": EngineSettings({"layerwise": "both"}, failures=0.3),
    "layerwise loads failing": EngineSettings({"layerwise": "load"}, failures=0.1),
    "layerwise saves": EngineSettings({"layerwise": "save"}, runs_ahead=True),
    "layerwise with large slots": EngineSettings({"layerwise": "both", "slot_tokens": 48}, failures=0.2),
    "large slots": EngineSettings({"slot_tokens": 48}, runs_ahead=True),
    "large slots failing": EngineSettings({"slot_tokens": 48}, failures=0.1),
    "drafts": EngineSettings(drafts=3),
    "drafts and tails failing": EngineSettings({"tails": True}, drafts=3, failures=0.05),
    "drafts ahead": EngineSettings(drafts=3, runs_ahead=True),
    "no prefix caching": EngineSettings(prefix_caching=False, runs_ahead=True),
    "no prefix caching failing": EngineSettings(prefix_caching=False, failures=0.1),
    "priorities": EngineSettings(policy="priority", runs_ahead=True),
    "prompts only": EngineSettings({"store": "prompts"}, runs_ahead=True),
}
TERMS: tuple[tuple[Mapping[str, object] | None, int], ...] = (  # of requests, and how often they come
    (None, 70),
    ({"kvservice": {"version": 1, "load": False}}, 8),
    ({"kvservice": {"version": 1, "store": False}}, 5),
    ({"do_remote_decode": True}, 12),
    ({"kvservice": {"version": 1, "role": "prefill", "handoff": "ab" * 16}}, 5),
    ({"kvservice": {"version": 1, "role": "prefill", "handoff": "cd" * 16, "load": False}}, 5),
)
WAITING_MAX = 12  # requests; more would only wait
# Bugs, each with the rule that it breaks, settings that show it, and where it is planted.
BUGS = (
    (
        "plain",
        Mutant(
            "a load copies every block that it counts",
            "kvservice.connector.scheduler.loads",
            "LoadPlan(request.request_id, tuple(entries), borrows)",
            "LoadPlan(request.request_id, tuple(entries[:-1] or entries), borrows)",
        ),
    ),
    (
        "plain",
        Mutant(
            "a block is stored under its own name",
            "kvservice.connector.scheduler.store_plan",
            "grouping.stored(part.table, group, position)",
            "grouping.stored(part.table, group, position and position - 1)",
        ),
    ),
    (
        "ahead failing",
        Mutant(
            "a load that failed is computed again",
            "kvservice.connector.worker.half",
            "            self._failed.add(load.request_id)\n",
            "            pass\n",
        ),
    ),
    (
        "layerwise with large slots",
        Mutant(
            "what a load that was not planned would have filled goes nowhere",
            "kvservice.connector.layerwise.scheduler",
            "        super().allocated(request_id, block_ids, external_tokens)\n",
            "        try:\n            super().allocated(request_id, block_ids, external_tokens)\n"
            "        except OSError:\n            self._loads._layered.pop(request_id, None)\n            raise\n",
            seed=7,
        ),
    ),
    (
        "layerwise failing",
        Mutant(
            "nothing is stored of a load that is not confirmed",
            "kvservice.connector.layerwise.scheduler",
            "        if self._loads.is_unconfirmed(request.request_id):\n            return []\n",
            "",
        ),
    ),
    (
        "lazy",
        Mutant(
            "a block that a preempted request lost is not stored",
            "kvservice.connector.scheduler.engine_cache",
            "found = cache.find(hashes[index])",
            "found = cache.find(hashes[index]) or 0",
            seed=7,
        ),
    ),
    (
        "plain",
        Mutant(
            "new weights have new names",
            "kvservice.connector.scheduler.half",
            "            self._keyring.begin_term(term)\n",
            "",
        ),
    ),
)
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


def play(folder: Path, name: str, seed: int) -> Counter[str]:
    """Play requests of few common beginnings, with aborts and changes of the weights. Everything is drawn in each step,
    whether it happens or not, so that the session's thread changes when and not what. Returns what was counted."""
    draw = random.Random(seed)
    block_count = draw.choice([BLOCKS_MIN, BLOCKS_MIN + 2, 26, 40])  # few, so that requests are preempted
    engine = HashingEngine(folder, SETTINGS[name], seed, block_count)
    beginnings = [draw.choices(range(200), k=200) for _ in range(3)]
    names: list[str] = []
    has_new_weights = False
    try:
        for _ in range(STEPS):
            event, which, coming = draw.random(), draw.random(), arrivals(draw, beginnings)
            if event < 0.12 and engine.request_count < WAITING_MAX:
                for it in coming:
                    names.append(f"request-{len(names)}")
                    engine.add(names[-1], it.prompt, it.length, salt=it.salt, priority=it.priority, params=it.params)
            elif 0.12 <= event < 0.15 and names:
                engine.abort(names[-1 - int(which * min(8, len(names)))])
            elif 0.15 <= event < 0.16:
                has_new_weights = True
            if has_new_weights:  # until the engine takes them
                has_new_weights = not engine.change_weights()
            engine.step()
        engine.drain()
        return engine.counters + Counter(engine.connector.counters())
    except Exception as error:
        error.add_note(f"settings {name!r}, seed {seed}")
        raise
    finally:
        engine.close()


@pytest.mark.parametrize("name", SETTINGS)
def test_no_byte_is_wrong(folder: Path, name: str) -> None:
    """Neither in the engine nor in the pool, and nobody holds anything when all requests have ended."""
    found: Counter[str] = Counter()
    for seed in GATE_SEEDS:
        found += play(folder, name, seed)
    for needed in ("requests_checked", "blocks_checked", "loaded_blocks"):
        assert found[needed], f"no {needed}: the test shows nothing"


@pytest.mark.slow
@pytest.mark.parametrize("seed", SLOW_SEEDS)
@pytest.mark.parametrize("name", SETTINGS)
def test_no_byte_is_wrong_with_more_seeds(folder: Path, name: str, seed: int) -> None:
    assert play(folder, name, seed)["requests_checked"]


@pytest.mark.parametrize(("name", "bug"), BUGS, ids=[bug.name for _, bug in BUGS])
def test_a_planted_bug_shows_as_wrong_bytes(folder: Path, name: str, bug: Mutant) -> None:
    with planted(bug):
        found = next(filter(None, (fault(folder, name, seed) for seed in (bug.seed, *SEARCHED))), "")
    assert "wrong" in found, f"{found or 'nothing'} was found"


def fault(folder: Path, name: str, seed: int) -> str:
    try:
        play(folder, name, seed)
    except AssertionError as error:
        return str(error)
    return ""
