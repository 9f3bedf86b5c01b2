"""Which bits each key has: a table of keys whose numbers stand for sets of bits.

Owns the bits and the sets; knows neither nodes nor time. A retired bit counts for nothing from then on, so forgetting
a million keys costs nothing at that moment. `sweep` removes the bit from the keys later, a bounded number per call, and
only then is the bit used again. Pure; one caller at a time. Readers in other processes may use the table
(core.directory.key_table).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvservice.core.block.keys import KEY_BYTES
from kvservice.core.directory.key_table import FEW, ROW_U32, BlockTable, Keys, Numbers, Positions, keys_array
from kvservice.units import BlockKey

__all__ = ["HolderTable", "Swept", "bits_of", "number_runs"]


@dataclass(frozen=True, slots=True)
class Swept:
    """What one call of `sweep` did."""

    looked_at: int  # keys visited; at least 1 while something is left to do
    lost: list[tuple[BlockKey, int]]  # keys without a holder now, each with one of the bits that held it
    freed: tuple[int, ...] = ()  # bits that no key has any more


class HolderTable:
    """`on_set(number, mask)` is called for each set of bits that gets a number. Numbers are used again."""

    def __init__(
        self, table: BlockTable, key_count_max: int, on_set: Callable[[int, int], None] = lambda number, mask: None
    ) -> None:
        self.table = table
        self._key_count_max = key_count_max
        self._on_set = on_set
        self._mask_of: list[int] = [0]  # by number; number 0 is the empty set
        self._number_of: dict[int, int] = {0: 0}
        self._uses = np.zeros(64, np.int64)  # keys with each number
        self._free_numbers: list[int] = []
        self._free_bits: list[int] = []  # heap: low bits keep the masks small
        self.bit_count = 0
        self.retired = 0  # mask of bits that are still to be swept
        self._sweeping = 0  # mask of the bits that this pass removes; 0 = no pass is under way
        self._sweep_row = 0
        self.dropped_full = 0

    def __len__(self) -> int:
        """Keys in memory, including those not swept yet."""
        return len(self.table)

    # -- bits ----

    @property
    def next_bit(self) -> int:
        """What `take_bit` returns next."""
        return self._free_bits[0] if self._free_bits else self.bit_count

    def take_bit(self) -> int:
        """The index of a bit that no key has."""
        if self._free_bits:
            return heapq.heappop(self._free_bits)
        self.bit_count += 1
        return self.bit_count - 1

    def retire(self, bit: int, *, has_keys: bool) -> None:
        """Forget all keys of this bit, in constant time."""
        if has_keys:
            self.retired |= 1 << bit
        else:
            heapq.heappush(self._free_bits, bit)

    @property
    def free(self) -> int:
        """Mask of the bits that can be taken."""
        return sum(1 << bit for bit in self._free_bits)

    # -- reading ----

    def mask(self, key: bytes) -> int:
        """The bits of a key, including retired ones; 0 when the key is not there."""
        return self._mask_of[self.table.get(key)]

    def runs(self, packed: bytes) -> list[tuple[int, int]]:
        """(first index, mask) at index 0 and wherever the mask changes. Masks include retired bits."""
        return [(start, self._mask_of[number]) for start, number in number_runs(self.table, packed)]

    def rows(self, row: int, count: int) -> Iterator[tuple[int, bytes]]:
        """(mask, packed keys) of everything in these rows of the table."""
        keys, numbers, _ = self.table.entries(row, count)
        for number in np.unique(numbers).tolist():
            yield self._mask_of[number], keys[numbers == number].tobytes()

    # -- writing ----

    def add(self, bit: int, packed: bytes) -> int:
        """Give the bit to these keys. Returns how many did not have it. Keys without room are counted and dropped."""
        one = 1 << bit
        if len(packed) <= FEW * KEY_BYTES:
            return sum(self._add_one(one, packed[i : i + KEY_BYTES]) for i in range(0, len(packed), KEY_BYTES))
        keys = keys_array(packed)
        positions = self.table.find(keys)
        known = positions >= 0
        given = 0
        if known.any():
            at, numbers, masks = self._sets_at(np.unique(positions[known]))
            given = sum(count for mask, count in masks.values() if not mask & one)
            self._change(at, numbers, {old: mask & ~self.retired | one for old, (mask, _) in masks.items()})
            keys = keys[~known]
        if len(keys):
            given += self._insert(one, _distinct(keys))
        return given

    def remove(self, bit: int, packed: bytes) -> int:
        """Take the bit from these keys. Returns how many had it."""
        one = 1 << bit
        if len(packed) <= FEW * KEY_BYTES:
            return sum(self._remove_one(one, packed[i : i + KEY_BYTES]) for i in range(0, len(packed), KEY_BYTES))
        positions = self.table.find(keys_array(packed))
        at, numbers, masks = self._sets_at(np.unique(positions[positions >= 0]))
        taken = sum(count for mask, count in masks.values() if mask & one)
        self._change(at, numbers, {old: mask & ~one for old, (mask, _) in masks.items()})
        return taken

    def sweep(self, limit: int) -> Swept | None:
        """Remove retired bits from up to `limit` keys, or from one row of them. None when nothing is left to do."""
        if not self._sweeping:
            if not self.retired:
                return None
            self._sweeping, self._sweep_row = self.retired, 0
        gone = self._sweeping
        step = self.table.rows_of(self._sweep_row, limit)
        keys, numbers, positions = self.table.entries(self._sweep_row, step)
        self._sweep_row += step
        dirty = [number for number in np.unique(numbers).tolist() if self._mask_of[number] & gone]
        lost: list[tuple[BlockKey, int]] = []
        if dirty:
            touched = np.isin(numbers, np.array(dirty, np.uint32))
            at, olds, masks = self._sets_at(positions[touched])
            kept = {old: mask & ~gone for old, (mask, _) in masks.items()}
            for key, old in zip(keys[touched], olds.tolist(), strict=True):
                if not kept[old]:
                    lost.append((BlockKey(key.tobytes()), masks[old][0].bit_length() - 1))
            self._change(at, olds, kept)
        freed: tuple[int, ...] = ()
        if self._sweep_row >= self.table.walk_end:
            freed = tuple(bits_of(gone))
            for bit in freed:
                heapq.heappush(self._free_bits, bit)
            self.retired &= ~gone
            self._sweeping = 0
        return Swept(max(1, len(keys)), lost, freed)

    # -- inside ----

    def _add_one(self, one: int, key: bytes) -> int:
        old = self.table.get(key)
        mask = self._mask_of[old]
        merged = mask & ~self.retired | one
        if merged == mask:
            return 0
        number = self._number(merged)
        if (not old and len(self.table) >= self._key_count_max) or not self.table.put(key, number):
            self.dropped_full += 1
            self._use(number, 0)
            return 0
        self._use(number, 1)
        if old:
            self._use(old, -1)
        return int(not mask & one)

    def _remove_one(self, one: int, key: bytes) -> int:
        old = self.table.get(key)
        mask = self._mask_of[old]
        if not mask & one:
            return 0
        number = self._number(mask & ~one)
        if number:
            self.table.put(key, number)
            self._use(number, 1)
        else:
            self.table.remove(key)
        self._use(old, -1)
        return 1

    def _insert(self, mask: int, keys: Keys) -> int:
        room = max(0, self._key_count_max - len(self.table))
        number = self._number(mask)
        count = int(np.count_nonzero(self.table.insert_many(keys[:room], np.full(len(keys[:room]), number, np.uint32))))
        self.dropped_full += len(keys) - count
        self._use(number, count)
        return count

    def _sets_at(self, at: Positions) -> tuple[Positions, Numbers, dict[int, tuple[int, int]]]:
        """(positions, the number at each, {number: (mask, how many of these keys have it)})"""
        numbers = self.table.numbers_at(at)
        found, counts = np.unique(numbers, return_counts=True)
        pairs = zip(found.tolist(), counts.tolist(), strict=True)
        return at, numbers, {number: (self._mask_of[number], count) for number, count in pairs}

    def _change(self, at: Positions, numbers: Numbers, masks: dict[int, int]) -> None:
        """Give entries other sets: `masks` maps an old number to the new mask. Entries with mask 0 are removed.

        The old numbers are in ascending order.
        """
        order = np.argsort(numbers, kind="stable")  # so that the entries of each set lie together
        ends = np.searchsorted(numbers[order], np.array([*masks], np.uint32), "right").tolist()
        start = 0
        for (old, mask), end in zip(masks.items(), ends, strict=True):
            start, chosen = end, at[order[start:end]]
            if mask == self._mask_of[old]:
                continue
            number = self._number(mask)
            if number:
                self.table.set_at(chosen, np.full(len(chosen), number, np.uint32))
                self._use(number, len(chosen))
            else:
                self.table.remove_at(chosen)
            self._use(old, -len(chosen))

    def _number(self, mask: int) -> int:
        number = self._number_of.get(mask)
        if number is None:
            if self._free_numbers:
                number = self._free_numbers.pop()
                self._mask_of[number] = mask
            else:
                number = len(self._mask_of)
                self._mask_of.append(mask)
                if number >= len(self._uses):
                    self._uses = np.concatenate((self._uses, np.zeros_like(self._uses)))
            self._number_of[mask] = number
            self._on_set(number, mask)
        return number

    def _use(self, number: int, by: int) -> None:
        """`by` more keys have this set. A set that no key has is forgotten."""
        self._uses[number] += by
        if not self._uses[number] and number:
            del self._number_of[self._mask_of[number]]
            self._free_numbers.append(number)

    def check_invariants(self) -> dict[int, int]:
        """Recounts everything. Returns how many keys have each bit."""
        self.table.check_invariants()
        assert self._sweeping & ~self.retired == 0, "a sweep takes bits that are in use"
        held: dict[int, int] = {}
        uses = np.zeros_like(self._uses)
        known = (1 << self.bit_count) - 1
        free = self.free
        assert len(set(self._free_bits)) == len(self._free_bits), "a bit is free twice"
        assert not free & self.retired, "a bit is free and retired"
        _, numbers, positions = self.table.entries(0, self.table.walk_end)
        np.add.at(uses, numbers, 1)
        swept = set(numbers[positions < self._sweep_row * ROW_U32].tolist())
        for number in set(numbers.tolist()):
            mask = self._mask_of[number]
            assert mask, "a key has no holder"
            assert mask & ~known == 0 and not mask & free, f"a key has a bit that is free: {mask:#x}"
            assert number not in swept or not mask & self._sweeping, "the sweep missed a key"
            for bit in bits_of(mask):
                held[bit] = held.get(bit, 0) + int(uses[number])
        assert (uses == self._uses).all(), "a set's count of keys is wrong"
        live = {self._mask_of[number]: number for number in np.flatnonzero(uses).tolist()}
        assert {0: 0, **live} == self._number_of, "sets and their numbers differ"
        return held


def bits_of(mask: int) -> Iterator[int]:
    """Indices of the bits that are set, in ascending order."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def number_runs(table: BlockTable, packed: bytes) -> list[tuple[int, int]]:
    """(first index, the table's number) at index 0 and wherever the number changes along these keys."""
    count = len(packed) // KEY_BYTES
    if count <= FEW:
        listed = [table.get(packed[i : i + KEY_BYTES]) for i in range(0, len(packed), KEY_BYTES)]
        return [(i, number) for i, number in enumerate(listed) if not i or number != listed[i - 1]]
    numbers = table.get_many(keys_array(packed))
    starts: NDArray[np.int64] = np.flatnonzero(numbers[1:] != numbers[:-1]) + 1
    heads = [0, *starts.tolist()]
    return list(zip(heads, numbers[heads].tolist(), strict=True))


def _distinct(keys: Keys) -> Keys:
    """The keys without repetitions."""
    if len(keys) < 2:
        return keys
    ordered = keys[np.argsort(keys[:, 0])]
    twins = ordered[1:, 0] == ordered[:-1, 0]
    if not twins.any():
        return keys
    unique: Keys = np.unique(keys, axis=0)
    return unique
