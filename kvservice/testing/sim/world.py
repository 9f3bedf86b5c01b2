"""Virtual time, a network that misbehaves, and processes that stop, pause and die. One thread; no real clock.

Everything random comes from one generator, in the order of events, so a run is a function of its schedule.
"""

from __future__ import annotations

import contextlib
import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable


class Violation(AssertionError):
    """Something happened that must never happen. The message names the rule."""


class Killed(BaseException):
    """A process was killed in the middle of what it does: nothing of it may go on, so it is no Exception."""


@dataclass(slots=True)
class SimLink:
    """One direction between two hosts."""

    cut: bool = False
    loss: float = 0.0
    twice: float = 0.0  # probability that a message arrives a second time, later
    slow_seconds: float = 0.0  # upper bound of an extra delay


class Buried(Protocol):
    def bury(self) -> None: ...


@runtime_checkable
class Dropped(Protocol):
    def drop(self) -> None: ...


@dataclass(slots=True)
class World:
    random: random.Random
    tell: bool = False  # keep all events, not only the outcome
    now: float = 0.0
    story: list[str] = field(default_factory=list)
    counters: Counter[str] = field(default_factory=Counter)
    right: dict[bytes, bytes] = field(default_factory=dict)  # block key -> the only bytes that are right under it
    owners: dict[bytes, tuple[str, str]] = field(default_factory=dict)  # block key -> its tenant and model
    computed: dict[bytes, float] = field(default_factory=dict)  # block key -> when an engine last stored its bytes
    _heap: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = field(default_factory=list)
    _next: int = 0
    loops: list[Buried] = field(default_factory=list)  # of every life of every process
    _links: dict[tuple[str, str], SimLink] = field(default_factory=dict)

    def at(self, delay: float, call: Callable[..., None], *arguments: object) -> None:
        """Run `call` this many seconds from now. Calls of one moment run in the order in which they were asked for."""
        self.at_moment(self.now + delay, call, *arguments)

    def at_moment(self, moment: float, call: Callable[..., None], *arguments: object) -> None:
        heapq.heappush(self._heap, (moment, self._next, call, arguments))
        self._next += 1

    def step(self, until: float) -> bool:
        """Run the next call. Returns False if there is none up to `until`, which is then the time."""
        if not self._heap or self._heap[0][0] > until:
            self.now = max(self.now, until)
            return False
        self.now, _, call, arguments = heapq.heappop(self._heap)
        with contextlib.suppress(Killed):
            call(*arguments)
        return True

    def end(self) -> None:
        """After the run: nothing of it runs any more."""
        waiting, self._heap = self._heap, []
        for loop in self.loops:
            loop.bury()
        for _, _, _, arguments in waiting:
            for argument in arguments:
                if isinstance(argument, Dropped):
                    argument.drop()

    def note(self, who: str, what: str) -> None:
        if self.tell:
            self.story.append(f"{self.now:9.4f}  {who:<8} {what}")

    # -- network ----

    def link(self, source: str, target: str) -> SimLink:
        return self._links.setdefault((source, target), SimLink())

    def heal(self) -> None:
        self._links.clear()

    def send(self, source: str, target: str, deliver: Callable[..., None], *arguments: object) -> None:
        """Deliver after a delay, or never, or twice. Messages overtake each other."""
        link = self._links.get((source, target))
        delay = 0.0002 + 0.0008 * self.random.random()
        if link is None:
            self.at(delay, deliver, *arguments)
            return
        if link.cut or (link.loss and self.random.random() < link.loss):
            self.counters["messages_lost"] += 1
            return
        delay += link.slow_seconds * self.random.random()
        self.at(delay, deliver, *arguments)
        if link.twice and self.random.random() < link.twice:
            self.counters["messages_twice"] += 1
            self.at(delay + self.random.random(), deliver, *arguments)

    def is_cut(self, source: str, target: str) -> bool:
        link = self._links.get((source, target))
        return link is not None and link.cut


class Process:
    """Runs calls while it lives. A dead process drops calls meant for it; a paused one gets them when it goes on."""

    def __init__(self, world: World, name: str, host: str) -> None:
        self.world = world
        self.name = name
        self.host = host
        self.alive = True
        self.life = 0  # grows with every death
        self._paused_until = 0.0
        self._skew = 1.0
        self._asleep = (0.0, 0.0)  # when its clock last stood still, from and to
        self._slept = 0.0  # in all, before that

    def set_clock_rate(self, rate: float) -> None:
        self._skew = rate

    def clock(self) -> float:
        """This host's monotonic clock. It runs a little fast or slow, and never goes back."""
        since, until = self._asleep
        asleep = self._slept + max(min(self.world.now, until) - since, 0.0)
        return (self.world.now - asleep) * self._skew

    def after(self, delay: float, call: Callable[..., None], *arguments: object) -> None:
        self.world.at(delay, self._guarded, self.life, call, arguments)

    def receive(self, call: Callable[..., None], *arguments: object) -> None:
        """A message arrives now, for whichever life there is."""
        self._guarded(self.life, call, arguments)

    def _guarded(self, life: int, call: Callable[..., None], arguments: tuple[object, ...]) -> None:
        if life != self.life or not self.alive:
            return
        if self.world.now < self._paused_until:
            self.world.at_moment(self._paused_until, self._guarded, life, call, arguments)
            return
        call(*arguments)

    def pause(self, seconds: float) -> None:
        self._paused_until = max(self._paused_until, self.world.now + seconds)
        self.world.note(self.name, f"paused for {seconds:.2f} s")

    def suspend(self, seconds: float) -> None:
        """Suspend the process as the host of a virtual machine does: nothing runs, and its clock stands still."""
        since, until = self._asleep
        if self.world.now >= until:
            self._slept += until - since
            self._asleep = (self.world.now, self.world.now + seconds)
            self.pause(seconds)

    @property
    def paused_until(self) -> float:
        return self._paused_until

    @property
    def is_paused(self) -> bool:
        return self.world.now < self._paused_until

    def die(self) -> None:
        self.alive = False
        self.life += 1
        self._paused_until = 0.0
