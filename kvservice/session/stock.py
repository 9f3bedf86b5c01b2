"""Slots that a session holds ready, so that an engine's step needs no call per block. Plain state, without I/O.

Its owner guards it with a lock of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from kvservice.core.messages import Attachment, EngineSpec
from kvservice.core.segment.refs import BlockRef

STOCK_MIN = 8  # Slots held ready without requests, so that the first blocks find room at once.
# An engine without requests for so long gives its stock back. A conversation's next turn comes sooner, as a rule; the
# first request after it has slots some milliseconds after it came, which is before its prompt is computed.
STOCK_IDLE_SECONDS = 60.0
STOCK_MAX = 1024  # The most slots held ready. A step that fills more blocks stores the rest in the next step.


class Stock:
    def __init__(self, spec: EngineSpec, minimum: int) -> None:
        """`minimum` is the number of slots held ready while no requests are known."""
        self._spec = spec
        self._minimum = min(max(minimum, STOCK_MIN), STOCK_MAX)
        self._layouts = (spec.layout, *(group.layout for group in spec.window_groups))
        self._slots: list[deque[BlockRef]] = [deque() for _ in self._layouts]  # by KV cache group
        self._expected = 0  # blocks that the requests in flight will want to store
        self._is_used = True  # since `is_idle` was asked last
        self._idle_from = 0.0

    @property
    def group_count(self) -> int:
        return len(self._slots)

    def expect(self, count: int) -> None:
        self._expected = max(0, self._expected + count)
        self._is_used = True

    def take(self, count: int, group: int) -> list[BlockRef]:
        """Up to `count` slots for a group."""
        self._is_used = True
        slots = self._slots[group]
        return [slots.popleft() for _ in range(min(count, len(slots)))]

    def add(self, refs: Sequence[BlockRef], group: int) -> None:
        self._slots[group].extend(refs)

    def clear(self) -> list[BlockRef]:
        """Take everything, because the attachment has ended."""
        found = [ref for slots in self._slots for ref in slots]
        for slots in self._slots:
            slots.clear()
        self._is_used = True
        return found

    def is_idle(self, now: float) -> bool:
        """Whether the engine has had no requests for a while, so that it need not hold slots."""
        if self._is_used or self._expected:
            self._idle_from = now + STOCK_IDLE_SECONDS
        self._is_used = False
        return now >= self._idle_from

    def level(self, group: int, attachment: Attachment, *, is_idle: bool) -> tuple[int, list[BlockRef]]:
        """(slots to reserve now, slots to give back now) so that a group's stock is what is expected. One of them is
        empty."""
        geometry = attachment.geometry
        payload_bytes = self._layouts[group].payload_bytes
        slots = geometry.slab_count * geometry.slots_per_slab(payload_bytes)
        if attachment.quota_bytes:  # slots held ready take the room of the tenant's own blocks
            slots = min(slots, attachment.quota_bytes // payload_bytes)
        slots //= len(self._layouts)
        idle = min(self._minimum, slots // 8)
        soon = self._spec.slots_for(group, idle + self._expected)
        wanted = 0 if is_idle else max(1, min(soon, STOCK_MAX, slots // 2))
        stock = self._slots[group]
        have = len(stock)
        surplus = [stock.pop() for _ in range(have - 2 * wanted)]
        is_low = not surplus and have * 2 <= wanted and not is_idle
        return wanted - have if is_low else 0, surplus
