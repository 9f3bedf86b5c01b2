"""Switches of one request: whether its blocks may be stored and loaded. They come with `kv_transfer_params`:

    {"kvservice": {"version": 1, "store": false, "load": false}}

`store: false` keeps a prompt and its answer out of the pool, for text that must not stay anywhere. `store: true` makes
the decode engine of a hand-off store what it computes, which it does not do by itself. `load: false` computes the
prompt even if it is cached, for measurements. Both stand beside the other keys, such as those of a hand-off.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvservice.connector.scheduler.handoff import NAME, check_version
from kvservice.errors import InvalidRequest

STORE, LOAD = "store", "load"


@dataclass(frozen=True, slots=True)
class Switches:
    store: bool | None = None  # None: as the engine's options say
    load: bool = True


CLOSED = Switches(store=False, load=False)  # for a request whose switches make no sense


def parse_switches(params: object) -> Switches:
    """What a request says about storing and loading. Raises InvalidRequest that names what is wrong."""
    ours = params.get(NAME) if isinstance(params, Mapping) else None
    if not isinstance(ours, Mapping) or not ours.keys() & {STORE, LOAD}:
        return Switches()
    check_version(ours)
    for name in (STORE, LOAD):
        if not isinstance(ours.get(name, True), bool):
            raise InvalidRequest(f"kv_transfer_params.{NAME}.{name} must be true or false, not {ours[name]!r:.40}")
    if ours.get("role") == "prefill" and ours.get(STORE) is False:
        raise InvalidRequest(
            f'kv_transfer_params.{NAME}: a "prefill" is handed off through the pool, so it cannot have "store": false'
        )
    return Switches(ours.get(STORE), ours.get(LOAD, True))
