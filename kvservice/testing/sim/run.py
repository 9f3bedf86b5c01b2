"""Plays a schedule: first checks safety under faults, then liveness once everything is healed.

Safety, at every event: no engine is given a wrong byte, and no state contradicts itself. Liveness, after healing: every
request ends, no lease and no slot stays taken, and the directory says what the shards hold.
"""

from __future__ import annotations

import logging
import math
import random
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from kvservice.client.shard import SEAL_SECONDS
from kvservice.codec.base import EXTRA_BYTES_MAX
from kvservice.connector.scheduler.handoff import Prefill
from kvservice.core.acquire.pulls import SUSPECT_SECONDS
from kvservice.core.block.marks import Mark, MarkKind
from kvservice.core.block.tenants import NOBODY, TenantLimits
from kvservice.core.messages import Handoff
from kvservice.core.segment.blockfile import disk_room
from kvservice.core.segment.geometry import Geometry
from kvservice.pool import tiers as pool_tiers
from kvservice.pool.tier_specs import DISK, NONE, OBJECTS, TierSpec
from kvservice.testing.builders import SMALL, make_spec
from kvservice.testing.sim.clears import STARTED_AT
from kvservice.testing.sim.engine import BLOCK_TOKENS, Engine
from kvservice.testing.sim.lookup import LookupPartition
from kvservice.testing.sim.memory import SegmentMemory
from kvservice.testing.sim.node import LEASE_SECONDS, Node
from kvservice.testing.sim.schedule import (
    FAULTS_SECONDS,
    FROZEN_SECONDS_MAX,
    PROMPT_BLOCKS_MAX,
    TIER_FAULTS,
    Ask,
    Fault,
    Schedule,
    TimedClear,
    hashes_of,
    smaller,
)
from kvservice.testing.sim.tier import FAULTS as LASTING
from kvservice.testing.sim.tier import TierStore
from kvservice.testing.sim.world import Process, Violation, World
from kvservice.units import BlockKey, HandoffId, MiB, NodeId, SlotIndex

# Virtual seconds after healing and the last pause. What has not converged by then is a violation.
CONVERGE_SECONDS = 40.0
CHECK_EVERY = 150  # Events between full checks of all states: they are slow, and a contradiction does not go away.
# More than the busiest schedule has. A run with more has a loop, which is a violation.
EVENTS_MAX = 400_000
NODES_FEW = (
    4  # Both are for so many nodes. With more there are as many times the events, and checks are as much slower.
)
WRONG_BYTES = ("garble", "tier_flip", "tier_torn", "tier_mix_up", "tier_stale")  # as they arrive
BITES = {"flip", "flip_header", "swap", "transplant"}  # need engines that verify what they load
NODE_DEATHS = ("crash_node", "lose_node", "cut_short", "crash_node_at_store", "crash_node_at_move")  # kinds
MOVE_STORES = 3  # that a slab is moved with; behind the last one no slot has a header yet
MEMORY_NODE_TIMES = 4  # the slabs of other nodes: what they evict fits for a while, and then it does not


@dataclass(frozen=True, slots=True)
class RunOutcome:
    seed: int
    violation: str  # "" if nothing went wrong
    counters: Counter[str]
    story: list[str]
    virtual_seconds: float


