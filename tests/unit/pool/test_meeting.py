"""Peers are met on the pool's loop, and nobody waits for it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import pytest

from kvservice.client.peer import PeerInfo, PeerPort
from kvservice.core import actions as act
from kvservice.core.directory.meetings import Meetings
from kvservice.core.messages import Holder, LocateResult
from kvservice.core.segment.geometry import plan_geometry
from kvservice.errors import Unavailable
from kvservice.observe.timings import Timings
from kvservice.pool import meeting
from kvservice.pool.meeting import PeerMeetings
from kvservice.pool.remote import RemoteShards
from kvservice.pool.runtime_ports import PullerPort
from kvservice.testing.builders import make_chain, make_holder
from kvservice.testing.eventually import eventually_async
from kvservice.units import BootEpoch, MiB, NodeId

CHAIN, PEER, SILENT = make_chain(2), make_holder("peer"), make_holder("silent")


class Peers:
    """Peers of which one never answers a handshake."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def handshake(self, holder: Holder, timeout: float) -> PeerInfo:
        self.asked.append(holder.node_id)
        if holder == SILENT:
            await asyncio.sleep(timeout)
            raise Unavailable("it did not answer")
        return PeerInfo(holder.epoch, plan_geometry(16 * MiB), b"there")

    async def locate(self, *_: object) -> LocateResult:
        return LocateResult(BootEpoch(1), None, 0.0, ())


class Pulls:
    def __init__(self, answers: bool | None = True) -> None:
        self.answers = answers  # None: it never does
        self.greeted: list[str] = []

    def greet(self, peer: NodeId, epoch: BootEpoch, description: bytes, on_met: Callable[[bool], None]) -> None:
        self.greeted.append(peer)
        if self.answers is not None:
            on_met(self.answers)
            on_met(self.answers)  # a transport that reports an end twice does no harm


class Rig:
    def __init__(self, pulls: Pulls, peers: Peers | None) -> None:
        self.counters: Counter[str] = Counter()
        self.tasks: list[asyncio.Task[None]] = []
        self.remote = RemoteShards(
            NodeId("me"),
            None,
            cast("PeerPort | None", peers),
            time.monotonic,
            self.counters,
            Timings(),
            on_asked=lambda node_id: self.meetings.asked(node_id),
        )
        state = Meetings(NodeId("me"), 8, self.counters)
        self.meetings = PeerMeetings(state, self.remote, cast(PullerPort, pulls), time.monotonic, self._spawn)

    def _spawn(self, work: Any) -> None:
        self.tasks.append(asyncio.get_running_loop().create_task(work))

    async def counted(self, name: str) -> None:
        async def is_counted() -> bool:
            return self.counters[name] > 0

        await eventually_async(is_counted, name)


async def test_a_named_peer_is_asked_and_read_without_a_request() -> None:
    pulls, peers = Pulls(), Peers()
    rig = Rig(pulls, peers)
    rig.meetings.heard(PEER, True)
    await rig.counted("peers_met")
    assert (peers.asked, pulls.greeted) == (["peer"], ["peer"])
    assert rig.remote.peer_info(PEER.node_id, PEER.epoch) is not None
    rig.meetings.close()


async def test_a_peer_that_never_answers_delays_no_request() -> None:
    pulls, peers = Pulls(), Peers()
    rig = Rig(pulls, peers)
    rig.meetings.heard(SILENT, True)

    async def is_asked() -> bool:
        return "silent" in peers.asked

    await eventually_async(is_asked, "the silent peer to be asked")
    began = time.monotonic()
    await rig.remote.perform(act.Locate(1, PEER, CHAIN, 1.0))
    assert time.monotonic() - began < meeting.HANDSHAKE_SECONDS / 2
    await rig.counted("meetings_failed")
    rig.meetings.close()


async def test_a_read_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "READ_SECONDS", 0.05)
    rig = Rig(Pulls(None), Peers())
    rig.meetings.heard(PEER, True)
    await rig.counted("meetings_failed")
    rig.meetings.close()


async def test_a_pool_without_peers_meets_nobody() -> None:
    rig = Rig(Pulls(), None)
    rig.meetings.heard(PEER, True)
    await rig.counted("meetings_failed")
    rig.meetings.close()
    rig.meetings.asked(SILENT.node_id)
    assert len(rig.tasks) == 1


async def test_an_answer_after_the_end_of_the_loop_is_dropped() -> None:
    rig = Rig(Pulls(), Peers())
    other = asyncio.new_event_loop()
    answer: asyncio.Future[bool] = other.create_future()
    other.close()
    rig.meetings._loop = other
    rig.meetings._tell(answer, True)
    assert not answer.done()
