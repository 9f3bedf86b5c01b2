"""What a shard still has to tell each lookup partition: changes, a full announcement, or only that it is alive.

The counterpart of `directory`. Each partition has at most one update on its way. An update that is not known to have
arrived is sent again with the same sequence, so that the receiver recognises it. Pure; one caller at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice

from kvservice.core.actions import Announce, Retract
from kvservice.core.block.keys import partition_of
from kvservice.core.directory.membership import AnnounceOutcome
from kvservice.units import BlockKey, SpanRoute

# Keys in one update: few enough that the lookup partition answers others soon. An update takes 256 KiB on the wire;
# more keys go into the next one.
UPDATE_KEYS_MAX = 16_384
# Changes that wait for a lookup partition that does not answer. With more, a full announcement costs less than the
# list, so the list is dropped and a full announcement sent when the partition is back.
PENDING_MAX = 1_000_000
assert UPDATE_KEYS_MAX <= PENDING_MAX

Inventory = Callable[[], Iterable[tuple[BlockKey, SpanRoute]]]


@dataclass(frozen=True, slots=True)
class Update:
    """One announcement. The same object is sent again until it is known whether it was applied."""

    sequence: int
    added: tuple[BlockKey, ...] = ()
    removed: tuple[BlockKey, ...] = ()
    full_begin: bool = False
    full_end: bool = False
    leaving: bool = False


@dataclass(slots=True)
class _PartitionStream:
    """The state of one partition. A full announcement is first wanted, and in `snapshot` until all of it is sent."""

    next_sequence: int = 1
    wants_full: bool = True
    snapshot: list[BlockKey] | None = None  # keys of the full announcement that are still to be sent, from the end
    pending: dict[BlockKey, bool] = field(default_factory=dict)  # latest change per key: True added, False removed
    outstanding: Update | None = None  # built, and not known yet whether it was applied
    in_flight: bool = False  # handed out, and neither answered nor failed
    refused_begins: int = 0  # consecutive full announcements that were refused
    lookup_epoch: int = 0  # epoch of the lookup partition that took our last full announcement; 0 = none did


class Announcer:
    """`inventory` returns everything that the shard holds at the moment of the call."""

    def __init__(self, partition_count: int, inventory: Inventory) -> None:
        assert partition_count >= 0
        self._inventory = inventory
        self._streams = [_PartitionStream() for _ in range(partition_count)]
        self.fenced = False  # True when a newer boot of this node announces: then this one sends nothing any more
        self.counters: Counter[str] = Counter()

    @property
    def partition_count(self) -> int:
        return len(self._streams)

    def change(self, changes: Iterable[Announce | Retract]) -> None:
        """Blocks came and went, in this order."""
        for change in changes:
            self._change(change.key, change.route, isinstance(change, Announce))

    def next_update(self, partition: int) -> Update | None:
        """The update to send now. None when there is nothing to send or an update is on its way.

        For each update handed out, `on_reply` or `on_failure` must be called.
        """
        stream = self._streams[partition]
        if self.fenced or stream.in_flight:
            return None
        if stream.outstanding is None:
            stream.outstanding = self._build(stream)
        stream.in_flight = stream.outstanding is not None
        return stream.outstanding

    def heartbeat(self, partition: int) -> Update:
        """Like next_update, but returns an empty update when there is nothing to send. None may be on its way."""
        stream = self._streams[partition]
        assert not stream.in_flight, "one update at a time"
        assert not self.fenced, "fenced: stay silent"
        update = self.next_update(partition)
        if update is None:
            update = stream.outstanding = Update(self._take_sequence(stream))
            stream.in_flight = True
        return update

    def farewell(self, partition: int) -> Update:
        """The last update before the node leaves. An update on its way does not matter any more.

        Afterwards only a full announcement brings the node back.
        """
        stream = self._streams[partition]
        self._demand_full(stream)
        return Update(self._take_sequence(stream), leaving=True)

    def on_reply(self, partition: int, outcome: AnnounceOutcome, lookup_epoch: int) -> None:
        """The answer to the update that is on its way."""
        stream = self._streams[partition]
        update, stream.outstanding = stream.outstanding, None
        stream.in_flight = False
        self.counters[f"announce_{outcome.value}"] += 1
        assert update is not None, "an answer, and nothing was on its way"
        if outcome is AnnounceOutcome.STALE_EPOCH:
            self.fenced = True
        elif outcome is AnnounceOutcome.RESYNC:
            if update.full_begin:
                # Refused although it begins anew: an earlier announcer of this epoch has used later sequences. Jumps
                # that double each time pass them in a few attempts.
                stream.refused_begins += 1
                stream.next_sequence += 1 << min(stream.refused_begins, 48)
            self._demand_full(stream)
        elif update.full_begin:
            stream.lookup_epoch = lookup_epoch
            stream.refused_begins = 0
        elif stream.lookup_epoch != lookup_epoch:
            self._demand_full(stream)

    def on_failure(self, partition: int) -> None:
        """There was no answer: the update may or may not have been applied. It is handed out again, unchanged."""
        self._streams[partition].in_flight = False
        self.counters["announce_failed"] += 1

    def begin_again(self, partition: int) -> None:
        """Whatever went wrong with the updates of this partition: the next one begins a full announcement."""
        stream = self._streams[partition]
        stream.in_flight = False
        self._demand_full(stream)

    def _change(self, key: BlockKey, route: SpanRoute, added: bool) -> None:
        if not self._streams:
            return
        stream = self._streams[partition_of(route, len(self._streams))]
        if stream.wants_full and stream.snapshot is None:
            return  # the inventory will contain the change
        # The latest change is always sent, also when it seems to undo one that was not sent yet. A repetition is
        # harmless; a wrong guess about what the directory knows would stay wrong for ever.
        stream.pending[key] = added
        if len(stream.pending) > PENDING_MAX:
            self._demand_full(stream)

    def _demand_full(self, stream: _PartitionStream) -> None:
        """Begin again with a full announcement. An update on its way stays there until its answer comes."""
        stream.wants_full = True
        stream.snapshot = None
        stream.pending.clear()
        if not stream.in_flight:
            stream.outstanding = None

    def _build(self, stream: _PartitionStream) -> Update | None:
        begin = stream.wants_full
        if begin:
            if stream.snapshot is None:
                self._take_snapshots()
            stream.wants_full = False
            self.counters["full_announcements"] += 1
        if stream.snapshot is not None:
            # Changes wait until the whole snapshot is sent: a removal must not overtake the update that adds its key.
            added = tuple(stream.snapshot[-UPDATE_KEYS_MAX:])
            del stream.snapshot[-UPDATE_KEYS_MAX:]
            end = not stream.snapshot
            if end:
                stream.snapshot = None
            return Update(self._take_sequence(stream), added, full_begin=begin, full_end=end)
        if not stream.pending:
            return None
        keys = list(islice(stream.pending, UPDATE_KEYS_MAX))
        words = [(key, stream.pending.pop(key)) for key in keys]
        return Update(
            self._take_sequence(stream),
            tuple(key for key, added in words if added),
            tuple(key for key, added in words if not added),
        )

    def _take_snapshots(self) -> None:
        """For every partition that wants one: to look at a million blocks takes long, and often all of them want it."""
        wanted = [stream.wants_full and stream.snapshot is None for stream in self._streams]
        found: list[list[BlockKey]] = [[] for _ in self._streams]
        for key, route in self._inventory():
            found[partition_of(route, len(found))].append(key)
        for stream, is_wanted, keys in zip(self._streams, wanted, found, strict=True):
            if is_wanted:
                stream.snapshot = keys

    @staticmethod
    def _take_sequence(stream: _PartitionStream) -> int:
        sequence = stream.next_sequence
        stream.next_sequence += 1
        return sequence

    def check_invariants(self) -> None:
        for stream in self._streams:
            assert stream.next_sequence >= 1
            assert len(stream.pending) <= PENDING_MAX
            assert not stream.in_flight or stream.outstanding is not None, "nothing is on its way"
            if stream.wants_full:
                assert stream.snapshot is not None or not stream.pending, "changes that the inventory will have wait"
            else:
                assert stream.snapshot is None or stream.snapshot, "an empty rest is no snapshot"
            update = stream.outstanding
            if update is not None:
                assert update.sequence < stream.next_sequence
                assert len(update.added) + len(update.removed) <= UPDATE_KEYS_MAX
                assert not set(update.added) & set(update.removed), "one update adds and removes a key"
                assert update.added or update.removed or not update.full_begin or update.full_end, "an empty piece"
