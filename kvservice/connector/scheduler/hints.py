"""Hints of clients about the future of a prompt's blocks, as a request carries them. They are advice: a request whose
hints make no sense is served without them. Pure.

With `kv_transfer_params`, for every engine and over vLLM's HTTP interface; each key may be left out:

    {"kvservice": {"version": 1, "hints": {"pin_seconds": 120, "prefetch": true, "write_down": true, "share": true,
                                           "no_store": true, "reuse_seconds": 30, "last_turn": true}}}

With vLLM's own `kv_hints`, an envelope of actions that programs and routers give to its engine. vLLM says nothing about
what actions there are; here the last part of an action's type counts, so `kv.pin` is `pin`. Pins and expected reuse
have their time in `payload["seconds"]`. Actions that are not known, or of a version that is not known, are skipped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from kvservice.connector.scheduler.handoff import NAME, check_version
from kvservice.core.acquire.holds import HOLD_SECONDS_MAX
from kvservice.core.messages import NO_HINTS, Hints
from kvservice.errors import InvalidRequest

HINTS = "hints"
ACTIONS_MAX = 64  # of one request; there are seven kinds. With more the hints are refused.
TEXT_CHARS_MAX = 128  # of an action's type or version; longer ones are refused
PAYLOAD_KEYS_MAX = 64  # of one action; with more the hints are refused
PIN_SECONDS = 60.0  # of a pin that says no time: two turns of a chat
REUSE_SECONDS_MAX = 7 * 86_400.0  # a week; what is expected later is said as this
VERSIONS = ("0", "1")  # of actions: the part before the first point
_TIMES = {"pin_seconds": HOLD_SECONDS_MAX, "reuse_seconds": REUSE_SECONDS_MAX}
# Types of actions, each with the hint that it is. Agents and routers have several words for some.
ACTIONS = {
    "pin": "pin_seconds",
    "retain": "pin_seconds",
    "prefetch": "prefetch",
    "fetch": "prefetch",
    "demote": "write_down",
    "write_down": "write_down",
    "share": "share",
    "no_store": "no_store",
    "expected_reuse": "reuse_seconds",
    "last_turn": "last_turn",
}


@dataclass(frozen=True, slots=True)
class HintsFound:
    hints: Hints
    skipped: int = 0  # actions that are not known


NO_HINTS_FOUND = HintsFound(NO_HINTS)


def parse_hints(params: object, envelope: object = None) -> HintsFound:
    """What a request hints, in its `kv_transfer_params` and in vLLM's envelope. Of two hints that differ the longer
    time counts. Raises InvalidRequest that names what is wrong."""
    found = _of_params(params)
    if envelope is None:
        return found
    actions = getattr(envelope, "actions", None)
    if not isinstance(actions, Sequence) or isinstance(actions, str | bytes) or len(actions) > ACTIONS_MAX:
        raise InvalidRequest(f"kv_hints has a list of at most {ACTIONS_MAX} actions")
    hints, skipped = found.hints, 0
    for action in actions:
        said = _of_action(action)
        skipped += not said
        for name, value in said.items():
            hints = replace(hints, **{name: max(getattr(hints, name), value)})
    return HintsFound(hints, skipped)


def _of_params(params: object) -> HintsFound:
    ours = params.get(NAME) if isinstance(params, Mapping) else None
    if not isinstance(ours, Mapping) or (given := ours.get(HINTS)) is None:
        return NO_HINTS_FOUND
    where = f"kv_transfer_params.{NAME}.{HINTS}"
    check_version(ours)
    if not isinstance(given, Mapping):
        raise InvalidRequest(f"{where} must be an object, not a {type(given).__name__}")
    known = {field.name for field in fields(Hints)}
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name not in known:
            raise InvalidRequest(f"{where} has no {str(name)[:40]!r}; it has {', '.join(sorted(known))}")
        found[name] = _time(f"{where}.{name}", value, _TIMES[name]) if name in _TIMES else _flag(where, name, value)
    return HintsFound(Hints(**found))


def _of_action(action: object) -> dict[str, float | bool]:
    """The hint of one action; nothing if it is not known."""
    kind, version = _text(action, "action_type"), _text(action, "action_version")
    name = ACTIONS.get(kind.lower().replace("-", "_").rpartition(".")[2])
    if name is None or version.partition(".")[0] not in VERSIONS:
        return {}
    if name not in _TIMES:
        return {name: True}
    payload = getattr(action, "payload", None)
    if not isinstance(payload, Mapping) or len(payload) > PAYLOAD_KEYS_MAX:
        raise InvalidRequest(f"the payload of a kv_hints action is an object of at most {PAYLOAD_KEYS_MAX} keys")
    default = PIN_SECONDS if name == "pin_seconds" else None
    return {name: _time(f"kv_hints {kind} seconds", payload.get("seconds", default), _TIMES[name])}


def _text(action: object, name: str) -> str:
    value = getattr(action, name, None)
    if not isinstance(value, str) or len(value) > TEXT_CHARS_MAX:
        raise InvalidRequest(f"the {name} of a kv_hints action is a text of at most {TEXT_CHARS_MAX} characters")
    return value


def _time(where: str, value: object, most: float) -> float:
    """Seconds, at most `most`. Text, lists, negative numbers and NaN are refused."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise InvalidRequest(f"{where} must be a number of seconds, not {value!r:.40}")
    return float(min(value, most))  # not of the value itself: a whole number may be too large for a float


def _flag(where: str, name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest(f"{where}.{name} must be true or false, not {value!r:.40}")
    return value
