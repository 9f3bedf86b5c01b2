"""The directory as one node knows it, in one piece of memory that others read: the mirror.

It holds what the watch streams of all lookup partitions said, and how recent that is. Owns the layout of the memory and
the decisions: what an event changes, and what may be answered. The segment and the streams belong to others. Pure; one
writer. Readers take no lock: what was read while a record was written is read again. What is torn all the same is at
worst a wrong hint, as any answer of the directory may be: bytes are verified wherever they come from.

    0       head, 4 KiB     magic, layout, epoch of the writer, sizes, versions
    4 KiB   feeds           per lookup partition: state, and when it was last heard of (monotonic, ns)
    8 KiB   nodes, 512 B each, then sets of them, 64 B each, then the table of keys (core.directory.key_table)

Every pair of partition and node has a number, because each partition resets its own keys. A record says which node the
number stands for and whether it counts now, so a node is hidden or forgotten by a single write.
"""

from __future__ import annotations

import struct
import zlib
from collections import Counter
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice

from kvservice.core.block.keys import KEY_BYTES
from kvservice.core.directory.holder_table import HolderTable, bits_of, number_runs
from kvservice.core.directory.key_table import ENTRIES, FULL_AT_END, OTHER_MIXER, ROWS_MIN, BlockTable, table_bytes
from kvservice.core.directory.membership import HIDE_SECONDS
from kvservice.core.messages import Holder, HolderRun
from kvservice.errors import another_version
from kvservice.units import BootEpoch, NodeId

MAGIC = b"KVSMIRR1"
LAYOUT = 1  # version of this layout; a mirror of another version is refused by name
PAGE = 4096  # bytes; the head and the feeds have one page each
PARTITIONS_MAX = PAGE // 16  # a feed takes two words. A service has at most 64 partitions (config).
NODES_MAX = 4096  # pairs of partition and node; with more, the partition becomes FULL and its keys are looked up by RPC
# Of a record: a name and an address. A node with longer ones counts as unknown (mirror_names_too_long).
NODE_BYTES = 512
SETS_MAX = 32_768  # different sets of holders; keys with a further set are looked up by RPC (mirror_sets_not_named)
SET_BYTES = 64  # one cache line
SET_HOLDERS_MAX = SET_BYTES // 2 - 1  # holders named of a larger set: more than any reader tries
STALE_SECONDS = 3.0  # a silent partition's part is not used: the directory itself hides a node after this
NODES_AT = 2 * PAGE  # offset in bytes
SETS_AT = NODES_AT + NODES_MAX * NODE_BYTES
TABLE_AT = SETS_AT + SETS_MAX * SET_BYTES
PIECE_KEYS = 64  # of a lookup that met a change are read at once: few changes fall into so short a time
READS_MAX = 8  # of one piece, while the writer changes what numbers stand for; then the lookup partition is asked
AHEAD_ROWS = 8192  # rows made usable before they are needed, so that no event waits for memory
SWEEP_KEYS = 4096  # keys visited by one call of sweep: some milliseconds
assert STALE_SECONDS >= HIDE_SECONDS, "a mirror must not be stale before its nodes are hidden"
assert max(NODES_MAX, SET_HOLDERS_MAX) <= 1 << 16, "a set holds u16"
assert NODE_BYTES % 8 == SET_BYTES % 8 == 0, "the table of keys is read as u64"

_HEAD = struct.Struct("<8sQQQQ")  # magic, layout, epoch, partitions, rows
_NODE = struct.Struct("<IBBHHQ")  # crc of what follows, counts, -, bytes of the name, of the address, boot epoch
_SET = struct.Struct(f"<{SET_BYTES // 2}H")  # number of holders, then their numbers
_NODES_VERSION, _SETS_VERSION, _FEEDS_VERSION = 16, 17, 18  # of the head as u64
_FEEDS = PAGE // 8  # index of the first feed as u64; each takes two


class Feed(IntEnum):
    """What a partition's part of the mirror can be used for."""

    NEVER = 0  # nothing was heard yet
    SYNCING = 1  # a snapshot is under way
    LIVE = 2
    FULL = 3  # it did not fit: a key that is not found here may have holders
    STALE = 4  # live, but not heard of for too long. Never written: the reader decides


@dataclass(frozen=True, slots=True)
class MirrorEvent:
    """One event of a partition's watch stream. An event without a node only shows that the stream is alive."""

    node: Holder | None = None
    added: bytes = b""  # packed keys
    removed: bytes = b""
    reset: bool = False
    hidden: bool = False
    snapshot_end: bool = False


def mirror_rows(size: int) -> int:
    """Rows of the table of a mirror with at most `size` bytes; 0 when that is too little.

    It is a power of two, because the rows between two powers cannot be used well.
    """
    rows = ROWS_MIN
    while mirror_bytes(rows * 2) <= size:
        rows *= 2
    return rows if mirror_bytes(rows) <= size else 0


