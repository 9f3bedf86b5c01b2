"""Reads the node's mirror of the directory, which its shard keeps in shared memory: lookups without a call.

It serves the shard itself and other processes of the node. Used by one thread at a time. It blocks only to open a file,
at most once a second. Whatever is wrong with a mirror, the lookup partitions are asked instead. It answers misses, too:
most lookups of a cold workload are misses.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from kvservice import discovery
from kvservice.core.directory.mirror import Feed, MirrorReader
from kvservice.core.messages import HolderRun
from kvservice.errors import SegmentError, VersionMismatch
from kvservice.lookup.mirror_file import MirrorSegment

LOOK_AGAIN_SECONDS = 1.0  # a new mirror is found within this time; one look is one readlink() call
MAPPED_AT_ONCE = 16 << 20  # bytes mapped ahead in one step: about a millisecond

log = logging.getLogger("kvservice.lookup")


class Mirror(Protocol):
    """The part of a mirror that LookupClient needs."""

    def reader(self, now: float) -> MirrorReader | None: ...

    def close(self) -> None: ...


class OwnMirror:
    """The shard's own view of the mirror that it writes."""

    def __init__(self, reader: MirrorReader) -> None:
        self._reader = reader

    def reader(self, now: float) -> MirrorReader | None:
        return self._reader

    def close(self) -> None:
        """Does nothing: the shard closes what it writes."""


class NodeMirror:
    """The mirror of the node with this directory (discovery). Follows the shard over its restarts."""

    def __init__(self, directory: Path) -> None:
        self._link = directory / discovery.MIRROR_NAME
        self._segment: MirrorSegment | None = None
        self._reader: MirrorReader | None = None
        self._look_at = 0.0
        self._is_refused = False  # it has another version, which has been logged

    def reader(self, now: float) -> MirrorReader | None:
        """The reader, or None when there is no mirror that can be read."""
        if now >= self._look_at:
            self._look_at = now + LOOK_AGAIN_SECONDS
            self._look()
        return self._reader

    def _look(self) -> None:
        try:
            path = self._link.readlink()
            if self._segment is not None and path.stat().st_ino == self._segment.inode:
                self.map_ahead(MAPPED_AT_ONCE)
                return
            self.close()
            segment = MirrorSegment.attach(path)
        except (OSError, SegmentError):
            self.close()
            return
        try:
            self._reader = MirrorReader(segment.buffer)
        except ValueError:  # it is not complete yet
            segment.close()
            return
        except VersionMismatch as error:  # lookups go to the lookup service until this process is restarted
            segment.close()
            if not self._is_refused:
                self._is_refused = True
                log.warning("mirror_refused", extra={"reason": error.message})
            return
        self._segment = segment

    def map_ahead(self, bytes_max: int) -> None:
        """Map more of the memory now: lookups are a few times slower in pages that this process has not read yet."""
        if self._segment is not None and self._reader is not None:
            self._segment.map_ahead(self._reader.used_bytes, bytes_max)

    def close(self) -> None:
        """Close the mapping. Idempotent; a later `reader` opens it again."""
        segment, reader = self._segment, self._reader
        self._segment = self._reader = None
        if reader is not None:
            reader.close()
        if segment is not None:
            segment.close()


def find_mirror(
    addresses: Sequence[str], service: str | None = None, runtime_root: Path | None = None
) -> Mirror | None:
    """The mirror of a shard of this machine that uses these lookup partitions; None when there is none.

    Blocks like find_shards, and while it maps the mirror: a tenth of a second for a GiB.
    """
    for record in discovery.find_shards(service, runtime_root):
        directory = discovery.node_directory(record.service, record.node_id, runtime_root)
        if record.lookup_addresses == tuple(addresses) and (directory / discovery.MIRROR_NAME).is_symlink():
            mirror = NodeMirror(directory)
            if mirror.reader(time.monotonic()) is not None:
                mirror.map_ahead(sys.maxsize)
            return mirror
    return None


class MirroredLookup:
    """Answers one client's lookups from a mirror, and counts the reasons when it cannot."""

    def __init__(self, mirror: Mirror | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._mirror = mirror
        self._clock = clock
        self._feeds_version = 0  # of the reader that `live` has returned
        self.counters: Counter[str] = Counter()

    @property
    def has_mirror(self) -> bool:
        return self._mirror is not None

    def set_mirror(self, mirror: Mirror | None) -> None:
        """Use this mirror from now on. The previous one is closed."""
        before, self._mirror = self._mirror, mirror
        if before is not None:
            before.close()

    def live(self, partition_count: int) -> tuple[MirrorReader | None, list[bool]]:
        """The reader, and for each partition whether it can answer."""
        if self._mirror is None:
            return None, []
        now = self._clock()
        reader = self._mirror.reader(now)
        if reader is None:
            self.counters["mirror_fallback_absent"] += 1
            return None, []
        if reader.partition_count != partition_count:
            self.counters["mirror_fallback_other_partitions"] += 1
            return None, []
        self._feeds_version = reader.feeds_version
        return reader, [self._is_live(reader.feed(partition, now)) for partition in range(partition_count)]

    def _is_live(self, feed: Feed) -> bool:
        if feed is Feed.LIVE:
            return True
        self.counters[f"mirror_fallback_{feed.name.lower()}"] += 1
        return False

    def resolve(self, reader: MirrorReader, packed: bytes) -> list[HolderRun] | None:
        """The holders of these keys, or None when the lookup partition must be asked. `live` was called just now."""
        runs = reader.resolve(packed)
        if runs is None:
            self.counters["mirror_fallback_sets"] += 1
        elif reader.feeds_version != self._feeds_version:  # keys may have been forgotten that a snapshot brings again
            self.counters["mirror_fallback_syncing"] += 1
            runs = None
        else:
            self.counters["mirror_answers"] += 1
        return runs
