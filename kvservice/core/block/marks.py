"""Marks: what was cleared, and when. A block that was stored before a mark that covers it is never served again. Pure.

Shards keep marks so that a block from before cannot come back: from a node that was not reached, from a tier, or from
memory that a restart finds. What is not known of a block counts against it: one whose model nobody knows goes with
every clear of a model. Times are of the clock of the wall, because marks and blocks cross nodes.

    file of marks   offset  size  field
                         0     8  magic       "KVSMARKS"
                         8     4  version     1
                        12     4  count       of marks
                        16        marks, one after the other:
                                  1  kind     0 everything, 1 namespace, 2 tenant, 3 model, 4 prompt
                                  8  at       seconds since 1970, a double
                                  2  length   of the name in bytes, then the name in UTF-8
                                  4  keys     their number, then the keys of 16 bytes
                       end     4  crc         crc32 of everything before it

All numbers are little endian.
"""

from __future__ import annotations

import functools
import itertools
import math
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from kvservice.core.block.keys import KEY_BYTES, KEYS_PER_REQUEST_MAX
from kvservice.core.block.tenants import NOBODY
from kvservice.errors import InvalidRequest
from kvservice.units import NAME_CHARS_MAX, BlockKey

MARKS_MAX = 1024  # with more, the oldest become one that covers everything before it: in doubt a miss
MARKED_KEYS_MAX = 65_536  # of all prompts together, a MiB; with more, as above
# After this a mark is forgotten. A tier adopts no older blocks, so nothing from before a mark outlives it.
MARK_SECONDS = 30 * 86_400.0
# Clocks of nodes may differ by this. A block that another node stored so long after a mark still counts as before it.
CLOCK_SKEW_SECONDS = 5.0
NAMESPACES_MAX = 1024  # whose parts are remembered, for speed; more than engines of one node have
FUTURE_SECONDS_MAX = 300.0  # a mark from further in the future has a wrong clock and is refused

MARKS_MAGIC, MARKS_VERSION = b"KVSMARKS", 1
_HEAD, _MARK, _COUNT, _CRC = struct.Struct("<8sII"), struct.Struct("<BdH"), struct.Struct("<I"), struct.Struct("<I")


class MarkKind(Enum):
    EVERYTHING = "everything"
    NAMESPACE = "namespace"
    TENANT = "tenant"
    MODEL = "model"
    PROMPT = "prompt"


_KINDS = tuple(MarkKind)  # their numbers in a file


@dataclass(frozen=True, slots=True)
class Mark:
    """What was cleared at `at`: the blocks of a namespace, tenant or model of this name, or of these keys."""

    kind: MarkKind
    at: float  # seconds since 1970, on the clock of whoever cleared
    name: str = ""
    keys: tuple[BlockKey, ...] = ()

    @property
    def scope(self) -> tuple[MarkKind, str, tuple[BlockKey, ...]]:
        """Two marks with the same scope are one, and the later time counts."""
        return self.kind, self.name, self.keys


@dataclass(frozen=True, slots=True)
class BlockScopes:
    """What a block can be cleared by."""

    key: BlockKey
    account: str  # its tenant; NOBODY: not known, or there are none
    names: frozenset[tuple[str, str]] | None  # (namespace, model) of its engines; None: not known


def check_mark(mark: Mark) -> Mark:
    """The same mark. Raises InvalidRequest for one that says nothing, or too much."""
    if not math.isfinite(mark.at) or mark.at < 0:
        raise InvalidRequest(f"a mark is of a time, not of {mark.at}")
    if (mark.kind is MarkKind.PROMPT) != bool(mark.keys) or len(mark.keys) > KEYS_PER_REQUEST_MAX:
        raise InvalidRequest(f"a prompt that is cleared has 1 to {KEYS_PER_REQUEST_MAX} keys, and nothing else has any")
    if any(len(key) != KEY_BYTES for key in mark.keys):
        raise InvalidRequest(f"a block key is {KEY_BYTES} bytes")
    needs_name = mark.kind in (MarkKind.TENANT, MarkKind.MODEL)
    if (needs_name and not mark.name) or len(mark.name) > NAME_CHARS_MAX:
        raise InvalidRequest(f"a {mark.kind.value} that is cleared has a name of 1 to {NAME_CHARS_MAX} characters")
    if mark.name and mark.kind in (MarkKind.PROMPT, MarkKind.EVERYTHING):
        raise InvalidRequest(f"a mark of a {mark.kind.value} has no name")
    return mark


def covers(mark: Mark, block: BlockScopes) -> bool:
    """Whether the block may belong to what was cleared. Its age is not looked at."""
    match mark.kind:
        case MarkKind.EVERYTHING:
            return True
        case MarkKind.TENANT:
            return block.account in (mark.name, NOBODY)
        case MarkKind.PROMPT:
            return block.key in mark.keys
        case MarkKind.NAMESPACE:
            return block.names is None or any(mark.name in _up_from(namespace) for namespace, _ in block.names)
        case _:
            return block.names is None or any(model == mark.name for _, model in block.names)


@functools.lru_cache(maxsize=NAMESPACES_MAX)
def _up_from(namespace: str) -> tuple[str, ...]:
    """The namespace and those above it, `a/b` and `a`, or `/b` and none: an engine of several ranks or kinds of pages
    has some of its blocks in namespaces below its own."""
    return tuple(itertools.accumulate(namespace.split("/"), lambda above, part: f"{above}/{part}"))


