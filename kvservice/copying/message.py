"""The messages between an engine and its copy worker, over one Unix socket that keeps messages apart (SEQPACKET).

    engine → worker   HELLO   the engine's KV memory: JSON, with its file descriptor if the memory is a memfd
                      POOL    the segment to copy to and from: JSON
                      LEAVE   that segment is no longer used: JSON
                      COPIES  jobs, each an id, a direction and rows of (block, part, slot, generation, key): packed
                      LEND    blocks that other engines may read, as the rows of one job; DONE when they can
                      RECALL  (job id, id of the LEND): no one may read them any more; DONE when no one does
    worker → engine   ANSWER  to HELLO and POOL: JSON; `error` is null or gives the reason
                      DONE    (job id, outcome, blocks copied from engines, bytes) of every ended job: packed
                      TAKEN   (id of the LEND): a reader has read what it wanted of these blocks
                      BYE     the last message: nothing is copied for this engine any more

Packed rows over SEQPACKET and not gRPC: a descriptor must travel along, a send must never wait, and the end of the
process must show at once. Bytes from the other process are checked before use. Nothing in here can run code.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from kvservice.core.segment.geometry import Geometry
from kvservice.core.segment.layout import SlotLayout
from kvservice.errors import ConfigError, InvalidRequest, UnsupportedLayout
from kvservice.units import BlockKey, BootEpoch, Generation, SlotIndex

VERSION = 3  # of these messages; a HELLO of another version is refused by name
# what a socket takes without a change of the system's settings; a longer message is refused
MESSAGE_BYTES_MAX = 128 << 10
ROWS_MAX = 2048  # rows of one COPIES message; larger steps take several
NO_EVENT = 0xFFFF  # names no event, so an engine has at most 65,535
U64_MAX = (1 << 64) - 1  # what the formats' 64-bit fields hold
# largest size of a segment that is believed, 64 PiB; computing with it cannot overflow 64 bits
SEGMENT_BYTES_MAX = 1 << 56

# A row of a copy job. The key is a void type, because numpy's byte strings drop trailing zeros.
ROW = np.dtype([("block", "<u4"), ("part", "<u4"), ("slot", "<u8"), ("generation", "<u8"), ("key", "V16")])
_ROW = struct.Struct("<IIQQ16s")
_COPIES = struct.Struct("<BBHHH")  # kind, zero, jobs, event, zero
_JOB = struct.Struct("<QBBHI")  # id, direction, may borrow, zero, rows
_DONE = struct.Struct("<BBHI")  # kind, zero, zero, count
_ENDED = struct.Struct("<QBBHIQ")  # id, outcome, zeros, blocks copied from engines, bytes
_LENT = struct.Struct("<BBHIQQ")  # kind, zeros, job id (0: none), id of the LEND
assert ROW.itemsize == _ROW.size
# A job of ROWS_MAX rows fits one message.
assert _COPIES.size + _JOB.size + ROWS_MAX * ROW.itemsize <= MESSAGE_BYTES_MAX


class Kind(IntEnum):
    HELLO = 1
    POOL = 2
    LEAVE = 3
    COPIES = 4
    ANSWER = 5
    DONE = 6
    LEND = 7
    RECALL = 8
    BYE = 9
    TAKEN = 10


class Direction(IntEnum):
    LOAD = 0  # slot → engine
    STORE = 1  # engine → slot


class CopyOutcome(IntEnum):
    COPIED = 0
    STALE = 1  # a slot did not hold what the row says; nothing more was copied for this job
    FAILED = 2  # the copy failed
    REFUSED = 3  # a row names a block or slot that this engine does not have, or no pool is mapped


class MemoryKind(Enum):
    MEMFD = "memfd"
    CUDA_IPC = "cuda_ipc"


@dataclass(frozen=True, slots=True)
class CopyRow:
    """One block of the engine to copy. `generation` and `key` are what the slot's header must say: for a load those of
    the sealed block, for a store the reserved generation (the header of a slot that is being written has its writer in
    place of the key)."""

    block: int
    slot: SlotIndex
    generation: Generation
    key: BlockKey
    part: int = 0  # of the slot


@dataclass(frozen=True, slots=True)
class CopyJob:
    job_id: int
    direction: Direction
    rows: npt.NDArray[np.void]  # `(rows,)` of dtype ROW
    may_borrow: bool = False  # for loads: blocks that another engine lends are copied from there


@dataclass(frozen=True, slots=True)
class Ended:
    job_id: int
    outcome: CopyOutcome
    byte_count: int
    borrowed: int = 0  # blocks copied from another engine's memory


@dataclass(frozen=True, slots=True)
class PoolSource:
    """A segment as one engine uses it. `pool_id` tells the POOL messages of one engine apart."""

    pool_id: int
    segment_path: str
    geometry: Geometry
    epoch: BootEpoch
    slot: SlotLayout
    engine_id: bytes  # the engine whose slots are written; names the lock to hold


def pack_rows(rows: Iterable[CopyRow]) -> bytes:
    return b"".join(_ROW.pack(row.block, row.part, row.slot, row.generation, row.key) for row in rows)


@dataclass(frozen=True, slots=True)
class PackedJob:
    job_id: int
    direction: Direction
    rows: bytes
    may_borrow: bool = False


def pack_copies(jobs: Sequence[PackedJob], event: int = NO_EVENT, kind: Kind = Kind.COPIES) -> bytes:
    """Pack COPIES, or LEND, whose jobs' directions mean nothing."""
    parts = [_COPIES.pack(kind, 0, len(jobs), event, 0)]
    for job in jobs:
        count = len(job.rows) // ROW.itemsize
        parts += [_JOB.pack(job.job_id, job.direction, job.may_borrow, 0, count), job.rows]
    return b"".join(parts)


