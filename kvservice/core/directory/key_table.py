"""A table of block keys in one piece of memory: 16-byte key -> number, for millions of keys and for other processes.

Owns the layout of that memory and nothing else. The memory is the caller's own, or shared memory with one writer and
with readers in other processes, which take no lock. A reader that looks while a key moves may miss it, or see the
number it had before. It never fails and never loops. Pure; one writer.

A row has 144 bytes for seven entries: seven first halves of keys, seven second halves, seven numbers (u32, 0 = empty),
and a count of keys that belong to this row and are in a later one because it was full. It uses linear hashing: the
table grows by splitting its next few rows, so it is never copied, and an entry only moves to a later row. Therefore a
walk over the rows from first to last sees every key that was there all the time. The first 64 bytes hold the number of
rows in use, the number of keys, and the constant that mixes keys into rows.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["FEW", "BlockTable", "Keys", "Positions", "keys_array", "private_table", "rows_for", "table_bytes"]

Keys = NDArray[np.uint64]  # (n, 2): the two halves of each key
Numbers = NDArray[np.uint32]
Positions = NDArray[np.int64]  # of entries: indices into the table as u32; -1 = not there


class Native(Protocol):
    """The compiled loops, over (rows of the table as bytes, rows in use, mixer)."""

    find: Callable[[memoryview, int, int, Keys | bytes, Numbers | None, Positions | None], None]
    insert: Callable[[memoryview, int, int, Keys | bytes, Numbers, NDArray[np.bool_]], int]


def _native() -> Native | None:
    """The compiled loops, or None when the installation had no compiler."""
    try:
        from kvservice.core.directory import _probe
    except ImportError:
        return None
    return _probe if hasattr(_probe, "insert") else None  # an older build is not used; `make native` builds it again


native = _native()


HEADER_BYTES = 64  # one cache line; three words of it are used
ENTRIES = 7  # of a row: as many keys as fit with their numbers and a counter into 144 bytes without a gap
ROW_WORDS = 18  # u64 of a row: two for each key, and four that hold eight u32, the numbers and the counter
ROW_BYTES = 8 * ROW_WORDS  # bytes of a row
ROW_U32 = 2 * ROW_WORDS  # u32 of a row
FIRST_NUMBER = 4 * ENTRIES  # index of the first number in a row, in u32
OVERFLOW = FIRST_NUMBER + ENTRIES
PROBES = 32  # rows in which a key may be, from its own on. A key that finds no room there is dropped and counted.
ROWS_MIN = 64  # rows of the smallest table, from which it grows by splitting
SMALL_ROWS = 4096  # rows of a private table at first: 590 KB. It moves once, to memory for all its keys.
FEW = 6  # up to this many keys, a loop over single keys is faster than one call with arrays
assert ROW_U32 == OVERFLOW + 1, "a row is its keys, their numbers and one counter"
assert ROWS_MIN >= PROBES and SMALL_ROWS >= ROWS_MIN
# Growing begins when the rows not split yet are this full, and ends before they are as full as the second share.
FULL_AT_START, FULL_AT_END = 0.55, 0.72

_KEY = struct.Struct("<QQ")
_M64 = (1 << 64) - 1  # keeps a product to 64 bits, as uint64 does
_K1 = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio, odd (Knuth's multiplicative hashing)
_NK1, _N32 = np.uint64(_K1), np.uint64(32)
# Odd constants of 64 well mixed bits. A table that is filled in the order of another one needs the second.
MIXER, OTHER_MIXER = 0xD6E8FEB86659FD93, 0xC2B2AE3D27D4EB4F
MIXER_AT = 2  # index of the mixer in the header, in u64


def keys_array(packed: bytes | bytearray | memoryview) -> Keys:
    """Packed keys as an array over the same memory. The length is a multiple of 16."""
    return np.frombuffer(packed, dtype="<u8").reshape(-1, 2)


def table_bytes(rows: int) -> int:
    """Bytes of a table with so many rows."""
    return HEADER_BYTES + (rows + PROBES - 1) * ROW_BYTES


def rows_for(key_count: int) -> int:
    """The rows that so many keys need at most."""
    return max(ROWS_MIN, int(key_count * 2 / (ENTRIES * FULL_AT_END)) + PROBES)


def private_table(key_count: int) -> BlockTable:
    """An empty table for up to `key_count` keys, in private memory.

    It begins small and moves once, to memory for all its keys. The system gives a page only when it is first used.
    """
    rows = rows_for(key_count)
    return BlockTable(_zeroes(min(rows, SMALL_ROWS)), fresh=True, then_rows=rows)


def _zeroes(rows: int) -> memoryview:
    return np.zeros((table_bytes(rows) + 7) // 8, np.uint64).data.cast("B")


class BlockTable:
    """A table over `buffer`. With `fresh` the buffer is zeroes and this object is the writer; else it only reads.

    `mixer` is odd and decides in which row a key is. A table that is filled in the order of another table's rows needs
    another mixer: with the same one its first rows would be full long before the others. `row_limit` is how many of the
    rows in the buffer may be used; the owner may raise it.
    """

    def __init__(self, buffer: memoryview, *, fresh: bool, then_rows: int = 0, mixer: int = MIXER) -> None:
        self._then_rows = then_rows
        self.dropped_full = 0
        self._one, self._at = np.zeros(1, np.uint32), np.zeros(1, np.int64)
        self._bind(buffer)
        if fresh:
            self._head[0], self._head[MIXER_AT] = ROWS_MIN, mixer
        self._mixer = int(self._head[MIXER_AT])
        self._mixer64 = np.uint64(self._mixer)

    def _bind(self, buffer: memoryview) -> None:
        self.row_count_max = (len(buffer) - HEADER_BYTES) // ROW_BYTES - PROBES + 1
        assert self.row_count_max >= ROWS_MIN, "too small for a table"
        size = table_bytes(self.row_count_max)
        self._head = buffer[:HEADER_BYTES].cast("Q")
        self._body = body = buffer[HEADER_BYTES:size]
        self._words, self._cells = body.cast("Q"), body.cast("I")
        self._rows = np.frombuffer(body, np.uint64).reshape(-1, ROW_WORDS)
        self._numbers = np.frombuffer(body, np.uint32)
        self._tails = self._numbers.reshape(-1, ROW_U32)[:, FIRST_NUMBER:]
        self.row_limit = self.row_count_max

    def __len__(self) -> int:
        return int(self._head[1])

    @property
    def row_count(self) -> int:
        """Rows that keys are spread over. In shared memory any value is possible, so it is limited to valid ones."""
        return min(max(int(self._head[0]), ROWS_MIN), self.row_count_max)

    @property
    def walk_end(self) -> int:
        """Where a walk over the rows ends: some keys are in rows after the last one in use."""
        return self.row_count + PROBES - 1

    def close(self) -> None:
        """Release the buffer."""
        empty = memoryview(bytearray(8))
        self._rows = np.zeros((1, 1), np.uint64)
        self._numbers = self._tails = np.zeros((1, 1), np.uint32)
        for view in (self._head, self._words, self._cells, self._body):
            view.release()
        self._head, self._words, self._cells = empty.cast("Q"), empty.cast("Q"), empty.cast("I")

    # -- reading ----

    def get(self, key: bytes) -> int:
        """The number of one key; 0 when it is not there."""
        if native is not None:
            native.find(self._body, self.row_count, self._mixer, key, self._one, None)
            return int(self._one[0])
        position = self._find_one(*_KEY.unpack(key))
        return 0 if position < 0 else self._cells[position]

    def get_many(self, keys: Keys) -> Numbers:
        """The number of each key; 0 for those that are not there."""
        if native is not None:
            answer = np.empty(len(keys), np.uint32)
            native.find(self._body, self.row_count, self._mixer, keys, answer, None)
            return answer
        positions = (self._find_one(first, second) for first, second in keys.tolist())
        # Each number is read right after its key: a writer in another process may give the entry to another key.
        return np.array([0 if position < 0 else self._cells[position] for position in positions], np.uint32)

    def find(self, keys: Keys) -> Positions:
        """The position of each key; -1 for those that are not there. Valid until the next change."""
        if native is not None:
            positions = np.empty(len(keys), np.int64)
            native.find(self._body, self.row_count, self._mixer, keys, None, positions)
            return positions
        return np.array([self._find_one(first, second) for first, second in keys.tolist()], np.int64)

    def numbers_at(self, positions: Positions) -> Numbers:
        """The numbers of these entries; 0 for position -1."""
        numbers = self._numbers.take(positions, mode="wrap")
        numbers[positions < 0] = 0
        return numbers

    def entries(self, row: int, count: int) -> tuple[Keys, Numbers, Positions]:
        """The keys, numbers and positions in `count` rows from `row` on."""
        end = min(row + count, self.walk_end)
        numbers = self._tails[row:end, :ENTRIES]
        at, entry = np.nonzero(numbers)
        rows = self._rows[row:end]
        keys = np.empty((len(at), 2), np.uint64)
        keys[:, 0], keys[:, 1] = rows[at, entry], rows[at, entry + ENTRIES]
        return keys, numbers[at, entry], (at + row) * ROW_U32 + (entry + FIRST_NUMBER)

    def rows_of(self, row: int, limit: int) -> int:
        """How many rows from `row` on hold at most `limit` keys; at least 1, at most `limit`."""
        counts = np.count_nonzero(self._tails[row : min(row + limit, self.walk_end), :ENTRIES], axis=1)
        return max(1, int(np.searchsorted(counts.cumsum(), limit, side="right")))

    # -- writing ----

    def set_at(self, positions: Positions, numbers: Numbers) -> None:
        """Give existing entries other numbers, none of them 0."""
        self._numbers[positions] = numbers

    def put(self, key: bytes, number: int) -> bool:
        """Add one key or change its number, which is not 0. False when there is no room."""
        position = self._position(key)
        if position >= 0:
            self._cells[position] = number
            return True
        self._one[0] = number
        return bool(self.insert_many(keys_array(key), self._one)[0])

    def insert_many(self, keys: Keys, numbers: Numbers) -> NDArray[np.bool_]:
        """Add keys that are not there, all different, with numbers that are not 0. False for those without room."""
        self.grow(len(keys))
        return self._insert(keys, numbers)

    def remove(self, key: bytes) -> None:
        """Remove one key, if it is there."""
        position = self._position(key)
        if position >= 0:
            self._remove_one(position)

    def remove_at(self, positions: Positions) -> None:
        """Remove these entries, each named once."""
        if len(positions) <= FEW:
            for position in positions.tolist():
                self._remove_one(position)
            return
        at, cell = np.divmod(positions, ROW_U32)
        entry = cell - FIRST_NUMBER
        homes = self._homes(self._rows[at, entry], self._rows[at, entry + ENTRIES])
        self._clear(positions, homes)

    def grow(self, more: int) -> None:
        """Make room for `more` keys, as far as `row_limit` allows, by splitting a number of rows in proportion."""
        while True:
            limit = min(self.row_limit, self.row_count_max)
            rows = self.row_count
            level = 1 << (rows.bit_length() - 1)
            expected = len(self) + more
            if expected <= FULL_AT_START * ENTRIES * level:
                return
            if rows >= limit:
                if self._then_rows <= limit:
                    return
                self._move()
                continue
            # In proportion, so that the last row is split when the others are filled to FULL_AT_END.
            progress = (expected / (ENTRIES * level) - FULL_AT_START) / (FULL_AT_END - FULL_AT_START)
            wanted = min(limit, level + min(level, int(level * progress) + 1))
            if wanted <= rows:
                return
            self._split(rows, wanted - rows)

    # -- inside ----

    def _home(self, first: int, second: int) -> int:
        mixed = first ^ (second * _K1 & _M64)
        mixed ^= mixed >> 32
        hashed = (mixed * self._mixer & _M64) >> 32
        rows = self.row_count
        mask = (1 << rows.bit_length()) - 1
        home = hashed & mask
        return home if home < rows else hashed & mask >> 1

    def _homes(self, first: NDArray[np.uint64], second: NDArray[np.uint64], rows: int = 0) -> NDArray[np.int64]:
        rows = rows or self.row_count
        mask = (1 << rows.bit_length()) - 1
        mixed = second * _NK1
        mixed ^= first
        mixed ^= mixed >> _N32
        mixed *= self._mixer64
        mixed >>= _N32
        hashed = mixed.view(np.int64)
        homes: NDArray[np.int64] = hashed & mask
        if rows != mask + 1 >> 1:
            beyond = homes >= rows
            homes[beyond] &= mask >> 1
        else:
            homes &= mask >> 1
        return homes

    def _position(self, key: bytes) -> int:
        if native is not None:
            native.find(self._body, self.row_count, self._mixer, key, None, self._at)
            return int(self._at[0])
        return self._find_one(*_KEY.unpack(key))

    def _find_one(self, first: int, second: int) -> int:
        home = self._home(first, second)
        words, cells = self._words, self._cells
        for row in range(home, home + PROBES):
            start, cell = row * ROW_WORDS, row * ROW_U32 + FIRST_NUMBER
            halves = words[start : start + ENTRIES].tolist()
            if first in halves:
                for entry in range(ENTRIES):
                    if halves[entry] == first and words[start + ENTRIES + entry] == second and cells[cell + entry]:
                        return cell + entry
            if not cells[cell + ENTRIES]:
                break
        return -1

    def _remove_one(self, position: int) -> None:
        row, cell = divmod(position, ROW_U32)
        word = row * ROW_WORDS + cell - FIRST_NUMBER
        self._cells[position] = 0
        self._head[1] -= 1
        for passed in range(self._home(self._words[word], self._words[word + ENTRIES]), row):
            self._cells[passed * ROW_U32 + OVERFLOW] -= 1

    def _clear(self, positions: Positions, homes: NDArray[np.int64]) -> None:
        """Empty these entries, whose own rows are `homes`, and count each out of the rows that it passed."""
        self._numbers[positions] = 0
        self._head[1] -= len(positions)
        rows = positions // ROW_U32
        far = np.flatnonzero(rows > homes)
        row, end = homes[far], rows[far]
        while len(row):
            np.subtract.at(self._numbers, row * ROW_U32 + OVERFLOW, np.uint32(1))
            row += 1
            left = row < end
            row, end = row[left], end[left]

    def _insert(self, keys: Keys, numbers: Numbers, rows_then: int = 0) -> NDArray[np.bool_]:
        """`rows_then`: place the keys as when so many rows are in use."""
        rows = rows_then or self.row_count
        if native is not None:
            done: NDArray[np.bool_] = np.empty(len(keys), np.bool_)
            native.insert(self._body, rows, self._mixer, keys, numbers, done)
        else:
            homes = self._homes(keys[:, 0], keys[:, 1], rows).tolist()
            each = zip(homes, keys.tolist(), numbers.tolist(), strict=True)
            placed = [self._insert_one(home, first, second, number) for home, (first, second), number in each]
            done = np.array(placed, np.bool_)
        count = int(np.count_nonzero(done))
        self._head[1] += count
        self.dropped_full += len(keys) - count
        return done

    def _insert_one(self, home: int, first: int, second: int, number: int) -> bool:
        """Write an entry into the first row with room, from its own row on. The caller counts it."""
        cells = self._cells
        for row in range(home, home + PROBES):
            cell = row * ROW_U32 + FIRST_NUMBER
            numbers = cells[cell : cell + ENTRIES].tolist()
            if 0 in numbers:
                entry = numbers.index(0)
                self._words[row * ROW_WORDS + entry] = first
                self._words[row * ROW_WORDS + ENTRIES + entry] = second
                for passed in range(home, row):
                    cells[passed * ROW_U32 + OVERFLOW] += 1
                cells[cell + entry] = number
                return True
        return False

    def _move(self) -> None:
        """Move to memory of the final size."""
        head, rows, used = self._head, self._rows, self.walk_end
        self._bind(_zeroes(self._then_rows))
        self._head[:] = head
        self._rows[:used] = rows[:used]

    def _split(self, rows: int, count: int) -> None:
        """Take the next `count` rows into use: the keys that belong there move from the rows that are split."""
        level = 1 << (rows.bit_length() - 1)
        first = rows - level
        keys, numbers, positions = self.entries(first, count + PROBES - 1)
        homes = self._homes(keys[:, 0], keys[:, 1])
        moving = (homes >= first) & (homes < first + count)
        moving &= self._homes(keys[:, 0], keys[:, 1], rows + count) != homes
        # In this order a reader finds each key before, during and after the move, unless it is slower than the move.
        self._insert(keys[moving], numbers[moving], rows + count)
        self._head[0] = rows + count
        self._clear(positions[moving], homes[moving])

    def check_invariants(self) -> None:
        """Recounts everything."""
        keys, _, positions = self.entries(0, self.walk_end)
        names = {key.tobytes() for key in keys}
        assert len(names) == len(keys), "a key is there twice"
        assert len(keys) == len(self), f"{len(keys)} keys, the counter says {len(self)}"
        homes, rows = self._homes(keys[:, 0], keys[:, 1]), positions // ROW_U32
        assert ((homes <= rows) & (rows < homes + PROBES)).all(), "a key is where it is not looked for"
        overflow = np.zeros(self.walk_end + 1, np.int64)
        np.add.at(overflow, homes, 1)
        np.add.at(overflow, rows, -1)
        counted = self._tails[: self.walk_end, ENTRIES]
        assert (counted == overflow.cumsum()[:-1]).all(), "an overflow counter is wrong"
        assert self.row_count <= self.row_limit or self.row_count == ROWS_MIN, "more rows than allowed"
