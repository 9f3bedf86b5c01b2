"""Every question that the core asks of other nodes is answered by an event, also where there is nobody to ask."""

from __future__ import annotations

import time
from collections import Counter

import pytest

from kvservice.core import actions as act
from kvservice.core import events as ev
from kvservice.core.messages import Handoff
from kvservice.observe.timings import Timings
from kvservice.pool.remote import RemoteShards
from kvservice.testing.builders import make_chain, make_holder
from kvservice.units import HandoffId, NodeId

CHAIN, PEER = make_chain(2), make_holder("peer")
HANDOFF = Handoff(HandoffId(b"h" * 16), NodeId("peer"))


@pytest.fixture
def alone() -> RemoteShards:
    return RemoteShards(NodeId("me"), None, None, time.monotonic, Counter(), Timings())


async def test_without_a_directory_nobody_is_said_to_be_asked(alone: RemoteShards) -> None:
    """Nothing is found."""
    assert await alone.perform(act.Resolve(3, CHAIN, 0, 1.0)) == ev.Resolved(3, (), complete=False)
    assert await alone.perform(act.FindTakers(())) == ev.TakersFound((), {})


async def test_without_peers_every_call_to_one_fails_and_ends(alone: RemoteShards) -> None:
    located = await alone.perform(act.Locate(3, PEER, CHAIN, 1.0))
    followed = await alone.perform(act.Follow(4, 5, HANDOFF, CHAIN, 1.0))
    assert isinstance(located, ev.Located) and (located.fetch, located.result) == (3, None)
    assert isinstance(followed, ev.Followed) and (followed.follow, followed.op, followed.result) == (4, 5, None)
    assert await alone.perform(act.Offer(6, PEER, 1, (), 1.0)) == ev.Offered(6, None)
