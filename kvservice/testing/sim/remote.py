"""What a simulated node sees of others: the directory and the shards of peers, as pool.remote asks for them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from kvservice.client.peer import PeerInfo
from kvservice.core import actions as act
from kvservice.core.block.keys import partition_of
from kvservice.core.directory.announce import Announcer
from kvservice.core.drain.receiver import room_bytes
from kvservice.core.messages import FollowResult, Holder, HolderRun, LocateResult, Peer, TakeOverResult
from kvservice.errors import StaleEpoch, Unavailable
from kvservice.lookup.client import LookupAnswer
from kvservice.pool.remote import Heard
from kvservice.pool.runtime import PoolRuntime
from kvservice.testing.sim.calls import SimCaller
from kvservice.testing.sim.lookup import LookupPartition, ask_directory
from kvservice.testing.sim.parts import NodeParts
from kvservice.units import BlockKey, NodeId, SpanRoute

T = TypeVar("T")
WATCH_SECONDS = 1.0  # between two looks of a node at the members: news come while something happens, and cost little


class SimLookup:
    """LookupPort over the simulated lookup partitions."""

    def __init__(self, node: NodeParts, lookups: Sequence[LookupPartition]) -> None:
        self._node = node
        self._lookups = lookups

    async def resolve(
        self, chain: Sequence[BlockKey], start: int, timeout: float, exclude: NodeId | None = None
    ) -> LookupAnswer:
        answer: asyncio.Future[LookupAnswer] = asyncio.get_running_loop().create_future()

        def resolved(runs: tuple[Any, ...], complete: bool) -> None:
            _answer(answer, LookupAnswer(runs, complete))

        node_id = self._node.node_id
        ask_directory(self._node, node_id, self._lookups, chain, start, timeout, exclude, resolved)
        return await answer

    async def find_node(self, node_id: NodeId, timeout: float) -> Holder | None:
        lookup = self._lookups[0]
        return await self._ask(lookup, lookup.find_node, node_id, timeout, None)

    async def members(self, timeout: float) -> list[Holder]:
        """Only nodes that accept what others evict, unless this one leaves: others would take nothing."""
        leaves = self._node.runtime is not None and self._node.runtime.state.draining
        asked = [peer.node_id for peer in self._node.peers.values() if leaves or peer.accepts_spill]
        return [found for name in asked if (found := await self.find_node(name, timeout)) is not None]

    async def holders_of(
        self, blocks: Sequence[tuple[BlockKey, SpanRoute]], timeout: float
    ) -> dict[BlockKey, tuple[Holder, ...]]:
        found: dict[BlockKey, tuple[Holder, ...]] = {}
        for index, lookup in enumerate(self._lookups):
            keys = [key for key, route in blocks if partition_of(route, len(self._lookups)) == index]
            none: list[HolderRun] = []
            for run in await self._ask(lookup, lookup.resolve, keys, timeout, none) if keys else none:
                found.update(dict.fromkeys(keys[run.start : run.start + run.count], run.holders))
        return found

    async def _ask(
        self,
        lookup: LookupPartition,
        call: Callable[[Any, NodeId, Callable[[T], None]], None],
        what: Any,
        timeout: float,
        silence: T,
    ) -> T:
        """What a partition answers, or `silence`."""
        node = self._node
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def reply(result: T) -> None:
            node.receive(_answer, answer, result)

        node.world.send(node.host, lookup.host, lookup.receive, call, what, node.node_id, reply)
        node.after(timeout, _answer, answer, silence)
        return await answer


class SimDirectory:
    """DirectoryPort of a simulated node."""

    def __init__(self, node: NodeParts, lookups: Sequence[LookupPartition], announcer: Announcer) -> None:
        self.lookup = SimLookup(node, lookups)
        self._node = node
        self._lookups = lookups
        self._announcer = announcer

    def tell(self, changes: Sequence[act.Announce | act.Retract]) -> None:
        self._announcer.change(changes)
        self._node.kick()

    async def leave(self) -> None:
        """Does nothing: missed heartbeats have the same effect, later."""

    def self_holder(self) -> Holder | None:
        return self._node.holder()

    def listen(self, heard: Heard) -> None:
        """Look at what the partitions know, again and again, as a watch stream would tell it."""

        def look() -> None:
            for lookup in self._lookups:
                if lookup.alive and not lookup.is_paused and not self._node.world.is_cut(lookup.host, self._node.host):
                    for summary in lookup.directory.nodes(lookup.clock()):
                        heard(summary.node, summary.visible)
            self._node.after(WATCH_SECONDS, look)

        self._node.after(WATCH_SECONDS, look)


class SimPeers:
    """PeerPort over calls between nodes."""

    def __init__(self, node: NodeParts) -> None:
        self._node = node
        self._caller = SimCaller(node, node.host)

    async def handshake(self, holder: Holder, timeout: float) -> PeerInfo:
        """A peer's description is fixed for its epoch, so nobody is asked, but a peer that is mute never answers."""
        if self._node.peers[holder.node_id].is_mute("handshakes"):
            await asyncio.sleep(timeout)
            raise Unavailable(f"{holder.node_id} did not answer within {timeout:.1f} s")
        memory = self._node.peers[holder.node_id].memory
        if memory.epoch != holder.epoch:
            raise StaleEpoch(f"{holder.node_id} restarted: epoch {memory.epoch}, the directory said {holder.epoch}")
        return PeerInfo(holder.epoch, memory.geometry, b"")

    async def locate(self, wanted: act.Locate) -> LocateResult:
        asked = (self._node.node_id, wanted.holder.epoch, wanted.keys, wanted.wait_seconds)
        return await self._call(wanted.holder, wanted.timeout_seconds, lambda runtime: runtime.locate(*asked))

    async def follow(self, holder: Holder, wanted: act.Follow, timeout: float) -> FollowResult:
        asked = (self._node.node_id, holder.epoch, wanted.handoff.handoff_id, wanted.keys, wanted.wait_seconds)
        return await self._call(holder, timeout, lambda runtime: runtime.follow(*asked))

    async def release(self, lease: act.ReleaseRemote, timeout: float) -> None:
        told = (self._node.node_id, lease.epoch, lease.lease_id, lease.suspects)
        await self._call(lease.holder, timeout, lambda runtime: runtime.release_located(*told))

    async def take_over(self, leaver: Holder, offer: act.Offer, timeout: float) -> TakeOverResult:
        asked = (offer.peer.epoch, leaver, offer.payload_bytes, offer.items, offer.wait_seconds)
        result = await self._call(offer.peer, timeout, lambda runtime: runtime.take_over(*asked))
        self._node.world.counters["blocks_spilled"] += sum(result.kept)
        return result

    async def room(self, holder: Holder, timeout: float) -> Peer:
        async def look(runtime: PoolRuntime) -> Peer:
            stats = runtime.stats()
            slab_bytes = runtime.geometry.slab_bytes
            free = room_bytes(stats.slab_free_count, slab_bytes, stats.slot_bytes, stats.secondary_bytes)
            up = runtime.uptime_seconds
            return Peer(holder, free, stats.segment_bytes, up, stats.draining, runtime.accepts_spill)

        return await self._call(holder, timeout, look)

    async def close(self) -> None:
        """Nothing to close."""

    async def _call(self, holder: Holder, timeout: float, work: Callable[[PoolRuntime], Awaitable[T]]) -> T:
        return await self._caller.call(self._node.peers[holder.node_id], timeout, work)


def _answer(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)