def pack_lent(kind: Kind, lend_id: int, job_id: int = 0) -> bytes:
    """Pack RECALL or TAKEN."""
    return _LENT.pack(kind, 0, 0, 0, job_id, lend_id)


def parse_lent(data: bytes) -> tuple[int, int]:
    """(job id, id of the LEND). Raises InvalidRequest."""
    if len(data) != _LENT.size:
        raise InvalidRequest(f"the message has {len(data)} bytes instead of {_LENT.size}")
    _, _, _, _, job_id, lend_id = _LENT.unpack(data)
    return job_id, lend_id


def parse_copies(data: bytes) -> tuple[list[CopyJob], int]:
    """(jobs, number of the event to wait for or NO_EVENT). Raises InvalidRequest."""
    try:
        _, _, count, event, _ = _COPIES.unpack_from(data)
        jobs, at = [], _COPIES.size
        for _ in range(count):
            job_id, direction, may_borrow, _, rows = _JOB.unpack_from(data, at)
            at += _JOB.size
            jobs.append(CopyJob(job_id, Direction(direction), np.frombuffer(data, ROW, rows, at), bool(may_borrow)))
            at += rows * ROW.itemsize
    except (struct.error, ValueError) as error:
        raise InvalidRequest(f"a COPIES message is malformed: {error}") from error
    if at != len(data):
        raise InvalidRequest(f"a COPIES message has {len(data) - at} bytes too many")
    return jobs, event


def pack_done(ended: Sequence[Ended]) -> bytes:
    parts = [_DONE.pack(Kind.DONE, 0, 0, len(ended))]
    parts += [_ENDED.pack(one.job_id, one.outcome, 0, 0, one.borrowed, one.byte_count) for one in ended]
    return b"".join(parts)


def parse_done(data: bytes) -> Iterator[Ended]:
    """Raises InvalidRequest."""
    try:
        _, _, _, count = _DONE.unpack_from(data)
        for index in range(count):
            job_id, outcome, _, _, borrowed, size = _ENDED.unpack_from(data, _DONE.size + index * _ENDED.size)
            yield Ended(job_id, CopyOutcome(outcome), size, borrowed)
    except (struct.error, ValueError) as error:
        raise InvalidRequest(f"a DONE message is malformed: {error}") from error


def pack_json(kind: Kind, fields: dict[str, Any]) -> bytes:
    return bytes([kind]) + json.dumps(fields).encode()


def parse_json(data: bytes) -> dict[str, Any]:
    """Raises InvalidRequest."""
    try:
        fields = json.loads(data[1:])
    # RecursionError comes from JSON that is nested a thousand levels deep
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise InvalidRequest("not a JSON object")
    return fields


def kind_of(data: bytes) -> Kind:
    """Raises InvalidRequest."""
    try:
        return Kind(data[0])
    except (IndexError, ValueError) as error:
        raise InvalidRequest("the message has an unknown kind") from error


def number(fields: dict[str, Any], name: str) -> int:
    """Raises InvalidRequest."""
    value = fields.get(name)
    if type(value) is not int or not 0 <= value <= U64_MAX:
        raise InvalidRequest(f"{name} must be a whole number of 64 bits, not {_shown(value)}")
    return value


def text(fields: dict[str, Any], name: str) -> str:
    """Raises InvalidRequest."""
    value = fields.get(name)
    if not isinstance(value, str) or "\0" in value or not _is_unicode(value):  # the text may become a path
        raise InvalidRequest(f"{name} must be text, not {_shown(value)}")
    return value


def _shown(value: object) -> str:
    return ascii(value)[:80] if isinstance(value, str | float | bool | None) else type(value).__name__


def _is_unicode(value: str) -> bool:
    """JSON can write halves of surrogate pairs, which nothing else accepts."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def pack_pool(pool: PoolSource) -> bytes:
    fields = {
        "pool_id": pool.pool_id,
        "segment_path": pool.segment_path,
        "slab_bytes": pool.geometry.slab_bytes,
        "slab_count": pool.geometry.slab_count,
        "epoch": pool.epoch,
        "layer_count": pool.slot.layer_count,
        "kv_head_count": pool.slot.kv_head_count,
        "cell_bytes": pool.slot.cell_bytes,
        "block_tokens": pool.slot.block_tokens,
        "parts": pool.slot.parts,
        "engine_id": pool.engine_id.hex(),
    }
    return pack_json(Kind.POOL, fields)


def _engine_id(fields: dict[str, Any]) -> bytes:
    try:
        return bytes.fromhex(text(fields, "engine_id"))
    except ValueError as error:
        raise InvalidRequest("engine_id is not hexadecimal") from error


def parse_pool(fields: dict[str, Any]) -> PoolSource:
    """Raises InvalidRequest."""
    try:
        slot = SlotLayout(
            layer_count=number(fields, "layer_count"),
            kv_head_count=number(fields, "kv_head_count"),
            cell_bytes=number(fields, "cell_bytes"),
            block_tokens=number(fields, "block_tokens"),
            parts=number(fields, "parts"),
        )
        geometry = Geometry(slab_bytes=number(fields, "slab_bytes"), slab_count=number(fields, "slab_count"))
    except (UnsupportedLayout, ConfigError) as error:
        raise InvalidRequest(error.message) from error
    if geometry.segment_bytes > SEGMENT_BYTES_MAX or geometry.slots_per_slab(slot.payload_bytes) == 0:
        raise InvalidRequest(f"a slab of {geometry.slab_bytes} bytes is too small for a block of {slot.payload_bytes}")
    return PoolSource(
        number(fields, "pool_id"),
        text(fields, "segment_path"),
        geometry,
        BootEpoch(number(fields, "epoch")),
        slot,
        _engine_id(fields),
    )
