"""The pools of two nodes in this process, for engines that hand prompts over: real runtimes that map each other's
memory, on one loop in a thread. Only the wire is missing: calls of engines and peers are calls of the runtime, and the
directory is a dictionary.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from kvservice.client.peer import PeerInfo
from kvservice.core.actions import Follow, Locate, Offer, ReleaseRemote
from kvservice.core.messages import (
    AcquireRequest,
    AcquireResult,
    Attachment,
    EngineSpec,
    FollowResult,
    Holder,
    LocateResult,
    Peer,
    Removed,
    RequestReport,
    SealItem,
    SealStatus,
    Statement,
    TakeOverResult,
    WarmRequest,
    WarmResult,
)
from kvservice.core.segment.geometry import plan_geometry
from kvservice.core.segment.refs import BlockRef
from kvservice.errors import KVServiceError, StaleEpoch, Unavailable
from kvservice.pool.port import PoolPort
from kvservice.pool.runtime import PoolRuntime
from kvservice.pool.runtime_ports import PoolConfig
from kvservice.testing.eventually import eventually, patience
from kvservice.testing.fake_directory import FakeDirectory, FakeLookup
from kvservice.transfer.puller import Puller
from kvservice.units import AttachmentId, BootEpoch, HandoffId, LeaseId, NodeId

T = TypeVar("T")
NODES = (NodeId("n0"), NodeId("n1"))
BOOT_SECONDS = 20.0  # for a pool to open or to close
QUIET_SECONDS = 8.0  # for what is under way to end when nobody asks any more


class TwoNodes:
    """Call it from the test's thread. `close` ends everything."""

    def __init__(self, folder: Path, pool_bytes: int, lease_seconds: float, faults: float, seed: int) -> None:
        """`faults` is the share of calls whose question or answer is lost."""
        self._faults, self._draw = faults, random.Random(seed)
        self._folder, self._pool_bytes, self._lease_seconds = folder, pool_bytes, lease_seconds
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="two-nodes", daemon=True)
        self._lookup = FakeLookup()
        self._boots = 0
        self.runtimes: dict[NodeId, PoolRuntime] = {}
        self.holders: dict[NodeId, Holder] = {}
        self._lost: dict[NodeId, list[Callable[[str], None]]] = {}
        self._thread.start()
        for node in NODES:
            self.start(node)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(BOOT_SECONDS * patience())

    # -- what a test does ----

    def start(self, node: NodeId) -> None:
        self.run(self._start(node))

    def lose(self, node: NodeId) -> None:
        """The shard ends without a word. Its memory stays, and its next boot finds it."""
        self.run(self._lose(node))

    def opener(self, node: NodeId) -> Callable[[], Awaitable[PoolPort]]:
        async def open_pool() -> PoolPort:
            return NodePool(self, node)

        return open_pool

    def check_quiet(self) -> None:
        """Nobody asks any more: only the engines' stocks are held, and no hand-off is open."""
        for node, runtime in self.runtimes.items():
            eventually(
                partial(self._is_quiet, runtime),
                f"{node} to be quiet",
                QUIET_SECONDS,
                detail=partial(self._held, runtime),
            )

    def _is_quiet(self, runtime: PoolRuntime) -> bool:
        assert runtime.fenced is None, runtime.fenced
        return not self._held(runtime)

    def _held(self, runtime: PoolRuntime) -> list[str]:
        return self.run(_held(runtime))

    def counters(self) -> Counter[str]:
        async def read() -> Counter[str]:
            found: Counter[str] = Counter()
            for runtime in self.runtimes.values():
                found.update(runtime.state.all_counters())
            return found

        return self.run(read())

    def close(self) -> None:
        for node in list(self.runtimes):
            self.lose(node)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(BOOT_SECONDS)
        self._loop.close()

    # -- on the loop ----

    def runtime(self, node: NodeId) -> PoolRuntime:
        """Raises Unavailable."""
        if node not in self.runtimes:
            raise Unavailable(f"nobody listens at {node}")
        return self.runtimes[node]

    async def _start(self, node: NodeId) -> None:
        self._boots += 1
        holder = Holder(node, f"at {node}", BootEpoch(10 * self._boots))
        config = PoolConfig(
            node,
            self._folder / f"{node}.segment",
            plan_geometry(self._pool_bytes),
            self._lease_seconds,
            self._folder,
            holder.epoch,
        )
        directory = FakeDirectory(self._lookup, holder)
        runtime = await PoolRuntime.open(
            config, reads=lambda segment: Puller(segment, None), directory=directory, peers=NodePeers(self, node)
        )
        assert runtime.epoch == holder.epoch
        self.runtimes[node], self.holders[node] = runtime, holder
        for key, _ in runtime.inventory():
            self._lookup.add(key, holder)

    async def _lose(self, node: NodeId) -> None:
        runtime = self.runtimes.pop(node)
        self._lookup.forget(self.holders.pop(node))
        await runtime.close()
        for lost in self._lost.pop(node, ()):
            lost("the connection broke")

    async def attach(self, node: NodeId, spec: EngineSpec, on_lost: Callable[[str], None]) -> Attachment:
        runtime = self.runtime(node)
        attachment = await runtime.attach(spec, on_lost)
        if self.runtimes.get(node) is not runtime:
            raise Unavailable("the connection broke")
        self._lost.setdefault(node, []).append(on_lost)
        return attachment

    async def call(self, node: NodeId, name: str, arguments: Sequence[Any]) -> Any:
        """A call that is lost on the way there or back ends as one over a connection that broke and came back."""
        drawn = self._draw.random()
        if drawn < self._faults and name != "detach":
            await asyncio.sleep(0.01)
            if drawn < self._faults / 2:
                raise Unavailable("the question was lost")
            await getattr(self.runtime(node), name)(*arguments)
            raise Unavailable("the answer was lost")
        if drawn < 4 * self._faults:
            await asyncio.sleep(0.02 * self._draw.random())  # and is overtaken by others
        return await getattr(self.runtime(node), name)(*arguments)


