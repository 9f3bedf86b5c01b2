"""What `Pool.explain` gives: what became of each block of a request, by the word of all nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ExplainedBlocks:
    """Consecutive blocks of a request with one explanation, as a RequestExplanation lists them.

    >>> import kvservice
    >>> kvservice.ExplainedBlocks(2, 3, "fetched", "n0", "", "", "n1").count
    3
    """

    start: int  # number of the first of them in the prompt
    count: int
    outcome: str  # `engine` (the asker had it), `local`, `fetched` (from another node) or `missed`
    node: str  # where it came from, or whose doing a miss was; "" for none in particular
    cause: str  # of a miss, as `kvservice explain -o json` names it; "" otherwise
    text: str  # the same for people
    asked_at: str  # the node whose shard was asked: a request may be asked for on several


@dataclass(frozen=True, slots=True)
class RequestExplanation:
    """What became of a request. It is false when no node remembers the request.

    `candidates` are the requests whose ids begin as the one that was asked for, when there are several; then nothing is
    explained. `silent` names the nodes and lookup partitions that did not answer: what they know is missing. `hosts`
    maps each node to the name of its machine.

    >>> import kvservice
    >>> with kvservice.connect(mode="embedded", memory="8MiB") as pool:
    ...     found = pool.explain("nobody-asked-this")
    >>> bool(found), isinstance(found, kvservice.RequestExplanation)
    (False, True)
    """

    request_id: str
    blocks: tuple[ExplainedBlocks, ...]
    candidates: tuple[str, ...]
    silent: tuple[str, ...]
    hosts: Mapping[str, str]

    def __bool__(self) -> bool:
        return bool(self.blocks)

    def __iter__(self) -> Iterator[ExplainedBlocks]:
        return iter(self.blocks)

    def __str__(self) -> str:
        """A line for each row of blocks."""
        if self.candidates:
            return f"several requests begin with {self.request_id!r}: {', '.join(self.candidates)}"
        if not self.blocks:
            return f"no node remembers a request {self.request_id!r}"
        return "\n".join(self._line(one) for one in self.blocks)

    def _line(self, one: ExplainedBlocks) -> str:
        place = f" {self._named(one.node)}" if one.node else ""
        why = f": {one.text}" if one.text else ""
        return f"{one.start}-{one.start + one.count - 1} {one.outcome}{place}{why}"

    def _named(self, node: str) -> str:
        host = self.hosts.get(node, "")
        return node if host in ("", node) else f"{host} ({node})"


def explanation_of(state: Mapping[str, Any], silent_lookups: tuple[str, ...] = ()) -> RequestExplanation:
    """Typed, from what kvservice.client.explanation gathers."""
    return RequestExplanation(
        state["request_id"] or state["asked_for"],
        tuple(
            ExplainedBlocks(
                one["start"],
                one["count"],
                one["outcome"],
                one["node"],
                one["miss_cause"] or "",
                one["text"],
                row["node"],
            )
            for row in state["requests"]
            for one in row["diagnosis"]
        ),
        tuple(state["candidates"]),
        (*state["silent_nodes"], *silent_lookups),
        dict(state["hosts"]),
    )
