"""What the scheduler half needs of its session, and what it answers the engine. Values and protocols only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvservice.connector.cache_groups import Table
from kvservice.core.messages import AcquireRequest, Attachment, RequestReport, SealItem
from kvservice.core.segment.refs import BlockRef
from kvservice.session.news import BlockNews
from kvservice.session.session import AcquireAnswer
from kvservice.units import AttachmentId, BlockHash, HandoffId, LeaseId

BlockIds = Callable[[], Table]  # the ids of a request's blocks: asked for only if it has something to store


class SessionPort(Protocol):
    """What the scheduler half needs of a Session. Nothing blocks."""

    @property
    def attachment(self) -> Attachment | None: ...

    def acquire(self, request_id: str, request: AcquireRequest) -> AttachmentId | None: ...

    def answers(self) -> list[AcquireAnswer]: ...

    def abandon(self, request_id: str) -> None: ...

    def expect(self, count: int) -> None: ...

    def take_slots(self, attachment: AttachmentId, count: int, group: int = 0) -> list[BlockRef]: ...

    def seal(self, attachment: AttachmentId, items: Sequence[SealItem]) -> None: ...

    def abort(self, attachment: AttachmentId, refs: Sequence[BlockRef]) -> None: ...

    def release(self, attachment: AttachmentId, lease_id: LeaseId) -> None: ...

    def report(self, report: RequestReport) -> None: ...

    def suspect(self, refs: Iterable[BlockRef]) -> None: ...

    def news(self) -> BlockNews: ...

    def open_handoff(self, handoff: HandoffId) -> AttachmentId | None: ...

    def close_handoff(self, attachment: AttachmentId, handoff: HandoffId) -> None: ...


@dataclass(frozen=True, slots=True)
class Wait:
    """Ask again in the next step."""


@dataclass(frozen=True, slots=True)
class Promise:
    """This many tokens beyond the engine's own hit are on this node, verified and leased; 0 means nothing."""

    tokens: int
    layered: bool = False  # the engine computes the rest in the step that loads these tokens


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A stored block for the engine's event stream, under the engine's own names."""

    block_hash: BlockHash
    parent: BlockHash | None
