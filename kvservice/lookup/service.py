"""The LookupService RPCs over a Directory: checks what arrives on the wire, asks the directory, encodes the answer.

Runs on the server's event loop. It never awaits between reading and changing the directory, so no lock is needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing

from kvservice.auth.identity import Caller, caller_of, proof_in
from kvservice.core.block.keys import KEY_BYTES, check_packed, unpack_keys
from kvservice.core.directory.announce import UPDATE_KEYS_MAX
from kvservice.core.directory.directory import AnnounceOutcome, Directory
from kvservice.core.messages import Holder, HolderRun
from kvservice.errors import Forbidden, InvalidRequest, Refused
from kvservice.lookup.watch import EVENT_OVERHEAD_BYTES, QUEUE_BYTES_MAX, WatchHub
from kvservice.observe.failpoints import failpoint
from kvservice.units import NodeId
from kvservice.wire.codec import decode_holder, encode_holder
from kvservice.wire.serving import MESSAGE_BYTES_MAX, Context
from kvservice.wire.v1 import lookup_pb2
from kvservice.wire.versions import check_version

# Keys added and removed by one announcement, each; four times what our announcer sends. More are refused.
ANNOUNCED_KEYS_MAX = 65_536
HEARTBEAT_SECONDS_MIN = 0.05  # asked by a watcher; more frequent heartbeats would only load the loop, and are refused
assert ANNOUNCED_KEYS_MAX >= UPDATE_KEYS_MAX
assert 2 * ANNOUNCED_KEYS_MAX * KEY_BYTES < MESSAGE_BYTES_MAX, "an announcement must fit into a request"
assert 2 * ANNOUNCED_KEYS_MAX * KEY_BYTES + EVENT_OVERHEAD_BYTES < QUEUE_BYTES_MAX, "an event must fit into a queue"

OUTCOMES = {
    AnnounceOutcome.APPLIED: lookup_pb2.AnnounceReply.OUTCOME_APPLIED,
    AnnounceOutcome.RESYNC: lookup_pb2.AnnounceReply.OUTCOME_RESYNC,
    AnnounceOutcome.STALE_EPOCH: lookup_pb2.AnnounceReply.OUTCOME_STALE_EPOCH,
}


class LookupServicer:
    """LookupService. Each coroutine is one RPC; KVServiceError becomes its status (wire.serving)."""

    def __init__(
        self,
        directory: Directory,
        hub: WatchHub,
        partition: int,
        partition_count: int,
        epoch: int,
        clock: Callable[[], float],
    ) -> None:
        self._directory = directory
        self._hub = hub
        self._partition = partition
        self._partition_count = partition_count
        self._epoch = epoch
        self._clock = clock
        self._counters: Counter[str] = Counter()

    async def resolve(self, request: lookup_pb2.ResolveRequest, context: Context) -> lookup_pb2.ResolveReply:
        packed = check_packed(request.keys)
        runs = self._directory.resolve(packed, self._clock())
        failpoint("lookup.resolve")
        counters = self._counters
        counters["resolve_calls"] += 1
        counters["resolve_keys"] += len(packed) // KEY_BYTES
        counters["resolve_keys_held"] += sum(run.count for run in runs)
        if self._directory.changes:
            self._hub.publish()
        return _encode_runs(runs)

    async def announce(self, request: lookup_pb2.AnnounceRequest, context: Context) -> lookup_pb2.AnnounceReply:
        check_version(request.protocol_version, "the announcing shard")
        if (request.partition, request.partition_count) != (self._partition, self._partition_count):
            raise Refused(
                f"this is lookup partition {self._partition} of {self._partition_count}, the announcement is for "
                f"{request.partition} of {request.partition_count}: give every shard and lookup partition the same "
                "list of lookup partitions, in the same order",
                partition=self._partition,
                partition_count=self._partition_count,
            )
        if request.sequence == 0:
            raise InvalidRequest("the sequence of announcements starts at 1")
        node = decode_holder(request.node)
        self._check_speaks_for(caller_of(context), node)
        outcome = self._directory.apply(
            node,
            request.sequence,
            check_packed(request.added, ANNOUNCED_KEYS_MAX),
            check_packed(request.removed, ANNOUNCED_KEYS_MAX),
            full_begin=request.full_begin,
            full_end=request.full_end,
            leaving=request.leaving,
            now=self._clock(),
            proof=proof_in(context),
        )
        failpoint("lookup.announce")
        self._counters["announce_calls"] += 1
        self._hub.publish()
        shown_since = self._directory.shown_since(node.node_id)
        return lookup_pb2.AnnounceReply(outcome=OUTCOMES[outcome], lookup_epoch=self._epoch, shown_since=shown_since)

    def _check_speaks_for(self, caller: Caller, node: Holder) -> None:
        try:
            caller.check_speaks_for(node.node_id, node.peer_address)
        except Forbidden:
            self._counters["announce_wrong_certificate"] += 1
            raise

    async def watch(self, request: lookup_pb2.WatchRequest, context: Context) -> AsyncIterator[lookup_pb2.WatchEvent]:
        check_version(request.protocol_version, "the watching shard")
        if not (request.heartbeat_seconds == 0 or request.heartbeat_seconds >= HEARTBEAT_SECONDS_MIN):
            raise InvalidRequest(f"heartbeats at most every {HEARTBEAT_SECONDS_MIN} s, or 0 for none")
        async with aclosing(self._hub.subscribe(request.heartbeat_seconds)) as events:
            async for event in events:
                yield event

    async def find_node(self, request: lookup_pb2.FindNodeRequest, context: Context) -> lookup_pb2.FindNodeReply:
        found = self._directory.find_node(NodeId(request.node_id), self._clock())
        return lookup_pb2.FindNodeReply(node=None if found is None else encode_holder(found))

    async def lost_blocks(self, request: lookup_pb2.LostBlocksRequest, context: Context) -> lookup_pb2.LostBlocksReply:
        keys, now = unpack_keys(request.keys), self._clock()
        lost = self._directory.find_lost(keys, now, now - max(request.age_seconds, 0.0))
        rows = [(index, lost[key]) for index, key in enumerate(keys) if key in lost]
        return lookup_pb2.LostBlocksReply(
            lost=[
                lookup_pb2.LostBlock(
                    index=index, node_id=eviction.caused_by, cause=eviction.cause.value, age_seconds=now - eviction.at
                )
                for index, eviction in rows
            ]
        )

    async def lookup_stats(
        self, request: lookup_pb2.LookupStatsRequest, context: Context
    ) -> lookup_pb2.LookupStatsReply:
        nodes = [
            lookup_pb2.LookupNodeStats(
                node=encode_holder(summary.node),
                block_count=summary.block_count,
                heartbeat_age_seconds=summary.heartbeat_age_seconds,
                alive=summary.visible,
            )
            for summary in self._directory.nodes(self._clock())
        ]
        counters = {**self.counters(), "watchers": len(self._hub)}
        return lookup_pb2.LookupStatsReply(
            partition=self._partition,
            partition_count=self._partition_count,
            lookup_epoch=self._epoch,
            key_count=len(self._directory),
            nodes=nodes,
            counters=counters,
        )

    def counters(self) -> dict[str, int]:
        """Counters of the directory, the watchers and the calls."""
        counters = {**self._directory.all_counters(), **self._counters}
        counters["watchers_cut_off"] = self._hub.cut_off_count
        return counters


def _encode_runs(runs: Sequence[HolderRun]) -> lookup_pb2.ResolveReply:
    nodes: dict[Holder, int] = {}
    indices_of: dict[int, list[int]] = {}  # by identity: the directory returns one tuple for each distinct set
    encoded: list[lookup_pb2.ResolveRun] = []
    for run in runs:
        indices = indices_of.get(id(run.holders))
        if indices is None:
            indices = indices_of[id(run.holders)] = [nodes.setdefault(node, len(nodes)) for node in run.holders]
        encoded.append(lookup_pb2.ResolveRun(start=run.start, count=run.count, holders=indices))
    return lookup_pb2.ResolveReply(runs=encoded, nodes=[encode_holder(node) for node in nodes])
