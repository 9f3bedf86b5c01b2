"""What one request asks of the cache, from its `kv_transfer_params`, its hints and the engine's options.

Parameters come from outside. What makes no sense is counted and logged, and the request is served without it.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from kvservice.connector.options import ConnectorOptions, StoredPart
from kvservice.connector.scheduler.handoff import Prefill, parse_public_tokens, parse_transfer_params
from kvservice.connector.scheduler.hints import NO_HINTS_FOUND, parse_hints
from kvservice.connector.scheduler.switches import CLOSED, parse_switches
from kvservice.core.acquire.handoff import HANDOFF_ID_BYTES
from kvservice.core.messages import NO_HINTS, Handoff, Hints
from kvservice.errors import KVServiceError
from kvservice.units import HandoffId

log = logging.getLogger("kvservice.connector")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RequestTerms:
    wants: Prefill | Handoff | None = None  # it is computed for another engine (with an id), or by another one
    public_tokens: int = 0  # leading tokens that other tenants may share, if this tenant may
    may_load: bool = True
    may_store: bool = True  # none of its blocks are stored without it
    prompt_only: bool = False  # what is generated for it is not stored
    hints: Hints = NO_HINTS


NO_TERMS = RequestTerms()  # of a request that says nothing


def terms_of(
    params: object, options: ConnectorOptions, failures: Counter[str], *, request_id: str, envelope: object = None
) -> RequestTerms:
    """Never raises for what the request says. `params` are its `kv_transfer_params`, `envelope` its `kv_hints`."""

    def parsed(parse: Callable[[object], T], instead: T, counter: str, outcome: str) -> T:
        try:
            return parse(params)
        except KVServiceError as error:
            failures[counter] += 1
            log.warning("%s: %s", outcome, error.message, extra={"request_id": request_id})
            return instead

    switches = parsed(
        parse_switches, CLOSED, "switches_refused", "a request is served without the cache, as its switches are unclear"
    )
    wants = parsed(parse_transfer_params, None, "handoff_params_refused", "a request is served without a hand-off")
    if switches is CLOSED:
        wants = None
    elif wants == Prefill():
        wants = Prefill(HandoffId(os.urandom(HANDOFF_ID_BYTES)))
    public = parsed(parse_public_tokens, 0, "public_params_refused", "a request shares no public blocks")
    found = parsed(
        partial(parse_hints, envelope=envelope), NO_HINTS_FOUND, "hints_refused", "a request is served without hints"
    )
    if found.skipped:
        failures["hints_skipped"] += found.skipped
    may_store = switches.store
    if may_store is None:
        may_store = options.store_after_handoff or not isinstance(wants, Handoff)
        if found.hints.no_store and not isinstance(wants, Prefill):  # a prefill is handed off through the pool
            may_store = False
    prompt_only = options.store is StoredPart.PROMPTS
    return RequestTerms(wants, public, switches.load, may_store, prompt_only, found.hints)
