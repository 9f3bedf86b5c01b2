"""What a request and the engine's options make of storing and loading. The envelope is vLLM's."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

from kvservice.connector.options import ConnectorOptions, StoredPart
from kvservice.connector.scheduler.handoff import Prefill, decode_params
from kvservice.connector.scheduler.request_terms import RequestTerms, terms_of
from kvservice.core.messages import NO_HINTS, Handoff, Hints
from kvservice.units import HandoffId, NodeId

RECEIVED = decode_params(Handoff(HandoffId(bytes(16)), NodeId("a")))


def terms(params: Any, options: ConnectorOptions | None = None, failures: Counter[str] | None = None) -> RequestTerms:
    return terms_of(params, options or ConnectorOptions(), Counter() if failures is None else failures, request_id="r")


def with_switches(params: dict[str, Any], **switches: object) -> dict[str, Any]:
    return {**params, "kvservice": {**params["kvservice"], **switches}}


def test_ordinary_request_is_stored_and_loaded() -> None:
    found = terms(None)
    assert (found.wants, found.may_store, found.may_load, found.prompt_only) == (None, True, True, False)


def test_receiver_of_a_hand_off_does_not_store_unless_told() -> None:
    assert not terms(RECEIVED).may_store
    assert terms(RECEIVED).may_load
    assert terms(with_switches(RECEIVED, store=True)).may_store, "told by the request"
    told = ConnectorOptions(store_after_handoff=True)
    assert terms(RECEIVED, told).may_store, "told by the engine's options"
    assert not terms(with_switches(RECEIVED, store=False), told).may_store, "the request decides"


def test_prefill_of_a_hand_off_is_always_stored() -> None:
    assert terms({"do_remote_decode": True}).may_store
    assert isinstance(terms({"do_remote_decode": True}).wants, Prefill)


def test_prompts_only_is_an_option() -> None:
    assert terms(None, ConnectorOptions(store=StoredPart.PROMPTS)).prompt_only


@pytest.mark.parametrize("ours", [{"version": 1, "store": "no"}, {"version": 3, "store": False}])
def test_unclear_switches_keep_a_request_out_of_the_cache(ours: dict[str, object]) -> None:
    failures: Counter[str] = Counter()
    found = terms({"kvservice": ours}, failures=failures)
    assert (found.may_store, found.may_load, found.wants) == (False, False, None)
    assert failures["switches_refused"] == 1


def test_hints_come_with_parameters_and_in_vllms_envelope() -> None:
    envelope = KvHintsEnvelope(
        "0.1", "m", [KvHintAction("a", "kv.pin", "1.0", {"seconds": 30}), KvHintAction("b", "kv.defragment", "1.0", {})]
    )
    params = {"kvservice": {"version": 1, "hints": {"last_turn": True}}}
    failures: Counter[str] = Counter()
    found = terms_of(params, ConnectorOptions(), failures, request_id="r", envelope=envelope)
    assert found.hints == Hints(pin_seconds=30.0, last_turn=True)
    assert (failures["hints_skipped"], found.may_store) == (1, True)


def test_hints_that_make_no_sense_cost_nothing_but_the_hints() -> None:
    failures: Counter[str] = Counter()
    found = terms({"kvservice": {"version": 1, "hints": {"pin_seconds": "long"}}}, failures=failures)
    assert (found.hints, found.may_store, found.may_load) == (NO_HINTS, True, True)
    assert failures == {"hints_refused": 1}


def test_no_store_is_heeded_except_for_a_prefill() -> None:
    hints = {"no_store": True}
    assert not terms({"kvservice": {"version": 1, "hints": hints}}).may_store
    assert terms({"kvservice": {"version": 1, "hints": hints, "store": True}}).may_store, "a switch is no hint"
    assert terms({"do_remote_decode": True, "kvservice": None}).may_store
    prefill = {"version": 1, "role": "prefill", "handoff": "0" * 32, "hints": hints}
    assert terms({"kvservice": prefill}).may_store
