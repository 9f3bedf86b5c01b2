"""The nodes that Ray is about to take away: preemption, scale-down, `ray drain-node`. Ray Serve uses the same list.

Ray 2.60 has no public name for it. If a version of Ray lacks it, no node counts as draining, and a shard leaves when
its process is told to end. Blocks for one call to Ray's control plane.
"""

from __future__ import annotations

import logging
import time

log = logging.getLogger("kvservice.actors")

NO_DEADLINE_SECONDS = 30.0  # For a node that Ray takes away without saying when, as it does with idle nodes.
MARGIN_SECONDS = 2.0  # The shard ends this long before its node does, so that its last calls still have a network.
# Shorter times are raised to this one: a shard cannot hand anything over in less. It may then be cut off.
SECONDS_MIN = 1.0
# Longer times are cut to this one, in which a shard can hand over what is worth keeping: a node may be announced hours
# ahead.
SECONDS_MAX = 120.0
_told: set[str] = set()


def draining_nodes() -> dict[str, float]:
    """Ray node id -> seconds that the node's shard may take to leave. Empty, with one warning, if Ray does not say."""
    try:
        from ray._private import state

        found = state.state.get_draining_nodes()
    except Exception as error:  # noqa: BLE001  an internal of Ray: it may be gone, or fail in its own ways
        if type(error).__name__ not in _told:
            _told.add(type(error).__name__)
            log.warning(
                "Ray does not say which nodes it drains (%s); their shards leave when their processes are told to end",
                error,
            )
        return {}
    return {node: seconds_left(deadline_ms, time.time()) for node, deadline_ms in found.items()}


def seconds_left(deadline_ms: int, now: float) -> float:
    """Seconds that a shard may take to leave.

    Args:
        deadline_ms: when the node goes, in milliseconds since 1970; 0 if it is not known.
        now: seconds since 1970.
    """
    if deadline_ms <= 0:
        return NO_DEADLINE_SECONDS
    return min(max(deadline_ms / 1000 - now - MARGIN_SECONDS, SECONDS_MIN), SECONDS_MAX)
