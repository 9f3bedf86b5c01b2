"""Which nodes Ray is about to take away: preemption, scale-down, `ray drain-node`. Ray's own Serve uses the same list.

Ray 2.60 has no public name for it; whatever is missing in another version is taken for "no node is drained", and the
shard then leaves when its process is told to end. Blocks for one call to Ray's control plane.
"""

from __future__ import annotations

import logging
import time

log = logging.getLogger("kvservice.actors")

NO_DEADLINE_SECONDS = 30.0  # for a node that Ray takes away when it is idle, without saying when
MARGIN_SECONDS = 2.0  # the shard has ended this long before the node does
SECONDS_MIN = 1.0
SECONDS_MAX = 120.0
_told: set[str] = set()


def draining_nodes() -> dict[str, float]:
    """Ray node id -> seconds that its shard may take to leave."""
    try:
        from ray._private import state

        found = state.state.get_draining_nodes()
    except Exception as error:  # noqa: BLE001  an internal of Ray: it may be gone, or fail in its own ways
        if type(error).__name__ not in _told:
            _told.add(type(error).__name__)
            log.warning("Ray does not say which nodes it drains (%s): their shards leave when they are ended", error)
        return {}
    return {node: seconds_left(deadline_ms, time.time()) for node, deadline_ms in found.items()}


def seconds_left(deadline_ms: int, now: float) -> float:
    """`deadline_ms`: milliseconds since 1970, 0 = none is known; `now`: seconds since then."""
    if deadline_ms <= 0:
        return NO_DEADLINE_SECONDS
    return min(max(deadline_ms / 1000 - now - MARGIN_SECONDS, SECONDS_MIN), SECONDS_MAX)
