"""A tier of a simulated node on virtual time: a disk of its own, or the object store of all nodes.

What it keeps are real block files with short payloads, which outlive processes. A block is read and written in two
halves at different moments, as in testing.sim.memory, so a slot that is given away too early shows. The tier itself is
right; its device is full, slow, broken, torn, flipped, forgetful or hung.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from kvservice.codec.coder import Coder
from kvservice.core.block.marks import Mark
from kvservice.core.events import BroughtBlock, PullResult
from kvservice.core.segment.blockfile import FILE_HEADER_BYTES, is_file_of, pack_file_header, unpack_file_header
from kvservice.core.segment.digest import digest_payload
from kvservice.core.tier.tier_block import TierBlock
from kvservice.errors import TierError
from kvservice.testing.sim.memory import REAL, SCALED
from kvservice.testing.sim.parts import NodeParts
from kvservice.testing.sim.world import Violation, World
from kvservice.tier.base import ProbeCallback, ReadCallback, TierRead, TierWrite, WriteCallback, WriteResult
from kvservice.tier.headers import brought
from kvservice.units import BlockKey, SlotIndex

PIECE_SECONDS = 0.01  # the longest that half a block takes: slow enough for something to happen meanwhile
SLOW_SECONDS = 0.4  # the same on a slow device: an engine does not wait for many of them
EXTRA_BYTES = 16  # most that the simulated codec adds to a block
ERASE_SECONDS = 1.0  # the longest that a device which is late with erasing takes
FAULTS = ("full", "slow", "error", "late", "hang")  # a device has them for a while


class TierStore:
    """What one device keeps. It outlives the processes that use it."""

    def __init__(self, world: World, name: str, is_shared: bool) -> None:
        self.name = name
        self.is_shared = is_shared
        self.files: dict[BlockKey, bytes] = {}
        self.stored_bytes: dict[BlockKey, int] = {}  # of each file that was ever here, as TierBlock counts them
        self.marks: list[Mark] = []  # of clears
        self.orphans: set[BlockKey] = set()  # files that a fault of the device kept from being listed or erased
        self.lost: set[BlockKey] = set()  # files that a fault of the device took away
        self.is_unusable = False  # at the next start
        self.tears = False  # what its node wrote last is torn when that dies
        self.checks_slots = True  # not where a fault changes memory
        self.encodes = False  # a codec changes the size of what is written
        self._world = world
        self._asked: dict[BlockKey, int] = {}  # which request wrote the file
        self._requests = 0
        self._until = dict.fromkeys(FAULTS, 0.0)
        self._index: list[BlockKey] | None = None  # what the next start lists: an index that was not written on

    def disturb(self, fault: str, seconds: float) -> None:
        self._until[fault] = max(self._until[fault], self._world.now + seconds)

    def has(self, fault: str) -> bool:
        return self._world.now < self._until[fault]

    def heal(self) -> None:
        """After this it does what it is told. What it lost stays lost."""
        self._until = dict.fromkeys(FAULTS, 0.0)
        self.is_unusable, self.tears = False, False

    def seconds(self) -> float:
        """How long the next half of a block takes."""
        hung = max(self._until["hang"] - self._world.now, 0.0)
        return hung + (SLOW_SECONDS if self.has("slow") else PIECE_SECONDS) * self._world.random.random()

    def request(self) -> int:
        """The number of a request. An erase removes what was asked for before it, however late it comes."""
        self._requests += 1
        return self._requests

    def put(self, block: TierBlock, payload: bytes, request: int) -> int:
        """Returns how many bytes the payload takes here: of each write another share of a block, or a little more."""
        header = Coder().encode(replace(block, payload_bytes=len(payload)), memoryview(payload))
        assert header is not None
        self.files[block.key] = pack_file_header(header.header) + payload
        self.orphans.discard(block.key)
        self.lost.discard(block.key)
        self._asked[block.key] = request
        share = (block.key[0] + request) % 5 if self.encodes else 4
        size = REAL[len(payload)]
        self.stored_bytes[block.key] = size * share // 4 + EXTRA_BYTES if self.encodes else size
        return self.stored_bytes[block.key]

    def erase(self, key: BlockKey, request: int) -> None:
        if self._asked.get(key, 0) < request and self.files.pop(key, None) is not None:
            self.orphans.discard(key)

    def listed(self) -> list[TierBlock]:
        """The blocks that a start finds."""
        index, self._index = self._index, None
        found = []
        for key in list(self.files) if index is None else index:
            header = unpack_file_header(self.files[key][:FILE_HEADER_BYTES]) if key in self.files else None
            if header is not None:
                stored_bytes = self.stored_bytes[header.block.key]
                size = REAL[header.block.payload_bytes]
                found.append(replace(header.block, payload_bytes=size, stored_bytes=stored_bytes))
        listed = {block.key for block in found}
        self.orphans.update(key for key in self.files if key not in listed)
        return found

    # -- faults that stay ----

    def flip(self, number: int) -> None:
        """Flip a bit of one file of two, mostly of its payload."""
        for key in list(self.files)[number % 2 :: 2]:
            data = bytearray(self.files[key])
            start = 0 if number % 4 == 0 else FILE_HEADER_BYTES
            data[start + (number >> 4) % (min(len(data) - start, 600))] ^= 1 << number % 8
            self.files[key] = bytes(data)

    def tear(self) -> None:
        """The file that was written last lost its second half, as after a power failure."""
        if self.tears and self.files:
            key = list(self.files)[-1]
            data = self.files[key]
            self.files[key] = data[: (FILE_HEADER_BYTES + len(data)) // 2].ljust(len(data), b"\0")
            self.tears = False

    def mix_up(self, number: int) -> None:
        """Two files have each other's content: each is whole, and has the wrong name."""
        if len(self.files) > 1:
            keys = list(self.files)
            one, other = keys[number % len(keys)], keys[(number >> 5) % len(keys)]
            self.files[one], self.files[other] = self.files[other], self.files[one]

    def lose(self, number: int) -> None:
        """Lose every file, or one of two."""
        for position, key in enumerate(list(self.files)):
            if number % 2 or position % 2:
                del self.files[key]
                self.lost.add(key)

    def stop_index(self) -> None:
        """The next start lists the files of this moment, whatever comes and goes until then."""
        self._index = list(self.files)

    def age(self, number: int) -> None:
        """A file under the right name that another engine's boot left: other weights, so other bytes."""
        if self.files:
            key = list(self.files)[number % len(self.files)]
            header = unpack_file_header(self.files[key][:FILE_HEADER_BYTES])
            if header is not None and header.block.fingerprint:
                payload = (b"stale" * header.block.payload_bytes)[: header.block.payload_bytes]
                digest = digest_payload(payload, key)
                is_orphan, stored_bytes = key in self.orphans, self.stored_bytes[key]
                self.put(replace(header.block, fingerprint=bytes(16), digest=digest), payload, 0)
                self.stored_bytes[key] = stored_bytes
                self.orphans.update([key] if is_orphan else [])  # nobody's file before, and nobody's now


