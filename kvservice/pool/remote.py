"""Asks other nodes what the shard's core needs to know: the lookup service, and the shards of peers.

Runs on the pool's loop. Each question is one action of the core and ends in one event, even when nobody answers.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from kvservice.client.peer import PeerInfo, PeerPort
from kvservice.core import actions as act
from kvservice.core import events as ev
from kvservice.core.bounded_table import NODES_MAX, BoundedTable
from kvservice.core.drain.sender import FIND_SECONDS as TAKERS_SECONDS
from kvservice.core.messages import FollowResult, Holder, LocateResult, Peer, TakeOverResult
from kvservice.errors import Exhausted, Forbidden, InvalidRequest, KVServiceError, Refused
from kvservice.lookup.client import LookupAnswer
from kvservice.observe import tracing
from kvservice.observe.failpoints import failpoint
from kvservice.observe.timings import Timings
from kvservice.pool.runtime_ports import PullerPort, Report
from kvservice.transfer.job import PullItem, PullJob
from kvservice.units import BlockKey, BootEpoch, NodeId, SpanRoute, printable

log = logging.getLogger("kvservice.pool")

RELEASE_SECONDS = 2.0  # a release is not needed: without it the peer's lease expires
FIND_NODE_SECONDS = 0.5  # a writer's node is looked up within this; else the acquisition asks the directory for blocks
FOLLOW_SLACK_SECONDS = 1.0  # for the network, beyond what the peer may wait
FIND_SECONDS = 1.2  # for each of the two steps in which a leaving node finds takers; the core waits a little longer
OFFER_SLACK_SECONDS = 1.0  # for the network, beyond what the taker may wait
REFUSALS = (
    Refused,
    Forbidden,
    InvalidRequest,
    Exhausted,
)  # what a peer that lives answers; calls to others end otherwise
assert 2 * FIND_SECONDS < TAKERS_SECONDS, "the core must not give up before both answers can come"


Heard = Callable[[Holder, bool], None]  # a node, and whether it counts now


class LookupPort(Protocol):
    """Questions to the lookup service, each answered within `timeout` seconds. Raises KVServiceError."""

    async def resolve(
        self, chain: Sequence[BlockKey], start: int, timeout: float, exclude: NodeId | None = None
    ) -> LookupAnswer: ...

    async def find_node(self, node_id: NodeId, timeout: float) -> Holder | None: ...

    async def members(self, timeout: float) -> list[Holder]: ...

    async def holders_of(
        self, blocks: Sequence[tuple[BlockKey, SpanRoute]], timeout: float
    ) -> dict[BlockKey, tuple[Holder, ...]]: ...


class DirectoryPort(Protocol):
    """The lookup service as a shard needs it: `lookup` asks, the rest announces. Only `leave` waits."""

    @property
    def lookup(self) -> LookupPort: ...

    def tell(self, changes: Sequence[act.Announce | act.Retract]) -> None:
        """What this node holds has changed, in this order. It is sent soon, with what else has changed by then."""
        ...

    async def leave(self) -> None: ...

    def self_holder(self) -> Holder | None: ...

    def listen(self, heard: Heard) -> None:
        """`heard` is told of every node that is named from now on, and of those that were. Call it once."""
        ...


class RemoteShards:
    """`directory` and `peers` are None in an embedded pool."""

    def __init__(
        self,
        node_id: NodeId,
        directory: DirectoryPort | None,
        peers: PeerPort | None,
        clock: Callable[[], float],
        counters: Counter[str],
        timings: Timings,
        *,
        accepts_spill: bool = False,
        on_asked: Callable[[NodeId], None] = lambda node_id: None,
    ) -> None:
        """`on_asked` is told of every peer that a request fetches from."""
        self._node_id = node_id
        self._on_asked = on_asked
        self._accepts_spill = accepts_spill
        self._directory = directory
        self._peers = peers
        self._clock = clock
        self._counters = counters
        self._timings = timings
        self._peer_infos: BoundedTable[NodeId, PeerInfo] = BoundedTable(NODES_MAX)
        self._writers: BoundedTable[NodeId, Holder] = BoundedTable(NODES_MAX)  # nodes whose hand-offs were followed
        self._told: BoundedTable[tuple[str, NodeId], str] = BoundedTable(2 * NODES_MAX)  # what was logged last

    def peer_info(self, node_id: NodeId, epoch: BootEpoch) -> PeerInfo | None:
        """What a peer's handshake said, if this epoch of the peer was asked before."""
        info = self._peer_infos.get(node_id)
        return info if info is not None and info.epoch == epoch else None

    async def perform(self, action: act.Outgoing) -> ev.Event | None:
        """Perform an action. Returns the event that answers it; None for an action without an answer."""
        match action:
            case act.Resolve():
                return await self._resolve(action)
            case act.Locate():
                return await self._locate(action)
            case act.Follow():
                return await self._follow(action)
            case act.FindTakers():
                return await self._find_takers(action)
            case act.Offer():
                return await self._offer(action)
            case act.ReleaseRemote():
                await self._release(action)
            case act.Farewell():
                await self._farewell()
            case _:
                act.nobody_performs(action)
        return None

    async def _resolve(self, action: act.Resolve) -> ev.Event:
        answer = LookupAnswer((), complete=False)
        if self._directory is not None:
            began = self._clock()
            with tracing.span("resolve", blocks=len(action.chain) - action.start) as span:
                try:
                    answer = await self._directory.lookup.resolve(
                        action.chain, action.start, action.timeout_seconds, self._node_id
                    )
                except KVServiceError as error:
                    log.info("lookup_failed", extra={"error": error.message})
                span.set(found=sum(run.count for run in answer.runs), complete=answer.complete)
            self._timings.add("resolve_seconds", self._clock() - began)
        return ev.Resolved(action.op, answer.runs, answer.complete)

    async def _locate(self, action: act.Locate) -> ev.Event:
        sent_at = self._clock()
        result: LocateResult | None = None
        if self._peers is not None:
            began = sent_at
            with tracing.span("locate", node=action.holder.node_id, blocks=len(action.keys)) as span:
                try:
                    self._on_asked(action.holder.node_id)
                    await self._meet(self._peers, action.holder, action.timeout_seconds)
                    sent_at = self._clock()
                    result = await self._peers.locate(action)
                    self._told.pop(("locate_failed", action.holder.node_id))
                    span.set(leased=sum(handle is not None for handle in result.handles))
                except KVServiceError as error:
                    self._counters["locate_failed"] += 1
                    span.set(failed=error.message)
                    self._tell("locate_failed", action.holder.node_id, error)
            self._timings.add("locate_seconds", self._clock() - began)
        return ev.Located(action.fetch, result, sent_at)

    async def _follow(self, action: act.Follow) -> ev.Event:
        writer = action.handoff.node_id
        known = self._writers.get(writer)
        if known is not None:
            followed = await self._follow_at(action, known)
            if followed.result is not None:
                return followed
            self._writers.pop(writer)  # it may have restarted since, and the directory knows its new address
        found = await self._find_writer(writer)
        if found is None or found == known:
            return ev.Followed(action.follow, action.op, None, None, self._clock())
        return await self._follow_at(action, found)

    async def _follow_at(self, action: act.Follow, holder: Holder) -> ev.Followed:
        sent_at = self._clock()
        result: FollowResult | None = None
        try:
            if self._peers is not None:
                self._on_asked(holder.node_id)
                await self._meet(self._peers, holder, FOLLOW_SLACK_SECONDS)
                sent_at = self._clock()
                result = await self._peers.follow(holder, action, action.wait_seconds + FOLLOW_SLACK_SECONDS)
                self._told.pop(("follow_failed", holder.node_id))
        except KVServiceError as error:
            self._tell("follow_failed", holder.node_id, error)
        return ev.Followed(action.follow, action.op, holder, result, sent_at)

    async def _find_takers(self, action: act.FindTakers) -> ev.Event:
        """The other nodes with their room. Nodes that do not answer are left out."""
        directory, ports = self._directory, self._peers
        if directory is None or ports is None:
            return ev.TakersFound((), {}, action.is_spill)
        members = [node for node in await directory.lookup.members(FIND_SECONDS) if node.node_id != self._node_id]
        asked = asyncio.gather(*[ports.room(node, FIND_SECONDS) for node in members], return_exceptions=True)
        holders = await directory.lookup.holders_of(action.blocks, FIND_SECONDS)
        peers = tuple(answer for answer in await asked if isinstance(answer, Peer))
        self._counters["find_takers_failed"] += len(members) - len(peers)
        others = {key: tuple(h for h in found if h.node_id != self._node_id) for key, found in holders.items()}
        return ev.TakersFound(peers, {key: found for key, found in others.items() if found}, action.is_spill)

    async def _offer(self, action: act.Offer) -> ev.Event:
        result: TakeOverResult | None = None
        refusal = ""
        leaver = None if self._directory is None else self._directory.self_holder()
        try:
            if self._peers is not None and leaver is not None:
                result = await self._peers.take_over(leaver, action, action.wait_seconds + OFFER_SLACK_SECONDS)
        except KVServiceError as error:
            if isinstance(error, REFUSALS):
                refusal = printable(error.message)
            log.info("take_over_failed", extra={"node": action.peer.node_id, "error": str(error)})
        return ev.Offered(action.offer, result, refusal)

    async def leaver(self, claimed: Holder) -> Holder:
        """The node as the directory knows it, so that no address given by a caller is ever connected to.

        Raises Refused when the node is not a live member or has another epoch. Unless this shard accepts what others
        evict, raises Forbidden when the node says itself that it does not leave, and what `room` raises.
        """
        found = None
        if self._directory is not None:
            found = await self._directory.lookup.find_node(claimed.node_id, FIND_NODE_SECONDS)
        if found is None or found.epoch != claimed.epoch:
            self._counters["takeover_strangers"] += 1
            raise Refused(f"node {claimed.node_id} in epoch {claimed.epoch} is not a member of this service")
        if self._accepts_spill:
            return found
        if self._peers is None or not (await self._peers.room(found, FIND_SECONDS)).draining:
            self._counters["takeover_forged"] += 1
            raise Forbidden(f"node {claimed.node_id} says that it does not leave, so it has offered nothing")
        return found

    async def _farewell(self) -> None:
        if self._directory is not None:
            await self._directory.leave()

    async def _release(self, action: act.ReleaseRemote) -> None:
        if self._peers is None:
            return
        try:
            await self._peers.release(action, RELEASE_SECONDS)
        except KVServiceError:
            self._counters["remote_release_failed"] += 1  # the peer's lease expires

    async def close(self) -> None:
        if self._peers is not None:
            await self._peers.close()

    async def meet(self, holder: Holder, timeout: float) -> PeerInfo | None:
        """Ask a peer about its segment before it is needed. None in an embedded pool. Raises KVServiceError."""
        return None if self._peers is None else await self._meet(self._peers, holder, timeout)

    async def _meet(self, peers: PeerPort, holder: Holder, timeout: float) -> PeerInfo:
        return self._peer_infos.put(holder.node_id, await peers.handshake(holder, timeout))

    def _tell(self, event: str, node: NodeId, error: KVServiceError) -> None:
        """Log what failed at a node. The same again is not logged until it answers: one of another version fails with
        every request."""
        if self._told.get((event, node)) != str(error):
            self._told.put((event, node), str(error))
            log.info(event, extra={"node": node, "error": str(error)})

    async def _find_writer(self, node_id: NodeId) -> Holder | None:
        found = None if self._directory is None else await self._directory.lookup.find_node(node_id, FIND_NODE_SECONDS)
        if found is None:
            self._counters["writer_unknown"] += 1
            return None
        return self._writers.put(node_id, found)


