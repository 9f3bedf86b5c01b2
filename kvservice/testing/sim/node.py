"""One simulated node: the shard's core, performing its actions on simulated memory and a simulated network.

The counterpart of pool.runtime and pool.outside. A pull reads each half of each payload, then the headers, at different
moments, as a one-sided READ does: without asking whether the other process still runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvservice.core import actions as act
from kvservice.core import events as ev
from kvservice.core.announce import Announcer
from kvservice.core.checks import is_as_located
from kvservice.core.digest import digest_payload
from kvservice.core.messages import BlockHandle, FollowResult, Holder, HolderRun, LocateResult
from kvservice.core.shard import ShardState
from kvservice.core.tenants import TenantLimits
from kvservice.errors import KVServiceError
from kvservice.testing.sim.lookup import Herald, LookupShard, ask_directory
from kvservice.testing.sim.memory import HALF, SegmentMemory
from kvservice.testing.sim.world import Process, Violation, World
from kvservice.units import BlockKey, BootEpoch, NodeId, SlotIndex, SpanRoute

LEASE_SECONDS = 2.0
FIND_NODE_SECONDS = 0.5
FOLLOW_SLACK_SECONDS = 1.0
PEER_FAILED_SECONDS = 0.05  # until a refused connection shows
LIVENESS_SECONDS = 0.1
LATE_SECONDS = 2.0  # a transfer that was given up may write so long
READ_SECONDS = 0.02  # at most, for half a block: slow enough for something to happen meanwhile

Reply = Callable[[object], None]  # a value, or the KVServiceError that was raised


@dataclass(slots=True)
class _Pull:
    action: act.Pull
    memory: SegmentMemory
    life: int
    is_decided: bool = False


class Node(Process):
    """`engines_alive` says whether any process of an engine still holds its liveness lock."""

    def __init__(
        self,
        world: World,
        name: str,
        memory: SegmentMemory,
        lookups: Sequence[LookupShard],
        engines_alive: Callable[[bytes], bool],
        tenants: Mapping[str, TenantLimits],
    ) -> None:
        super().__init__(world, name, name)
        self.node_id = NodeId(name)
        self.memory = memory
        self.peers: dict[str, Node] = {}
        self._lookups = lookups
        self._engines_alive = engines_alive
        self._tenants = tenants
        self._calls: dict[int, Reply] = {}
        self._next_op = 1
        self._watched: set[bytes] = set()
        self._hang_seconds = 0.0  # of the next read
        self._garbles = False  # the next read
        self._timer: float | None = None
        self.is_changed = False  # since its invariants were last checked
        self.boot()

    # -- life ----

    def boot(self) -> None:
        self.alive = True
        self._calls.clear()
        self._watched.clear()
        self._timer = None
        self.state = ShardState(
            self.node_id, self.memory.boot(), self.memory.geometry, lease_seconds=LEASE_SECONDS, tenants=self._tenants
        )
        self.announcer = Announcer(len(self._lookups), self._inventory)
        self.herald = Herald(self, self.announcer, self._lookups, self._holder, self._fenced)
        for slot, payload_bytes, header in self.memory.scan():
            sound = header.is_stable and header.length == payload_bytes
            verified = sound and self.memory.digest(slot, header.key) == header.digest
            self.handle(ev.Adopt(slot, payload_bytes, header, verified))
        for engine_id in sorted(self.state.watch_list()):
            self._watch(engine_id)
        self.world.note(self.name, f"booted, epoch {self.state.epoch}, {len(self.state.blocks())} blocks")

    def crash(self, with_memory: bool) -> None:
        self.world.note(self.name, "crashed" + (" with its memory" if with_memory else ""))
        self.die()
        if with_memory:
            self.memory.lose()

    def wedge(self, seconds: float) -> None:
        """The next read that this node posts does not end for a while."""
        self._hang_seconds = seconds
        self.world.note(self.name, f"its next read hangs for {seconds:.2f} s")

    def garble(self) -> None:
        """The next bytes that this node reads arrive with an error."""
        self._garbles = True

    def _holder(self) -> Holder:
        return Holder(self.node_id, str(self.node_id), self.state.epoch)

    def _inventory(self) -> list[tuple[BlockKey, SpanRoute]]:
        return [(block.key, block.route) for block in self.state.blocks()]

    def _fenced(self) -> None:
        raise Violation(f"{self.name} heard of a newer boot of itself although it is the newest")

    # -- calls ----

    def call(self, make: Callable[[int], ev.Event], reply: Reply) -> int:
        """Hand the core an event with an answer."""
        op = self._next_op
        self._next_op += 1
        self._calls[op] = reply
        self.handle(make(op))
        return op

    def cancel(self, op: int) -> None:
        if self._calls.pop(op, None) is not None:
            self.handle(ev.Cancel(op))

    def handle(self, event: ev.Event) -> None:
        self.world.counters["events"] += 1
        self.is_changed = True
        before = self._used() if isinstance(event, ev.Reserve) else {}
        performed = self.state.handle(event, self.clock())
        if before:
            self._check_quotas(event, before)
        for action in performed:
            self._perform(action)
        if any(isinstance(action, act.Announce | act.Retract) for action in performed):
            self.herald.kick()
        self._arm()

    def _used(self) -> dict[str, int]:
        return {row.name: row.used_bytes for row in self.state.tenants()}

    def _check_quotas(self, event: ev.Event, before: Mapping[str, int]) -> None:
        """What a tenant reserves costs no other one that holds no more than its quota."""
        assert isinstance(event, ev.Reserve)
        own, used = self.state.account_of(event.attachment), self._used()
        for tenant, limits in self._tenants.items():
            if limits.quota_bytes and used[tenant] > max(limits.quota_bytes, before[tenant]):
                raise Violation(f"{tenant} holds more than its quota on {self.name}")
            if tenant != own and used[tenant] < min(limits.quota_bytes, before[tenant]):
                raise Violation(f"{own} took blocks of {tenant}, which was within its quota, on {self.name}")

    def _arm(self) -> None:
        due = self.state.next_deadline()
        if due is not None and (self._timer is None or due < self._timer):
            self._timer = due
            self.after(max(due - self.clock(), 0.0) + 0.001, self._tick, due)

    def _tick(self, due: float) -> None:
        if self._timer == due:
            self._timer = None
        self.handle(ev.Tick())

    # -- actions ----

    def _perform(self, action: act.Action) -> None:
        if isinstance(action, act.WriteHeader):
            self.memory.write_header(action.slot, action.header)
        elif isinstance(action, act.ClearHeader):
            self.memory.clear_header(action.slot)
        elif isinstance(action, act.AssignSlab):
            self.memory.assign_slab(action.slab, action.payload_bytes)
        elif isinstance(action, act.Reply | act.Refuse):
            reply = self._calls.pop(action.op, None)
            if reply is not None:
                reply(action.value if isinstance(action, act.Reply) else action.error)
        elif isinstance(action, act.Announce):
            self.announcer.add(action.key, action.route)
        elif isinstance(action, act.Retract):
            self.announcer.remove(action.key, action.route)
        elif isinstance(action, act.Digest):
            self.after(0.0005 + 0.001 * self.world.random.random(), self._digest, action)
        elif isinstance(action, act.Pull):
            self._begin_pull(action)
        elif isinstance(action, act.WatchEngine):
            self._watch(action.engine_id)
        else:
            self._ask_outside(action)

    def _digest(self, action: act.Digest) -> None:
        self.handle(ev.Digested(action.slot, action.key, self.memory.digest(action.slot, action.key)))

    def _watch(self, engine_id: bytes) -> None:
        if engine_id not in self._watched:
            self._watched.add(engine_id)
            self.after(LIVENESS_SECONDS, self._look, engine_id)

    def _look(self, engine_id: bytes) -> None:
        if self._engines_alive(engine_id):
            self.after(LIVENESS_SECONDS, self._look, engine_id)
        else:
            self._watched.discard(engine_id)
            self.handle(ev.EngineGone(engine_id))

    # -- other nodes ----

    def _ask_outside(self, action: act.Action) -> None:
        if isinstance(action, act.Resolve):
            op = action.op

            def resolved(runs: tuple[HolderRun, ...], complete: bool) -> None:
                self.handle(ev.Resolved(op, runs, complete))

            ask_directory(
                self, self.node_id, self._lookups, action.chain, action.start, action.timeout_seconds, resolved
            )
        elif isinstance(action, act.Locate):
            self._locate(action)
        elif isinstance(action, act.Follow):
            self._follow(action)
        elif isinstance(action, act.ReleaseRemote):
            released = action
            self._ask_peer(
                action.holder,
                lambda op: ev.PeerRelease(op, self.node_id, released.epoch, released.lease_id),
                1.0,
                lambda answer: None,
            )
        else:
            raise AssertionError(f"nobody performs {action}")

    def _locate(self, action: act.Locate) -> None:
        sent_at = self.clock()

        def answered(answer: object) -> None:
            self.handle(ev.Located(action.fetch, answer if isinstance(answer, LocateResult) else None, sent_at))

        epoch = action.holder.epoch
        self._ask_peer(
            action.holder, lambda op: ev.PeerLocate(op, self.node_id, epoch, action.keys),
            action.timeout_seconds, answered,
        )  # fmt: skip

    def _follow(self, action: act.Follow) -> None:
        writer = action.handoff.node_id
        lookup = self._lookups[0]
        is_found = False

        def reply(holder: Holder | None) -> None:
            self.receive(found, holder)

        def found(holder: Holder | None) -> None:
            nonlocal is_found
            if is_found:
                return
            is_found = True
            if holder is None:
                self.handle(ev.Followed(action.follow, action.op, None, None, self.clock()))
            else:
                self._follow_at(action, holder)

        self.world.send(self.host, lookup.host, lookup.receive, lookup.find_node, writer, self.node_id, reply)
        self.after(FIND_NODE_SECONDS, found, None)

    def _follow_at(self, action: act.Follow, holder: Holder) -> None:
        sent_at = self.clock()

        def answered(answer: object) -> None:
            result = answer if isinstance(answer, FollowResult) else None
            self.handle(ev.Followed(action.follow, action.op, holder, result, sent_at))

        self._ask_peer(
            holder,
            lambda op: ev.PeerFollow(
                op, self.node_id, holder.epoch, action.handoff.handoff_id, action.keys, action.wait_seconds
            ),
            action.wait_seconds + FOLLOW_SLACK_SECONDS,
            answered,
        )

    def _ask_peer(
        self, holder: Holder, make: Callable[[int], ev.Event], timeout: float, answered: Callable[[object], None]
    ) -> None:
        """A call of another shard; `answered` comes exactly once, with None when it failed."""
        peer = self.peers[holder.peer_address]
        is_over = False

        def over(answer: object) -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                answered(None if isinstance(answer, KVServiceError) else answer)

        def reply(answer: object) -> None:
            self.world.send(peer.host, self.host, self.receive, over, answer)

        def arrive() -> None:
            op = peer.call(make, reply)
            # The caller's deadline travels with the call: past it the callee is told that nobody waits.
            peer.after(timeout, peer.cancel, op)

        if not peer.alive:
            self.after(PEER_FAILED_SECONDS, over, None)
            return
        self.world.send(self.host, peer.host, peer.receive, arrive)
        self.after(timeout, over, None)

    # -- one-sided reads ----

    def _begin_pull(self, action: act.Pull) -> None:
        peer = self.peers[action.holder.peer_address]
        pull = _Pull(action, peer.memory, self.life)
        self.world.note(self.name, f"pulls {len(action.items)} blocks from {peer.name}")
        if self.world.is_cut(self.host, peer.host) or self.world.is_cut(peer.host, self.host):
            self._broken(pull, landed_late=self.world.random.random() < 0.5)
            return
        self.after(max(action.deadline - self.clock(), 0.0) + 0.001, self._pull_deadline, pull)
        self._read(pull, 0, 0)

    def _read(self, pull: _Pull, index: int, half: int) -> None:
        """One half of one payload lands; then the next, and in the end the headers."""
        if pull.is_decided:
            return
        items = pull.action.items
        peer = pull.action.holder.peer_address
        if self.world.is_cut(self.host, peer) or self.world.is_cut(peer, self.host):
            self._broken(pull, landed_late=True)
            return
        if self._hang_seconds:
            hang, self._hang_seconds = self._hang_seconds, 0.0
            self.world.at(hang, self._continue, pull, index, half)
            return
        handle, destination = items[index]
        self.memory.write_half(destination, half, pull.memory.read(handle.slot))
        if self._garbles:
            self._garbles = False
            self.memory.flip(destination, half * 8 * HALF + 5)
            self.world.note(self.name, f"garbled what it read into slot {destination:#x}")
        pause = READ_SECONDS * self.world.random.random()
        if half == 0:
            self.world.at(pause, self._continue, pull, index, 1)
        elif index + 1 < len(items):
            self.world.at(pause, self._continue, pull, index + 1, 0)
        else:
            self.world.at(pause, self._judge, pull)

    def _continue(self, pull: _Pull, index: int, half: int) -> None:
        if self.life == pull.life:  # a dead process's NIC stops with its registration
            self._read(pull, index, half)

    def _judge(self, pull: _Pull) -> None:
        if self.life != pull.life or pull.is_decided:
            return
        headers = [pull.memory.header_bytes(handle.slot) for handle, _ in pull.action.items]
        self.receive(self._pulled, pull, headers)

    def _pulled(self, pull: _Pull, headers: list[bytes]) -> None:
        if pull.is_decided:
            return
        pull.is_decided = True
        action = pull.action
        if self.clock() > action.deadline:
            self.handle(ev.Pulled(action.job, (ev.PullVerdict.FAILED,) * len(action.items)))
            return
        verdicts = tuple(
            self._verdict(header, handle, destination, action.epoch)
            for header, (handle, destination) in zip(headers, action.items, strict=True)
        )
        self.world.counters["blocks_pulled"] += verdicts.count(ev.PullVerdict.OK)
        self.handle(ev.Pulled(action.job, verdicts))

    def _verdict(self, header: bytes, handle: BlockHandle, destination: SlotIndex, epoch: BootEpoch) -> ev.PullVerdict:
        if not is_as_located(header, handle, epoch):
            return ev.PullVerdict.STALE
        landed = self.memory.read(destination)
        return ev.PullVerdict.OK if digest_payload(landed, handle.key) == handle.digest else ev.PullVerdict.CORRUPT

    def _pull_deadline(self, pull: _Pull) -> None:
        if not pull.is_decided:
            self._broken(pull, landed_late=True)

    def _broken(self, pull: _Pull, landed_late: bool) -> None:
        """The transfer did not end: what it writes may still come, and only then is the slot free of it."""
        pull.is_decided = True
        stuck = ev.PullVerdict.STUCK if landed_late else ev.PullVerdict.FAILED
        job = pull.action.job
        self.after(0.001, self.handle, ev.Pulled(job, (stuck,) * len(pull.action.items)))
        if landed_late:
            self.world.counters["pulls_stuck"] += 1
            times = sorted(0.05 + LATE_SECONDS * self.world.random.random() for _ in range(3))
            for delay in times:
                self.world.at(delay, self._land_late, pull)
            self.world.at(times[-1], self._quiesce, pull)

    def _land_late(self, pull: _Pull) -> None:
        if self.life == pull.life:
            for _, destination in pull.action.items:
                self.memory.write_half(destination, self.world.random.randrange(2), b"late" * (2 * HALF // 4))

    def _quiesce(self, pull: _Pull) -> None:
        if self.life == pull.life:
            self.receive(self.handle, ev.Quiesced(pull.action.job))
