"""What one router has sent where: work not done yet, and prefixes an engine has seen. Pure: `now` is passed in.

Both are guesses that end by themselves: work by its own estimate, a prefix after some time, and both with the replica.
A replica that was restarted has another name, so nothing is believed of an engine that is new. Runs on the router's
loop.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvservice.serve.routing import QueueWait
from kvservice.units import BlockHash

FADE_SECONDS = 30.0
UTILIZATION_MAX = 0.9
WEIGHT = 0.1  # of the newest request in the average
FIRST_REQUEST_SECONDS = 0.05  # before anything was routed
REQUEST_SECONDS_MAX = 3600.0  # one whose end nobody told is forgotten
UNCONFIRMED_SECONDS = 5.0  # a decision that was not followed by a request counts no longer


@dataclass(slots=True)
class _Sent:
    replica: str
    seconds: float  # estimated work
    done_at: float  # by estimate
    confirmed: bool
    decided_at: float


@dataclass(slots=True)
class _Queue:
    busy_until: float = 0.0
    work: float = 0.0  # seconds sent, fading out
    work_at: float = 0.0

    def utilization(self, now: float) -> float:
        """Share of the last minute or so that its prefills took, by estimate."""
        return self.work * math.exp((self.work_at - now) / FADE_SECONDS) / FADE_SECONDS

    requests: dict[str, _Sent] = field(default_factory=dict)


class LoadBook:
    """Requests of this router, by replica. Work is done in the order it was sent, one after the other."""

    def __init__(self) -> None:
        self._queues: dict[str, _Queue] = {}
        self._where: dict[str, str] = {}  # request -> replica
        self._share, self._share_at = 1.0, -1.0
        self.request_seconds = FIRST_REQUEST_SECONDS  # moving average of the work of a request

    def decided(self, request: str, replica: str, seconds: float, now: float) -> None:
        """`replica` will probably get this request. Counts at once, for the decisions of the same moment."""
        self._remove(request, now, undone=True)
        self._add(request, replica, seconds, now, confirmed=False)
        self.request_seconds += WEIGHT * (seconds - self.request_seconds)

    def routed(self, request: str, replica: str, now: float) -> None:
        """It went to this replica, whatever had been decided."""
        if self._where.get(request) == replica:
            self._queues[replica].requests[request].confirmed = True
            return
        sent = self._remove(request, now, undone=True)
        self._add(request, replica, self.request_seconds if sent is None else sent.seconds, now, confirmed=True)

    def completed(self, request: str, now: float) -> None:
        self._remove(request, now, undone=False)

    def keep(self, replicas: Iterable[str]) -> None:
        """Forget all others."""
        kept = set(replicas)
        for replica in [name for name in self._queues if name not in kept]:
            for request in self._queues.pop(replica).requests:
                self._where.pop(request, None)

    def wait(self, replica: str, reported: int | None, now: float) -> QueueWait:
        """`reported`: requests that the replica itself, or Serve, last counted there; None when unknown."""
        queue = self._queues.get(replica)
        if queue is None:
            backlog, confirmed, decoding = 0.0, 0, 0
        else:
            self._expire(queue, now)
            unfinished = any(sent.done_at > now for sent in queue.requests.values())
            backlog = max(queue.busy_until - now, 0.0) if unfinished else 0.0
            confirmed = sum(sent.confirmed for sent in queue.requests.values())
            decoding = sum(sent.confirmed and sent.done_at <= now for sent in queue.requests.values())
        others = max((reported or 0) - confirmed, 0)
        share = self._waiting_share(now) if others else 0.0
        busy = 0.0 if queue is None else min(queue.utilization(now), UTILIZATION_MAX)
        return QueueWait(backlog, others * share, decoding + others * (1 - share), busy / (1 - busy))

    def _waiting_share(self, now: float) -> float:
        """How much of what is in flight waits for its prefill, told from our own requests: what others sent is taken
        to be alike. With few requests of our own it is taken to wait, which is the careful guess."""
        if self._share_at != now:  # asked for each replica of one decision
            sent = [sent for queue in self._queues.values() for sent in queue.requests.values()]
            self._share = (1 + sum(one.done_at > now for one in sent)) / (1 + len(sent))
            self._share_at = now
        return self._share

    def in_flight(self, replica: str) -> int:
        queue = self._queues.get(replica)
        return 0 if queue is None else len(queue.requests)

    def _add(self, request: str, replica: str, seconds: float, now: float, *, confirmed: bool) -> None:
        queue = self._queues.setdefault(replica, _Queue())
        queue.busy_until = max(queue.busy_until, now) + seconds
        queue.work = queue.utilization(now) * FADE_SECONDS + seconds
        queue.work_at = now
        queue.requests[request] = _Sent(replica, seconds, queue.busy_until, confirmed, now)
        self._where[request] = replica

    def _remove(self, request: str, now: float, *, undone: bool) -> _Sent | None:
        """`undone`: it was not worked on there at all."""
        replica = self._where.pop(request, None)
        queue = None if replica is None else self._queues.get(replica)
        sent = None if queue is None else queue.requests.pop(request, None)
        if queue is not None and sent is not None:
            self._give_back(queue, sent, now, undone=undone)
        return sent

    @staticmethod
    def _give_back(queue: _Queue, sent: _Sent, now: float, *, undone: bool) -> None:
        """It ended before its estimate: so will what is behind it."""
        if undone:
            queue.work, queue.work_at = max(queue.utilization(now) * FADE_SECONDS - sent.seconds, 0.0), now
        left = min(max(sent.done_at - now, 0.0), sent.seconds)
        if left:
            queue.busy_until -= left
            for other in queue.requests.values():
                if other.done_at > sent.done_at:
                    other.done_at -= left

    def _expire(self, queue: _Queue, now: float) -> None:
        late = [
            name
            for name, sent in queue.requests.items()
            if now - sent.decided_at > (REQUEST_SECONDS_MAX if sent.confirmed else UNCONFIRMED_SECONDS)
        ]
        for name in late:
            sent = queue.requests.pop(name)
            self._where.pop(name, None)
            self._give_back(queue, sent, now, undone=not sent.confirmed)


class SentPrefixes:
    """Blocks that an engine computed or loaded because of what was sent to it: it may still have them itself.

    At most `blocks_max` per replica, the leaves of the oldest prompts go first; none longer than `seconds`.
    """

    def __init__(self, blocks_max: int, seconds: float) -> None:
        self._blocks_max = blocks_max
        self._seconds = seconds
        self._seen: dict[str, OrderedDict[BlockHash, float]] = {}

    def remember(self, replica: str, hashes: Sequence[BlockHash], now: float) -> None:
        seen = self._seen.setdefault(replica, OrderedDict())
        for block_hash in reversed(hashes[: self._blocks_max]):  # the head of the chain is the newest: it goes last
            seen.pop(block_hash, None)
            seen[block_hash] = now
        while len(seen) > self._blocks_max:
            seen.popitem(last=False)

    def leading(self, replica: str, hashes: Sequence[BlockHash], now: float) -> int:
        """How many blocks from the first on."""
        seen = self._seen.get(replica)
        if seen is None:
            return 0
        for index, block_hash in enumerate(hashes):
            at = seen.get(block_hash)
            if at is None or now - at > self._seconds:
                return index
        return len(hashes)

    def keep(self, replicas: Iterable[str]) -> None:
        kept = set(replicas)
        self._seen = {replica: seen for replica, seen in self._seen.items() if replica in kept}
