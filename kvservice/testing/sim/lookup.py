"""Simulated lookup partitions, and the two parts of a node that talk to them: one announces, one asks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from kvservice.aio import within
from kvservice.core.block.keys import KEYS_PER_REQUEST_MAX as SNAPSHOT_KEYS
from kvservice.core.block.keys import partition_of, route_of_head, unpack_keys
from kvservice.core.directory.announce import Announcer, Update
from kvservice.core.directory.directory import AnnounceOutcome, Directory
from kvservice.core.messages import Holder, HolderRun
from kvservice.lookup.announce_pump import AnnouncePump
from kvservice.lookup.client import merge_runs
from kvservice.lookup.service import OUTCOMES
from kvservice.testing.sim.world import Process, World
from kvservice.units import BlockKey, NodeId
from kvservice.wire.v1 import lookup_pb2

# Heartbeats of a node: the production default.
HEARTBEAT_SECONDS = 1.0
# For one lookup. Then the answer is incomplete.
CALL_SECONDS = 0.5
# Between two sweeps of silent nodes: as often as heartbeats.
SWEEP_SECONDS = 1.0


class LookupPartition(Process):
    """One partition of the directory. Its state is lost when it restarts."""

    def __init__(self, world: World, partition: int) -> None:
        super().__init__(world, f"lookup{partition}", f"lookup{partition}")
        self.directory = Directory()
        self.epoch = 1
        self.after(SWEEP_SECONDS, self._sweep)

    def restart(self) -> None:
        self.alive = True
        self.epoch += 1
        self.directory = Directory()
        self.after(SWEEP_SECONDS, self._sweep)
        self.world.note(self.name, f"started, epoch {self.epoch}")

    def _sweep(self) -> None:
        self.directory.expire(self.clock())
        self.directory.sweep(64)
        self.after(SWEEP_SECONDS, self._sweep)

    def keys_by_node(self) -> dict[NodeId, set[BlockKey]]:
        """All keys that each node holds."""
        keys: dict[NodeId, set[BlockKey]] = {}
        row: int | None = 0
        while row is not None:
            held, row = self.directory.snapshot(row, SNAPSHOT_KEYS)
            for node_id, packed in held.items():
                keys.setdefault(node_id, set()).update(unpack_keys(packed))
        return keys

    def announce(self, node: Holder, update: Update, reply: Callable[[AnnounceOutcome, int], None]) -> None:
        outcome = self.directory.apply(
            node,
            update.sequence,
            update.added,
            update.removed,
            full_begin=update.full_begin,
            full_end=update.full_end,
            leaving=update.leaving,
            now=self.clock(),
        )
        self.world.send(self.host, str(node.node_id), reply, outcome, self.epoch)

    def resolve(self, keys: Sequence[BlockKey], asker: NodeId, reply: Callable[[list[HolderRun]], None]) -> None:
        self.world.send(self.host, str(asker), reply, self.directory.resolve(keys, self.clock()))

    def find_node(self, node_id: NodeId, asker: NodeId, reply: Callable[[Holder | None], None]) -> None:
        self.world.send(self.host, str(asker), reply, self.directory.find_node(node_id, self.clock()))


class Herald(AnnouncePump):
    """Carries a node's announcements: the production pump over the simulated network."""

    def __init__(
        self,
        process: Process,
        announcer: Announcer,
        lookups: Sequence[LookupPartition],
        node: Callable[[], Holder],
        on_fenced: Callable[[], None],
    ) -> None:
        addresses = [lookup.name for lookup in lookups]
        super().__init__(
            announcer, addresses, node, HEARTBEAT_SECONDS, on_fenced, process.clock, rng=process.world.random
        )
        self._process = process
        self._lookups = lookups
        self._me = node

    async def _announce(self, partition: int, update: Update, timeout: float) -> lookup_pb2.AnnounceReply:
        lookup, process, world = self._lookups[partition], self._process, self._process.world
        answer: asyncio.Future[lookup_pb2.AnnounceReply] = asyncio.get_running_loop().create_future()
        life = process.life

        def answered(outcome: AnnounceOutcome, lookup_epoch: int) -> None:
            if not answer.done():
                answer.set_result(lookup_pb2.AnnounceReply(outcome=OUTCOMES[outcome], lookup_epoch=lookup_epoch))

        def reply(outcome: AnnounceOutcome, lookup_epoch: int) -> None:
            if process.life == life:
                process.receive(answered, outcome, lookup_epoch)

        world.send(process.host, lookup.host, lookup.receive, lookup.announce, self._me(), update, reply)
        return await within(min(timeout, CALL_SECONDS), answer)


def ask_directory(
    me: Process,
    node_id: NodeId,
    lookups: Sequence[LookupPartition],
    chain: Sequence[BlockKey],
    start: int,
    timeout: float,
    exclude: NodeId | None,
    answer: Callable[[tuple[HolderRun, ...], bool], None],
) -> None:
    """Look up a chain that is shorter than a span, so one partition knows all of it. `answer` is called exactly
    once."""
    lookup = lookups[partition_of(route_of_head(chain[0]), len(lookups))]
    answered = False

    def reply(runs: list[HolderRun]) -> None:
        me.receive(arrived, runs)

    def arrived(runs: list[HolderRun]) -> None:
        nonlocal answered
        if not answered:
            answered = True
            answer(merge_runs([HolderRun(run.start + start, run.count, run.holders) for run in runs], exclude), True)

    def gave_up() -> None:
        nonlocal answered
        if not answered:
            answered = True
            answer((), False)

    me.world.send(me.host, lookup.host, lookup.receive, lookup.resolve, tuple(chain[start:]), node_id, reply)
    me.after(timeout, gave_up)