async def _held(runtime: PoolRuntime) -> list[str]:
    """What nobody should hold any more."""
    state = runtime.state
    state.check_invariants()
    slots = {name: count for name, (count, _) in state.slot_usage().items()}
    found = [f"{slots[name]} slots {name}" for name in ("writing", "leased") if slots[name]]
    found += [f"{len(state._leases)} leases"] if len(state._leases) else []
    found += [f"{state._handoffs.open_count} open hand-offs"] if state._handoffs.open_count else []
    follows = len(state._handoffs._follows) + len(state._handoffs._watches)
    found += [f"{follows} readers of hand-offs"] if follows else []
    found += [] if state._acquisitions.is_idle else ["acquisitions"]
    return found


class NodePool:
    """PoolPort of an engine on a loop of its own."""

    def __init__(self, nodes: TwoNodes, node: NodeId) -> None:
        self._nodes, self._node = nodes, node
        self._attached: AttachmentId | None = None

    async def _there(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run it on the loop of the nodes. If nobody waits for it any more, what it brings is taken back there: on a
        wire, an answer that crosses a cancel leaves a lease to expire, which would look like one that was forgotten."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        tasks: list[asyncio.Task[T]] = []

        def settle(task: asyncio.Task[T]) -> None:
            if done.done():
                return
            if task.cancelled():
                done.cancel()
            elif (error := task.exception()) is not None:
                done.set_exception(error)
            else:
                done.set_result(task.result())

        def ended(task: asyncio.Task[T]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, task)

        def begin() -> None:
            tasks.append(self._nodes._loop.create_task(work()))
            tasks[0].add_done_callback(ended)

        self._nodes._loop.call_soon_threadsafe(begin)
        try:
            return await done
        except asyncio.CancelledError:
            self._nodes._loop.call_soon_threadsafe(self._give_up, tasks)
            raise

    def _give_up(self, tasks: Sequence[asyncio.Task[Any]]) -> None:
        (task,) = tasks
        if not task.done():
            task.cancel()
        elif not task.cancelled() and task.exception() is None and isinstance(result := task.result(), AcquireResult):
            self._nodes._loop.create_task(self._take_back(result.lease_id))

    async def _take_back(self, lease_id: LeaseId) -> None:
        if lease_id and self._attached is not None:
            with contextlib.suppress(KVServiceError):
                await self._nodes.runtime(self._node).release(self._attached, [lease_id])

    async def _call(self, name: str, *arguments: Any) -> Any:
        return await self._there(lambda: self._nodes.call(self._node, name, arguments))

    async def attach(self, spec: EngineSpec, on_lost: Callable[[str], None]) -> Attachment:
        loop = asyncio.get_running_loop()

        def told(reason: str) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(on_lost, reason)

        attachment = await self._there(lambda: self._nodes.attach(self._node, spec, told))
        self._attached = attachment.attachment_id
        return attachment

    async def detach(self, attachment: AttachmentId) -> None:
        self._attached = None
        await self._call("detach", attachment)

    async def acquire(self, attachment: AttachmentId, request: AcquireRequest) -> AcquireResult:
        result: AcquireResult = await self._call("acquire", attachment, request)
        return result

    async def reserve(self, attachment: AttachmentId, count: int, group: int = 0, call: int = 0) -> list[BlockRef]:
        refs: list[BlockRef] = await self._call("reserve", attachment, count, group, call)
        return refs

    async def seal(self, attachment: AttachmentId, items: Sequence[SealItem]) -> list[SealStatus]:
        statuses: list[SealStatus] = await self._call("seal", attachment, items)
        return statuses

    async def abort(self, attachment: AttachmentId, refs: Sequence[BlockRef]) -> None:
        await self._call("abort", attachment, refs)

    async def release(self, attachment: AttachmentId, lease_ids: Sequence[LeaseId]) -> None:
        await self._call("release", attachment, lease_ids)

    async def open_handoff(self, attachment: AttachmentId, handoff: HandoffId, call: int = 0) -> None:
        await self._call("open_handoff", attachment, handoff, call)

    async def close_handoff(self, attachment: AttachmentId, handoff: HandoffId) -> None:
        await self._call("close_handoff", attachment, handoff)

    async def renew(
        self,
        attachment: AttachmentId,
        lease_ids: Sequence[LeaseId],
        reports: Sequence[RequestReport] = (),
        statement: Statement | None = None,
        suspects: Sequence[BlockRef] = (),
    ) -> Removed:
        removed: Removed = await self._call("renew", attachment, lease_ids, reports, statement, suspects)
        return removed

    async def warm(self, request: WarmRequest) -> WarmResult:
        result: WarmResult = await self._call("warm", request)
        return result

    async def close(self) -> None:
        if self._attached is not None:
            with contextlib.suppress(KVServiceError):
                await self.detach(self._attached)


class NodePeers:
    """PeerPort of one node."""

    def __init__(self, nodes: TwoNodes, node: NodeId) -> None:
        self._nodes, self._node = nodes, node

    async def _call(self, holder: Holder, timeout: float, name: str, *arguments: Any) -> Any:
        try:
            return await asyncio.wait_for(self._nodes.call(holder.node_id, name, arguments), timeout)
        except TimeoutError:
            raise Unavailable(f"{holder.node_id} did not answer within {timeout} s") from None

    async def handshake(self, holder: Holder, timeout: float) -> PeerInfo:
        runtime = self._nodes.runtime(holder.node_id)
        if runtime.epoch != holder.epoch:
            raise StaleEpoch(f"{holder.node_id} restarted")
        return PeerInfo(runtime.epoch, runtime.geometry, runtime.describe_transport())

    async def locate(self, wanted: Locate) -> LocateResult:
        asked = (self._node, wanted.holder.epoch, wanted.keys, wanted.wait_seconds)
        result: LocateResult = await self._call(wanted.holder, wanted.timeout_seconds, "locate", *asked)
        return result

    async def follow(self, holder: Holder, wanted: Follow, timeout: float) -> FollowResult:
        asked = (self._node, holder.epoch, wanted.handoff.handoff_id, wanted.keys, wanted.wait_seconds)
        result: FollowResult = await self._call(holder, timeout, "follow", *asked)
        return result

    async def release(self, lease: ReleaseRemote, timeout: float) -> None:
        told = (self._node, lease.epoch, lease.lease_id, lease.suspects)
        await self._call(lease.holder, timeout, "release_located", *told)

    async def take_over(self, leaver: Holder, offer: Offer, timeout: float) -> TakeOverResult:
        raise Unavailable("nobody takes anything over here")

    async def room(self, holder: Holder, timeout: float) -> Peer:
        raise Unavailable("nobody takes anything over here")

    async def close(self) -> None:
        """Nothing to close."""
