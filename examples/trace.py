"""One trace of a remote hit, printed as a tree of spans: engine, lookup partition and both shards.

    python -m examples.trace

It runs a lookup partition and the cache shards of two nodes as real processes, with traces on. This process plays two
engines, with the connector's own connection to a shard: the first stores a prompt, the second asks for it. All
processes append their spans to one file. It needs no model and no collector, and leaves nothing behind.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from kvservice.client.shard import ShardClient
from kvservice.core.block.fingerprint import Fingerprint
from kvservice.core.block.keys import block_keys, chain_hashes, span_route
from kvservice.core.messages import AcquireRequest, Attachment, EngineSpec, SealItem
from kvservice.core.segment.layout import SlotLayout
from kvservice.memory.segment import Segment
from kvservice.observe import tracing
from kvservice.session.session import Session
from kvservice.testing.cluster import LocalCluster
from kvservice.units import BlockKey, MiB

BLOCKS, LAYOUT = 32, SlotLayout(layer_count=16, kv_head_count=4, cell_bytes=4096, block_tokens=16)
FINGERPRINT = Fingerprint.of({"model": "demo", "dtype": "bfloat16"})
WAIT_SECONDS = 60.0  # for a shard to answer: far more than it takes, also on a busy machine


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "spans.jsonl"
        where = f"file:{path}"
        tracing.start(where, "kvservice-engine")
        with LocalCluster(2, 1, pool_bytes=16 * MiB, environment={"KVSERVICE_TRACES": where}) as cluster:
            keys = tuple(block_keys(FINGERPRINT.digest, chain_hashes(list(range(BLOCKS * 16)), 16)))
            with engine(cluster.socket("n0")) as (session, attachment):
                store(session, attachment, keys)
                cluster.wait_until_known(keys)
            with engine(cluster.socket("n1")) as (session, _):
                session.acquire("chat-1", AcquireRequest(keys, 0, WAIT_SECONDS, request_id="chat-1"))
                session.wait_for_answer(WAIT_SECONDS)
                (answer,) = session.answers()
        tracing.stop()
        assert answer.result is not None and answer.result.fetched_count == BLOCKS, "the blocks did not come"
        print("\n".join(tree([json.loads(line) for line in path.read_text().splitlines()])))


@contextmanager
def engine(socket: str) -> Iterator[tuple[Session, Attachment]]:
    """An engine at this shard, with slots in stock."""

    async def open_pool() -> ShardClient:
        return ShardClient(socket)

    session = Session(open_pool, EngineSpec(os.urandom(16), "demo", FINGERPRINT, LAYOUT), lambda: True, BLOCKS)
    session.start(WAIT_SECONDS)
    try:
        assert session.attachment is not None, "the shard refused the engine"
        yield session, session.attachment
    finally:
        session.close()


def store(session: Session, attachment: Attachment, keys: tuple[BlockKey, ...]) -> None:
    """Write the blocks into slots of the shard's memory and have them sealed."""
    refs = []
    while len(refs) < len(keys):  # the session reserves them on a thread of its own
        refs += session.take_slots(attachment.attachment_id, len(keys) - len(refs))
    segment = Segment.attach(Path(attachment.segment_path), attachment.geometry)
    items = []
    for number, ref in enumerate(refs):
        segment.payload(ref.slot, LAYOUT.payload_bytes)[:] = os.urandom(LAYOUT.payload_bytes)
        parent = keys[number - 1] if number else None
        items.append(SealItem(ref, keys[number], parent, number, span_route(keys, number)))
    segment.close()
    session.seal(attachment.attachment_id, items)


def tree(spans: list[dict[str, Any]]) -> Iterator[str]:
    """The lines of all traces: each span below its parent, in the order of their beginning."""
    by_parent: dict[str | None, list[dict[str, Any]]] = {}
    for span in sorted(spans, key=lambda span: str(span["start_time"])):
        by_parent.setdefault(span["parent_id"], []).append(span)

    def lines(parent: str | None, depth: int) -> Iterator[str]:
        for span in by_parent.get(parent, []):
            yield line(span, depth)
            yield from lines(span["context"]["span_id"], depth + 1)

    yield from lines(None, 0)


def line(span: dict[str, Any], depth: int) -> str:
    began, ended = (datetime.fromisoformat(span[name].replace("Z", "+00:00")) for name in ("start_time", "end_time"))
    process = span["resource"]["attributes"]
    where = " ".join(str(process[name]) for name in ("service.name", "kvservice.node") if name in process)
    said = " ".join(f"{name.removeprefix('kvservice.')}={value}" for name, value in span["attributes"].items())
    title = "  " * depth + span["name"].removeprefix("kvservice.")
    return f"{title:<30} {(ended - began).total_seconds() * 1e3:>8.1f} ms  {where:<20}  {said}".rstrip()


if __name__ == "__main__":
    main()
