"""One simulated node: the production pool runtime on simulated memory, with a network and a clock that misbehave."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from kvservice.core.block.marks import Mark
from kvservice.core.block.tenants import TenantLimits
from kvservice.core.directory.announce import Announcer
from kvservice.core.messages import Holder
from kvservice.core.shard import ShardState
from kvservice.core.slices import DEFAULT_SLICES, SliceSizes
from kvservice.pool.runtime import PoolRuntime
from kvservice.pool.runtime_ports import PoolConfig
from kvservice.pool.tier_specs import TierSpec
from kvservice.pool.tiers import TierPhase
from kvservice.testing.sim.ages import Ages
from kvservice.testing.sim.clears import Clears
from kvservice.testing.sim.late import LateReader
from kvservice.testing.sim.lookup import Herald, LookupPartition
from kvservice.testing.sim.loop import ProcessLoop
from kvservice.testing.sim.memory import SegmentMemory
from kvservice.testing.sim.parts import NodeParts, Unanswered
from kvservice.testing.sim.puller import SimPuller
from kvservice.testing.sim.remote import SimDirectory, SimPeers
from kvservice.testing.sim.tier import SimSharedTier, SimTier, TierStore
from kvservice.testing.sim.world import Violation, World
from kvservice.units import AttachmentId, BlockKey, NodeId, SpanRoute

# Short, so that leases end within a schedule.
LEASE_SECONDS = 2.0
STOP_SECONDS = 10.0  # Virtual seconds. A runtime that takes longer to close is a violation.
TURN_SECONDS = 0.5  # Virtual seconds that a call waits for its next turn, at most and rarely: others ask as well
ONE_AT_A_TIME = SliceSizes(blocks=1, slots=1)


class _TakingTurns(PoolRuntime):
    """Its callers wait for their turns, as they do where many ask much."""

    world: World

    def _in_turn(self, op: int, work: Callable[[], None]) -> None:
        self.world.counters["slices"] += 1
        self._loop.call_later(TURN_SECONDS * self.world.random.random() ** 4, work)


class Node(NodeParts):
    peers: dict[str, Node]

    def __init__(
        self,
        world: World,
        name: str,
        memory: SegmentMemory,
        lookups: Sequence[LookupPartition],
        tenants: Mapping[str, TenantLimits],
        tiers: Mapping[TierSpec, TierStore] | None = None,
        mark_files: tuple[Path, ...] = (),
        *,
        accepts_spill: bool = False,
        maps_peers: bool = False,
        slices: bool = False,
        max_age: float = 0.0,
    ) -> None:
        super().__init__(world, name, name)
        self.node_id = NodeId(name)
        self.memory = memory
        self.peers = {}
        self.runtime: PoolRuntime | None = None  # None while it does not serve
        self.hang_seconds = 0.0  # how long the next read hangs
        self.garbles = False  # the next read
        self._mute_until = {"handshakes": 0.0, "reads": 0.0}  # the world's time
        self._lookups = lookups
        self._tenants = tenants
        self._tiers = tiers or {}
        self.clears = Clears(world, name)
        self.ages = Ages(world, name, max_age)
        self.late = LateReader(world, name, memory)
        self._mark_files = mark_files
        self.accepts_spill = accepts_spill
        self.maps_peers = maps_peers
        self._slices = ONE_AT_A_TIME if slices else DEFAULT_SLICES
        self._stopped_at: float | None = None
        self._on_news: Callable[[], None] | None = None
        self.boot()

    # -- life ----

    def boot(self) -> None:
        self.alive = True
        self._stopped_at = None
        self.memory.boot()
        self.loop = ProcessLoop(self)
        self.loop.start(self._serve())

    async def _serve(self) -> None:
        self.announcer = Announcer(len(self._lookups), self._inventory)
        self._herald = Herald(self, self.announcer, self._lookups, self.holder, self._fenced)
        runtime = _TakingTurns(
            PoolConfig(
                self.node_id,
                self.memory.path,
                self.memory.geometry,
                lease_seconds=LEASE_SECONDS,
                tenants=self._tenants,
                tiers=tuple(self._tiers),
                slices=self._slices,
                accept_spill=self.accepts_spill,
                max_age_seconds=self.ages.limit_seconds,
                mark_files=self._mark_files,
                wall_clock=self.clears.wall,
            ),
            self.memory,
            SimPuller(self),
            SimDirectory(self, self._lookups, self.announcer),
            SimPeers(self),
            self.clock,
            self._claim,
            {store.name: partial(self._tier_of(store), self, store) for store in self._tiers.values()},
        )
        runtime.world = self.world
        await runtime.begin()
        if self._mark_files:
            others = [peer.runtime for peer in self.peers.values() if peer.runtime is not None]
            await self.clears.learn(runtime, others)
        self.runtime = runtime
        self.loop.start(self._herald.run())
        self.world.note(self.name, f"booted, epoch {runtime.epoch}, {len(runtime.state.blocks())} blocks")

    def _tier_of(self, store: TierStore) -> type[SimTier]:
        return SimSharedTier if store.is_shared and self._mark_files else SimTier

    def crash(self, with_memory: bool) -> None:
        self.world.note(self.name, "crashed" + (" with its memory" if with_memory else ""))
        self.die()
        if with_memory:
            self.memory.lose()

    def stop(self, ended: Callable[[], None]) -> None:
        """SIGTERM. `ended` is called when the node has stopped."""
        runtime, self.runtime = self.runtime, None
        if runtime is None:
            return
        self._stopped_at = self.world.now
        self.world.note(self.name, "is told to stop")

        async def close() -> None:
            await self._herald.stop(leaving=False)
            await runtime.close()
            self.world.note(self.name, "stopped")
            self.world.at(0.0, ended)

        self.loop.start(close())

    def stop_at_news(self, turns: int, ended: Callable[[], None]) -> None:
        """Like `stop`, but so many turns of the loop after there is something to announce."""

        def later(turns: int) -> None:
            if turns:
                self.loop.call_soon(later, turns - 1)
            else:
                self.stop(ended)

        self._on_news = partial(later, turns)

    def kick(self) -> None:
        """Note that there is something to announce."""
        self._herald.kick()
        if self._on_news is not None:
            call, self._on_news = self._on_news, None
            call()

    def die(self) -> None:
        super().die()
        for store in self.disks:
            store.tear()
        self._on_news = None
        self.runtime = None
        self._stopped_at = None

    def check(self) -> None:
        """Raises AssertionError if the node contradicts itself, or does not end."""
        stopped_at = self._stopped_at
        if stopped_at is not None and self.world.now - max(stopped_at, self.paused_until) > STOP_SECONDS:
            raise Violation(f"{self.name} was told to stop at {stopped_at:.2f}, and stop() does not return")
        if self.runtime is not None:
            if self.runtime.fenced is not None:
                raise Violation(f"{self.name} is {self.runtime.fenced}")
            self.runtime.state.check_invariants()
            self.announcer.check_invariants()
            self.runtime.meetings.state.check_invariants()
            self.clears.check(self.runtime, [store.files for store in self.disks])
            self.ages.check(self.runtime.state)

    def check_marks(self) -> None:
        """Check that everything is known here that was cleared according to the store, whoever was told of it."""
        known = [] if self.runtime is None else self.runtime.state.freshness.marks.all()
        kept = [mark for store in self._tiers.values() for mark in store.marks] if self.has_open_tiers else []
        for mark in kept:
            if not any(one.scope == mark.scope and one.at >= mark.at for one in known):
                raise Violation(f"{self.name} never heard of a clear whose mark the store has kept")

    @property
    def disks(self) -> list[TierStore]:
        """Stores of this node alone."""
        return [store for store in self._tiers.values() if not store.is_shared]

    @property
    def has_open_tiers(self) -> bool:
        """Whether every tier of this boot could start."""
        return self.runtime is not None and all(tier.phase is TierPhase.OPEN for tier in self.runtime.tier_states())

    @property
    def state(self) -> ShardState | None:
        return None if self.runtime is None else self.runtime.state

    def wedge(self, seconds: float) -> None:
        """Make the next read that this node posts hang for a while."""
        self.hang_seconds = seconds
        self.world.note(self.name, f"its next read hangs for {seconds:.2f} s")

    def clear(self, mark: Mark) -> None:
        """An operator tells this node, if it serves."""
        if self.runtime is not None:
            self.loop.start(self.clears.apply(self.runtime, [mark]))

    def silence(self, what: Unanswered, seconds: float) -> None:
        """Answer no handshake, or no small read, that begins within these seconds."""
        self._mute_until[what] = self.world.now + seconds
        self.world.note(self.name, f"answers no {what} for {seconds:.2f} s")

    def is_mute(self, what: Unanswered) -> bool:
        return self.world.now < self._mute_until[what]

    def garble(self) -> None:
        """Make the next bytes that this node reads arrive with an error."""
        self.garbles = True

    def holder(self) -> Holder:
        return Holder(self.node_id, str(self.node_id), self.memory.epoch)

    def _inventory(self) -> list[tuple[BlockKey, SpanRoute]]:
        return [] if self.runtime is None else self.runtime.inventory()

    def _fenced(self) -> None:
        raise Violation(f"{self.name} heard of a newer boot of itself although it is the newest")

    @contextlib.contextmanager
    def _claim(self, engine_id: bytes) -> Iterator[bool]:
        """As memory.liveness.claim."""
        if engine_id in self.memory.writers:
            yield False
            return
        self.memory.claimed.add(engine_id)
        yield True
        self.memory.claimed.discard(engine_id)

    # -- tenants ----

    def quota_of(self, tenant: str) -> int:
        limits = self._tenants.get(tenant)
        return 0 if limits is None else limits.quota_bytes

    @contextlib.contextmanager
    def quotas_kept(self, attachment: AttachmentId) -> Iterator[None]:
        """Check that what a tenant reserves meanwhile takes no block of another tenant that is within its quota. Not
        where the reserving takes turns with others: they give blocks up for reasons of their own."""
        state = self.state if self._slices is DEFAULT_SLICES else None
        before = {} if state is None else {row.name: row.used_bytes for row in state.tenants()}
        yield
        if state is None:
            return
        own, used = state.account_of(attachment), {row.name: row.used_bytes for row in state.tenants()}
        for tenant, limits in self._tenants.items():
            if limits.quota_bytes and used[tenant] > max(limits.quota_bytes, before[tenant]):
                raise Violation(f"{tenant} holds more than its quota on {self.name}")
            if tenant != own and used[tenant] < min(limits.quota_bytes, before[tenant]):
                raise Violation(f"{own} took blocks of {tenant}, which was within its quota, on {self.name}")