def without_repeated(marks: Sequence[Mark]) -> list[Mark]:
    """The marks but for those that a later one repeats, of the same scope or of everything: later also if clocks
    differ."""
    latest: dict[tuple[MarkKind, str, tuple[BlockKey, ...]], float] = {}
    for mark in marks:
        latest[mark.scope] = max(latest.get(mark.scope, 0.0), mark.at)
    everything = latest.get((MarkKind.EVERYTHING, "", ()), 0.0)
    return [mark for mark in marks if max(latest[mark.scope], everything) < mark.at + CLOCK_SKEW_SECONDS]


class Marks:
    """The marks of one shard. Looking one up for a block takes as long with one mark as with all."""

    def __init__(self) -> None:
        self._marks: dict[tuple[MarkKind, str, tuple[BlockKey, ...]], Mark] = {}
        self._by_name: dict[tuple[MarkKind, str], float] = {}
        self._by_key: dict[BlockKey, float] = {}
        self._latest: dict[MarkKind, float] = {}  # for blocks of which nothing else is known

    def __len__(self) -> int:
        return len(self._marks)

    def all(self) -> tuple[Mark, ...]:
        """The oldest first."""
        return tuple(sorted(self._marks.values(), key=lambda mark: (mark.at, mark.kind.value, mark.name, mark.keys)))

    def add(self, marks: Iterable[Mark]) -> None:
        """Take over marks, as check_mark lets them through."""
        for mark in marks:
            known = self._marks.get(mark.scope)
            if known is None or known.at < mark.at:
                self._marks[mark.scope] = mark
                self._index(mark)
        keys = sum(len(mark.keys) for mark in self._marks.values())
        if len(self._marks) > MARKS_MAX or keys > MARKED_KEYS_MAX:
            self._merge_oldest(keys)

    def expire(self, wall: float) -> None:
        """Forget marks that are older than MARK_SECONDS."""
        kept = [mark for mark in self._marks.values() if mark.at + MARK_SECONDS > wall]
        if len(kept) < len(self._marks):
            self._replace(kept)

    def cleared_at(self, block: BlockScopes) -> float:
        """The time of the latest mark that covers the block; 0 = none does."""
        if not self._marks:
            return 0.0
        times = [self._latest.get(MarkKind.EVERYTHING, 0.0), self._by_key.get(block.key, 0.0)]
        if block.account == NOBODY:
            times.append(self._latest.get(MarkKind.TENANT, 0.0))
        else:
            times.append(self._by_name.get((MarkKind.TENANT, block.account), 0.0))
        if block.names is None:
            times += [self._latest.get(MarkKind.NAMESPACE, 0.0), self._latest.get(MarkKind.MODEL, 0.0)]
        else:
            for namespace, model in block.names:
                times += [self._by_name.get((MarkKind.NAMESPACE, name), 0.0) for name in _up_from(namespace)]
                times.append(self._by_name.get((MarkKind.MODEL, model), 0.0))
        return max(times)

    # -- inside ----

    def _index(self, mark: Mark) -> None:
        self._latest[mark.kind] = max(self._latest.get(mark.kind, 0.0), mark.at)
        name = (mark.kind, mark.name)
        self._by_name[name] = max(self._by_name.get(name, 0.0), mark.at)
        for key in mark.keys:
            self._by_key[key] = max(self._by_key.get(key, 0.0), mark.at)

    def _replace(self, marks: Iterable[Mark]) -> None:
        self._marks, self._by_name, self._by_key, self._latest = {}, {}, {}, {}
        for mark in marks:
            self._marks[mark.scope] = mark
            self._index(mark)

    def _merge_oldest(self, keys: int) -> None:
        """Make one mark of the oldest, which covers everything stored before the latest of them."""
        kept = list(self.all())
        until = 0.0
        while len(kept) >= MARKS_MAX or keys > MARKED_KEYS_MAX:
            oldest = kept.pop(0)
            keys -= len(oldest.keys)
            until = oldest.at
        self._replace([mark for mark in kept if mark.kind is not MarkKind.EVERYTHING or mark.at > until])
        self.add([Mark(MarkKind.EVERYTHING, until)])


def pack_marks(marks: Sequence[Mark]) -> bytes:
    parts = [_HEAD.pack(MARKS_MAGIC, MARKS_VERSION, len(marks))]
    for mark in marks:
        name = mark.name.encode()
        parts.append(_MARK.pack(_KINDS.index(mark.kind), mark.at, len(name)) + name)
        parts.append(_COUNT.pack(len(mark.keys)) + b"".join(mark.keys))
    body = b"".join(parts)
    return body + _CRC.pack(zlib.crc32(body))


def unpack_marks(data: bytes) -> tuple[Mark, ...] | None:
    """The marks of a file; None when it is damaged or of another version. Then everything may have been cleared."""
    if len(data) < _HEAD.size + _CRC.size or _CRC.unpack(data[-_CRC.size :])[0] != zlib.crc32(data[: -_CRC.size]):
        return None
    magic, version, count = _HEAD.unpack_from(data)
    if magic != MARKS_MAGIC or version != MARKS_VERSION or count > MARKS_MAX:
        return None
    found: list[Mark] = []
    body, place = data[: -_CRC.size], _HEAD.size
    try:
        for _ in range(count):
            kind, at, length = _MARK.unpack_from(body, place)
            place += _MARK.size
            name = body[place : place + length].decode()
            (keys,) = _COUNT.unpack_from(body, place + length)
            place += length + _COUNT.size
            packed = body[place : place + keys * KEY_BYTES]
            place += keys * KEY_BYTES
            split = tuple(BlockKey(packed[i : i + KEY_BYTES]) for i in range(0, len(packed), KEY_BYTES))
            found.append(check_mark(Mark(_KINDS[kind], at, name, split)))
    except (struct.error, UnicodeDecodeError, IndexError, InvalidRequest):
        return None
    return tuple(found) if place == len(body) else None
