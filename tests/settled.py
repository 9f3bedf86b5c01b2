"""Whether what runs by itself has come to rest: only tests wait for that."""

from __future__ import annotations

from collections.abc import Sequence

from kvservice.core.directory.announce import Announcer
from kvservice.lookup.client import LookupAnswer, LookupClient
from kvservice.session.session import Session
from kvservice.units import BlockKey

CALL_SECONDS = 2.0  # for a lookup partition on this machine


def is_synced(announcer: Announcer, partition: int) -> bool:
    """Whether the lookup partition has confirmed everything."""
    stream = announcer._streams[partition]
    return not (stream.wants_full or stream.snapshot is not None or stream.pending or stream.outstanding)


def has_slots(session: Session) -> bool:
    """Whether slots are ready for every KV cache group."""
    with session._lock:
        return all(session._stock._slots)


async def mirrored_answer(lookup: LookupClient, chain: Sequence[BlockKey]) -> LookupAnswer | None:
    """What the node's mirror answers. None while a lookup partition must be asked."""
    calls = lookup.counters.get("lookup_rpcs", 0)
    answer = await lookup.resolve(chain, 0, CALL_SECONDS)
    return answer if answer.complete and lookup.counters.get("lookup_rpcs", 0) == calls else None