@dataclass(slots=True, eq=False)
class _SimWrite:
    job: TierWrite
    on_done: WriteCallback
    request: int
    before: list[bytes]  # headers of the slots
    results: list[WriteResult]
    stored_bytes: list[int]


@dataclass(slots=True, eq=False)
class _SimRead:
    job: TierRead
    on_done: ReadCallback
    before: list[bytes]  # headers of the slots
    answers: list[BroughtBlock]


class SimTier:
    """A Tier. Each one belongs to one life of its node."""

    def __init__(self, node: NodeParts, store: TierStore) -> None:
        self.name = store.name
        self._node = node
        self._store = store
        self._world = node.world
        self._life = node.life
        self._is_closed = False
        self._open: dict[int, Callable[[], None]] = {}  # by id of the job: what answers one that will not end
        self._coder = Coder()

    def start(self) -> list[TierBlock]:
        if self._store.is_unusable:
            self._store.is_unusable = False
            raise TierError("the device does not keep bytes")
        if self._store.is_shared:
            return []
        return self._store.listed()

    def write(self, job: TierWrite, on_done: WriteCallback) -> None:
        failed = (WriteResult.FAILED,) * len(job.items)
        self._open[id(job)] = partial(on_done, job.job_id, failed)
        before = [self._header(payload) for _, payload in job.items]
        self._step(self._write, _SimWrite(job, on_done, self._store.request(), before, [], []), b"")

    def read(self, job: TierRead, on_done: ReadCallback) -> None:
        count = len(job.items)
        self._open[id(job)] = partial(on_done, job.job_id, (BroughtBlock(PullResult.FAILED),) * count)
        self._step(self._read, _SimRead(job, on_done, [self._header(target) for _, target in job.items], []), False)

    def erase(self, keys: Sequence[BlockKey]) -> None:
        request = self._store.request()
        late = ERASE_SECONDS * self._world.random.random() if self._store.has("late") else 0.0
        for key in keys:
            self._world.at(late + self._store.seconds(), self._erase, key, request)

    def probe(self, keys: Sequence[BlockKey], deadline: float, on_done: ProbeCallback) -> None:
        def count() -> None:
            found = 0
            while found < len(keys) and keys[found] in self._store.files:
                found += 1
            is_wrong = self._store.has("error")
            self._node.receive(on_done, 0 if is_wrong else found, not is_wrong and found < len(keys))

        self._step(count)

    def counters(self) -> Mapping[str, int]:
        return self._coder.counters()

    def close(self) -> None:
        self._is_closed = True
        left, self._open = self._open, {}
        for answer in left.values():
            answer()

    # -- the device ----

    @property
    def _works(self) -> bool:
        return self._node.life == self._life and not self._is_closed

    def _step(self, call: Callable[..., None], *arguments: object) -> None:
        """Make the next step after the time that the device takes."""
        self._world.at(self._store.seconds(), self._go_on, call, arguments)

    def _go_on(self, call: Callable[..., None], arguments: tuple[object, ...]) -> None:
        if not self._works:
            return
        if self._store.has("hang"):
            self._step(call, *arguments)
        else:
            call(*arguments)

    def _answer(self, job: object, on_done: Callable[..., None], *arguments: object) -> None:
        if self._open.pop(id(job), None) is not None:
            self._node.receive(on_done, *arguments)

    def _erase(self, key: BlockKey, request: int) -> None:
        if self._store.has("error"):
            self._store.orphans.add(key)
        elif self._works:
            self._store.erase(key, request)

    def _write(self, write: _SimWrite, first: bytes) -> None:
        """Take one half of one payload, then the next. A file appears when both are there."""
        results = write.results
        block, payload = write.job.items[len(results)]
        self._check_slot(payload, write.before[len(results)], "writes it down")
        if not first:
            self._step(self._write, write, bytes(payload[: len(payload) // 2]))
            return
        if self._store.has("error") or self._store.has("full"):
            results.append(WriteResult.FAILED if self._store.has("error") else WriteResult.FULL)
            write.stored_bytes.append(0)
        else:
            data = first + bytes(payload[len(first) :])
            if self._store.checks_slots and digest_payload(data, block.key) != block.digest:
                raise Violation(f"{self._node.name} wrote down bytes that are not the block's")
            write.stored_bytes.append(self._store.put(block, data, write.request))
            self._world.counters["blocks_written_down"] += 1
            results.append(WriteResult.OK)
        if len(results) < len(write.job.items):
            self._step(self._write, write, b"")
        else:
            self._answer(write.job, write.on_done, write.job.job_id, tuple(results), tuple(write.stored_bytes))

    def _read(self, read: _SimRead, has_half: bool) -> None:
        """Let one half of one payload arrive in its slot, then the rest, and verify it."""
        index = len(read.answers)
        block, target = read.job.items[index]
        wanted = replace(block, payload_bytes=SCALED[block.payload_bytes])
        self._check_slot(target, read.before[index], "reads into it")
        data = self._store.files.get(block.key, b"")
        if not has_half and self._node.clock() <= read.job.deadline and data:
            half = len(target) // 2
            target[:half] = data[FILE_HEADER_BYTES:][:half].ljust(half, b"\0")
            self._step(self._read, read, True)
            return
        header = unpack_file_header(data[:FILE_HEADER_BYTES])
        if self._store.has("error") or (not has_half and data):
            answer = BroughtBlock(PullResult.FAILED)
        elif not data:
            answer = BroughtBlock(PullResult.STALE)
        elif header is None:
            answer = BroughtBlock(PullResult.CORRUPT)
        elif not is_file_of(header, wanted):
            answer = BroughtBlock(PullResult.STALE)
        else:
            answer = brought(self._coder.decode(header, memoryview(data)[FILE_HEADER_BYTES:], target), header)
        read.answers.append(answer)
        if len(read.answers) < len(read.job.items):
            self._step(self._read, read, False)
            return
        self._world.counters["blocks_brought_back"] += sum(one.result is PullResult.OK for one in read.answers)
        self._answer(read.job, read.on_done, read.job.job_id, tuple(read.answers))

    # -- slots ----

    def _header(self, payload: memoryview) -> bytes:
        return self._node.memory.header_bytes(self._slot(payload))

    def _slot(self, payload: memoryview) -> SlotIndex:
        return self._node.memory.slot_of(payload)

    def _check_slot(self, payload: memoryview, before: bytes, what: str) -> None:
        if self._store.checks_slots and self._header(payload) != before:
            raise Violation(f"slot {self._slot(payload):#x} was given away while the {self.name} tier {what}")


class SimSharedTier(SimTier):
    """A SimTier that keeps the marks of clears for nodes that hear of them from nobody else."""

    def load_marks(self) -> tuple[Mark, ...]:
        self._check_store()
        return tuple(self._store.marks)

    def keep_marks(self, marks: Sequence[Mark]) -> None:
        self._check_store()
        self._store.marks += marks

    def _check_store(self) -> None:
        if self._store.has("error"):
            raise TierError("the store does not answer")
