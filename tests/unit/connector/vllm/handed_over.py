"""Two engines of hashing_engine.py, one that computes prompts and one that goes on, at the pools of two_nodes.py, and a
proxy that sends each prompt to both, in every order there is. What ends a hand-off early happens at random.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvservice.connector.scheduler.request import EngineRequest
from kvservice.core.messages import AcquireResult, MissReason
from kvservice.session.session import AcquireAnswer
from kvservice.testing.eventually import eventually, patience
from kvservice.units import MiB, NodeId
from tests.unit.connector.vllm.hash_chain import EngineSettings
from tests.unit.connector.vllm.hashing_engine import DRAIN_SECONDS, HashingEngine
from tests.unit.connector.vllm.hashing_groups import blocks_min, engine_of
from tests.unit.connector.vllm.two_nodes import NODES, TwoNodes

PREFILL, DECODE = NODES
WAITING_MAX = 10  # requests of one engine; more would only wait
WAYS = {  # in which a proxy sends a prompt, and how often
    "at once": 4,
    "decode first": 2,
    "one after the other": 4,
    "as for another connector": 2,
    "twice at once": 1,  # with an id for each
    "without prefill": 1,
    "without decode": 1,
    "without hand-off": 1,
}
CALM_WAYS = ("at once", "decode first", "one after the other", "as for another connector", "twice at once")


@dataclass(frozen=True)
class PairSettings:
    prefill: EngineSettings = field(default_factory=EngineSettings)
    decode: EngineSettings = field(default_factory=EngineSettings)
    pool_bytes: int = 8 * MiB
    one_node: bool = False  # both engines at one shard
    is_calm: bool = False  # nothing fails and nobody leaves: every reader gets everything
    losses: float = 0.0  # of shards, in a step
    faults: float = 0.0  # the share of calls whose question or answer is lost

    @property
    def lease_seconds(self) -> float:
        """So long that a lease which is forgotten shows, unless answers are lost, which leaves leases to expire."""
        return 2.0 if self.losses or self.faults else 60.0


@dataclass(frozen=True, slots=True)
class Later:
    """A request that is sent when this one has been answered; None: some steps later."""

    after: str | None
    send: Callable[[Mapping[str, Any] | None], object]


class HandedOver:
    """Raises AssertionError from any call as soon as something is wrong; `drain` also when something was left behind.

    Everything is drawn in each step, whether it happens or not.
    """

    def __init__(self, model: Path, place: Path, settings: PairSettings, seed: int) -> None:
        self._settings, self._draw = settings, random.Random(seed)
        self._nodes = TwoNodes(place, settings.pool_bytes, settings.lease_seconds, settings.faults, seed)
        self._decodes_at = PREFILL if settings.one_node else DECODE
        least = [blocks_min(it) for it in (settings.prefill, settings.decode)]
        counts = [count + self._draw.choice([0, 2, 8, 22]) for count in least]
        at = self._nodes.opener
        self._prefill = engine_of(model, settings.prefill, seed, counts[0], at(PREFILL))
        self._decode = engine_of(model, settings.decode, seed + 1, counts[1], at(self._decodes_at))
        self._beginnings = [self._draw.choices(range(200), k=200) for _ in range(3)]
        self._sent: dict[HashingEngine, list[str]] = {self._prefill: [], self._decode: []}
        self._later: list[Later] = []
        self._ids: list[str] = []
        self._down: tuple[NodeId, int] | None = None  # a node without a shard, and for how many steps
        self._wrong: list[str] = []
        self._heard: Counter[str] = Counter()
        self._take_answer = self._decode._half._take_answer
        setattr(self._decode._half, "_take_answer", self._hear)  # noqa: B010  not a method of its own to mypy

    def _hear(self, answer: AcquireAnswer, request: EngineRequest | None, result: AcquireResult) -> None:
        """An answer of the decode engine's pool. One to a reader of a hand-off never comes as late as it may."""
        if answer.asked.handoff is not None:
            # A reader that was preempted asks for what it generated as well, which nobody hands it.
            of_prompt = len(answer.asked.keys) if request is None else request.prompt_blocks
            asked, got = min(len(answer.asked.keys), of_prompt) - answer.asked.skip, len(result.blocks)
            self._heard["handoffs_heard"] += 1
            self._heard["handoffs_cut"] += got < asked
            cut = f"{answer.request_id} got {got} of {asked} blocks of its hand-off, {result.miss.value}"
            if result.miss is MissReason.DEADLINE and self._settings.lease_seconds > 2.0:
                self._wrong.append(f"too late: {cut}")
            elif self._settings.is_calm and got < asked:
                self._wrong.append(f"cut: {cut}")
        self._take_answer(answer, request, result)

    # -- what a test does ----

    def step(self) -> None:
        draw = self._draw
        event, which, engine = draw.random(), draw.random(), draw.choice([self._prefill, self._decode, self._decode])
        send = self._prompt()
        if event < 0.12 and max(it.request_count for it in self._sent) < WAITING_MAX:
            send()
        elif 0.12 <= event < 0.18 and self._sent[engine] and not self._settings.is_calm:
            name = self._sent[engine][-1 - int(which * min(4, len(self._sent[engine])))]
            engine.abort(name)
            engine.answers.setdefault(name, None)
        elif 0.18 <= event < 0.18 + self._settings.losses and self._down is None:
            self._down = draw.choice([PREFILL, self._decodes_at]), draw.randrange(1, 15)
            self._nodes.lose(self._down[0])
        elif self._down is not None:
            self._come_back(self._down[1] - 1)
        self._send_later(0.3)
        for each in draw.choice(["pd", "pd", "ppd", "pdd", "p", "d"]):
            self._step_of(self._prefill if each == "p" else self._decode)

    def drain(self) -> None:
        """Let all requests end. Then nobody may hold anything of the engines or the pools any more."""
        self._come_back(0)
        end = time.monotonic() + DRAIN_SECONDS * patience()
        while self._later or any(engine.is_busy for engine in self._sent):
            self._send_later(1.0)
            for engine in self._sent:
                self._step_of(engine)
            waiting = [engine.waiting() for engine in self._sent]
            assert time.monotonic() < end, f"hangs: {waiting}, and {len(self._later)} are not sent"
        for engine in self._sent:
            engine.check_quiet()
        self._nodes.check_quiet()

    def counters(self) -> Counter[str]:
        """What was checked and what happened, of both engines and both pools."""
        found = self._heard + self._nodes.counters()
        for engine in self._sent:
            found += engine.counters + Counter(engine.connector.counters())
        return found

    def close(self) -> None:
        for engine in self._sent:
            engine.close()
        self._nodes.close()

    # -- inside ----

    def _step_of(self, engine: HashingEngine) -> None:
        if self._settings.is_calm:  # a step of a real engine takes longer than its slots
            eventually(engine.has_slots_in_stock, "slots in stock")
        engine.step()
        assert not self._wrong, self._wrong

    def _come_back(self, steps: int) -> None:
        if self._down is not None:
            node, self._down = self._down[0], (self._down[0], steps)
            if steps <= 0:
                self._down = None
                self._nodes.start(node)

    def _send_later(self, share: float) -> None:
        for it in list(self._later):
            if self._draw.random() < share and (it.after is None or it.after in self._prefill.answers):
                self._later.remove(it)
                it.send(None if it.after is None else self._prefill.answers[it.after])

    def _prompt(self) -> Callable[[], None]:
        """Draw a prompt and its way. Returns what sends it."""
        draw, is_calm = self._draw, self._settings.is_calm
        beginning = draw.choice(self._beginnings)[: draw.randrange(1, 200)]
        prompt = [*beginning, *draw.choices(range(200), k=draw.choice([0, 1, 3, 17, 40]))]
        (way,) = draw.choices(list(WAYS), list(WAYS.values()))
        readers, tokens, salt = (
            draw.choice([1, 1, 1, 2, 3]),
            draw.choice([1, 1, 1, 3]),
            draw.choice([None, None, "salt"]),
        )
        lengths, priority = [draw.choice([1, 2, 5, 20, 60]) for _ in range(3)], draw.randrange(3)
        ids = [draw.randbytes(16).hex() for _ in range(2)]
        is_used_before, is_other, may_load = draw.random() < 0.1, draw.random() < 0.05, draw.random() < 0.9
        used = draw.choice([*self._ids, ids[0]])
        if is_calm:
            way = way if way in CALM_WAYS else "at once"
        elif is_used_before:
            ids[0] = used
        asked = [*prompt, 7] if is_other and not is_calm else prompt  # or the reader has another prompt

        def of(index: int, role: str) -> dict[str, Any]:
            more = {"node": PREFILL} if role == "decode" else {} if may_load else {"load": False}
            return {"kvservice": {"version": 1, "role": role, "handoff": ids[index], **more}}

        def prefill(params: Mapping[str, Any]) -> str:
            name = self._name(self._prefill)
            self._prefill.add(name, prompt, tokens, salt=salt, priority=priority, params=params)
            return name

        def decode(params: Mapping[str, Any] | None) -> None:
            for length in lengths[:readers]:
                name = self._name(self._decode)
                self._decode.add(name, asked, length, salt=salt, priority=priority, params=params)

        def send() -> None:
            self._ids.append(ids[0])
            if way in ("at once", "twice at once", "without decode"):
                prefill(of(0, "prefill"))
            if way in ("at once", "twice at once", "decode first", "without prefill"):
                decode(of(0, "decode"))
            if way == "twice at once":
                prefill(of(1, "prefill"))
                decode(of(1, "decode"))
            elif way == "decode first":
                self._later.append(Later(None, lambda _: prefill(of(0, "prefill"))))
            elif way == "one after the other":
                self._later.append(Later(prefill(of(0, "prefill")), decode))
            elif way == "as for another connector":
                self._later.append(Later(prefill({"do_remote_decode": True}), decode))
            elif way == "without hand-off":
                decode(None)

        return send

    def _name(self, engine: HashingEngine) -> str:
        kind = "prefill" if engine is self._prefill else "decode"
        self._sent[engine].append(f"{kind}-{len(self._sent[engine])}")
        return self._sent[engine][-1]
