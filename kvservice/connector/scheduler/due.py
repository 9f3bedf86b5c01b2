"""Which requests of a step may have filled a block. Pure; used on the scheduler's thread.

An engine that decodes computes one token of each request a step, so a request fills a block once in many steps. It
stands in a ring of steps until then, and costs nothing meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class DueRing:
    """A request is due when it is new, when it computes several tokens, and in the step in which it fills a block at
    one token a step. It may be due early, if the engine left it out of steps, and never late."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._step = 0
        self._ring: list[list[str]] = [[] for _ in range(block_tokens + 1)]  # by step, modulo its length
        self._due_at: dict[str, int] = {}  # the step in which each request is due; entries of other steps are void
        self._overdue: dict[str, None] = {}  # due, and not in a step since; in the order of their turns

    def begin_step(self, tokens: Mapping[str, int], total: int, fresh: Iterable[str]) -> list[str]:
        """The requests of the next step that have to be looked at; `look_again` says when to do so next.

        Args:
            tokens: how many tokens the step computes of each request; `total` is their sum.
            fresh: those of them that were not looked at since they came, or came back.
        """
        self._step += 1
        place = self._step % len(self._ring)
        for request_id in self._ring[place]:
            if self._due_at.get(request_id) == self._step:
                self._overdue[request_id] = None
        self._ring[place] = []
        due = dict.fromkeys(request_id for request_id in self._overdue if request_id in tokens)
        for request_id in due:
            del self._overdue[request_id]
        due.update(dict.fromkeys(fresh))
        if total != len(tokens):
            due.update(dict.fromkeys([request_id for request_id, count in tokens.items() if count > 1]))
        return list(due)

    def look_again(self, request_id: str, computed_tokens: int) -> None:
        """The request was looked at in this step, at the end of which it has so many tokens computed."""
        at = self._step + self._block_tokens - computed_tokens % self._block_tokens
        known = self._due_at.get(request_id, 0)
        if known <= self._step or at < known:  # else it stands in the ring, and is due early
            self._due_at[request_id] = at
            self._ring[at % len(self._ring)].append(request_id)

    def look_next(self, request_ids: Iterable[str]) -> None:
        """These requests are due in the next step that has them."""
        self._overdue.update(dict.fromkeys(request_ids))

    def forget(self, request_id: str) -> None:
        """The request has ended, or lost its blocks: it is fresh when it comes back."""
        self._due_at.pop(request_id, None)
        self._overdue.pop(request_id, None)
