"""`kvservice demo`: one remote hit, seen in seconds. It needs no engine, no Ray and no model.

One lookup partition and the cache shards of two nodes run as real processes on this machine. This process plays two
engines. The engine at the first node stores the blocks of a prompt; the engine at the second node asks for the same
prompt, twice. The bytes come from a seed, so that each can be checked. However the demo ends, all is removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import typer

from kvservice.cli.output import drop_output
from kvservice.errors import KVServiceError, Unavailable
from kvservice.units import KiB, MiB, format_bytes

BLOCKS, BLOCK_TOKENS = 32, 16  # 8 MiB in all: enough to see what moving them costs
LAYERS, HEADS, CELL_BYTES = 16, 4, 4 * KiB  # a head of a layer: 16 tokens, K and V, 64 numbers of 2 bytes
BLOCK_BYTES = LAYERS * HEADS * CELL_BYTES  # 256 KiB
POOL_BYTES = 16 * MiB  # of each node; two fit into the 64 MiB of shared memory that a container has
ACQUIRE_SECONDS = 10.0  # far more than it takes, also on a busy machine; then the answer is what is there
TRANSPORTS = {"nixl": "NIXL", "shm": "shared memory"}
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run() -> None:
    """Run the demo; blocks for some seconds. Raises KVServiceError if a step fails, SystemExit after a signal.
    Everything that was started is removed by then."""
    from kvservice.testing.cluster import LocalCluster
    from kvservice.testing.eventually import NotInTime

    started, stops = time.perf_counter(), _Stops()
    try:
        with LocalCluster(nodes=2, lookup_partitions=1, pool_bytes=POOL_BYTES) as cluster:
            _say(
                "started", "a lookup partition, and the cache shards of nodes n0 and n1; this process plays the engines"
            )
            asyncio.run(_play(cluster))
    except BaseException as error:
        if stops.signal is None:
            if isinstance(error, OSError | NotInTime):  # also if a process does not start
                raise Unavailable(f"the demo failed: {error}") from error
            raise
    # Not by the exception: what a stopped shard answers may replace it, and Python drops one raised within an import.
    if stops.signal is not None:
        _say("stopped", "everything that was started is removed")
        raise SystemExit(128 + stops.signal)
    _say("removed", f"all processes, sockets and shared memory; took {time.perf_counter() - started:.1f} s")
    _say("next", "`kvservice up --no-ray` runs one node for engines and programs; docs/start/one-machine.md goes on")


async def _play(cluster: Any) -> None:
    import numpy as np

    from kvservice.core.block.fingerprint import Fingerprint
    from kvservice.core.block.keys import block_keys, chain_hashes

    random, fingerprint = np.random.default_rng(13), Fingerprint.of({"model": "demo", "dtype": "bfloat16"})
    tokens = random.integers(0, 50_000, BLOCKS * BLOCK_TOKENS).tolist()
    keys = tuple(block_keys(fingerprint.digest, chain_hashes(tokens, BLOCK_TOKENS)))
    payloads = [random.bytes(BLOCK_BYTES) for _ in keys]
    here, there = cluster.nodes
    async with (
        _engine(cluster.socket(here), fingerprint) as writer,
        _engine(cluster.socket(there), fingerprint) as reader,
    ):
        took = await _store(keys, payloads, *writer)
        _say("stored", f"a prompt at {here}: {BLOCKS} blocks, {format_bytes(BLOCKS * BLOCK_BYTES)}, in {took:.1f} ms")
        cluster.wait_until_known(keys)
        for turn, wanted in (("first", BLOCKS), ("second", 0)):
            before = cluster.stats(there).counters.get("fetched_bytes", 0)
            fetched, milliseconds = await _hit(keys, payloads, *reader)
            stats = cluster.stats(there)
            moved = stats.counters.get("fetched_bytes", 0) - before
            by = " or ".join(TRANSPORTS[way] for way in stats.transport.split("+"))
            way = f"{format_bytes(moved)} from {here} by {by}" if moved else "nothing moved"
            hit = f"the same prompt at {there} hits {BLOCKS} of {BLOCKS} blocks in {milliseconds:.1f} ms"
            _say(turn, f"{hit}; {way}; every byte is as stored")
            if (fetched, moved) != (wanted, wanted * BLOCK_BYTES):
                raise KVServiceError(f"{wanted} blocks should have come from {here}")


@contextlib.asynccontextmanager
async def _engine(socket: str, fingerprint: Any) -> AsyncIterator[tuple[Any, Any, Any]]:
    """Do what a connector does for its engine: attach to the shard of its node and map the shard's memory. Yields the
    pool, the attachment and the memory."""
    from kvservice.client.shard import ShardClient
    from kvservice.core.messages import EngineSpec
    from kvservice.core.segment.layout import SlotLayout
    from kvservice.memory.liveness import hold
    from kvservice.memory.segment import Segment

    pool = ShardClient(socket)
    spec = EngineSpec(os.urandom(16), "demo", fingerprint, SlotLayout(LAYERS, HEADS, CELL_BYTES, BLOCK_TOKENS))
    attachment = await pool.attach(spec, lambda reason: None)  # after a loss the next call raises
    segment = Segment.attach(Path(attachment.segment_path), attachment.geometry)
    lock = hold(segment, spec.engine_id, attachment.epoch)
    try:
        yield pool, attachment.attachment_id, segment
    finally:
        await pool.close()
        lock.release()
        segment.close()


async def _store(keys: Sequence[Any], payloads: Sequence[bytes], pool: Any, attachment: Any, segment: Any) -> float:
    """Store the blocks. Returns the milliseconds that it took."""
    from kvservice.core.block.keys import span_route
    from kvservice.core.messages import SealItem, SealStatus

    started, items = time.perf_counter(), []
    for number, ref in enumerate(await pool.reserve(attachment, len(keys))):
        segment.payload(ref.slot, BLOCK_BYTES)[:] = payloads[number]
        parent = keys[number - 1] if number else None
        items.append(SealItem(ref, keys[number], parent, number, span_route(keys, number)))
    if await pool.seal(attachment, items) != [SealStatus.SEALED] * len(keys):
        raise KVServiceError("the first node did not store all blocks")
    return (time.perf_counter() - started) * 1000


async def _hit(
    keys: tuple[Any, ...], payloads: Sequence[bytes], pool: Any, attachment: Any, segment: Any
) -> tuple[int, float]:
    """Acquire the prompt and compare every byte. Returns how many blocks were fetched, and milliseconds until the
    answer."""
    from kvservice.core.messages import AcquireRequest

    started = time.perf_counter()
    result = await pool.acquire(attachment, AcquireRequest(keys, 0, ACQUIRE_SECONDS))
    milliseconds = (time.perf_counter() - started) * 1000
    if len(result.blocks) != len(keys):
        raise KVServiceError(f"only {len(result.blocks)} of {len(keys)} blocks were found: {result.miss.value}")
    if [segment.payload(ref.slot, BLOCK_BYTES) for ref in result.blocks] != list(payloads):
        raise KVServiceError("a block has other bytes than those that were stored")
    await pool.release(attachment, [result.lease_id])
    return result.fetched_count, milliseconds


class _Stops:
    """Lets Ctrl-C, SIGTERM or a closed terminal end the demo once. Further signals do not interrupt the cleaning up."""

    def __init__(self) -> None:
        self.signal: int | None = None  # the one that ended it
        for number in STOP_SIGNALS:
            signal.signal(number, self._stop)

    def _stop(self, number: int, frame: object) -> None:
        self.signal = number
        for each in STOP_SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)


def _say(what: str, text: str) -> None:
    try:
        typer.echo(f"{what + ':':<9} {text}")
    except BrokenPipeError:  # the demo goes on to its end unseen, and removes everything
        drop_output()
