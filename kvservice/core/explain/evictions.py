"""The eviction history: which blocks were evicted, when, why, and for whom. A ring that forgets the oldest first.

An entry costs 39 bytes. Adding is cheap, because it happens at every eviction. Finding walks the ring, because it
happens only when a person asks. Pure; one caller at a time.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from kvservice.core.block.keys import KEY_BYTES
from kvservice.units import BlockKey

# 2.4 MB: twice the blocks of a shard with 64 GiB and blocks of 2 MiB. The oldest entry is overwritten.
EVICTIONS_MAX = 65_536
KEEP_SECONDS = 3600.0  # older entries do not answer any more; records of requests are kept for less (records.py)
NAMES_MAX = 4096  # distinct names in `caused_by`; a further one is remembered as ""


class EvictionCause(Enum):
    """Why a block is no longer held."""

    PRESSURE = "pressure"  # evicted for another block of its size
    SLAB_MOVED = "slab_moved"  # evicted with its slab, which was needed for blocks of another size
    DRAIN = "drain"  # its node left, and no other node took the block over
    OWNER_DIED = "owner_died"  # its node fell silent
    RESTARTED = "restarted"  # its node restarted and did not keep it
    CORRUPT = "corrupt"  # its bytes were wrong
    QUOTA = "quota"  # evicted for another block of its tenant, which is at its quota
    CLEARED = "cleared"  # somebody cleared it
    AGED = "aged"  # it reached the age limit

    __hash__ = object.__hash__  # members are unique; Enum's own hash is slow, and every eviction looks up three


_CAUSES = tuple(EvictionCause)
_CODE_OF = {cause: code for code, cause in enumerate(_CAUSES)}


@dataclass(frozen=True, slots=True)
class Eviction:
    """One eviction. `at` is on the clock of the caller."""

    cause: EvictionCause
    at: float
    caused_by: str  # who needed the room, or the node with which the block was lost; "" when not known
    held_seconds: float = 0.0  # how long it had been held; 0 = not known
    idle_seconds: float = 0.0  # since its last use, at its eviction; 0 = not known
    reason: int = 0  # why the policy chose it: see core.store.reasons


class EvictionHistory:
    """A ring of `capacity` evictions. Entries older than KEEP_SECONDS are not found."""

    def __init__(self, capacity: int = EVICTIONS_MAX) -> None:
        assert capacity > 0
        self._capacity = capacity
        self._keys = bytearray()
        self._at = array("d")
        self._cause = array("B")
        self._caused_by = array("I")
        self._held = array("f")
        self._idle = array("f")
        self._reason = array("H")
        self._next = 0
        self._names: list[str] = [""]
        self._number_of: dict[str, int] = {"": 0}

    def __len__(self) -> int:
        return len(self._at)

    def add(
        self,
        key: BlockKey,
        cause: EvictionCause,
        caused_by: str,
        now: float,
        *,
        held_seconds: float = 0.0,
        idle_seconds: float = 0.0,
        reason: int = 0,
    ) -> None:
        place = self._next
        code, name = _CODE_OF[cause], self._number(caused_by)
        if place == len(self._at):
            self._keys += key
            self._at.append(now)
            self._cause.append(code)
            self._caused_by.append(name)
            self._held.append(held_seconds)
            self._idle.append(idle_seconds)
            self._reason.append(reason)
        else:
            self._keys[place * KEY_BYTES : (place + 1) * KEY_BYTES] = key
            self._at[place], self._cause[place], self._caused_by[place] = now, code, name
            self._held[place], self._idle[place], self._reason[place] = held_seconds, idle_seconds, reason
        self._next = (place + 1) % self._capacity

    def find(self, keys: Iterable[BlockKey], now: float, as_of: float) -> dict[BlockKey, Eviction]:
        """For each key, its latest eviction of what was stored before `as_of`. O(capacity).

        The eviction of a block that was stored again after a question says nothing about the answer."""
        wanted = set(keys)
        found: dict[BlockKey, int] = {}
        packed, count = bytes(self._keys), len(self._at)
        first = self._next if count == self._capacity else 0  # the oldest
        for step in range(count if wanted else 0):
            place = (first + step) % count
            key = packed[place * KEY_BYTES : (place + 1) * KEY_BYTES]
            if key in wanted and self._at[place] - self._held[place] <= as_of:
                found[BlockKey(key)] = place
        return {
            key: Eviction(
                _CAUSES[self._cause[place]],
                self._at[place],
                self._names[self._caused_by[place]],
                self._held[place],
                self._idle[place],
                self._reason[place],
            )
            for key, place in found.items()
            if now - self._at[place] <= KEEP_SECONDS
        }

    def _number(self, name: str) -> int:
        number = self._number_of.get(name)
        if number is None:
            if len(self._names) >= NAMES_MAX:
                return 0
            number = self._number_of[name] = len(self._names)
            self._names.append(name)
        return number
