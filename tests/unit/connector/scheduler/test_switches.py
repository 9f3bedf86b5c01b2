"""What a request may say about storing and loading, and what is refused."""

from __future__ import annotations

import pytest

from kvservice.connector.scheduler.handoff import parse_transfer_params
from kvservice.connector.scheduler.switches import Switches, parse_switches
from kvservice.errors import InvalidRequest


@pytest.mark.parametrize(
    ("ours", "switches"),
    [
        ({}, Switches()),
        ({"store": False}, Switches(store=False)),
        ({"store": True}, Switches(store=True)),
        ({"load": False}, Switches(load=False)),
        ({"store": False, "load": False, "public_tokens": 3}, Switches(store=False, load=False)),
        ({"role": "prefill", "handoff": "0" * 32, "load": False}, Switches(load=False)),
    ],
)
def test_switches_are_read(ours: dict[str, object], switches: Switches) -> None:
    assert parse_switches({"kvservice": {"version": 1, **ours}}) == switches


@pytest.mark.parametrize("params", [None, 7, {}, {"kvservice": 7}, {"do_remote_decode": True}])
def test_without_switches_everything_is_open(params: object) -> None:
    assert parse_switches(params) == Switches()


@pytest.mark.parametrize(
    ("ours", "text"),
    [
        ({"version": 1, "store": "no"}, "store must be true or false, not 'no'"),
        ({"version": 1, "load": 0}, "load must be true or false"),
        ({"version": 1, "store": None}, "store must be true or false"),
        ({"version": 2, "store": False}, "version is 2"),
        ({"store": False}, "version is None"),
        ({"version": 1, "role": "prefill", "handoff": "0" * 32, "store": False}, "handed off through the pool"),
    ],
)
def test_switch_that_makes_no_sense_is_refused(ours: dict[str, object], text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        parse_switches({"kvservice": ours})


def test_switches_alone_are_no_hand_off() -> None:
    assert parse_transfer_params({"kvservice": {"version": 1, "store": False}}) is None
