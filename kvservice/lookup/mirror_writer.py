"""Keeps the node's mirror of the directory: writes one watch stream of every lookup partition into shared memory.

Runs on the shard's event loop, in pieces of a few milliseconds, with a turn of the loop after each. If a mirror cannot
be made, or does not fit, lookups go over gRPC and nothing else changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path

import grpc

from kvservice.aio import end_tasks, within
from kvservice.auth.tls import TlsFiles
from kvservice.client.channels import RETIRED_SECONDS, Channels
from kvservice.core.block.keys import KEY_BYTES, check_packed
from kvservice.core.directory.mirror import (
    AHEAD_ROWS,
    PARTITIONS_MAX,
    STALE_SECONDS,
    Feed,
    MirrorEvent,
    MirrorReader,
    MirrorWriter,
    mirror_bytes,
    mirror_rows,
)
from kvservice.core.messages import Holder
from kvservice.errors import KVServiceError
from kvservice.lookup.mirror_file import MirrorSegment
from kvservice.lookup.mirror_reader import OwnMirror
from kvservice.lookup.service import ANNOUNCED_KEYS_MAX, HEARTBEAT_SECONDS_MIN
from kvservice.wire.codec import decode_holder
from kvservice.wire.status import error_from_rpc
from kvservice.wire.v1 import lookup_pb2, lookup_pb2_grpc
from kvservice.wire.versions import PROTOCOL_VERSION

log = logging.getLogger("kvservice.shard")

HEARTBEAT_SECONDS = STALE_SECONDS / 3  # asked of each stream, so that two may be late before its part is stale
SILENT_SECONDS = 3 * HEARTBEAT_SECONDS  # without an event for this long, the stream is made again
# Keys added and removed by one event, each. A snapshot and an announcement stay below it; a larger event is malformed,
# and the stream is made again.
EVENT_KEYS_MAX = 1 << 17
PIECE_BYTES = 2048 * KEY_BYTES  # of keys applied without a turn of the loop: 2 to 4 ms
RETRY_SECONDS_FIRST, RETRY_SECONDS_MAX = 0.1, 5.0  # pauses before a broken stream is made again; they double
FULL_SECONDS = 60.0  # before a partition that did not fit is tried again; doubles each time, up to half an hour
# An event waits so long for room that a sweep may make. Ten million keys are swept in that time.
ROOM_SECONDS_MAX = 5.0
IDLE_SWEEP_SECONDS = 0.01  # pause between two sweeps while something is left, so that the loop serves others
assert HEARTBEAT_SECONDS >= HEARTBEAT_SECONDS_MIN, "the server would refuse the stream"
assert EVENT_KEYS_MAX >= ANNOUNCED_KEYS_MAX, "an event has what one announcement changed"
assert PIECE_BYTES // KEY_BYTES <= AHEAD_ROWS // 2, "a piece must not need more rows than are usable"
assert ROOM_SECONDS_MAX + SILENT_SECONDS < RETIRED_SECONDS, "a channel that was replaced must be left before it closes"
END_OF_STREAM = grpc.aio.EOF  # type: ignore[attr-defined]  # missing in the stubs


class DirectoryMirror:
    """Make one with `open`. `addresses` of the lookup partitions are in partition order; their number is fixed."""

    def __init__(
        self,
        segment: MirrorSegment,
        writer: MirrorWriter,
        link: Path,
        addresses: Sequence[str],
        tls: TlsFiles | None,
    ) -> None:
        self._segment = segment
        self._writer = writer
        self._link = link
        self._addresses = tuple(addresses)
        self._channels = Channels(tls)
        self._tasks: list[asyncio.Task[None]] = []
        self._counters: Counter[str] = Counter()
        self._heard: Callable[[Holder, bool], None] = lambda node, is_here: None
        self._stopped = False
        self._unlinked = False
        self._own = MirrorReader(segment.buffer.toreadonly())
        self.view = OwnMirror(self._own)

    @classmethod
    def open(
        cls,
        path: Path,
        link: Path,
        addresses: Sequence[str],
        size: int,
        epoch: int,
        tls: TlsFiles | None = None,
    ) -> DirectoryMirror | None:
        """A mirror of at most `size` bytes, with `link` as a symbolic link to it. None, and a log line, on failure."""
        rows = mirror_rows(size)
        if not rows or not 0 < len(addresses) <= PARTITIONS_MAX:
            if size:
                log.warning("mirror_too_small", extra={"mirror_bytes": size})
            return None
        try:
            segment = MirrorSegment.create(path, mirror_bytes(rows))
        except (KVServiceError, OSError) as error:
            log.warning("mirror_failed", extra={"reason": str(error)})
            return None
        try:
            _link(link, path)
        except OSError as error:
            segment.close()
            segment.unlink()
            log.warning("mirror_failed", extra={"reason": str(error)})
            return None
        return cls(segment, MirrorWriter(segment.buffer, len(addresses), epoch), link, addresses, tls)

    def relink(self) -> None:
        """Make the symbolic link again after its directory was removed. Raises OSError."""
        _link(self._link, self._segment.path)

    def listen(self, heard: Callable[[Holder, bool], None]) -> None:
        """`heard(node, whether it counts now)` is called for every event about a node, from `start` on."""
        self._heard = heard

    def start(self) -> None:
        """Open the streams, on the loop that runs."""
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._follow(partition)) for partition in range(len(self._addresses))]
        self._tasks.append(loop.create_task(self._sweep()))

    def set_addresses(self, addresses: Sequence[str]) -> None:
        """Use new addresses; the number of partitions stays the same. Streams that end are made again there."""
        if len(addresses) == len(self._addresses):
            self._addresses = tuple(addresses)
            self._channels.keep_only(addresses)

    async def stop(self) -> None:
        """End the streams and remove the mirror. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        tasks, self._tasks = self._tasks, []
        await end_tasks(tasks)
        await self._channels.close()
        self.unlink()
        self._own.close()
        self._writer.close()
        self._segment.close()

    def unlink(self) -> None:
        """Remove the file and the link. Idempotent."""
        if self._unlinked:  # by now, the node's next shard may have made its own
            return
        self._unlinked = True
        with contextlib.suppress(OSError):
            if self._link.readlink() == self._segment.path:
                self._link.unlink()
        self._segment.unlink()

    @property
    def counters(self) -> dict[str, int]:
        """The counters of the streams, and the state of the mirror now."""
        if self._stopped:
            return dict(self._counters)
        now, partitions = time.monotonic(), range(len(self._addresses))
        live = [self._own.feed(partition, now) is Feed.LIVE for partition in partitions]
        ages = [self._writer.age(partition, now) for partition in partitions if live[partition]]
        return {
            **self._counters,
            **self._writer.counters,
            "mirror_keys": self._writer.key_count,
            "mirror_bytes": self._segment.reserved_bytes,
            "mirror_live_partitions": sum(live),
            "mirror_age_ms": max(0, int(max(ages, default=0.0) * 1e3)),
        }

    async def _follow(self, partition: int) -> None:
        failures = filled_up = 0
        while True:
            begun = False
            try:
                self._counters["mirror_streams"] += 1
                async with aclosing(self._events(partition)) as events:
                    async for event in events:
                        if self._stopped:
                            return
                        if not begun:  # the previous contents stay valid until then, as long as they are fresh
                            if not event.ByteSize():  # the stream waits for its turn to get a snapshot
                                continue
                            self._writer.begin(partition)
                            begun = True
                        await self._take(partition, event)
                        if self._writer.feed(partition) is Feed.FULL:
                            break
                        if self._writer.feed(partition) is Feed.LIVE:  # not before: the stream may fail in its snapshot
                            failures = filled_up = 0
            except asyncio.CancelledError:
                raise
            except asyncio.TimeoutError:
                self._note_failure(partition, failures, "silent", f"nothing came for {SILENT_SECONDS:g} s")
            except grpc.aio.AioRpcError as error:
                found = error_from_rpc(error, "watch")
                self._note_failure(partition, failures, found.reason.lower(), found.message)
            except KVServiceError as error:
                self._note_failure(partition, failures, "malformed", error.message)
            except Exception:  # task boundary: a failing mirror must not end the shard, and must be seen in the log
                log.exception("mirror_failed", extra={"partition": partition})
            if begun and self._writer.feed(partition) is Feed.FULL:  # else it is full since an earlier stream
                log.warning("mirror_full", extra={"partition": partition, "keys": self._writer.key_count})
                await asyncio.sleep(FULL_SECONDS * 2 ** min(filled_up, 5))
                filled_up += 1
                continue
            failures += 1
            await asyncio.sleep(min(RETRY_SECONDS_MAX, RETRY_SECONDS_FIRST * 2 ** min(failures, 10)))

    def _note_failure(self, partition: int, failures: int, kind: str, reason: str) -> None:
        """Count a stream that failed. The first one since it was live is logged as well, with the partition's words."""
        self._counters[f"mirror_stream_{kind}"] += 1
        if failures == 0:
            log.warning(
                "mirror_stream_failed",
                extra={"partition": partition, "address": self._addresses[partition], "reason": reason},
            )

    async def _events(self, partition: int) -> AsyncGenerator[lookup_pb2.WatchEvent, None]:
        """The events of a new stream. Raises asyncio.TimeoutError when not even heartbeats arrive.

        Ends when the lookup partition has moved or the certificates have changed. Its channel is closed soon then, and
        that would look like a cancellation of the task.
        """
        channel = self._channels.get(self._addresses[partition])
        call = lookup_pb2_grpc.LookupServiceStub(channel).Watch(
            lookup_pb2.WatchRequest(heartbeat_seconds=HEARTBEAT_SECONDS, protocol_version=PROTOCOL_VERSION)
        )
        look_at = time.monotonic() + HEARTBEAT_SECONDS
        try:
            while True:
                event = await within(SILENT_SECONDS, call.read())
                if event is END_OF_STREAM:
                    return
                if time.monotonic() >= look_at:
                    look_at = time.monotonic() + HEARTBEAT_SECONDS
                    if self._channels.get(self._addresses[partition]) is not channel:
                        return
                yield event
        finally:
            call.cancel()

    async def _take(self, partition: int, event: lookup_pb2.WatchEvent) -> None:
        for piece in pieces_of(event):
            if piece.node is not None:
                self._heard(piece.node, not piece.hidden)
            await self._make_room(partition, piece)
            self._writer.apply(partition, piece, time.monotonic())
            if self._writer.sweep() or len(piece.added) + len(piece.removed) >= PIECE_BYTES // 2:
                await asyncio.sleep(0)

    async def _make_room(self, partition: int, event: MirrorEvent) -> None:
        if self._writer.rows_allowed < self._writer.rows_needed:
            rows = self._writer.rows_ahead
            if self._segment.reserve(mirror_bytes(rows)):
                self._writer.allow_rows(rows)
        until = time.monotonic() + ROOM_SECONDS_MAX
        while not self._writer.has_room(partition, event) and time.monotonic() < until:
            if not self._writer.sweep():
                return
            await asyncio.sleep(0)

    async def _sweep(self) -> None:
        while True:
            try:
                is_busy = self._writer.sweep()
            except Exception:  # task boundary, as above
                log.exception("mirror_sweep_failed")
                return
            await asyncio.sleep(IDLE_SWEEP_SECONDS if is_busy else HEARTBEAT_SECONDS)


def _link(link: Path, path: Path) -> None:
    link.unlink(missing_ok=True)
    link.symlink_to(path)


def pieces_of(event: lookup_pb2.WatchEvent) -> list[MirrorEvent]:
    """The event as several events that are applied quickly; each is true by itself.

    Raises InvalidRequest for what a correct lookup partition never sends.
    """
    if not event.HasField("node"):
        return [MirrorEvent(snapshot_end=event.snapshot_end)]
    node = decode_holder(event.node)
    added, removed = (check_packed(packed, EVENT_KEYS_MAX) for packed in (event.added, event.removed))
    pieces = []
    if event.reset or not (added or removed):  # alone, so that what follows can wait for the room that it leaves
        pieces.append(MirrorEvent(node, reset=event.reset, hidden=event.hidden))
    for start in range(0, len(added), PIECE_BYTES):
        pieces.append(MirrorEvent(node, added[start : start + PIECE_BYTES], hidden=event.hidden))
    for start in range(0, len(removed), PIECE_BYTES):
        pieces.append(MirrorEvent(node, removed=removed[start : start + PIECE_BYTES], hidden=event.hidden))
    return pieces