def limits_of(schedule: Schedule) -> dict[str, TenantLimits]:
    """The tenants of a run. Empty if all engines belong to one."""
    if schedule.tenants == 1:
        return {}
    quota = schedule.slabs * (MiB // SMALL) // 2 * SMALL
    return {"guarded": TenantLimits(quota_bytes=quota), "hot": TenantLimits()}


def spec_of(schedule: Schedule, name: str) -> TierSpec:
    codec = "simulated" if schedule.encodes else NONE
    block_bytes = disk_room(SMALL + (EXTRA_BYTES_MAX if schedule.encodes else 0))
    budget = schedule.disk_blocks * block_bytes if name == DISK else 0
    return TierSpec(name, "simulated", budget, schedule.tier_write, codec)


class SimulatedRun:
    def __init__(self, schedule: Schedule, tell: bool = False) -> None:
        self.schedule = schedule
        self.world = World(random.Random(schedule.seed ^ 0x5EED), tell)
        self.lookups = [LookupPartition(self.world, i) for i in range(schedule.lookups)]
        geometry = Geometry(slab_bytes=MiB, slab_count=schedule.slabs)
        self.nodes: list[Node] = []
        self.verifies = any(fault.kind in BITES for fault in schedule.faults)
        self.stores: list[TierStore] = []  # the disk of each node, and the object store of all
        objects = self._make_store(OBJECTS, True)
        self._folder = tempfile.TemporaryDirectory() if schedule.clears else None  # of the real files of marks
        for i in range(schedule.nodes):
            of_node = {DISK: self._make_store(DISK, False), OBJECTS: objects}
            tiers = {spec_of(schedule, name): of_node[name] for name in schedule.tiers}
            self.stores += [store for store in tiers.values() if store not in self.stores]
            marks = (Path(self._folder.name) / f"node{i}.marks",) if self._folder else ()
            is_memory_node = i >= schedule.nodes - schedule.memory_nodes
            room = replace(geometry, slab_count=MEMORY_NODE_TIMES * schedule.slabs) if is_memory_node else geometry
            node = Node(
                self.world,
                f"node{i}",
                SegmentMemory(room),
                self.lookups,
                limits_of(schedule),
                tiers,
                marks,
                accepts_spill=is_memory_node,
                maps_peers=schedule.maps_peers,
                slices=schedule.slices,
                max_age=schedule.max_age,
            )
            node.set_clock_rate(schedule.rates[i])
            self.nodes.append(node)
        for node in self.nodes:
            node.peers = {other.name: other for other in self.nodes}
        self.engines: list[Engine] = []
        self.gone: list[Engine] = []  # killed engines whose workers may live on
        for i in range(schedule.engines):
            self.engines.append(self._make_engine(i, 0))
        self._asked = 0

    def _make_store(self, name: str, is_shared: bool) -> TierStore:
        store = TierStore(self.world, name, is_shared)
        store.checks_slots = not self.verifies
        store.encodes = self.schedule.encodes
        return store

    def _make_engine(self, index: int, life: int) -> Engine:
        model = index % self.schedule.models
        spec = make_spec(f"engine{index}.{life}", f"model{model}", payload_bytes=self.schedule.sizes[model])
        assert spec.layout.block_tokens == BLOCK_TOKENS
        node = self.nodes[index % (self.schedule.nodes - self.schedule.memory_nodes)]
        return Engine(
            self.world,
            f"engine{index}",
            node,
            spec,
            verifies_loads=self.verifies,
            copy_delay=self.schedule.copy_delay,
            tenant=self._tenant_of(index),
            tails=self.schedule.tails,
        )

    def _tenant_of(self, index: int) -> str:
        names = tuple(limits_of(self.schedule))
        return names[index // self.schedule.models % len(names)] if names else NOBODY

    # -- the run ----

    def play(self) -> None:
        for number, ask in enumerate(self.schedule.asks):
            self.world.at(ask.at, self._ask, number, ask)
        for fault in self.schedule.faults:
            self.world.at(fault.at, self._inject, fault)
        for clear in self.schedule.clears:
            self.world.at(clear.at, self._clear, clear)
        self._until(FAULTS_SECONDS + 2.0, lambda: False)
        self._heal()
        end = self._all_run_at() + CONVERGE_SECONDS
        self._until(end, self._is_quiet)
        if not self._is_quiet():
            open_requests = [request for engine in self.engines for request in engine.unfinished.values()]
            raise Violation(f"after healing, {len(open_requests)} requests never end: {open_requests[:2]}")
        self._until(self._all_run_at() + 4 * LEASE_SECONDS, lambda: False)
        bytes_were_wrong = self.verifies or any(self.world.counters[f"fault_{name}"] for name in WRONG_BYTES)
        if bytes_were_wrong and any(node.state and node.state.slot_counts().get("quarantined") for node in self.nodes):
            # a slot that failed a check rests for this long
            self._until(self.world.now + SUSPECT_SECONDS, lambda: False)
        # A Seal whose answer was lost, or an Attach that was, is waited for as long as it may take.
        self._until(self.world.now + SEAL_SECONDS + LEASE_SECONDS, lambda: not self._unequal())
        if self.schedule.memory_nodes:
            self._let_spilling_end()
        self._check_end()
        self.world.counters["slabs_moved"] += sum(node.memory.slabs_moved for node in self.nodes)

    def _let_spilling_end(self) -> None:
        """Memory nodes read what others evict also when no engine does anything, and then it is announced."""
        taken, end = -1, self.world.now + CONVERGE_SECONDS + SUSPECT_SECONDS
        while self.world.now < end and (taken < self.world.counters["blocks_spilled"] or self._are_read()):
            taken = self.world.counters["blocks_spilled"]
            self._until(self.world.now + LEASE_SECONDS, lambda: False)

    def _are_read(self) -> bool:
        known = [node.state for node in self.nodes if node.state is not None]
        counts = [state.slot_counts() for state in known]
        return any(each["leased"] or each["quarantined"] for each in counts) or any(each.lease_count for each in known)

    def _unequal(self) -> list[str]:
        """Where a shard and the engines of its node disagree: an engine is not attached, about slots that it may write,
        or about hand-offs that are open."""
        found = [f"{engine.name} is not attached" for engine in self.engines if engine.session.attachment is None]
        held_at: dict[str, set[SlotIndex]] = {node.name: set() for node in self.nodes}
        for engine in self.engines:
            held_at[engine.node.name].update(ref.slot for ref in engine.session.held)
        for node in self.nodes:
            held = held_at[node.name]
            if node.state is not None and node.state.reserved_slots() != held:
                reserved = len(node.state.reserved_slots())
                found.append(f"{node.name} holds {reserved} slots for engines, they hold {len(held)}")
            if node.state is not None and node.state.open_handoff_count:
                found.append(f"{node.name} has {node.state.open_handoff_count} hand-offs open")
        return found

    def _until(self, end: float, is_over: Callable[[], bool]) -> None:
        count, times = 0, -(-len(self.nodes) // NODES_FEW)
        while (count % times or not is_over()) and self.world.step(end):
            count += 1
            if count % (CHECK_EVERY * times) == 0:
                self._check()
            if count > EVENTS_MAX * times:
                raise Violation("too many events: there is an endless loop")
        self._check()

    def _all_run_at(self) -> float:
        """The time when no process is paused any more."""
        processes: list[Process] = [*self.nodes, *self.engines, *self.lookups]
        return max(self.world.now, *(process.paused_until for process in processes))

    def _is_quiet(self) -> bool:
        return all(engine.is_idle for engine in self.engines)

    def _check(self) -> None:
        for node in self.nodes:
            node.check()
            if not self.verifies:  # nobody has corrupted memory
                self._audit(node)
                node.late.check(node.state)
        for engine in self.engines:
            engine.check()

    def _audit(self, node: Node) -> None:
        """Check that every readable block holds the bytes of its key, whether anybody reads it or not."""
        for block in [] if node.state is None else node.state.blocks():
            if node.memory.read(block.slot.index, block.payload_bytes) != self.world.right[block.key]:
                place = f"in slot {block.slot.index:#x}, as block {block.position}"
                raise Violation(f"{node.name} holds wrong bytes {place}")

    def _check_end(self) -> None:
        unequal = self._unequal()
        if unequal:
            raise Violation(f"after everything ended, {unequal[0]}")
        for lookup in self.lookups:
            lookup.directory.check_invariants()
        known = [lookup.keys_by_node() for lookup in self.lookups]
        for node in self.nodes:
            if node.state is None:
                raise Violation(f"{node.name} does not serve after everything ended")
            counts = node.state.slot_counts()
            if node.state.lease_count:
                raise Violation(f"{node.name} still has {node.state.lease_count} leases after everything ended")
            for state in ("leased", "quarantined"):
                if counts.get(state):
                    raise Violation(f"{node.name} has {counts[state]} slots {state} after everything ended")
            held = {key for key, _ in node.runtime.inventory()} if node.runtime is not None else set()
            self._check_disks(node, held)
            if pool_tiers.MARKS_EVERY_SECONDS < CONVERGE_SECONDS:
                node.check_marks()
            if node.runtime is not None:
                node.runtime.meetings.state.check_progress(node.clock())
            said = {key for keys in known for key in keys.get(node.node_id, ())}
            if held != said:
                raise Violation(
                    f"the directory says {node.name} holds {len(said)} blocks, it holds {len(held)}: "
                    f"{len(said - held)} too many, {len(held - said)} missing"
                )

    def _check_disks(self, node: Node, held: set[BlockKey]) -> None:
        """Check that a disk has what the books of its node say, and no more, but for what its faults did."""
        in_memory = set() if node.state is None else {block.key for block in node.state.blocks()}
        for store in node.disks if node.has_open_tiers else ():
            left = store.files.keys() - held - store.orphans
            if left:
                raise Violation(f"{len(left)} files of the disk of {node.name} are in no books: they are never erased")
            missing = held - in_memory - store.files.keys() - store.lost
            if missing:
                raise Violation(f"the disk of {node.name} has not {len(missing)} blocks that its books name")
            usage = {} if node.state is None else {one.name: one.used_bytes for one in node.state.tier_usage()}
            takes = sum(disk_room(store.stored_bytes[key]) for key in store.files)
            if usage and not store.orphans and not store.lost and usage[store.name] != takes:
                raise Violation(f"the disk of {node.name} holds {takes} bytes, its books count {usage[store.name]}")

    # -- events of the schedule ----

    def _ask(self, number: int, ask: Ask) -> None:
        hashes = hashes_of(ask)
        engine = self.engines[ask.engine]
        if ask.decode_at < 0:
            if engine.alive:
                self.world.note(engine.name, f"r{number} asks for {ask.blocks} blocks of prompt {ask.prompt}")
                engine.submit(f"r{number}", hashes, None)
            return
        handoff = HandoffId(number.to_bytes(16, "big"))
        if engine.alive:
            self.world.note(engine.name, f"r{number} prefills {ask.blocks} blocks for engine{ask.decode_at}")
            engine.submit(f"r{number}p", hashes, Prefill(handoff))
        writer = NodeId(engine.node.name)

        def decode() -> None:
            reader = self.engines[ask.decode_at]
            if reader.alive:
                reader.submit(f"r{number}d", hashes, Handoff(handoff, writer))

        self.world.at(ask.decode_delay, decode)

    def _inject(self, fault: Fault) -> None:
        self.world.counters[f"fault_{fault.kind}"] += 1
        node = self.nodes[fault.target % len(self.nodes)]
        engine_index = fault.target % len(self.engines)
        lookup = self.lookups[fault.target % len(self.lookups)]
        hosts = [n.host for n in self.nodes] + [shard.host for shard in self.lookups]
        one, other = hosts[fault.target % len(hosts)], hosts[fault.other % len(hosts)]
        kind = fault.kind
        if kind in NODE_DEATHS:
            self._kill_node(node, self.engines[engine_index], fault)
        elif kind == "pause_node":
            node.pause(fault.seconds)
        elif kind == "crash_engine":
            self._crash_engine(engine_index, fault.seconds)
        elif kind == "crash_at_store":
            self.engines[engine_index].on_store = partial(self._crash_engine, engine_index, fault.seconds)
        elif kind == "pause_engine":
            self.engines[engine_index].pause(2 * fault.seconds)  # sometimes longer than a lease
        elif kind == "pause_at_answer":
            self.engines[engine_index].pause_at_answer = LEASE_SECONDS + fault.seconds
        elif kind == "crash_lookup":
            if lookup.alive:
                lookup.die()
                self.world.note(lookup.name, "crashed")
                self.world.at(fault.seconds, self._restart_lookup, lookup)
        elif kind == "pause_lookup":
            lookup.pause(fault.seconds)
        elif kind.startswith("freeze_"):
            frozen = {"freeze_node": node, "freeze_engine": self.engines[engine_index], "freeze_lookup": lookup}[kind]
            frozen.pause(1.0 + (FROZEN_SECONDS_MAX - 1.0) * fault.number / (1 << 16))
        elif kind == "suspend":  # the whole machine
            for process in (node, *(engine for engine in self.engines if engine.node is node)):
                process.suspend(fault.seconds)
        elif kind == "stop_node":
            self._stop_node(node, fault.seconds, fault.number)
        elif kind == "stop_engine":
            if fault.number % 2:
                self._stop_engine(engine_index, fault.seconds)
            else:  # when its worker has a plan and has not begun it
                worker = self.engines[engine_index].worker
                worker.late_seconds = fault.seconds / 4
                worker.on_late = partial(self._stop_engine, engine_index, fault.seconds)
        elif kind.startswith("line_"):
            engine = self.engines[engine_index]
            self._disturb(kind.removeprefix("line_"), engine.name, engine.node.name, fault.seconds)
        elif kind in ("cut", "cut_one_way", "loss", "twice", "slow"):
            self._disturb(kind, one, other, fault.seconds)
        elif kind in BITES:
            self._corrupt(kind, node, fault.number)
        elif kind in TIER_FAULTS:
            self._break_tier(kind.removeprefix("tier_"), fault)
        elif kind == "garble":
            node.garble()
        elif kind == "reset":
            self.engines[engine_index].change_weights()
        elif kind == "wedge":
            node.wedge(fault.seconds)
        elif kind == "mute_node":
            node.silence("reads" if fault.number % 2 else "handshakes", fault.seconds)
        elif kind == "drain":
            if node.runtime is not None:
                node.runtime.drain()
                self.world.at(fault.seconds, self._undrain, node)
        else:
            self._abort(fault)

    def _kill_node(self, node: Node, engine: Engine, fault: Fault) -> None:
        """Kill this node now or when it moves a slab next, or that of the engine when it stores next."""
        if fault.kind == "crash_node_at_store":
            engine.on_store = partial(self._crash_node, engine.node, fault.seconds / 8, False)
        elif fault.kind == "crash_node_at_move":
            node.memory.cut_next_move(
                1 + fault.number % MOVE_STORES, partial(self._crash_node, node, fault.seconds, False)
            )
        else:
            if fault.kind == "cut_short":
                node.memory.cut_short()  # whoever touches the rest ends, as the node itself
            self._crash_node(node, fault.seconds, with_memory=fault.kind != "crash_node")

    def _clear(self, clear: TimedClear) -> None:
        """An operator tells every node, one after the other."""
        mark = self._mark_of(clear)
        self.world.note("operator", f"clears {mark.kind.value} {mark.name}")
        self.world.counters["clears"] += 1
        for node, seconds in zip(self.nodes, clear.heard, strict=True):
            if seconds < math.inf:
                self.world.at(seconds, node.receive, node.clear, mark)

    def _mark_of(self, clear: TimedClear) -> Mark:
        at, named = STARTED_AT + self.world.now, list(self.world.owners)
        tenants = list(limits_of(self.schedule))
        if clear.what == "prompt" and named:
            start = clear.number % len(named)
            return Mark(
                MarkKind.PROMPT, at, keys=tuple(BlockKey(key) for key in named[start : start + PROMPT_BLOCKS_MAX])
            )
        if clear.what == "tenant" and tenants:
            return Mark(MarkKind.TENANT, at, tenants[clear.number % len(tenants)])
        if clear.what == "model":
            return Mark(MarkKind.MODEL, at, f"model{clear.number % self.schedule.models}")
        return Mark(MarkKind.EVERYTHING, at)

    def close(self) -> None:
        """Nothing of it runs any more, and nothing is left."""
        self.world.end()
        if self._folder is not None:
            self._folder.cleanup()

    def _break_tier(self, kind: str, fault: Fault) -> None:
        store = self.stores[fault.target % len(self.stores)]
        self.world.note(f"{store.name}{fault.target % len(self.stores)}", f"{kind} for {fault.seconds:.2f} s")
        if kind in LASTING:
            store.disturb(kind, fault.seconds)
        elif kind == "torn":
            store.tears = True
        elif kind == "unusable":
            store.is_unusable = True
        elif kind == "old_index":
            store.stop_index()
        elif kind == "stale":
            store.age(fault.number)
        elif kind == "flip":
            store.flip(fault.number)
        elif kind == "mix_up":
            store.mix_up(fault.number)
        else:
            store.lose(fault.number)

    def _undrain(self, node: Node) -> None:
        if node.runtime is not None:
            node.runtime.drain(undo=True)

    def _abort(self, fault: Fault) -> None:
        engine = self.engines[fault.target % len(self.engines)]
        open_requests = list(engine.unfinished)
        if engine.alive and open_requests:
            engine.abort(open_requests[fault.number % len(open_requests)])

    def _crash_node(self, node: Node, seconds: float, with_memory: bool) -> None:
        if not node.alive:
            return
        node.crash(with_memory)
        if with_memory:  # the host: its engines too
            for index, engine in enumerate(self.engines):
                if engine.node is node and engine.alive:
                    self._crash_engine(index, seconds + 0.1)
            for engine in self.engines + self.gone:  # and workers that outlived theirs
                if engine.node is node:
                    engine.worker.die()
        self._end_node(node, seconds)

    def _end_node(self, node: Node, seconds: float) -> None:
        """Its engines notice the end of the node soon, and it boots again."""
        for engine in self.engines:
            if engine.node is node and engine.alive:
                engine.after(0.001, engine.line.node_died)
        self.world.at(seconds, self._boot, node)

    def _stop_node(self, node: Node, seconds: float, number: int) -> None:
        def ended() -> None:
            node.die()
            self._end_node(node, seconds)

        if number % 2:
            node.stop_at_news(number // 2 % 3, ended)
        else:
            node.stop(ended)

    def _stop_engine(self, index: int, seconds: float) -> None:
        engine = self.engines[index]
        if engine.alive:
            engine.stop(lambda: self.world.at(seconds, self._restart_engine, index))

    def _boot(self, node: Node) -> None:
        if not node.alive:
            node.boot()

    def _crash_engine(self, index: int, seconds: float) -> None:
        engine = self.engines[index]
        if engine.alive:
            engine.crash()
            self.world.at(seconds, self._restart_engine, index)

    def _restart_engine(self, index: int) -> None:
        dead = self.engines[index]
        if not dead.alive:
            self.gone.append(dead)
            self.engines[index] = self._make_engine(index, len(self.gone))
            self.world.note(dead.name, "started again")

    def _restart_lookup(self, lookup: LookupPartition) -> None:
        if not lookup.alive:
            lookup.restart()

    def _disturb(self, kind: str, one: str, other: str, seconds: float) -> None:
        if one == other:
            return
        self.world.note("network", f"{kind} {one} -> {other} for {seconds:.2f} s")
        ways = ((one, other), (other, one)) if kind in ("cut", "loss") else ((one, other),)
        for way in ways:
            link = self.world.link(*way)
            link.cut |= kind in ("cut", "cut_one_way")
            link.loss = 0.3 if kind == "loss" else link.loss
            link.twice = 0.5 if kind == "twice" else link.twice
            link.slow_seconds = 1.5 if kind == "slow" else link.slow_seconds
        self.world.at(seconds, self._mend, ways)

    def _mend(self, ways: tuple[tuple[str, str], ...]) -> None:
        for way in ways:
            link = self.world.link(*way)
            link.cut, link.loss, link.twice, link.slow_seconds = False, 0.0, 0.0, 0.0

    def _corrupt(self, kind: str, node: Node, number: int) -> None:
        slots = node.memory.sealed()
        if not slots:
            return
        slot = slots[number % len(slots)]
        self.world.note(node.name, f"{kind} in slot {slot:#x}")
        if kind == "flip":
            node.memory.flip(slot, number >> 4)
        elif kind == "flip_header":
            node.memory.flip_header(slot, number >> 4)
        elif kind == "swap":
            node.memory.swap(slot, slots[(number >> 5) % len(slots)])
        else:
            node.memory.transplant(slot, slots[(number >> 5) % len(slots)])

    def _heal(self) -> None:
        self.world.note("world", "heals")
        self.world.heal()
        for store in self.stores:
            store.heal()
        for node in self.nodes:
            node.memory.let_moves_end()
            self._boot(node)
            self._undrain(node)
        for lookup in self.lookups:
            self._restart_lookup(lookup)
        for index in range(len(self.engines)):
            self._restart_engine(index)


def run_schedule(schedule: Schedule, tell: bool = False, play: type[SimulatedRun] = SimulatedRun) -> RunOutcome:
    """Play a schedule. Never raises for what the simulated system does: an AssertionError in it is a violation."""
    violation = ""
    logger = logging.getLogger("kvservice")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)  # logs of simulated faults help nobody
    run = play(schedule, tell)
    try:
        run.play()
    except AssertionError as error:
        violation = f"{type(error).__name__}: {error}"
    except Exception as error:  # noqa: BLE001  whatever the code under test raises is what we are looking for
        violation = f"raised {type(error).__name__}: {error}"
    finally:
        run.close()
        logger.setLevel(level)
    if violation:
        run.world.note("world", violation)
    return RunOutcome(schedule.seed, violation, run.world.counters, run.world.story, run.world.now)


def minimise(schedule: Schedule, runs_max: int = 400) -> Schedule:
    """The smallest schedule that still fails, found by leaving parts out."""
    runs = 0
    shrunk = True
    while shrunk and runs < runs_max:
        shrunk = False
        for candidate in smaller(schedule):
            runs += 1
            if run_schedule(candidate).violation:
                schedule = candidate
                shrunk = True
                break
            if runs >= runs_max:
                break
    return schedule
