"""Bytes that others wrote: every parser gives a value that is valid, or its own error, and nothing else ever.

Seeded: what is damaged is mostly right, since what is wrong everywhere fails at the first check.
"""

from __future__ import annotations

import json
import random
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from kvservice.config import ServiceConfig, load_config
from kvservice.connector.scheduler.handoff import Prefill, decode_params, parse_transfer_params
from kvservice.copying import message
from kvservice.copying.message import CopyJob, CopyOutcome, CopyRow, Direction, Ended, Kind, PackedJob, PoolSource
from kvservice.core.messages import AcquireRequest, Handoff
from kvservice.core.segment.blockfile import BlockFileHeader, pack_file_header, unpack_file_header
from kvservice.core.segment.copy_runs import CopyTemplate, RegionLayout
from kvservice.core.segment.geometry import Geometry, slot_index
from kvservice.core.segment.header import SlotFlags, SlotHeader, pack_header, unpack_header
from kvservice.core.segment.layout import SlotLayout
from kvservice.core.tier.tier_block import TierBlock
from kvservice.discovery import (
    CopyWorkerRecord,
    ShardRecord,
    find_shards,
    read_copy_worker,
    write_copy_worker,
    write_record,
)
from kvservice.errors import ConfigError, InvalidRequest, KVServiceError, SegmentError, TransferError, UnsupportedLayout
from kvservice.memory.segment import Segment
from kvservice.shard.engine_calls import OF_ATTACHED, question
from kvservice.testing.unique import unique_name
from kvservice.tier.index import pack_erased, pack_head, pack_row, parse_index
from kvservice.transfer.mapped import is_here, pack_description
from kvservice.transfer.ways import pack_ways, unpack_ways
from kvservice.units import AttachmentId, BlockKey, BootEpoch, Generation, HandoffId, MiB, NodeId, SlotIndex, SpanRoute
from kvservice.wire import frames
from kvservice.wire.codec import encode_acquire
from tests.fuzz.damage import damaged

COUNT = 1200
ALLOCATED_MAX = 4 * MiB  # at once, for one input of at most 128 KiB
SLOT = SlotLayout(2, 2, 4096, 16)
GEOMETRY = Geometry(slab_bytes=1 * MiB, slab_count=2)
HEADER = SlotHeader(BootEpoch(3), Generation(4), BlockKey(bytes(range(16))), 5, SpanRoute(6), 7, 8, SlotFlags.SECONDARY)
BLOCK_FILE = BlockFileHeader(TierBlock(HEADER.key, 4096, 7, 8, SpanRoute(6), 5, bytes(16), 1.7e9), 99, "zstd")
REGION = RegionLayout(1 << 20, 4, (0, 8192), 1, 2, 16, 256, 65_536, 8192, 4096, 256)
POOL = PoolSource(1, "/dev/shm/kvservice-x", GEOMETRY, BootEpoch(3), SLOT, bytes(range(16)))
ROWS = message.pack_rows(CopyRow(i, SlotIndex(i), Generation(1), BlockKey(bytes(16))) for i in range(20))
COPIES = message.pack_copies([PackedJob(1, Direction.LOAD, ROWS), PackedJob(2, Direction.STORE, ROWS)])
DONE = message.pack_done([Ended(1, CopyOutcome.COPIED, 10), Ended(2, CopyOutcome.STALE, 0)])
HOSTILE_JSON = (
    "[" * 100_000,
    '{"a":' * 20_000,
    "1" * 5000,
    '"\\ud800"',
    "NaN",
    "1e999",
    "-0",
    "\ufeff{}",
    '{"":0}',
    "",
)
HOSTILE_VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1 << 64,
    10**4299,
    1.5,
    float("nan"),
    "",
    "\0",
    "\ud800",
    "x" * 10_000,
    [],
    [[]],
    {},
    [1] * 5000,
    {"a": {"b": []}},
    "/dev/null",
    "../../x",
)


