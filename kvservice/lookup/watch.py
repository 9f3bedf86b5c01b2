"""Subscribers of a lookup partition: each gets a snapshot, then every change, through a bounded queue of its own.

Runs on the server's event loop. A subscriber that is too slow is cut off, so it can neither hold memory nor slow down
the others. It may subscribe again and gets a new snapshot. Snapshots are taken in turn: when all subscribe at once, as
after a break of the network, each would take so long otherwise that its queue overflows, again and again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from kvservice.core.directory.directory import Change, Directory
from kvservice.errors import Exhausted, Unavailable
from kvservice.wire.codec import encode_holder
from kvservice.wire.v1 import lookup_pb2

SUBSCRIBERS_MAX = 256  # one for each node with a mirror; further ones are refused and use lookups without a mirror
QUEUE_BYTES_MAX = 16 << 20  # of each subscriber; it is cut off when more is waiting
EVENT_OVERHEAD_BYTES = 256  # counted for each event, so that many empty ones cannot fill the memory
SNAPSHOTS_MAX = 4  # at once; further subscribers wait for their turn, with heartbeats and without a queue
TURN_SECONDS_MAX = 10.0  # after this the next has its turn, so that four subscribers that do not read delay nobody long
SNAPSHOT_KEYS = 4096  # keys read from the directory between two turns of the loop


class Subscriber:
    """The queue of one watch stream."""

    def __init__(self) -> None:
        self._events: deque[lookup_pb2.WatchEvent] = deque()
        self._queued_bytes = 0
        self._wake = asyncio.Event()
        self._end: Exhausted | Unavailable | None = None
        self.had_turn = False  # its snapshot has begun

    def begin(self) -> None:
        """Its turn has come: from now on it needs the changes."""
        self.had_turn = True
        self._wake.set()

    def push(self, event: lookup_pb2.WatchEvent) -> None:
        if self._end is not None or not self.had_turn:
            return
        self._queued_bytes += _cost(event)
        if self._queued_bytes > QUEUE_BYTES_MAX:
            self._events.clear()
            self.end(Exhausted("the watcher does not keep up with the changes: subscribe again for a new snapshot"))
            return
        self._events.append(event)
        self._wake.set()

    def end(self, reason: Exhausted | Unavailable) -> None:
        self._end = self._end or reason
        self._wake.set()

    @property
    def was_cut_off(self) -> bool:
        return isinstance(self._end, Exhausted)

    def raise_if_ended(self) -> None:
        if self._end is not None:
            raise self._end

    async def next_event(self, heartbeat_seconds: float) -> lookup_pb2.WatchEvent:
        """The next event. When there is none for `heartbeat_seconds`, an empty one; 0 waits without end.

        Raises Exhausted when the subscriber was cut off, Unavailable when the server stops.
        """
        while not self._events:
            self.raise_if_ended()
            await self._woken(heartbeat_seconds)
            if heartbeat_seconds and not self._events and self._end is None:
                return lookup_pb2.WatchEvent()
        event = self._events.popleft()
        self._queued_bytes -= _cost(event)
        return event

    async def has_turn_within(self, heartbeat_seconds: float) -> bool:
        """Wait for its turn, and so long at most; 0 waits without end. Raises as `next_event`."""
        while not self.had_turn:
            self.raise_if_ended()
            await self._woken(heartbeat_seconds)
            if heartbeat_seconds and not self.had_turn and self._end is None:
                return False
        return True

    async def _woken(self, seconds: float) -> None:
        self._wake.clear()
        timer = asyncio.get_running_loop().call_later(seconds, self._wake.set) if seconds else None
        try:
            await self._wake.wait()
        finally:
            if timer is not None:
                timer.cancel()


class WatchHub:
    """Sends the directory's changes to all subscribers. Call `publish` after whatever may change the directory."""

    def __init__(self, directory: Directory, clock: Callable[[], float]) -> None:
        self._directory = directory
        self._clock = clock
        self._subscribers: set[Subscriber] = set()
        self._waiting: deque[Subscriber] = deque()  # for their turn to get a snapshot
        self._served: set[Subscriber] = set()  # whose turn it is
        self.cut_off_count = 0

    def __len__(self) -> int:
        return len(self._subscribers)

    def publish(self) -> None:
        if not self._directory.changes:
            return
        changes, self._directory.changes = self._directory.changes, []
        for event in map(_encode_change, changes):
            for subscriber in self._subscribers:
                subscriber.push(event)

    async def subscribe(self, heartbeat_seconds: float = 0.0) -> AsyncGenerator[lookup_pb2.WatchEvent, None]:
        """A snapshot, then every change. Raises Exhausted with too many subscribers, or if this one is too slow."""
        if len(self._subscribers) >= SUBSCRIBERS_MAX:
            raise Exhausted(f"{SUBSCRIBERS_MAX} watchers already", watcher_count_max=SUBSCRIBERS_MAX)
        subscriber = Subscriber()
        self._subscribers.add(subscriber)
        self._directory.record_changes = True
        self._waiting.append(subscriber)
        try:
            self._give_turns()
            while not await subscriber.has_turn_within(heartbeat_seconds):
                yield lookup_pb2.WatchEvent()
            async with aclosing(self._snapshot(subscriber)) as snapshot:
                async for event in snapshot:
                    yield event
            while True:
                yield await subscriber.next_event(heartbeat_seconds)
        finally:
            self._subscribers.discard(subscriber)
            self._end_turn(subscriber)
            self.cut_off_count += subscriber.was_cut_off
            if not self._subscribers:
                self._directory.record_changes = False
                self._directory.changes.clear()

    def close(self) -> None:
        for subscriber in self._subscribers:
            subscriber.end(Unavailable("the lookup partition stops"))

    def _give_turns(self) -> None:
        while self._waiting and len(self._served) < SNAPSHOTS_MAX:
            subscriber = self._waiting.popleft()
            self._served.add(subscriber)
            asyncio.get_running_loop().call_later(TURN_SECONDS_MAX, self._end_turn, subscriber)
            subscriber.begin()

    def _end_turn(self, subscriber: Subscriber) -> None:
        """Idempotent. One that is gone needs no turn any more."""
        self._served.discard(subscriber)
        if subscriber not in self._subscribers and subscriber in self._waiting:
            self._waiting.remove(subscriber)
        self._give_turns()

    async def _snapshot(self, subscriber: Subscriber) -> AsyncGenerator[lookup_pb2.WatchEvent, None]:
        """Reads the directory while it changes. Changes meanwhile wait in the queue and are sent after the snapshot, in
        order, so the end result is right.
        """
        holders = {}
        for summary in self._directory.nodes(self._clock()):
            holders[summary.node.node_id] = summary.node
            yield lookup_pb2.WatchEvent(node=encode_holder(summary.node), reset=True, hidden=not summary.visible)
        row: int | None = 0
        while row is not None:
            subscriber.raise_if_ended()
            held, row = self._directory.snapshot(row, SNAPSHOT_KEYS)
            for node_id, packed in held.items():
                if node_id in holders:  # else the node is new, and its announcement is in the queue
                    hidden = self._directory.is_hidden(node_id)
                    yield lookup_pb2.WatchEvent(node=encode_holder(holders[node_id]), added=packed, hidden=hidden)
            await asyncio.sleep(0)
        self._end_turn(subscriber)
        yield lookup_pb2.WatchEvent(snapshot_end=True)


def _cost(event: lookup_pb2.WatchEvent) -> int:
    return len(event.added) + len(event.removed) + EVENT_OVERHEAD_BYTES


def _encode_change(change: Change) -> lookup_pb2.WatchEvent:
    return lookup_pb2.WatchEvent(
        node=encode_holder(change.node),
        added=change.added,
        removed=change.removed,
        reset=change.reset,
        hidden=change.hidden,
    )
