"""What one router has sent where: work that is not done yet, and prefixes that an engine has seen. Pure: `now` is
passed in.

Both are guesses, and both end by themselves: work after its estimated time, a prefix after a fixed time, and both when
the replica goes. A restarted replica has another name, so nothing is assumed of a new engine. Runs on the router's
loop.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvservice.serve.routing import QueueWait
from kvservice.units import BlockHash

FADE_SECONDS = 30.0  # Time constant of the average load: long beside a request, short beside a change of traffic.
# Beyond this utilization the expected queue (u / (1 - u)) grows without bound, while its estimate becomes worthless.
# Here it is nine requests.
UTILIZATION_MAX = 0.9
WEIGHT = 0.1  # Weight of the newest request in the average.
FIRST_REQUEST_SECONDS = 0.05  # The average work of a request before any was routed: a short prompt on one accelerator.
# A request whose end was never reported is forgotten after this time. Longer than any request takes.
REQUEST_SECONDS_MAX = 3600.0
# A decision that no request followed counts no longer than this: Serve sends a request within milliseconds of it.
UNCONFIRMED_SECONDS = 5.0


@dataclass(slots=True)
class _Sent:
    replica: str
    seconds: float  # estimated work
    done_at: float  # estimated end
    confirmed: bool
    decided_at: float


@dataclass(slots=True)
class _Queue:
    busy_until: float = 0.0
    work: float = 0.0  # seconds of work sent, fading with FADE_SECONDS
    work_at: float = 0.0

    def utilization(self, now: float) -> float:
        """The share of the last minute or so that prefills took on this replica, by estimate."""
        return self.work * math.exp((self.work_at - now) / FADE_SECONDS) / FADE_SECONDS

    requests: dict[str, _Sent] = field(default_factory=dict)


class LoadBook:
    """The requests of this router, by replica. A replica is assumed to work in the order of arrival, one request at a
    time."""

    def __init__(self) -> None:
        self._queues: dict[str, _Queue] = {}
        self._where: dict[str, str] = {}  # request -> replica
        self._share, self._share_at = 1.0, -1.0
        self.request_seconds = FIRST_REQUEST_SECONDS  # moving average of the work of a request

    def decided(self, request: str, replica: str, seconds: float, now: float) -> None:
        """Note that `replica` will probably get this request. It counts at once, for other decisions of the same
        moment."""
        self._remove(request, now, undone=True)
        self._add(request, replica, seconds, now, confirmed=False)
        self.request_seconds += WEIGHT * (seconds - self.request_seconds)

    def routed(self, request: str, replica: str, now: float) -> None:
        """Note that the request went to this replica, whatever was decided."""
        if self._where.get(request) == replica:
            self._queues[replica].requests[request].confirmed = True
            return
        sent = self._remove(request, now, undone=True)
        self._add(request, replica, self.request_seconds if sent is None else sent.seconds, now, confirmed=True)

    def completed(self, request: str, replica: str, now: float) -> None:
        """Note that this replica is done with the request. A replica that was full says so too, and maybe only after
        the request went elsewhere."""
        if self._where.get(request) == replica:
            self._remove(request, now, undone=False)

    def keep(self, replicas: Iterable[str]) -> None:
        """Forget all other replicas."""
        kept = set(replicas)
        for replica in [name for name in self._queues if name not in kept]:
            for request in self._queues.pop(replica).requests:
                self._where.pop(request, None)

    def wait(self, replica: str, reported: int | None, now: float) -> QueueWait:
        """The queue that a new request would meet. `reported` is the number of requests that the replica, or Serve,
        last counted there; None if unknown."""
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
        """The share of a replica's requests that still wait for their prefill. It is computed from our own requests and
        assumed for those of other routers. With few requests of our own all are assumed to wait, which is the careful
        guess."""
        if self._share_at != now:  # computed once for all replicas of one decision
            sent = [sent for queue in self._queues.values() for sent in queue.requests.values()]
            self._share = (1 + sum(one.done_at > now for one in sent)) / (1 + len(sent))
            self._share_at = now
        return self._share

    def in_flight(self, replica: str, now: float) -> int:
        queue = self._queues.get(replica)
        if queue is None:
            return 0
        self._expire(queue, now)
        return len(queue.requests)

    def _add(self, request: str, replica: str, seconds: float, now: float, *, confirmed: bool) -> None:
        queue = self._queues.setdefault(replica, _Queue())
        queue.busy_until = max(queue.busy_until, now) + seconds
        queue.work = queue.utilization(now) * FADE_SECONDS + seconds
        queue.work_at = now
        queue.requests[request] = _Sent(replica, seconds, queue.busy_until, confirmed, now)
        self._where[request] = replica

    def _remove(self, request: str, now: float, *, undone: bool) -> _Sent | None:
        """Take the request off its replica. `undone` means that the replica did no work on it."""
        replica = self._where.pop(request, None)
        queue = None if replica is None else self._queues.get(replica)
        sent = None if queue is None else queue.requests.pop(request, None)
        if queue is not None and sent is not None:
            self._give_back(queue, sent, now, undone=undone)
        return sent

    @staticmethod
    def _give_back(queue: _Queue, sent: _Sent, now: float, *, undone: bool) -> None:
        """Correct the queue for a request that ended before its estimate: those behind it end earlier too."""
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
    """The blocks that an engine computed or loaded for requests sent to it. It may still have them in its own cache.

    Keeps at most `blocks_max` per replica, dropping the leaves of the oldest prompts first, and none longer than
    `seconds`.
    """

    def __init__(self, blocks_max: int, seconds: float) -> None:
        self._blocks_max = blocks_max
        self._seconds = seconds
        self._seen: dict[str, OrderedDict[BlockHash, float]] = {}

    def remember(self, replica: str, hashes: Sequence[BlockHash], now: float) -> None:
        seen = self._seen.setdefault(replica, OrderedDict())
        # the head of the chain is noted last, so it is dropped last
        for block_hash in reversed(hashes[: self._blocks_max]):
            seen.pop(block_hash, None)
            seen[block_hash] = now
        while len(seen) > self._blocks_max:
            seen.popitem(last=False)

    def leading(self, replica: str, hashes: Sequence[BlockHash], now: float) -> int:
        """How many blocks, from the first on, the replica may have."""
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
