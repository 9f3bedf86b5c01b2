"""The rules that every Transport must keep. Subclass, give it a `pair` fixture, and pytest runs the rules against
it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import pytest

from kvservice.errors import TransferError
from kvservice.memory.segment import Segment
from kvservice.transfer.base import Completion, Copy, PeerHandle, TransferOutcome, Transport

# For a transfer, which takes milliseconds; a busy machine gets more. Then the rule fails.
WAIT_SECONDS = 10.0


@dataclass(slots=True)
class Pair:
    """A reader with its own segment, and the segment and transport of the peer that it reads from."""

    reader: Transport
    reader_segment: Segment
    source: Transport
    source_segment: Segment

    def connect(self) -> PeerHandle:
        return self.reader.connect(self.source.describe())

    def wait(self, count: int = 1) -> list[Completion]:
        """Poll until this many completions came."""
        found: list[Completion] = []
        deadline = time.monotonic() + WAIT_SECONDS
        while len(found) < count and time.monotonic() < deadline:
            found += self.reader.poll()
        return found


class TransportContract:
    """Offsets lie past the first MiB, where a fresh segment holds only payload space."""

    start = 2 << 20

    def fill(self, segment: Segment, offset: int, length: int) -> bytes:
        data = os.urandom(length)
        segment.buffer[offset : offset + length] = data
        return data

    def test_done_means_all_bytes_of_all_runs_are_visible(self, pair: Pair) -> None:
        peer = pair.connect()
        runs = [Copy(self.start + i * 131_072, self.start + (63 - i) * 131_072, 70_000 + i) for i in range(64)]
        wanted = {c.local_offset: self.fill(pair.source_segment, c.remote_offset, c.length) for c in runs}
        transfer = pair.reader.post_read(peer, runs)
        assert [(c.transfer, c.outcome) for c in pair.wait()] == [(transfer, TransferOutcome.DONE)]
        for run in runs:
            got = bytes(pair.reader_segment.buffer[run.local_offset : run.local_offset + run.length])
            assert got == wanted[run.local_offset]

    def test_each_transfer_is_reported_exactly_once(self, pair: Pair) -> None:
        peer = pair.connect()
        copies = [Copy(self.start, self.start + i * 4096, 4096) for i in range(20)]
        transfers = {pair.reader.post_read(peer, [copy]) for copy in copies}
        reported = [c.transfer for c in pair.wait(20)]
        assert sorted(reported) == sorted(transfers)
        assert pair.reader.poll() == []

    @pytest.mark.parametrize("where", ["remote", "local"])
    def test_runs_outside_a_segment_are_refused_before_anything_moves(self, pair: Pair, where: str) -> None:
        peer = pair.connect()
        size = pair.source_segment.geometry.segment_bytes
        for offset, length in ((size - 10, 11), (size, 1), (-1, 5), (0, 0)):
            bad = Copy(offset, self.start, length) if where == "remote" else Copy(self.start, offset, length)
            with pytest.raises(TransferError):
                pair.reader.post_read(peer, [Copy(self.start, self.start, 64), bad])
        assert pair.reader.poll() == []

    def test_junk_descriptions_are_refused(self, pair: Pair) -> None:
        good = pair.source.describe()
        for junk in (b"", b"junk", good[:-3] + b"\xff\xff\xff", b"\0" * 64, good[:20], os.urandom(400)):
            if junk == good:
                continue
            with pytest.raises(TransferError):
                pair.reader.connect(junk)

    def test_unknown_peers_are_refused(self, pair: Pair) -> None:
        with pytest.raises(TransferError):
            pair.reader.post_read(PeerHandle(10_000), [Copy(self.start, self.start, 64)])

    def test_disconnect_ends_open_transfers_and_is_idempotent(self, pair: Pair) -> None:
        peer = pair.connect()
        transfer = pair.reader.post_read(peer, [Copy(self.start, self.start, 1 << 20)])
        pair.reader.disconnect(peer)
        pair.reader.disconnect(peer)
        assert [c.transfer for c in pair.wait()] == [transfer]
        with pytest.raises(TransferError):
            pair.reader.post_read(peer, [Copy(self.start, self.start, 64)])

    def test_description_is_small_and_stable(self, pair: Pair) -> None:
        assert 0 < len(pair.source.describe()) <= 64 << 10
        assert pair.source.describe() == pair.source.describe()

    def test_close_is_idempotent(self, pair: Pair) -> None:
        pair.connect()
        pair.reader.close()
        pair.reader.close()
        assert pair.source.describe()
