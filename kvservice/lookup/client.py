"""Asks the lookup partitions which nodes hold a chain of blocks. One RPC per partition that the chain touches, in
parallel.

All coroutines run on the caller's loop. When a partition fails or is late, only its own spans are unknown. After three
failures in a row only one caller a second asks it, so a dead lookup partition costs the others nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

import grpc

from kvservice.aio import end_tasks
from kvservice.auth.tls import TlsFiles
from kvservice.breaker import OPEN_SECONDS_FIRST, Breaker
from kvservice.client.channels import Channels
from kvservice.core.block.keys import KEYS_PER_REQUEST_MAX, SPAN_BLOCKS, partition_of, route_of_head
from kvservice.core.directory.mirror import MirrorReader
from kvservice.core.messages import Holder, HolderRun
from kvservice.errors import InvalidRequest
from kvservice.lookup.mirror_reader import Mirror, MirroredLookup
from kvservice.observe import tracing
from kvservice.units import BlockKey, NodeId, SpanRoute
from kvservice.wire.calls import call_in_time
from kvservice.wire.codec import decode_holder, decode_live_nodes, newest_holders
from kvservice.wire.serving import CHANNEL_OPTIONS
from kvservice.wire.status import readable
from kvservice.wire.v1 import lookup_pb2, lookup_pb2_grpc

TIMEOUT_SECONDS_MIN = 0.001  # no call is made with less time left, because none would be answered in time
OPEN_SECONDS_MAX = 1.0  # a lookup partition restarts fast, and until it is asked again no remote hit is found
assert OPEN_SECONDS_FIRST <= OPEN_SECONDS_MAX
_CHANNEL_OPTIONS = [*CHANNEL_OPTIONS, ("grpc.max_reconnect_backoff_ms", 1_000)]  # for the same reason

T = TypeVar("T")
ChainSegments = list[tuple[int, int]]  # (first index in the chain, number of keys), ascending


@dataclass(frozen=True, slots=True)
class LookupAnswer:
    """Runs in ascending order, disjoint; indices count from the beginning of the chain.

    When it is not `complete`, a partition did not answer, and blocks that are missing here may have holders.
    """

    runs: tuple[HolderRun, ...]
    complete: bool


@dataclass(slots=True)
class _Partition:
    address: str
    breaker: Breaker = field(default_factory=lambda: Breaker(open_seconds_max=OPEN_SECONDS_MAX))
    channel: grpc.aio.Channel | None = None  # the channel that the stub uses
    stub: lookup_pb2_grpc.LookupServiceStub | None = None


class LookupClient:
    """`addresses` are in partition order. Channels are made on first use, on the loop that runs then.

    What the `mirror` can answer is not asked over gRPC.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        clock: Callable[[], float] = time.monotonic,
        tls: TlsFiles | None = None,
        mirror: Mirror | None = None,
    ) -> None:
        self._clock = clock
        self.mirrored = MirroredLookup(mirror, clock)
        self._channels = Channels(tls, _CHANNEL_OPTIONS)
        self._partitions = [_Partition(address) for address in addresses]
        self._counters: Counter[str] = Counter()

    @property
    def counters(self) -> dict[str, int]:
        return {**self._counters, **self.mirrored.counters}

    def set_addresses(self, addresses: Sequence[str]) -> None:
        """Use new addresses of the lookup partitions. Calls that are under way to the old ones may still finish."""
        kept = {partition.address: partition for partition in self._partitions}
        self._partitions = [kept.get(address) or _Partition(address) for address in addresses]
        self._channels.keep_only(addresses)

    async def resolve(
        self, chain: Sequence[BlockKey], start: int, timeout: float, exclude: NodeId | None = None
    ) -> LookupAnswer:
        """The nodes apart from `exclude` that hold the blocks of the chain from index `start` on.

        Answers within `timeout` seconds. Never raises because a lookup partition fails.
        """
        self._counters["lookup_calls"] += 1
        if start >= len(chain):
            return LookupAnswer((), True)
        if not self._partitions:
            return LookupAnswer((), False)
        reader, live = self.mirrored.live(len(self._partitions))
        if reader is not None and all(live):
            answer = self._read(reader, chain, start, exclude)
            if answer is not None:
                return answer
        parts = split_chain(chain, start, len(self._partitions))
        found: list[HolderRun] = []
        calls = []
        for index, segments in parts:
            runs = self.mirrored.resolve(reader, _pack(chain, segments)) if reader is not None and live[index] else None
            if runs is None:
                calls.append(self._ask(self._partitions[index], chain, segments, timeout))
            else:
                found += place_runs(runs, segments)
        answers = [await calls[0]] if len(calls) == 1 else await asyncio.gather(*calls)
        complete = all(answer is not None for answer in answers)
        if not complete:
            self._counters["lookup_incomplete"] += 1
        found += [run for answer in answers if answer is not None for run in answer]
        return LookupAnswer(merge_runs(found, exclude), complete)

    def _read(
        self, reader: MirrorReader, chain: Sequence[BlockKey], start: int, exclude: NodeId | None
    ) -> LookupAnswer | None:
        runs = self.mirrored.resolve(reader, b"".join(chain[start:] if start else chain))
        if runs is None:
            return None
        if start:
            runs = [HolderRun(run.start + start, run.count, run.holders) for run in runs]
        return LookupAnswer(merge_runs(runs, exclude), True)

    async def find_node(self, node_id: NodeId, timeout: float) -> Holder | None:
        """The address of a live node's shard, from any lookup partition that knows it; None when none does.

        Answers within `timeout` seconds. Never raises.
        """
        if timeout < TIMEOUT_SECONDS_MIN:
            return None
        now = self._clock()
        asked = [
            asyncio.ensure_future(self._judged(partition, self._find(partition, node_id, timeout)))
            for partition in self._partitions
            if partition.breaker.allows(now)
        ]
        try:
            for answer in asyncio.as_completed(asked):
                found = await answer
                if found is not None:
                    return found
            return None
        finally:
            await end_tasks(asked)

    async def members(self, timeout: float) -> list[Holder]:
        """Every live node that at least one lookup partition knows. Never raises."""

        async def ask(partition: _Partition) -> list[Holder]:
            try:
                method = self._stub(partition).LookupStats
                reply = await call_in_time(method, lookup_pb2.LookupStatsRequest(), timeout)
                return decode_live_nodes(readable(reply, "stats"))
            except (grpc.aio.AioRpcError, InvalidRequest):
                self._counters["members_failed"] += 1
                return []

        found = await asyncio.gather(*map(ask, self._partitions))
        return newest_holders(holder for nodes in found for holder in nodes)

    async def holders_of(
        self, blocks: Sequence[tuple[BlockKey, SpanRoute]], timeout: float
    ) -> dict[BlockKey, tuple[Holder, ...]]:
        """The holders of single blocks, from the partitions that answer within `timeout` seconds. Never raises."""
        if not self._partitions:
            return {}
        by_partition: dict[int, list[BlockKey]] = {}
        for key, route in blocks:
            by_partition.setdefault(partition_of(route, len(self._partitions)), []).append(key)
        deadline = self._clock() + timeout

        async def ask(index: int, keys: list[BlockKey]) -> dict[BlockKey, tuple[Holder, ...]]:
            found: dict[BlockKey, tuple[Holder, ...]] = {}
            for start in range(0, len(keys), KEYS_PER_REQUEST_MAX):
                part = keys[start : start + KEYS_PER_REQUEST_MAX]
                left = deadline - self._clock()
                runs = await self._ask(self._partitions[index], part, [(0, len(part))], left)
                for run in runs or ():
                    found.update(dict.fromkeys(part[run.start : run.start + run.count], run.holders))
            return found

        merged: dict[BlockKey, tuple[Holder, ...]] = {}
        for answer in await asyncio.gather(*[ask(index, keys) for index, keys in by_partition.items()]):
            merged.update(answer)
        return merged

    async def close(self) -> None:
        self.mirrored.set_mirror(None)
        await self._channels.close()

    async def _ask(
        self, partition: _Partition, chain: Sequence[BlockKey], segments: ChainSegments, timeout: float
    ) -> list[HolderRun] | None:
        if timeout < TIMEOUT_SECONDS_MIN:
            self._counters["lookup_no_time"] += 1
            return None
        if not partition.breaker.admits(self._clock(), OPEN_SECONDS_MAX):
            self._counters["lookup_skipped"] += 1
            return None
        self._counters["lookup_rpcs"] += 1
        return await self._judged(partition, self._resolve(partition, chain, segments, timeout))

    async def _resolve(
        self, partition: _Partition, chain: Sequence[BlockKey], segments: ChainSegments, timeout: float
    ) -> list[HolderRun]:
        request = lookup_pb2.ResolveRequest(keys=_pack(chain, segments))
        reply = await call_in_time(self._stub(partition).Resolve, request, timeout, tracing.metadata())
        return decode_runs(readable(reply, "resolve"), segments)

    async def _find(self, partition: _Partition, node_id: NodeId, timeout: float) -> Holder | None:
        request = lookup_pb2.FindNodeRequest(node_id=node_id)
        reply = await call_in_time(self._stub(partition).FindNode, request, timeout)
        return decode_holder(reply.node) if readable(reply, "find node").HasField("node") else None

    async def _judged(self, partition: _Partition, asking: Awaitable[T]) -> T | None:
        """The answer of a partition, or None when it fails. Its breaker hears of both."""
        try:
            found = await asking
        except grpc.aio.AioRpcError as error:
            self._failed(partition, f"lookup_failed_{error.code().name.lower()}")
            return None
        except InvalidRequest:
            self._failed(partition, "lookup_failed_malformed")
            return None
        partition.breaker.succeeded()
        return found

    def _failed(self, partition: _Partition, counter: str) -> None:
        self._counters[counter] += 1
        self._counters["lookup_breaker_opened"] += partition.breaker.failed_once(self._clock())

    def _stub(self, partition: _Partition) -> lookup_pb2_grpc.LookupServiceStub:
        channel = self._channels.get(partition.address)
        if partition.stub is None or partition.channel is not channel:
            partition.channel, partition.stub = channel, lookup_pb2_grpc.LookupServiceStub(channel)
        return partition.stub