def changed(draw: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    """Some values replaced, at any depth; keys dropped or added."""
    found = json.loads(json.dumps(fields))
    inside = [found, *(value for value in found.values() if isinstance(value, dict))]
    for _ in range(draw.choice((1, 1, 2, 4))):
        target = draw.choice(inside)
        name = draw.choice([*target, "another"])
        if draw.random() < 0.15:
            target.pop(name, None)
        else:
            target[name] = draw.choice(HOSTILE_VALUES)
    return found


def as_json(value: object) -> bytes:
    return json.dumps(value).encode()


def damaged_json(draw: random.Random, fields: dict[str, Any]) -> bytes:
    kind = draw.random()
    if kind < 0.03:
        return draw.choice(HOSTILE_JSON).encode()
    return as_json(changed(draw, fields)) if kind < 0.7 else damaged(draw, as_json(fields))


def parse_hello(data: bytes) -> CopyTemplate:
    """As a copy worker does."""
    layout = message.parse_json(data).get("layout")
    if not isinstance(layout, dict):
        raise InvalidRequest("no layout")
    return CopyTemplate(RegionLayout.of(layout), SLOT)


def parse_frames(data: bytes) -> list[object]:
    """As a shard does with what an engine sends, in two pieces: the event of each frame."""
    reader, found = frames.FrameReader(frames.REQUEST_BYTES_MAX), list[object]()
    for piece in (data[: len(data) // 2], data[len(data) // 2 :]):
        for frame in reader.feed(piece):
            frames.decode_failure(frame.body)
            if frame.kind in OF_ATTACHED:
                found.append(question(frames.FrameKind(frame.kind), frame.body, AttachmentId(1))(1))
    return found


FRAMES = frames.pack_frame(
    frames.FrameKind.ACQUIRE, 7, encode_acquire(AcquireRequest((HEADER.key,), 0, 1.0)).SerializeToString()
) + frames.pack_frame(frames.FrameKind.RELEASE, 8, trace=b"00-0-1-01")
WAYS = pack_ways({"shm": pack_description(b"-" * 36, 1, 2, MiB, Path("/dev/shm/x")), "nixl": b"an agent"})
BYTES_PARSERS: dict[str, tuple[bytes, Callable[[bytes], object]]] = {
    "header": (pack_header(HEADER), unpack_header),
    "block_file": (pack_file_header(BLOCK_FILE), unpack_file_header),
    "disk_index": (pack_head() + pack_row(BLOCK_FILE.block) + pack_erased(HEADER.key), parse_index),
    "kind": (COPIES, message.kind_of),
    "copies": (COPIES, message.parse_copies),
    "done": (DONE, lambda data: list(message.parse_done(data))),
    "ways": (WAYS, unpack_ways),
    "mapped": (unpack_ways(WAYS)["shm"], lambda data: [is_here(data)]),
    "frames": (FRAMES, parse_frames),
    "lent": (message.pack_lent(Kind.RECALL, 3, 4), message.parse_lent),
}
JSON_PARSERS: dict[str, tuple[dict[str, Any], Callable[[bytes], object]]] = {
    "pool": (json.loads(message.pack_pool(POOL)[1:]), lambda data: message.parse_pool(message.parse_json(data))),
    "hello": ({"version": 2, "layout": REGION.fields()}, parse_hello),
}


def bounded(parse: Callable[[bytes], object], data: bytes, *errors: type[Exception]) -> object:
    """The value, None for one of these errors. Fails when parsing took far more memory than the input."""
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    try:
        return parse(data)
    except errors:
        return None
    finally:
        peak = tracemalloc.get_traced_memory()[1] - before
        assert peak < ALLOCATED_MAX, f"{peak} bytes for {len(data)}: {data[:200].hex()}"


@pytest.fixture(autouse=True)
def traced() -> Iterator[None]:
    tracemalloc.start(1)
    yield
    tracemalloc.stop()


@pytest.mark.parametrize("name", BYTES_PARSERS)
def test_damaged_bytes_give_a_value_or_the_parsers_error(name: str) -> None:
    whole, parse = BYTES_PARSERS[name]
    assert parse(whole) is not None
    draw = random.Random(name)
    for index in range(COUNT):
        data = damaged(draw, whole) if index % 4 else draw.randbytes(draw.randrange(200))
        found = bounded(parse, data, InvalidRequest, TransferError)
        if name == "copies" and found is not None:
            jobs, _ = found  # type: ignore[misc]
            assert all(isinstance(job, CopyJob) for job in jobs) and sum(job.rows.nbytes for job in jobs) <= len(data)


@pytest.mark.parametrize("name", JSON_PARSERS)
def test_damaged_json_gives_a_value_or_the_parsers_error(name: str) -> None:
    whole, parse = JSON_PARSERS[name]
    assert parse(b"\x01" + as_json(whole)) is not None
    draw = random.Random(name)
    for _ in range(COUNT // 2):
        bounded(parse, b"\x01" + damaged_json(draw, whole), InvalidRequest, UnsupportedLayout)
    for text in HOSTILE_JSON:
        bounded(parse, b"\x01" + text.encode(), InvalidRequest, UnsupportedLayout)


def test_transfer_parameters_are_understood_or_refused() -> None:
    """What is understood can be sent on: the node goes into a message of the wire."""
    whole = decode_params(Handoff(HandoffId(bytes(range(16))), NodeId("n0")))
    draw = random.Random("params")
    for _ in range(COUNT):
        params = changed(draw, whole)
        try:
            found = parse_transfer_params(params if draw.random() < 0.95 else draw.choice(HOSTILE_VALUES))
        except InvalidRequest as refused:
            assert refused.message.encode()
            continue
        assert found is None or isinstance(found, Prefill | Handoff)
        if isinstance(found, Handoff):
            assert found.node_id.encode()


def test_records_of_shards_and_copy_workers_are_whole_or_absent(tmp_path: Path) -> None:
    shard = ShardRecord("s", NodeId("n"), "/tmp/none.sock", "127.0.0.1:1", 7, BootEpoch(3), ("127.0.0.1:2",))
    copy_worker = CopyWorkerRecord("s", NodeId("n"), "cpu", "/tmp/none.sock", 7)
    shard_path, copy_worker_path = write_record(shard, tmp_path), write_copy_worker(copy_worker, tmp_path)
    assert find_shards("s", tmp_path, live_only=False) == [shard]
    assert read_copy_worker(copy_worker_path) == copy_worker
    draw = random.Random("records")
    for index in range(COUNT // 6):
        shard_path.write_bytes(damaged_json(draw, asdict(shard)))
        copy_worker_path.write_bytes(damaged_json(draw, asdict(copy_worker)))
        for found in (*find_shards("s", tmp_path, live_only=index % 2 == 0), read_copy_worker(copy_worker_path)):
            if found is not None:
                assert isinstance(found.socket, str) and isinstance(found.node_id, str) and type(found.pid) is int
                assert json.dumps(asdict(found), ensure_ascii=False).encode()
    shard_path.write_bytes(b" " * (16 * MiB))
    tracemalloc.reset_peak()
    assert find_shards("s", tmp_path) == []
    assert tracemalloc.get_traced_memory()[1] < ALLOCATED_MAX, "a file of any size was read whole"


def test_a_config_file_is_a_config_or_an_error_that_says_so(tmp_path: Path) -> None:
    whole = (
        b'service = "prod"\npool_bytes = "4GiB"\nlookup_partitions = 2\nlease_seconds = 10.0\ncopy_workers = "off"\n'
    )
    hostile = [
        b"\xff\xfe",
        b'service = "\xe9"',
        b"x = " + b"[" * 50_000,
        b"pool_bytes = 1" + b"0" * 5000,
        b'pool_bytes = "1e999GiB"',
        b"lease_seconds = nan",
        b"lease_seconds = inf",
        b"[service]\na = 1",
        b'pool_bytes = "' + b"9" * 400 + b'GiB"',
        b"lookup_partitions = true",
        b"pool_bytes = 1.5",
    ]
    path, draw = tmp_path / "config.toml", random.Random("config")
    path.write_bytes(whole)
    assert load_config(path, {}).service == "prod"
    for data in [*hostile, *(damaged(draw, whole) for _ in range(COUNT // 4))]:
        path.write_bytes(data)
        try:
            assert isinstance(load_config(path, {}), ServiceConfig)
        except ConfigError as error:
            assert error.message


@pytest.fixture
def segment_file() -> Iterator[Path]:
    path = Path(f"/dev/shm/kvservice-parse{unique_name()}-n")
    yield path
    path.unlink(missing_ok=True)


def attach(path: Path) -> Segment:
    return Segment.attach(path, GEOMETRY)


def create(path: Path) -> Segment:
    return Segment.create(path, GEOMETRY, "n")


def test_a_damaged_segment_is_made_anew_refused_or_scanned(segment_file: Path) -> None:
    """Control page, slab headers and slot headers, in any state; what is found lies inside the segment."""
    made = Segment.create(segment_file, GEOMETRY, "n")
    made.assign_slab(0, SLOT.payload_bytes)
    for index in range(8):
        made.write_header(slot_index(0, index), HEADER)
    control, slab = bytes(made.buffer[:64]), GEOMETRY.slab_offset(0)
    head = bytes(made.buffer[slab : slab + 64 * 9])
    made.close()
    draw = random.Random("segment")
    for index in range(COUNT // 8):
        with segment_file.open("r+b") as file:
            file.write((damaged(draw, control) if index % 3 == 0 else control)[:64])
            file.seek(slab)
            file.write((damaged(draw, head) if index % 3 else head)[: 64 * 9])
        for opened in (
            lambda: Segment.attach(segment_file, GEOMETRY),
            lambda: Segment.create(segment_file, GEOMETRY, "n"),
        ):
            try:
                segment = opened()
            except SegmentError:
                continue
            for slot, payload_bytes, _ in segment.scan():
                assert len(segment.payload(slot, payload_bytes)) == payload_bytes
            segment.close()


@pytest.mark.parametrize("path", ["/dev/shm/a\0b", "/dev/shm/\ud800", "/dev/shm", "/dev/null", "", "/no/such/file"])
def test_what_is_no_segment_is_refused(path: str) -> None:
    with pytest.raises(KVServiceError):
        Segment.attach(Path(path), GEOMETRY)
