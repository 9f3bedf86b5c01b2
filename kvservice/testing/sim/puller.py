"""One-sided reads of one simulated node. Each half of each payload is read, then the headers, at different moments,
without asking whether the other process still runs.

Peers of one machine are mapped: no network is between them, nothing lands late, and a file without a name is read as it
was. One that is cut short ends the pull.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvservice.core import events as ev
from kvservice.core.segment.digest import digest_payload
from kvservice.core.segment.header_checks import is_as_located
from kvservice.core.segment.refs import BlockHandle
from kvservice.testing.sim.memory import SCALED, MappedFile
from kvservice.testing.sim.parts import NodeParts
from kvservice.transfer.job import DoneCallback, PullJob, WritesEndedCallback
from kvservice.units import BootEpoch, NodeId, SlotIndex

LATE_SECONDS = 2.0  # a transfer that was given up may still write for this long
READ_SECONDS = 0.02  # the longest that reading half a block takes: slow enough for something to happen meanwhile


@dataclass(slots=True)
class _Pull:
    job: PullJob
    memory: MappedFile
    on_done: DoneCallback
    on_writes_ended: WritesEndedCallback
    is_decided: bool = False


class SimPuller:
    """A PullerPort. Each one belongs to one life of its node."""

    def __init__(self, node: NodeParts) -> None:
        self._node = node
        self._world = node.world
        self._life = node.life
        self._is_closed = False
        self._maps_peers = node.maps_peers

    name = "simulated"

    def describe(self) -> bytes:
        return b""

    def counters(self) -> Mapping[str, int]:
        return {}

    def submit(self, job: PullJob, on_done: DoneCallback, on_writes_ended: WritesEndedCallback) -> None:
        peer = self._node.peers[job.peer]
        memory = peer.memory.file if self._maps_peers else peer.memory
        pull = _Pull(job, memory, on_done, on_writes_ended)
        self._world.note(self._node.name, f"pulls {len(job.items)} blocks from {peer.name}")
        if self._is_cut(pull):
            self._broken(pull, landed_late=self._world.random.random() < 0.5)
            return
        self._node.after(max(job.deadline - self._node.clock(), 0.0) + 0.001, self._deadline, pull)
        self._read(pull, 0, 0)

    def greet(self, peer: NodeId, epoch: BootEpoch, description: bytes, on_met: Callable[[bool], None]) -> None:
        if self._node.peers[peer].is_mute("reads"):
            return  # a peer that stopped keeps its answer
        cut = self._world.is_cut(self._node.host, peer) or self._world.is_cut(peer, self._node.host)
        self._node.after(READ_SECONDS, on_met, not cut)

    def close(self) -> None:
        """Stop: nothing is written any more."""
        self._is_closed = True

    @property
    def _writes(self) -> bool:
        return self._node.life == self._life and not self._is_closed  # a NIC stops with its registration

    def _is_cut(self, pull: _Pull) -> bool:
        if self._maps_peers:
            return pull.memory.is_cut_short
        me, peer = self._node.host, pull.job.peer
        return self._world.is_cut(me, peer) or self._world.is_cut(peer, me)

    def _read(self, pull: _Pull, index: int, half: int) -> None:
        """Let one half of one payload arrive, then the next, and in the end the headers."""
        if pull.is_decided or not self._writes:
            return
        items, memory = pull.job.items, self._node.memory
        if self._is_cut(pull):
            self._broken(pull, landed_late=True)
            return
        if self._node.hang_seconds and not self._maps_peers:
            hang, self._node.hang_seconds = self._node.hang_seconds, 0.0
            self._world.at(hang, self._read, pull, index, half)
            return
        item = items[index]
        memory.write_half(item.destination, half, pull.memory.read(item.handle.slot, item.handle.length))
        if self._node.garbles:
            self._node.garbles = False
            memory.flip(item.destination, half * 4 * SCALED[item.handle.length] + 5)
            self._world.note(self._node.name, f"garbled what it read into slot {item.destination:#x}")
        pause = READ_SECONDS * self._world.random.random()
        if half == 0:
            self._world.at(pause, self._read, pull, index, 1)
        elif index + 1 < len(items):
            self._world.at(pause, self._read, pull, index + 1, 0)
        else:
            self._world.at(pause, self._judge, pull)

    def _judge(self, pull: _Pull) -> None:
        if self._writes and not pull.is_decided:
            headers = [pull.memory.header_bytes(item.handle.slot) for item in pull.job.items]
            self._node.receive(self._pulled, pull, headers)

    def _pulled(self, pull: _Pull, headers: list[bytes]) -> None:
        if pull.is_decided:
            return
        pull.is_decided = True
        job = pull.job
        if self._node.clock() > job.deadline:
            pull.on_done(job.job_id, (ev.PullResult.FAILED,) * len(job.items))
            return
        results = tuple(
            self._result(header, item.handle, item.destination, job.peer_epoch)
            for header, item in zip(headers, job.items, strict=True)
        )
        self._world.counters["blocks_pulled"] += results.count(ev.PullResult.OK)
        pull.on_done(job.job_id, results)

    def _result(self, header: bytes, handle: BlockHandle, destination: SlotIndex, epoch: BootEpoch) -> ev.PullResult:
        if not is_as_located(header, handle, epoch):
            return ev.PullResult.STALE
        landed = self._node.memory.read(destination, handle.length)
        return ev.PullResult.OK if digest_payload(landed, handle.key) == handle.digest else ev.PullResult.CORRUPT

    def _deadline(self, pull: _Pull) -> None:
        if not pull.is_decided:
            self._broken(pull, landed_late=True)

    def _broken(self, pull: _Pull, landed_late: bool) -> None:
        """The transfer did not end. What it writes may still arrive, and the slot is free only after that. A copy of
        our own ends with its pull."""
        landed_late = landed_late and not self._maps_peers
        pull.is_decided = True
        stuck = ev.PullResult.STUCK if landed_late else ev.PullResult.FAILED
        self._node.after(0.001, pull.on_done, pull.job.job_id, (stuck,) * len(pull.job.items))
        if landed_late:
            self._world.counters["pulls_stuck"] += 1
            times = sorted(0.05 + LATE_SECONDS * self._world.random.random() for _ in range(3))
            for delay in times:
                self._world.at(delay, self._land_late, pull)
            self._world.at(times[-1], self._end_writes, pull)

    def _land_late(self, pull: _Pull) -> None:
        if self._writes:
            for item in pull.job.items:
                late = b"late" * (SCALED[item.handle.length] // 4)
                self._node.memory.write_half(item.destination, self._world.random.randrange(2), late)

    def _end_writes(self, pull: _Pull) -> None:
        if self._writes:
            self._node.receive(pull.on_writes_ended, pull.job.job_id)