def split_chain(chain: Sequence[BlockKey], start: int, partition_count: int) -> list[tuple[int, ChainSegments]]:
    """The parts of chain[start:] that each partition is asked for: (partition, segments) for each RPC."""
    by_partition: dict[int, ChainSegments] = {}
    first = start
    while first < len(chain):
        head = first - first % SPAN_BLOCKS
        end = min(head + SPAN_BLOCKS, len(chain))
        segments = by_partition.setdefault(partition_of(route_of_head(chain[head]), partition_count), [])
        if segments and sum(segments[-1]) == first:
            segments[-1] = (segments[-1][0], end - segments[-1][0])
        else:
            segments.append((first, end - first))
        first = end
    return [(index, part) for index, segments in by_partition.items() for part in _bounded(segments)]


def _bounded(segments: ChainSegments) -> list[ChainSegments]:
    """The segments in portions of at most KEYS_PER_REQUEST_MAX keys."""
    if sum(count for _, count in segments) <= KEYS_PER_REQUEST_MAX:
        return [segments]
    portions: list[ChainSegments] = [[]]
    room = KEYS_PER_REQUEST_MAX
    for first, count in segments:
        while count:
            if not room:
                portions.append([])
                room = KEYS_PER_REQUEST_MAX
            taken = min(count, room)
            portions[-1].append((first, taken))
            first, count, room = first + taken, count - taken, room - taken
    return portions


