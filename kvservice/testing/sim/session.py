"""A session as the scheduler half knows it, over simulated calls of its node's shard.

What connector.session does, without a thread: commands become calls, answers are kept until they are asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from kvservice.connector.session import Answer
from kvservice.core import events as ev
from kvservice.core.messages import (
    AcquireRequest,
    AcquireResult,
    Attachment,
    BlockRef,
    RequestReport,
    SealItem,
)
from kvservice.core.shard import AttachReply
from kvservice.units import AttachmentId, HandoffId, LeaseId

if TYPE_CHECKING:
    from kvservice.testing.sim.engine import Engine

CALL_SECONDS = 0.0003
RETRY_SECONDS = 0.2
STOCK = 4


@dataclass(slots=True)
class _Acquire:
    op: int = 0  # once it has arrived
    is_over: bool = False


class SimSession:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._life = 0  # of the attachment
        self.attachment: Attachment | None = None
        self._stock: deque[BlockRef] = deque()
        self._expected = 0
        self._restocking = False
        self._answers: deque[Answer] = deque()
        self._asking: dict[str, _Acquire] = {}  # the call of each request that waits for one
        self._leases: set[LeaseId] = set()
        self._reports: list[RequestReport] = []
        self._seals = 0  # under way
        self._after_seals: list[Callable[[], None]] = []
        engine.after(0.0, self._attach)

    # -- attachment ----

    def _attach(self) -> None:
        node = self._engine.node
        if self.attachment is not None:
            return
        if not node.alive or not self._engine.half.may_reattach():
            self._engine.after(RETRY_SECONDS, self._attach)
            return
        boot = node.life

        def attached(answer: object) -> None:
            if isinstance(answer, AttachReply) and node.life == boot:
                self._engine.receive(self._attached, answer, boot)
            else:
                self._engine.after(RETRY_SECONDS, self._attach)

        self._send(lambda: node.call(lambda op: ev.Attach(op, self._engine.spec, self._engine.tenant), attached))
        self._engine.after(1.0, self._attach)  # when no answer comes

    def _attached(self, reply: AttachReply, boot: int) -> None:
        if self.attachment is not None or self._engine.node.life != boot:
            return
        node = self._engine.node
        self.attachment = Attachment(
            reply.attachment,
            node.node_id,
            reply.epoch,
            reply.lease_seconds,
            node.name,
            node.memory.geometry,
            "lock",
            self._engine.tenant_key,
        )
        self._life += 1
        self._engine.after(reply.lease_seconds / 3, self._renew, self._life)
        self._restock()

    def lost(self) -> None:
        """The shard died: its stream ended."""
        self.attachment = None
        self._life += 1
        self._stock.clear()
        self._leases.clear()
        self._restocking = False
        for call in self._asking.values():
            call.is_over = True
        self._asking.clear()
        self._engine.after(RETRY_SECONDS, self._attach)

    def _renew(self, life: int) -> None:
        if life != self._life or self.attachment is None:
            return
        attachment, leases = self.attachment, tuple(sorted(self._leases))
        reports, self._reports = tuple(self._reports), []
        self._call(lambda op: ev.Renew(op, attachment.attachment_id, leases, reports), lambda answer: None)
        self._engine.after(attachment.lease_seconds / 3, self._renew, life)

    def _restock(self) -> None:
        attachment, life = self.attachment, self._life
        if attachment is None or self._restocking:
            return
        wanted = STOCK + min(self._expected, 8)
        if len(self._stock) * 2 > wanted:
            return
        self._restocking = True
        count = wanted - len(self._stock)

        def reserved(answer: object) -> None:
            if life != self._life:
                return
            self._restocking = False
            if isinstance(answer, list):
                self._stock.extend(answer)

        self._call(lambda op: ev.Reserve(op, attachment.attachment_id, count), reserved)

    # -- SessionPort ----

    def acquire(self, request_id: str, request: AcquireRequest) -> AttachmentId | None:
        attachment = self.attachment
        if attachment is None:
            return None
        call = self._asking[request_id] = _Acquire()

        def answered(answer: object) -> None:
            if call.is_over:
                return  # given up meanwhile: what it promised is not renewed, and ends
            call.is_over = True
            self._asking.pop(request_id, None)
            result = answer if isinstance(answer, AcquireResult) else None
            if result is not None and result.lease_id:
                self._leases.add(result.lease_id)
            self._answers.append(Answer(request_id, attachment.attachment_id, result))
            if self._engine.pause_at_answer and result is not None and result.lease_id:
                self._engine.pause(self._engine.pause_at_answer)
                self._engine.pause_at_answer = 0.0

        def reply(answer: object) -> None:
            if isinstance(answer, AcquireResult):
                self._engine.check_promised(request, answer)
            self._back(answered, answer)

        def ask() -> None:
            if not call.is_over:
                call.op = self._engine.node.call(lambda op: ev.Acquire(op, attachment.attachment_id, request), reply)

        self._send(ask)
        return attachment.attachment_id

    def answers(self) -> list[Answer]:
        found = list(self._answers)
        self._answers.clear()
        return found

    def abandon(self, request_id: str) -> None:
        call = self._asking.pop(request_id, None)
        if call is not None:
            call.is_over = True
            if call.op:
                self._send(lambda: self._engine.node.cancel(call.op))

    def expect(self, count: int) -> None:
        self._expected = max(0, self._expected + count)

    def take_slots(self, attachment: AttachmentId, count: int, side: int = 0) -> list[BlockRef]:
        if self.attachment is None or self.attachment.attachment_id != attachment:
            return []
        taken = [self._stock.popleft() for _ in range(min(count, len(self._stock)))]
        self._restock()
        return taken

    def seal(self, attachment: AttachmentId, items: Sequence[SealItem]) -> None:
        sealing = tuple(items)
        self._seals += 1
        is_over = False

        def sealed(answer: object) -> None:
            nonlocal is_over
            if is_over:
                return
            is_over = True
            self._seals -= 1
            if not self._seals:
                waiting, self._after_seals = self._after_seals, []
                for call in waiting:
                    call()

        if self._is_current(attachment):
            self._call(lambda op: ev.Seal(op, attachment, sealing), sealed, lost=sealed)
        else:
            sealed(None)

    def abort(self, attachment: AttachmentId, refs: Sequence[BlockRef]) -> None:
        given = tuple(refs)
        if self._is_current(attachment):
            self._call(lambda op: ev.Abort(op, attachment, given), lambda answer: None)

    def release(self, attachment: AttachmentId, lease_id: LeaseId) -> None:
        self._leases.discard(lease_id)
        if self._is_current(attachment):
            self._call(lambda op: ev.Release(op, attachment, (lease_id,)), lambda answer: None)

    def report(self, report: RequestReport) -> None:
        self._reports.append(report)

    def open_handoff(self, handoff: HandoffId) -> AttachmentId | None:
        attachment = self.attachment
        if attachment is None:
            return None
        wanted = attachment.attachment_id
        self._call(lambda op: ev.OpenHandoff(op, wanted, handoff), lambda answer: None)
        return wanted

    def close_handoff(self, attachment: AttachmentId, handoff: HandoffId) -> None:
        def close() -> None:
            if self._is_current(attachment):
                self._call(lambda op: ev.CloseHandoff(op, attachment, handoff), lambda answer: None)

        if self._seals:
            self._after_seals.append(close)
        else:
            close()

    # -- calls ----

    def _is_current(self, attachment: AttachmentId) -> bool:
        return self.attachment is not None and self.attachment.attachment_id == attachment

    def _send(self, call: Callable[[], object]) -> None:
        """Over the node's socket: fast, in order, and gone when either side dies."""
        node, life = self._engine.node, self._engine.node.life

        def arrive() -> None:
            if node.life == life:
                node.receive(perform)

        def perform() -> None:
            call()

        self._engine.world.at(CALL_SECONDS, arrive)

    def _call(
        self,
        make: Callable[[int], ev.Event],
        answered: Callable[[object], None],
        lost: Callable[[object], None] | None = None,
    ) -> None:
        node, life = self._engine.node, self._engine.node.life
        if not node.alive:
            if lost is not None:
                lost(None)
            return
        self._send(lambda: node.call(make, partial(self._back, answered)))
        if lost is not None:
            self._engine.when_node_dies(node, life, lost)

    def _back(self, answered: Callable[[object], None], answer: object) -> None:
        node, life = self._engine.node, self._engine.node.life

        def arrive() -> None:
            if node.life == life:
                self._engine.receive(answered, answer)

        self._engine.world.at(CALL_SECONDS, arrive)
