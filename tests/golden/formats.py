"""One example of every format that lies in shared memory or in a file, or that travels on a socket without protobuf."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvservice import discovery
from kvservice.auth.tenants import dump_tenants, parse_tenants
from kvservice.connector.scheduler.handoff import decode_params
from kvservice.copying import message as link
from kvservice.core.block.engine_names import pack_names
from kvservice.core.block.marks import Mark, MarkKind, pack_marks
from kvservice.core.directory.mirror import MirrorEvent, MirrorWriter, mirror_bytes
from kvservice.core.messages import Handoff
from kvservice.core.segment.blockfile import BlockFileHeader, pack_file_header
from kvservice.core.segment.geometry import Geometry
from kvservice.core.segment.header import SlotFlags, SlotHeader, pack_header
from kvservice.core.segment.layout import SlotLayout
from kvservice.core.tier.tier_block import TierBlock
from kvservice.errors import Exhausted
from kvservice.memory.segment import Segment
from kvservice.testing.builders import make_chain, make_holder
from kvservice.tier.index import pack_erased, pack_head, pack_row
from kvservice.transfer.mapped import pack_description
from kvservice.transfer.ways import pack_ways
from kvservice.units import BlockKey, BootEpoch, Generation, HandoffId, MiB, NodeId, SlotIndex, SpanRoute
from kvservice.wire.frames import NO_CALL, REFUSED, encode_failure, pack_frame
from kvservice.wire.frames import FrameKind as FrameKind

KEY = BlockKey(bytes(range(16)))
GEOMETRY = Geometry(slab_bytes=MiB, slab_count=2)
SLOT = SlotLayout(layer_count=4, kv_head_count=2, cell_bytes=8192, block_tokens=16)
HEADER = SlotHeader(
    epoch=BootEpoch(7),
    generation=Generation(4),
    key=KEY,
    length=65_536,
    route=SpanRoute(0x01020304),
    digest=0x1122334455667788,
    position=9,
    flags=SlotFlags(1),
    account_tag=5,
)


def segment() -> bytes:
    """The control page up to its checksum, then the header of the first slab."""
    with tempfile.TemporaryDirectory() as folder:
        made = Segment.create(Path(folder, "segment"), GEOMETRY, "n0", epoch_floor=7)
        made.assign_slab(0, SLOT.payload_bytes)
        slab = GEOMETRY.slab_offset(0)
        found = bytes(made.buffer[:64]) + bytes(made.buffer[slab : slab + 64])
        made.close()
        return found


def slot_header() -> bytes:
    return pack_header(HEADER)


def block_file() -> bytes:
    """The header of a block's file without the blanks that fill it up."""
    block = TierBlock(KEY, 65_536, 0x1122334455667788, 9, SpanRoute(0x01020304), 5, bytes(range(16, 32)), 1.7e9)
    header = BlockFileHeader(block, 40_000, "zstd", "tenant/search", bytes(range(12)))
    return pack_file_header(header).rstrip(b" ")


def disk_index() -> bytes:
    """The head, a block that was written, and a key that was erased."""
    block = TierBlock(KEY, 65_536, 0x1122334455667788, 9, SpanRoute(0x01020304), 5, bytes(range(16, 32)), 1.7e9, 40_000)
    return pack_head() + pack_row(block) + pack_erased(KEY)


def marks() -> bytes:
    return pack_marks([Mark(MarkKind.MODEL, 1.5e9, "model"), Mark(MarkKind.PROMPT, 1.6e9, keys=(KEY,))])


def engine_names() -> bytes:
    return pack_names({bytes(range(16, 32)): frozenset({("prod", "model"), ("", "model")})})


def mirror() -> bytes:
    """Head, feeds, the first nodes and sets; then the rows of the table that are not empty. Zeros are left out."""
    memory = memoryview(bytearray(mirror_bytes(64)))
    writer = MirrorWriter(memory, 2, epoch=7)
    writer.allow_rows(64)
    chain = make_chain(3)
    for name in ("n0", "n1"):
        added = b"".join(chain[: 3 if name == "n0" else 2])
        writer.apply(0, MirrorEvent(make_holder(name, 3), added, reset=True), now=5.0)
    writer.apply(0, MirrorEvent(snapshot_end=True), now=6.0)
    return _without_zeros(bytes(memory))


