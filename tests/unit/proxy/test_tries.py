"""How many servers get one request: it may be what ends them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvservice.errors import ConfigError
from kvservice.proxy.plan import (
    DECODE_FAILED,
    LOST,
    NO_CONNECTION,
    CancelAttempt,
    RefuseClient,
    SendDecode,
    SendPrefill,
    State,
)
from kvservice.proxy.servers import Role, ServerFault
from kvservice.proxy.settings import ProxySettings
from tests.unit.proxy.test_plan import World, in_state, names


def test_a_request_is_refused_after_enough_servers_failed() -> None:
    world = World(prefill=0, decode=6, tries=3)
    world.begin()
    assert names(world.decode_fails(ServerFault.BROKEN)) == ["SendDecode"]
    assert names(world.decode_fails(ServerFault.ERROR)) == ["SendDecode"]
    assert world.decode_fails(ServerFault.BROKEN) == [RefuseClient(LOST)]
    assert 500 <= LOST.status < 600 and LOST.retry_after is None


@pytest.mark.parametrize("fault", [fault for fault in ServerFault if not fault.blames_request])
def test_only_a_server_that_had_the_request_counts(fault: ServerFault) -> None:
    world = World(prefill=0, decode=4)
    world.begin()
    for _ in range(3):
        assert names(world.decode_fails(fault)) == ["SendDecode"]
    problem = NO_CONNECTION if fault is ServerFault.BUSY else DECODE_FAILED
    assert world.decode_fails(fault) == [RefuseClient(problem)]


def test_after_prefill_was_lost_one_decode_has_the_request() -> None:
    world = in_state(State.BOTH, decode=3)
    assert world.decode is not None
    exposed = world.decode.server
    cancel, decode = world.prefill_fails(ServerFault.BROKEN)
    assert isinstance(cancel, CancelAttempt) and isinstance(decode, SendDecode)
    assert decode.server is exposed and decode.handoff is None
    assert world.decode_fails(ServerFault.BROKEN) == [RefuseClient(LOST)]


def test_a_stopped_decode_gets_the_request_again() -> None:
    """It does so however its checks go."""
    world = in_state(State.BOTH, decode=3)
    assert world.decode is not None
    exposed = world.decode.server
    exposed.healthy = False  # it answers its checks too slowly, and there is no room for another one
    cancel, decode = world.prefill_fails(ServerFault.BROKEN)
    assert isinstance(cancel, CancelAttempt) and isinstance(decode, SendDecode)
    assert decode.server is exposed


def test_a_decode_that_made_way_gets_the_request_again() -> None:
    """It made way for another prefill."""
    world = in_state(State.BOTH, decode=3)
    assert world.prefill is not None and world.decode is not None
    exposed = world.decode.server
    for server in world.pool:
        if server.role is Role.PREFILL and server is not world.prefill.server:
            server.node = None  # the prefill after the first goes out by itself
    cancel, prefill = world.prefill_fails(ServerFault.UNREACHABLE)
    assert isinstance(cancel, CancelAttempt) and isinstance(prefill, SendPrefill)
    (decode,) = world.prefill_fails(ServerFault.BROKEN)
    assert isinstance(decode, SendDecode) and decode.server is exposed


def test_decode_lost_beside_prefill_waits_for_prefills_word() -> None:
    world = in_state(State.BOTH, decode=3)
    assert world.prefill is not None and world.decode is not None
    handoff, lost = world.prefill.handoff_id, world.decode.server
    assert world.decode_fails(ServerFault.BROKEN) == []
    (decode,) = world.prefill_answers()
    assert isinstance(decode, SendDecode) and decode.server is not lost
    assert decode.handoff is not None and decode.handoff.id == handoff


def test_a_request_that_ended_both_servers_goes_to_no_other() -> None:
    world = in_state(State.BOTH, prefill=3, decode=3)
    world.decode_fails(ServerFault.BROKEN)
    assert world.prefill_fails(ServerFault.BROKEN) == [RefuseClient(LOST)]


@given(
    prefill=st.integers(0, 4),
    decode=st.integers(1, 4),
    known=st.booleans(),
    tries=st.integers(2, 4),
    order=st.lists(st.booleans(), min_size=8, max_size=8),
)
def test_a_request_that_ends_servers_ends_no_more_than_allowed(
    prefill: int, decode: int, known: bool, tries: int, order: list[bool]
) -> None:
    """Also when a server that was told to stop working on it ends all the same."""
    world = World(prefill, decode, known=known, tries=tries)
    world.begin()
    for prefill_first in order:
        if world.prefill is not None and (prefill_first or world.decode is None):
            world.prefill_fails(ServerFault.BROKEN)
        elif world.decode is not None:
            world.decode_fails(ServerFault.BROKEN)
    assert world.exchange.state is State.DONE and isinstance(world.actions[-1], RefuseClient)
    sent = [each for each in world.actions if isinstance(each, SendPrefill | SendDecode)]
    assert len({(each.server.role, each.server.url) for each in sent}) <= tries


def test_a_pair_of_servers_needs_two_tries() -> None:
    assert ProxySettings((), ("http://d",), tries=1).tries == 1
    with pytest.raises(ConfigError, match="at least 2 if there are prefill servers"):
        ProxySettings(("http://p",), ("http://d",), tries=1)
