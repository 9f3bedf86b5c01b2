"""Reconciliation: an engine holds exactly what its heartbeats say. Pure; one half is the engine's, one the shard's.

Abort, Release, CloseHandoff, a refused Seal and the answer of a Reserve are each sent once. Each may be lost, delayed,
duplicated or overtaken, and none is sent again. They only speed up what the next heartbeat does anyway. A heartbeat
carries a Statement of every slot that the engine may write and of every hand-off that it has open, and it names the
leases that the engine reads under. The shard keeps what is stated and frees what is not: leases and hand-offs that no
heartbeat names expire, and a slot that the engine denies is freed at once.

A slot that somebody may still write must never be freed. So silence frees no slot: a paused engine sends nothing and
may write later. And a statement must not deny what was granted after it was composed, however late or often it arrives.
Therefore the engine numbers the calls that grant something. It states the highest number it has used and the calls
whose answers it may still use. A statement denies a slot when three things are true:

1. The slot was granted to a call of this number or a lower one.
2. The call is not open: the engine took its answer, or gave the call up and will never take it.
3. The slot is not among the stated slots.

Then one of two things happened before the engine composed the statement. Either it had given the slot back, which it
does only when no worker of its own will write it any more; or it never took the slot and told no worker of it. Both
stay true for ever, because a slot that is granted again belongs to another call. So statements need no order: one may
arrive twice, or last. They carry no generations either: a slot that is stated by mistake is only kept a heartbeat
longer.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvservice.core.messages import Statement
from kvservice.core.segment.refs import BlockRef
from kvservice.units import HandoffId, SlotIndex

# How much one statement can list, so that a heartbeat stays below the largest request (wire.serving). An engine that
# holds more slots or hand-offs sends no statement until it holds less. The shard refuses a longer list.
STATED_SLOTS_MAX = 65_536  # an engine writes a few thousand slots at a time
STATED_HANDOFFS_MAX = 4096  # at least what one attachment may have open (core.acquire.handoff)
OPEN_CALLS_MAX = 1024  # an engine has a few calls open at a time


class Ledger:
    """The engine's half: what it holds under one attachment. Its owner calls one method at a time."""

    def __init__(self) -> None:
        self._calls = 0  # grows over attachments: a number is used once
        self._open: set[int] = set()
        self._slots: set[BlockRef] = set()
        self._handoffs: dict[HandoffId, None] = {}

    def begin_call(self) -> int:
        """A number for a call. Its answer will be taken with `take`, or the call given up with `give_up`."""
        self._calls += 1
        self._open.add(self._calls)
        return self._calls

    def take(self, call: int, refs: Iterable[BlockRef]) -> bool:
        """Take the answer of a call: these slots are the engine's from now on.

        Returns False when the call was given up or answered before. The engine must then use none of the slots, because
        a statement may have denied them already.
        """
        if call not in self._open:
            return False
        self._open.remove(call)
        self._slots.update(refs)
        return True

    def give_up(self, call: int) -> None:
        """Ignore the answer of this call if it still comes. Does nothing when the answer was taken."""
        self._open.discard(call)

    def give_back(self, refs: Iterable[BlockRef]) -> None:
        """No worker of this engine will write these slots any more."""
        self._slots.difference_update(refs)

    def open_handoff(self, handoff: HandoffId) -> int:
        """Note a hand-off as open. Returns the number of the call that opens it."""
        self._calls += 1
        self._handoffs[handoff] = None
        return self._calls

    def close_handoff(self, handoff: HandoffId) -> None:
        self._handoffs.pop(handoff, None)

    def forget(self) -> None:
        """Forget everything that the attachment held, because it has ended."""
        self._open.clear()
        self._slots.clear()
        self._handoffs.clear()

    @property
    def slots(self) -> frozenset[BlockRef]:
        return frozenset(self._slots)

    def state(self) -> Statement | None:
        """The statement of a heartbeat that is sent now. None when one message cannot list everything.

        A statement that leaves something out would be false, so none is sent then.
        """
        if len(self._slots) > STATED_SLOTS_MAX or len(self._handoffs) > STATED_HANDOFFS_MAX:
            return None
        slots = tuple(ref.slot for ref in self._slots)
        return Statement(self._calls, tuple(sorted(self._open)), slots, tuple(self._handoffs))


class Grants:
    """The shard's half: the slots that one attachment was given to write, each with the call that it was given to."""

    def __init__(self) -> None:
        self._slots: dict[SlotIndex, tuple[BlockRef, int]] = {}  # also slots that were sealed or given back since

    def add(self, call: int, refs: Iterable[BlockRef]) -> None:
        """Note the slots that a call was granted. Call 0 is of an engine that sends no statements; it is ignored."""
        if call:
            self._slots.update((ref.slot, (ref, call)) for ref in refs)

    def denied(self, statement: Statement) -> list[BlockRef]:
        """The granted slots that the engine does not hold and never will. Each is returned once."""
        found: list[BlockRef] = []
        for index in self._slots.keys() - set(statement.slots):
            ref, call = self._slots[index]
            if is_settled(call, statement):
                del self._slots[index]
                found.append(ref)
        return found


def is_settled(call: int, statement: Statement) -> bool:
    """Whether the engine had taken the answer of this call, or given it up, when it composed the statement."""
    return 0 < call <= statement.calls and call not in statement.open_calls