def _without_zeros(data: bytes) -> bytes:
    """Every line of 16 bytes that is not all zeros, behind its place as eight bytes."""
    lines = np.frombuffer(data, np.uint8).reshape(-1, 16)
    kept = np.flatnonzero(lines.any(axis=1))
    return b"".join(int(index * 16).to_bytes(8, "big") + lines[index].tobytes() for index in kept)


def epoch_file() -> bytes:
    return _written(lambda root: discovery.keep_epoch(root, BootEpoch(7)), discovery.EPOCH_NAME)


def shard_record() -> bytes:
    record = discovery.ShardRecord(
        "kvservice",
        NodeId("n0"),
        "/run/kvservice/kvservice/n0/shard.sock",
        "10.0.0.1:7500",
        42,
        BootEpoch(7),
        ("10.0.0.1:7400", "10.0.0.2:7400"),
        "/etc/kvservice/tls",
    )
    return _written(lambda root: discovery.write_record(record, root), f"kvservice/n0/{discovery.RECORD_NAME}")


def copy_worker_record() -> bytes:
    record = discovery.CopyWorkerRecord("kvservice", NodeId("n0"), "cpu", "/run/kvservice/kvservice/n0/copy.sock", 42)
    with tempfile.TemporaryDirectory() as folder:
        return discovery.write_copy_worker(record, Path(folder)).read_bytes()


def _written(write: Callable[[Path], object], name: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        return Path(folder, name).read_bytes()


def tenants_file() -> bytes:
    row = {
        "name": "search",
        "tokens": ["11" * 32],
        "secret": "22" * 32,
        "quota": "50%",
        "in_flight": 8,
        "public": "read",
        "admin": False,
    }
    return dump_tenants(parse_tenants({"version": 1, "public_secret": "33" * 32, "tenants": [row]})).encode()


def frames() -> bytes:
    """A question with its trace, a refusal, and what has no body."""
    trace = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    asked = pack_frame(FrameKind.ACQUIRE, 7, b"body", trace=trace)
    refused = pack_frame(FrameKind.RESERVE, 8, encode_failure(Exhausted("full", free="0")), REFUSED)
    return asked + refused + pack_frame(FrameKind.HEARTBEAT, NO_CALL)


def frame_kinds() -> bytes:
    return "\n".join(f"{kind.value} {kind.name}" for kind in FrameKind).encode()


def handoff_params() -> bytes:
    return json.dumps(decode_params(Handoff(HandoffId(KEY), NodeId("n0"))), sort_keys=True).encode()


def peer_ways() -> bytes:
    """What a shard that peers can map, or read by NIXL, says of itself in a handshake."""
    machine, path = b"01234567-89ab-cdef-0123-456789abcdef", Path("/dev/shm/kvservice-kvservice-n0")
    return pack_ways({"shm": pack_description(machine, 26, 7, GEOMETRY.segment_bytes, path), "nixl": b"an agent"})


def link_messages() -> dict[str, bytes]:
    row = link.CopyRow(3, SlotIndex(17), Generation(5), KEY)
    rows = link.pack_rows([row])
    pool = link.PoolSource(1, "/dev/shm/kvservice-kvservice-n0", GEOMETRY, BootEpoch(7), SLOT, KEY)
    jobs = [link.PackedJob(9, link.Direction.STORE, rows, True), link.PackedJob(10, link.Direction.LOAD, rows)]
    return {
        "link_pool": link.pack_pool(pool),
        "link_leave": link.pack_json(link.Kind.LEAVE, {}),
        "link_copies": link.pack_copies(jobs, event=2),
        "link_lend": link.pack_copies(jobs[:1], kind=link.Kind.LEND),
        "link_recall": link.pack_lent(link.Kind.RECALL, 9, 11),
        "link_taken": link.pack_lent(link.Kind.TAKEN, 9),
        "link_done": link.pack_done([link.Ended(9, link.CopyOutcome.COPIED, 65_536, 1)]),
        "link_bye": link.pack_json(link.Kind.BYE, {}),
    }


FORMATS: dict[str, Callable[[], bytes]] = {
    **{
        made.__name__: made
        for made in (
            segment,
            slot_header,
            block_file,
            disk_index,
            marks,
            engine_names,
            mirror,
            epoch_file,
            shard_record,
            copy_worker_record,
            tenants_file,
            handoff_params,
            peer_ways,
            frames,
            frame_kinds,
        )
    },
    **{name: (lambda data=data: data) for name, data in link_messages().items()},  # type: ignore[misc]
}