def mirror_bytes(rows: int) -> int:
    return TABLE_AT + table_bytes(rows)


def keys_that_fit(rows: int) -> int:
    return int(rows * ENTRIES * FULL_AT_END)


class MirrorWriter:
    """Writes the mirror into zeroed memory of `mirror_bytes(rows)`.

    The caller makes memory usable before it is written: at first everything up to TABLE_AT, then as `rows_ahead` says.
    It reports that with `allow_rows`. `now` is monotonic, in seconds.
    """

    def __init__(self, buffer: memoryview, partition_count: int, epoch: int) -> None:
        assert 0 < partition_count <= PARTITIONS_MAX
        self._buffer = buffer
        self._words = buffer[:NODES_AT].cast("Q")
        self._table = BlockTable(buffer[TABLE_AT:], fresh=True, mixer=OTHER_MIXER)  # filled in the order of tables
        self._table.row_limit = ROWS_MIN
        self._holders = HolderTable(self._table, keys_that_fit(self._table.row_count_max), self._write_set)
        self._bits: list[dict[NodeId, int]] = [{} for _ in range(partition_count)]
        self._counts: dict[int, int] = {}  # keys by bit
        self._records: dict[int, tuple[Holder, bool]] = {}  # by bit: the node, and whether it counts
        self.counters: Counter[str] = Counter()
        _HEAD.pack_into(buffer, 0, MAGIC, LAYOUT, epoch, partition_count, self._table.row_count_max)

    def close(self) -> None:
        """Release the buffer."""
        self._table.close()
        self._words.release()
        self._buffer.release()

    # -- memory ----

    @property
    def rows_ahead(self) -> int:
        """How many rows of the table should be usable by now."""
        used = self._table.row_count
        return min(self._table.row_count_max, used + used // 8 + AHEAD_ROWS)

    @property
    def rows_needed(self) -> int:
        """How many rows must be usable before the next event."""
        return min(self._table.row_count_max, self._table.row_count + AHEAD_ROWS // 2)

    @property
    def rows_allowed(self) -> int:
        return self._table.row_limit

    def allow_rows(self, rows: int) -> None:
        """The memory of `mirror_bytes(rows)` is usable now."""
        self._table.row_limit = rows

    # -- what is known ----

    @property
    def key_count(self) -> int:
        return len(self._holders)

    def feed(self, partition: int) -> Feed:
        return Feed(self._words[_FEEDS + 2 * partition])

    def age(self, partition: int, now: float) -> float:
        """Seconds since the partition was last heard of."""
        return now - self._words[_FEEDS + 2 * partition + 1] / 1e9

    # -- events ----

    def begin(self, partition: int) -> None:
        """A new stream of this partition begins with a snapshot: everything earlier is forgotten."""
        self._set_feed(partition, Feed.SYNCING)
        self._forget_all(partition)

    def apply(self, partition: int, event: MirrorEvent, now: float) -> None:
        """Apply one event. With many keys that takes milliseconds, so pass it in pieces, first the `reset` alone.

        A partition that does not fit becomes FULL, and stays FULL until its next `begin`.
        """
        if self.feed(partition) is Feed.FULL:
            return
        if event.node is not None:
            self._apply_node(partition, event.node, event)
        self._words[_FEEDS + 2 * partition + 1] = max(0, int(now * 1e9))
        if event.snapshot_end and self.feed(partition) is not Feed.FULL:
            self._set_feed(partition, Feed.LIVE)
        self.counters["mirror_events"] += 1

    def has_room(self, partition: int, event: MirrorEvent) -> bool:
        """Whether the event fits. If not, it may fit after a sweep: what was forgotten takes room until then."""
        if event.node is None or self.feed(partition) is Feed.FULL:
            return True
        needs_number = event.added and event.node.node_id not in self._bits[partition]
        if needs_number and self._holders.next_bit >= NODES_MAX:
            return False
        key_count = len(self._holders) + len(event.added) // KEY_BYTES
        return key_count <= keys_that_fit(self._table.row_limit)

    def sweep(self) -> bool:
        """Remove forgotten numbers from some keys. False when nothing is left to do."""
        return self._holders.sweep(SWEEP_KEYS) is not None

    def _apply_node(self, partition: int, node: Holder, event: MirrorEvent) -> None:
        bits = self._bits[partition]
        if event.reset and node.node_id in bits:
            self._retire(bits.pop(node.node_id))
        bit = bits.get(node.node_id)
        if bit is None and not event.added:
            return  # it left, or holds nothing, and needs no number
        if bit is None:
            bit = self._holders.take_bit()
            if bit >= NODES_MAX:
                self._holders.retire(bit, has_keys=False)
                self._fill_up(partition)
                return
            bits[node.node_id] = bit
        self._write_node(bit, node, counts=not event.hidden)
        dropped = self._holders.dropped_full
        added = self._holders.add(bit, event.added)
        removed = self._holders.remove(bit, event.removed)
        self._counts[bit] = self._counts.get(bit, 0) + added - removed
        self.counters["mirror_keys_taken"] += added + removed
        # A key may be dropped although the mirror is not full: its part of the table has some two hundred other keys.
        # That happens to one key in millions and does not make the partition FULL.
        if self._holders.dropped_full > dropped and self._is_full():
            self._fill_up(partition)

    def _is_full(self) -> bool:
        rows = self._table.row_count
        return rows >= self._table.row_limit or len(self._holders) >= keys_that_fit(self._table.row_count_max)

    def _fill_up(self, partition: int) -> None:
        self._set_feed(partition, Feed.FULL)
        self._forget_all(partition)
        self.counters["mirror_filled_up"] += 1

    def _forget_all(self, partition: int) -> None:
        bits, self._bits[partition] = self._bits[partition], {}
        for bit in bits.values():
            self._retire(bit)

    def _retire(self, bit: int) -> None:
        self._write_node(bit, self._records[bit][0], counts=False)
        del self._records[bit]
        self._holders.retire(bit, has_keys=self._counts.pop(bit, 0) > 0)

    # -- records ----

    def _set_feed(self, partition: int, feed: Feed) -> None:
        """The version grows behind the state, and before anything is forgotten: `MirrorReader.feeds_version`."""
        self._words[_FEEDS + 2 * partition] = int(feed)
        self._words[_FEEDS_VERSION] += 1

    def _write_node(self, bit: int, node: Holder, *, counts: bool) -> None:
        if self._records.get(bit) == (node, counts):
            return
        self._records[bit] = (node, counts)
        name, address = node.node_id.encode(), node.peer_address.encode()
        if _NODE.size + len(name) + len(address) > NODE_BYTES:
            self.counters["mirror_names_too_long"] += counts
            name = address = b""
            counts = False
        body = _NODE.pack(0, counts, 0, len(name), len(address), node.epoch)[4:] + name + address
        self._write(_NODES_VERSION, NODES_AT + bit * NODE_BYTES, zlib.crc32(body).to_bytes(4, "little") + body)

    def _write_set(self, number: int, mask: int) -> None:
        if number >= SETS_MAX:
            self.counters["mirror_sets_not_named"] += 1
            return
        bits = list(islice(bits_of(mask), SET_HOLDERS_MAX))
        record = _SET.pack(len(bits), *bits, *[0] * (SET_HOLDERS_MAX - len(bits)))
        self._write(_SETS_VERSION, SETS_AT + number * SET_BYTES, record)

    def _write(self, version: int, start: int, record: bytes) -> None:
        """The version grows on both sides: a lookup that read a number before the record changed reads it again."""
        self._words[version] += 1
        self._buffer[start : start + len(record)] = record
        self._words[version] += 1

    def check_invariants(self) -> None:
        """Recounts everything."""
        held = self._holders.check_invariants()
        for bits in self._bits:
            for bit in bits.values():
                assert held.get(bit, 0) == self._counts.get(bit, 0), f"number {bit} has {held.get(bit, 0)} keys"
        owned = [bit for bits in self._bits for bit in bits.values()]
        assert len(owned) == len(set(owned)) and sorted(owned) == sorted(self._records)


class MirrorReader:
    """Reads memory that a MirrorWriter writes, in this process or in another. One thread at a time.

    Raises ValueError when the memory is not a mirror, and VersionMismatch when it has another layout.
    """

    def __init__(self, buffer: memoryview) -> None:
        if len(buffer) < TABLE_AT + table_bytes(ROWS_MIN):
            raise ValueError("too small for a mirror")
        magic, layout, epoch, partition_count, rows = _HEAD.unpack_from(buffer, 0)
        if magic != MAGIC:
            raise ValueError("not a mirror")
        if layout != LAYOUT:
            raise another_version("the mirror of the directory", layout, LAYOUT)
        if not 0 < partition_count <= PARTITIONS_MAX or rows < ROWS_MIN or len(buffer) < mirror_bytes(rows):
            raise ValueError("a mirror with impossible sizes")
        self.epoch = epoch
        self.partition_count = partition_count
        self._buffer = buffer
        self._words = buffer[:NODES_AT].cast("Q")
        self._table = BlockTable(buffer[TABLE_AT : mirror_bytes(rows)], fresh=False)
        self._holders: dict[int, tuple[Holder, ...] | None] = {}  # by number of a set, for _versions
        self._named: dict[bytes, tuple[Holder, ...]] = {}  # by record of a set: few records change with a version
        self._nodes: dict[int, Holder | None] = {}
        self._versions = (-1, -1)

    def close(self) -> None:
        """Release the buffer."""
        self._table.close()
        self._words.release()
        self._buffer.release()

    @property
    def key_count(self) -> int:
        return len(self._table)

    @property
    def used_bytes(self) -> int:
        """Bytes of the buffer that are in use, from its beginning on."""
        return mirror_bytes(self._table.row_count)

    @property
    def feeds_version(self) -> int:
        """How often a feed has changed its state. What was read is that of a live feed only if this, read before the
        feed, is the same afterwards."""
        return self._words[_FEEDS_VERSION]

    def feed(self, partition: int, now: float) -> Feed:
        """The state of this partition's part. Only LIVE may be used for answers."""
        state = self._words[_FEEDS + 2 * partition]
        if state == Feed.LIVE and now - self._words[_FEEDS + 2 * partition + 1] / 1e9 > STALE_SECONDS:
            return Feed.STALE
        return Feed(state) if state <= Feed.FULL else Feed.NEVER

    def resolve(self, packed: bytes) -> list[HolderRun] | None:
        """The holders of these keys, as Directory.resolve. None when that is not known for one of the keys.

        Pieces of the answer may be of different moments, as the answers of two lookup partitions are.
        """
        runs: list[HolderRun] = []
        count = end = len(packed) // KEY_BYTES
        run_start = start = reads = 0
        current: tuple[Holder, ...] | None = ()
        while start < count:
            found, read_to = self._read(packed, start, end)
            for head, holders in found:
                if holders != current:
                    if holders is None:
                        return None
                    if current:
                        runs.append(HolderRun(run_start, head - run_start, current))
                    run_start, current = head, holders
            reads = 0 if read_to > start else reads + 1
            if reads == READS_MAX:
                return None
            start, end = read_to, min(count, read_to + PIECE_KEYS)
        if current:
            runs.append(HolderRun(run_start, count - run_start, current))
        return runs

    def _read(self, packed: bytes, start: int, end: int) -> tuple[list[tuple[int, tuple[Holder, ...] | None]], int]:
        """(index, holders or None) at `start` and where they may change, and the index before which that holds: less
        than `end` when a record changed meanwhile."""
        self._refresh()
        numbers = number_runs(self._table, packed[start * KEY_BYTES : end * KEY_BYTES])
        named = self._holders
        found: list[tuple[int, tuple[Holder, ...] | None]] = []
        for first in range(0, len(numbers), PIECE_KEYS):
            before = len(found)
            for head, number in numbers[first : first + PIECE_KEYS]:
                found.append((start + head, named[number] if number in named else self._name(number)))
            if self._versions != self._written:  # a number that was read may stand for another set by now
                return found[:before], found[before][0]
        return found, end

    @property
    def _written(self) -> tuple[int, int]:
        """How often the records of nodes and those of sets were written."""
        return self._words[_NODES_VERSION], self._words[_SETS_VERSION]

    def _refresh(self) -> None:
        versions = self._written
        if versions != self._versions:
            if versions[0] != self._versions[0]:
                self._nodes, self._named = {}, {}
            self._holders = {0: ()}
            self._versions = versions

    def _name(self, number: int) -> tuple[Holder, ...] | None:
        found: tuple[Holder, ...] | None = None
        if number < SETS_MAX:
            record = bytes(self._buffer[SETS_AT + number * SET_BYTES : SETS_AT + (number + 1) * SET_BYTES])
            found = self._named.get(record)
            if found is None:
                found = self._read_set(record)
        self._holders[number] = found
        return found

    def _read_set(self, record: bytes) -> tuple[Holder, ...]:
        count, *bits = _SET.unpack(record)
        nodes = {self._node(bit) for bit in bits[: min(count, SET_HOLDERS_MAX)]}
        if len(self._named) >= SETS_MAX:
            self._named.clear()
        found = tuple(sorted((node for node in nodes if node is not None), key=lambda node: node.node_id))
        self._named[record] = found
        return found

    def _node(self, bit: int) -> Holder | None:
        """The node with this number. None when its record does not count, or is being written."""
        if bit not in self._nodes:
            self._nodes[bit] = self._read_node(bit) if bit < NODES_MAX else None
        return self._nodes[bit]

    def _read_node(self, bit: int) -> Holder | None:
        record = bytes(self._buffer[NODES_AT + bit * NODE_BYTES : NODES_AT + (bit + 1) * NODE_BYTES])
        crc, counts, _, name_bytes, address_bytes, epoch = _NODE.unpack_from(record)
        end = _NODE.size + name_bytes + address_bytes
        if not counts or end > NODE_BYTES or zlib.crc32(record[4:end]) != crc:
            return None
        name, address = record[_NODE.size : _NODE.size + name_bytes], record[_NODE.size + name_bytes : end]
        return Holder(NodeId(name.decode()), address.decode(), BootEpoch(epoch))
