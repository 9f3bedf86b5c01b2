"""Hints of clients: what is understood, what is skipped, and that nothing of it can hurt."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvservice.connector.scheduler.handoff import parse_transfer_params
from kvservice.connector.scheduler.hints import (
    ACTIONS_MAX,
    NO_HINTS_FOUND,
    PAYLOAD_KEYS_MAX,
    PIN_SECONDS,
    REUSE_SECONDS_MAX,
    TEXT_CHARS_MAX,
    HintsFound,
    parse_hints,
)
from kvservice.core.acquire.holds import HOLD_SECONDS_MAX
from kvservice.core.messages import Hints
from kvservice.errors import InvalidRequest


def params(**hints: Any) -> dict[str, object]:
    return {"kvservice": {"version": 1, "hints": hints}}


def action(kind: Any, version: Any = "1.0", **payload: Any) -> SimpleNamespace:
    return SimpleNamespace(action_id="a", action_type=kind, action_version=version, payload=payload)


def envelope(*actions: Any) -> SimpleNamespace:
    return SimpleNamespace(protocol_version="0.1", message_id="m", actions=list(actions))


def test_a_request_without_hints_says_nothing() -> None:
    for given_params in (None, {}, [], {"kvservice": 3}, {"kvservice": {"version": 1}}, {"do_remote_decode": True}):
        assert parse_hints(given_params) is NO_HINTS_FOUND


def test_every_hint_can_be_given_with_the_parameters() -> None:
    everything = {name: True for name in ("prefetch", "write_down", "share", "no_store", "last_turn")}
    found = parse_hints(params(pin_seconds=120, reuse_seconds=30.5, **everything))
    assert found == HintsFound(Hints(120.0, True, True, True, True, 30.5, True))
    assert parse_transfer_params(params(last_turn=True)) is None, "hints alone are no hand-off"


def test_actions_are_understood_by_the_last_word_of_their_type() -> None:
    found = parse_hints(
        None,
        envelope(
            action("kv.pin", seconds=30),
            action("kv.Prefetch", "0.1"),
            action("demote"),
            action("kv.share"),
            action("no-store"),
            action("expected_reuse", seconds=5),
            action("last-turn"),
        ),
    )
    assert found == HintsFound(Hints(30.0, True, True, True, True, 5.0, True))
    assert parse_hints(None, envelope(action("pin"))).hints.pin_seconds == PIN_SECONDS


def test_what_is_not_known_is_skipped_and_counted() -> None:
    found = parse_hints(None, envelope(action("kv.defragment"), action("pin", "2.0"), action("kv."), action("share")))
    assert found == HintsFound(Hints(share=True), 3)


def test_of_two_times_the_longer_counts_and_both_have_an_end() -> None:
    found = parse_hints(params(pin_seconds=10), envelope(action("pin", seconds=5), action("retain", seconds=20)))
    assert found.hints.pin_seconds == 20.0
    far = parse_hints(params(pin_seconds=10**9, reuse_seconds=10**12)).hints
    assert (far.pin_seconds, far.reuse_seconds) == (HOLD_SECONDS_MAX, REUSE_SECONDS_MAX)
    assert parse_hints(params(pin_seconds=10**400)).hints == Hints(pin_seconds=HOLD_SECONDS_MAX), "no float holds it"


@pytest.mark.parametrize(
    ("given_params", "given_envelope", "says"),
    [
        ({"kvservice": {"version": 2, "hints": {"share": True}}}, None, "version is 2, and this engine knows 1 only"),
        ({"kvservice": {"version": 1, "hints": [1]}}, None, "must be an object, not a list"),
        (params(pinn=1), None, "has no 'pinn'; it has last_turn, no_store, pin_seconds"),
        (params(share="yes"), None, "share must be true or false, not 'yes'"),
        (params(pin_seconds=-1), None, "must be a number of seconds, not -1"),
        (params(pin_seconds=math.nan), None, "not nan"),
        (params(pin_seconds=True), None, "not True"),
        (params(pin_seconds="1" * 1000), None, "seconds, not '1111"),
        (None, SimpleNamespace(actions="pin"), "a list of at most"),
        (None, SimpleNamespace(), "a list of at most"),
        (None, envelope(*[action("pin")] * (ACTIONS_MAX + 1)), "a list of at most"),
        (None, envelope(action(7)), "action_type of a kv_hints action is a text"),
        (None, envelope(action("x" * (TEXT_CHARS_MAX + 1))), "action_type of a kv_hints action is a text"),
        (None, envelope(action("pin", None)), "action_version of a kv_hints action is a text"),
        (None, envelope(action("pin", seconds="long")), "kv_hints pin seconds must be a number"),
        (None, envelope(action("expected_reuse")), "expected_reuse seconds must be a number of seconds, not None"),
        (None, envelope(action("pin", **{str(i): i for i in range(PAYLOAD_KEYS_MAX + 1)})), "at most 64 keys"),
        (None, envelope(SimpleNamespace(action_type="pin", action_version="1", payload=3)), "payload"),
        (None, envelope(3), "action_type"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(given_params: Any, given_envelope: Any, says: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_hints(given_params, given_envelope)
    assert says in refused.value.message and len(refused.value.message) < 400


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(["pin_seconds", "prefetch", "share", "reuse_seconds", "x"])


@given(
    hints=st.dictionaries(NAMES, ANYTHING, max_size=4) | ANYTHING,
    kinds=st.lists(st.sampled_from(["pin", "kv.share", "expected_reuse"]) | ANYTHING, max_size=4),
    payload=ANYTHING | st.fixed_dictionaries({"seconds": ANYTHING}),
)
def test_anything_is_either_understood_or_refused(hints: Any, kinds: list[Any], payload: Any) -> None:
    actions = [SimpleNamespace(action_type=kind, action_version="1.0", payload=payload) for kind in kinds]
    try:
        found = parse_hints({"kvservice": {"version": 1, "hints": hints}}, SimpleNamespace(actions=actions))
    except InvalidRequest:
        return
    assert 0 <= found.hints.pin_seconds <= HOLD_SECONDS_MAX
    assert 0 <= found.hints.reuse_seconds <= REUSE_SECONDS_MAX
    assert found.skipped <= len(kinds)
