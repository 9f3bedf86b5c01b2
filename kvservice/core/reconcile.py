"""Reconciliation: an engine holds what its heartbeats say that it holds. Pure; a half for each of engine and shard.

Abort, Release, CloseHandoff, a refused Seal, the answer of a Reserve: each is sent once, and may be lost, late, doubled
or overtaken. None of them is sent again. They only hasten what the next heartbeat brings about: it carries a Statement
of every slot that the engine may write and of every hand-off that it has open, and names the leases it reads under.
The shard keeps what is stated, and lets go of what is not: leases and hand-offs that nobody states end by time, and a
slot that the engine denies is free at once.

A slot that somebody may still write must never be freed. So silence frees no slot: a paused engine says nothing and
goes on to write later. And a statement must not deny what was granted after it was composed, however late or often it
arrives. Therefore the engine numbers the calls that grant something, and states the last number it has given out and
the calls whose answers it may still use. A statement denies a slot when three things are true:

1. The slot was granted to a call of this number or a lower one.
2. The call is not open: the engine took its answer, or gave the call up and will never take it.
3. The slot is not among those that are stated.

Then the engine had given the slot back before it composed the statement, which it does only when no worker of its own
will write it any more, or it never had the slot and told no worker of it. Either stays true for ever, as a slot that is
granted again has another call. So statements need no order of their own: the same one may arrive twice, or last. They
carry no generations either: a slot that is stated by mistake is kept a heartbeat longer, which harms nobody.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvservice.core.messages import Statement
from kvservice.core.segment.refs import BlockRef
from kvservice.units import HandoffId, SlotIndex

STATED_SLOTS_MAX = 65_536
STATED_HANDOFFS_MAX = 4096
OPEN_CALLS_MAX = 1024


class Ledger:
    """The engine's half: what it holds under one attachment. Its owner calls one method at a time."""

    def __init__(self) -> None:
        self._calls = 0  # grows over attachments: a number is used once
        self._open: set[int] = set()
        self._slots: set[BlockRef] = set()
        self._handoffs: dict[HandoffId, None] = {}

    def begin_call(self) -> int:
        """A number for a call whose answer will be taken, or which will be given up."""
        self._calls += 1
        self._open.add(self._calls)
        return self._calls

    def take(self, call: int, refs: Iterable[BlockRef]) -> bool:
        """The answer of a call: these slots are the engine's from now on. False when the call was given up, or answered
        before: then the engine must use none of them, for it may have denied them already."""
        if call not in self._open:
            return False
        self._open.remove(call)
        self._slots.update(refs)
        return True

    def give_up(self, call: int) -> None:
        """The answer of this call will not be used, should it still come. Nothing happens once it was taken."""
        self._open.discard(call)

    def give_back(self, refs: Iterable[BlockRef]) -> None:
        """No worker of this engine will write these slots any more."""
        self._slots.difference_update(refs)

    def open_handoff(self, handoff: HandoffId) -> int:
        """It is open from now on. Returns the number of the call that says so."""
        self._calls += 1
        self._handoffs[handoff] = None
        return self._calls

    def close_handoff(self, handoff: HandoffId) -> None:
        self._handoffs.pop(handoff, None)

    def forget(self) -> None:
        """The attachment is over, and with it all that it held."""
        self._open.clear()
        self._slots.clear()
        self._handoffs.clear()

    @property
    def slots(self) -> frozenset[BlockRef]:
        return frozenset(self._slots)

    def state(self) -> Statement | None:
        """For a heartbeat that is sent now. None when there is too much for one message: one that leaves something out
        would be false."""
        if len(self._slots) > STATED_SLOTS_MAX or len(self._handoffs) > STATED_HANDOFFS_MAX:
            return None
        slots = tuple(ref.slot for ref in self._slots)
        return Statement(self._calls, tuple(sorted(self._open)), slots, tuple(self._handoffs))


class Grants:
    """The shard's half: the slots that one attachment was given to write, each with the call that it was given to."""

    def __init__(self) -> None:
        self._slots: dict[SlotIndex, tuple[BlockRef, int]] = {}  # also of slots that were sealed or given back since

    def add(self, call: int, refs: Iterable[BlockRef]) -> None:
        """Call 0: of an engine that states nothing, so that nothing is ever denied."""
        if call:
            self._slots.update((ref.slot, (ref, call)) for ref in refs)

    def denied(self, statement: Statement) -> list[BlockRef]:
        """What the engine does not hold, and never will. Each is named once."""
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