def _pack(chain: Sequence[BlockKey], segments: ChainSegments) -> bytes:
    return b"".join([b"".join(chain[first : first + count]) for first, count in segments])


def place_runs(runs: Sequence[HolderRun], segments: ChainSegments) -> list[HolderRun]:
    """Translate runs over the packed keys of these segments into indices of the chain."""
    placed: list[HolderRun] = []
    base = at = 0  # segment number `at` begins at index `base` of the packed keys
    for run in runs:
        position, end = run.start, run.start + run.count
        while position < end:
            while position >= base + segments[at][1]:
                base += segments[at][1]
                at += 1
            first, count = segments[at]
            taken = min(end, base + count) - position
            placed.append(HolderRun(first + position - base, taken, run.holders))
            position += taken
    return placed


def decode_runs(reply: lookup_pb2.ResolveReply, segments: ChainSegments) -> list[HolderRun]:
    """The runs of one reply, in indices of the chain. Raises InvalidRequest for a malformed reply."""
    nodes = [decode_holder(info) for info in reply.nodes]
    asked_count = sum(count for _, count in segments)
    found: list[HolderRun] = []
    end = 0
    holders_of: dict[tuple[int, ...], tuple[Holder, ...]] = {}
    for run in reply.runs:
        end_before, end = end, run.start + run.count
        if run.start < end_before or run.count == 0 or end > asked_count or not run.holders:
            raise InvalidRequest(f"a lookup partition answered run {run.start}+{run.count} after {end_before}")
        indices = tuple(run.holders)
        holders = holders_of.get(indices)
        if holders is None:
            if max(indices) >= len(nodes):
                raise InvalidRequest(f"a lookup partition named holder {max(indices)} of {len(nodes)}")
            chosen = {nodes[index] for index in indices}
            holders = holders_of[indices] = tuple(sorted(chosen, key=lambda holder: holder.node_id))
        found.append(HolderRun(run.start, run.count, holders))
    return place_runs(found, segments)


def merge_runs(runs: list[HolderRun], exclude: NodeId | None) -> tuple[HolderRun, ...]:
    """The runs in ascending order, without `exclude`. Adjacent runs with the same holders are merged."""
    if exclude is not None:
        runs = [run for run in (_without(run, exclude) for run in runs) if run.holders]
    runs = sorted(runs, key=lambda run: run.start)
    merged: list[HolderRun] = []
    for run in runs:
        last = merged[-1] if merged else None
        if last is not None and last.start + last.count == run.start and last.holders == run.holders:
            merged[-1] = HolderRun(last.start, last.count + run.count, run.holders)
        else:
            merged.append(run)
    assert all(before.start + before.count <= after.start for before, after in pairwise(merged))
    return tuple(merged)


def _without(run: HolderRun, node_id: NodeId) -> HolderRun:
    if all(holder.node_id != node_id for holder in run.holders):
        return run
    return HolderRun(run.start, run.count, tuple(holder for holder in run.holders if holder.node_id != node_id))