class PeerReads:
    """Reads blocks of peers into slots of this pool. `puller` is None in a pool that reads from nobody.

    The puller's threads report the ends, as events of the core.
    """

    def __init__(
        self,
        puller: PullerPort | None,
        remote: RemoteShards,
        clock: Callable[[], float],
        timings: Timings,
        report: Report,
    ) -> None:
        self._puller = puller
        self._remote = remote
        self._clock = clock
        self._timings = timings
        self._report = report

    def begin(self, action: act.Pull) -> None:
        info = self._remote.peer_info(action.holder.node_id, action.epoch)
        if self._puller is None or info is None:
            failed = (ev.PullResult.FAILED,) * len(action.items)
            self._report(ev.Pulled(action.job, failed), contextvars.copy_context())
            return
        items = tuple(PullItem(handle, destination) for handle, destination in action.items)
        job = PullJob(
            action.job,
            action.holder.node_id,
            action.epoch,
            info.description,
            info.geometry,
            action.payload_bytes,
            items,
            action.deadline,
        )
        size = len(items) * job.payload_bytes
        span = tracing.begin("fetch", node=action.holder.node_id, blocks=len(items), bytes=size)
        came = partial(self._on_pulled, self._clock(), span, contextvars.copy_context())
        self._puller.submit(job, came, self._on_writes_ended)

    def _on_pulled(
        self,
        began: float,
        span: tracing.Span,
        context: contextvars.Context,
        job: int,
        results: tuple[ev.PullResult, ...],
    ) -> None:
        failpoint("shard.pulled")
        span.end(verified=results.count(ev.PullResult.OK))
        context.run(self._timings.add, "fetch_seconds", self._clock() - began, "peer")
        self._report(ev.Pulled(job, results), context)

    def _on_writes_ended(self, job: int) -> None:
        self._report(ev.WritesEnded(job), None)
