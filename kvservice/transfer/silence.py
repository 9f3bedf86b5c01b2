"""Which connections are silent: blocks are being read over them, and for seconds no read has ended.

A peer whose data path is cut or hangs may still answer calls and grant leases. Whoever reads from it then waits until
its own deadline, and the slots that are read into cannot be used until the reads end, which may be minutes later.
Owned by the puller's thread. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvservice.transfer.base import PeerHandle

# A read takes milliseconds, and of the largest batch on a link of 4 MiB/s as long as this. So only few requests begin
# to wait for a peer that has become silent.
SILENT_SECONDS = 2.0


@dataclass(slots=True)
class _Reads:
    """Of one connection. Mutable: it is the table's own record."""

    since: float  # when the first of them began, or the last one ended
    count: int = 0


class Silence:
    """`now` is monotonic, in seconds. What has ended is only known after a look."""

    def __init__(self) -> None:
        self._open: dict[PeerHandle, _Reads] = {}  # connections with reads in flight
        self._looked_at = 0.0

    def looked(self, now: float) -> None:
        """Whatever had ended by now has been reported."""
        self._looked_at = now

    def began(self, peer: PeerHandle, now: float) -> None:
        self._open.setdefault(peer, _Reads(now)).count += 1

    def ended(self, peer: PeerHandle, now: float) -> None:
        reads = self._open[peer]
        reads.count -= 1
        reads.since = now
        if not reads.count:
            del self._open[peer]

    def heard(self, peer: PeerHandle, now: float) -> None:
        """Something else came over the connection."""
        if peer in self._open:
            self._open[peer].since = now

    def is_long(self, peer: PeerHandle) -> bool:
        reads = self._open.get(peer)
        return reads is not None and self._looked_at - reads.since > SILENT_SECONDS
