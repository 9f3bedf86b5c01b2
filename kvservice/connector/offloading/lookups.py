"""What the engine asked the tier for, and what it was promised, until the requests that asked have ended.

The engine asks for chunks one by one, again in each step, and must not wait. So the chunks of a step are asked for
together when the step ends, and a chunk that is promised stays leased until it is loaded or nobody wants it any more.
Used on the scheduler's thread only.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum

from kvservice.api.named import NamedBlocks, PromisedBlock


class Presence(Enum):
    HERE = "here"  # on this node, and promised
    MISSING = "missing"
    ASKED = "asked"  # ask again in the next step


@dataclass(slots=True, eq=False)
class _Question:
    """About one chunk. `requests` is empty when nobody wants the answer any more."""

    name: bytes
    requests: set[str] = field(default_factory=set)
    answer: Presence = Presence.ASKED
    promise: PromisedBlock | None = None  # until a load takes it


class Lookups:
    def __init__(self, blocks: NamedBlocks, seconds: float) -> None:
        """`seconds`: longest that a chunk may take to come from elsewhere."""
        self._blocks = blocks
        self._seconds = seconds
        self._questions: dict[bytes, _Question] = {}
        self._of_request: dict[str, set[bytes]] = {}
        self._new: list[_Question] = []  # of this step
        self._sent: list[tuple[list[_Question], Future[list[PromisedBlock | None]]]] = []

    def ask(self, name: bytes, request_id: str) -> Presence:
        """Whether the chunk is here, as far as is known."""
        question = self._questions.get(name)
        if question is None or self._is_outdated(question, request_id):
            question = _Question(name, set() if question is None else question.requests)
            self._questions[name] = question
            self._new.append(question)
        question.requests.add(request_id)
        self._of_request.setdefault(request_id, set()).add(name)
        return question.answer

    @staticmethod
    def _is_outdated(question: _Question, request_id: str) -> bool:
        """Whether the chunk is asked for anew: it was loaded and is wanted again, or it was missing for others."""
        if question.answer is Presence.MISSING:
            return request_id not in question.requests
        return question.answer is Presence.HERE and question.promise is None

    def send(self) -> None:
        """Ask for everything that was new in this step."""
        wanted = [question for question in self._new if question.requests]
        self._new = []
        if wanted:
            self._sent.append((wanted, self._blocks.hold([question.name for question in wanted], self._seconds)))

    def receive(self) -> tuple[int, int]:
        """Take the answers that have come. Returns (chunks found, chunks missed)."""
        waiting, found, missed = [], 0, 0
        for questions, answers in self._sent:
            if not answers.done():
                waiting.append((questions, answers))
                continue
            failed = answers.cancelled() or answers.exception() is not None
            promises = [None] * len(questions) if failed else answers.result()
            found += sum(promise is not None for promise in promises)
            missed += sum(promise is None for promise in promises)
            for question, promise in zip(questions, promises, strict=True):
                if self._questions.get(question.name) is question:
                    question.promise = promise
                    question.answer = Presence.MISSING if promise is None else Presence.HERE
                elif promise is not None:  # nobody wants it any more, or the chunk was asked for anew
                    self._blocks.release([promise])
        self._sent = waiting
        return found, missed

    def take(self, names: Iterable[bytes]) -> dict[bytes, PromisedBlock]:
        """What is promised of these chunks. The caller releases it."""
        taken: dict[bytes, PromisedBlock] = {}
        for name in names:
            question = self._questions.get(name)
            if question is not None and question.promise is not None:
                taken[name], question.promise = question.promise, None
        return taken

    def failed(self, names: Iterable[bytes]) -> None:
        """These chunks could not be loaded. They count as missing for the requests that asked: else the engine would
        try the same load for ever."""
        for name in names:
            question = self._questions.get(name)
            if question is not None:
                question.answer = Presence.MISSING
                self._give_back(question)  # it may have a newer promise, and be asked for anew

    def end(self, request_id: str) -> None:
        """The request wants nothing more."""
        for name in self._of_request.pop(request_id, ()):
            question = self._questions[name]
            question.requests.discard(request_id)
            if not question.requests:
                self._forget(question)

    def forget(self) -> None:
        """Nobody wants anything of what was asked so far."""
        for question in list(self._questions.values()):
            question.requests.clear()
            self._forget(question)
        self._of_request.clear()

    def _forget(self, question: _Question) -> None:
        del self._questions[question.name]
        self._give_back(question)

    def _give_back(self, question: _Question) -> None:
        if question.promise is not None:
            self._blocks.release([question.promise])
            question.promise = None
