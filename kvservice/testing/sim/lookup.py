"""Simulated lookup shards, and the two sides of a node that talk to them: what it announces, what it asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvservice.core.announce import Announcer, Update
from kvservice.core.index import DirectoryIndex, Outcome
from kvservice.core.keys import KEYS_PER_REQUEST_MAX as SNAPSHOT_KEYS
from kvservice.core.keys import partition_of, route_of_head, unpack_keys
from kvservice.core.messages import Holder, HolderRun
from kvservice.testing.sim.world import Process, World
from kvservice.units import BlockKey, NodeId

HEARTBEAT_SECONDS = 1.0
CALL_SECONDS = 0.5
RETRY_SECONDS = 0.2
SWEEP_SECONDS = 1.0


class LookupShard(Process):
    """One partition of the directory; its state is lost with it."""

    def __init__(self, world: World, partition: int) -> None:
        super().__init__(world, f"lookup{partition}", f"lookup{partition}")
        self.index = DirectoryIndex()
        self.epoch = 1
        self.after(SWEEP_SECONDS, self._sweep)

    def restart(self) -> None:
        self.alive = True
        self.epoch += 1
        self.index = DirectoryIndex()
        self.after(SWEEP_SECONDS, self._sweep)
        self.world.note(self.name, f"started, epoch {self.epoch}")

    def _sweep(self) -> None:
        self.index.expire(self.clock())
        self.index.sweep(64)
        self.after(SWEEP_SECONDS, self._sweep)

    def keys_of(self, node_id: NodeId) -> set[BlockKey]:
        """All that this node holds."""
        keys: set[BlockKey] = set()
        row: int | None = 0
        while row is not None:
            held, row = self.index.snapshot(row, SNAPSHOT_KEYS)
            keys.update(unpack_keys(held.get(node_id, b"")))
        return keys

    def announce(self, node: Holder, update: Update, reply: Callable[[Outcome, int], None]) -> None:
        outcome = self.index.apply(
            node, update.sequence, update.added, update.removed,
            full_begin=update.full_begin, full_end=update.full_end, leaving=update.leaving, now=self.clock(),
        )  # fmt: skip
        self.world.send(self.host, str(node.node_id), reply, outcome, self.epoch)

    def resolve(self, keys: Sequence[BlockKey], asker: NodeId, reply: Callable[[list[HolderRun]], None]) -> None:
        self.world.send(self.host, str(asker), reply, self.index.resolve(keys, self.clock()))

    def find_node(self, node_id: NodeId, asker: NodeId, reply: Callable[[Holder | None], None]) -> None:
        self.world.send(self.host, str(asker), reply, self.index.find_node(node_id, self.clock()))


class Herald:
    """Carries a node's announcements: one update a partition at a time, sent again until it is answered."""

    def __init__(
        self,
        process: Process,
        announcer: Announcer,
        lookups: Sequence[LookupShard],
        node: Callable[[], Holder],
        on_fenced: Callable[[], None],
    ) -> None:
        self._process = process
        self._life = process.life
        self.announcer = announcer
        self._lookups = lookups
        self._node = node
        self._on_fenced = on_fenced
        self._sent: dict[int, Update] = {}  # on its way, by partition
        self._heard = [-HEARTBEAT_SECONDS] * len(lookups)
        for partition in range(len(lookups)):
            process.after(0.0, self._beat, partition)

    def kick(self) -> None:
        for partition in range(len(self._lookups)):
            self._offer(partition)

    def _beat(self, partition: int) -> None:
        """Nothing said for a heartbeat: say that the node lives."""
        if self.announcer.fenced:
            return
        self._offer(partition)
        due = self._heard[partition] + HEARTBEAT_SECONDS
        if partition not in self._sent and self._process.clock() >= due:
            self._send(partition, self.announcer.heartbeat(partition))
        self._process.after(HEARTBEAT_SECONDS / 2, self._beat, partition)

    def _offer(self, partition: int) -> None:
        if partition not in self._sent and not self.announcer.fenced:
            update = self.announcer.next_update(partition)
            if update is not None:
                self._send(partition, update)

    def _send(self, partition: int, update: Update) -> None:
        self._sent[partition] = update
        lookup, me, world = self._lookups[partition], self._process, self._process.world

        def reply(outcome: Outcome, lookup_epoch: int) -> None:
            if me.life == self._life:
                me.receive(self._answered, partition, update, outcome, lookup_epoch)

        world.send(me.host, lookup.host, lookup.receive, lookup.announce, self._node(), update, reply)
        me.after(CALL_SECONDS, self._timed_out, partition, update)

    def _answered(self, partition: int, update: Update, outcome: Outcome, lookup_epoch: int) -> None:
        if self._sent.get(partition) is not update:
            return  # answered before, or given up
        del self._sent[partition]
        self._heard[partition] = self._process.clock()
        self.announcer.on_reply(partition, outcome, lookup_epoch)
        if self.announcer.fenced:
            self._on_fenced()
        else:
            self._offer(partition)

    def _timed_out(self, partition: int, update: Update) -> None:
        if self._sent.get(partition) is not update:
            return
        self.announcer.on_failure(partition)
        # Still "on its way" for a moment, so that it is not sent again in a circle.
        self._process.after(RETRY_SECONDS, self._again, partition, update)

    def _again(self, partition: int, update: Update) -> None:
        if self._sent.get(partition) is update:
            del self._sent[partition]
            self._offer(partition)


def ask_directory(
    me: Process,
    node_id: NodeId,
    lookups: Sequence[LookupShard],
    chain: Sequence[BlockKey],
    start: int,
    timeout: float,
    answer: Callable[[tuple[HolderRun, ...], bool], None],
) -> None:
    """One lookup of a chain that is shorter than a span, so one shard knows all of it. `answer` comes exactly once."""
    lookup = lookups[partition_of(route_of_head(chain[0]), len(lookups))]
    answered = False

    def reply(runs: list[HolderRun]) -> None:
        me.receive(arrived, runs)

    def arrived(runs: list[HolderRun]) -> None:
        nonlocal answered
        if not answered:
            answered = True
            answer(tuple(_shifted(runs, start, node_id)), True)

    def gave_up() -> None:
        nonlocal answered
        if not answered:
            answered = True
            answer((), False)

    me.world.send(me.host, lookup.host, lookup.receive, lookup.resolve, tuple(chain[start:]), node_id, reply)
    me.after(timeout, gave_up)


def _shifted(runs: Sequence[HolderRun], start: int, exclude: NodeId) -> list[HolderRun]:
    found = []
    for run in runs:
        holders = tuple(holder for holder in run.holders if holder.node_id != exclude)
        if holders:
            found.append(HolderRun(run.start + start, run.count, holders))
    return found
