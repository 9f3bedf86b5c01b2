"""Why a prefix ends where it does: the reasons of the pool, and those of the program, with words for people."""

from __future__ import annotations

from kvservice.core.messages import MissReason

TOO_LONG = "too_long"
NO_POOL = "unavailable"

WORDS: dict[str, str] = {
    MissReason.NEVER_STORED.value: "no node is known to have it",
    MissReason.TIER_NOT_OPEN.value: "no node is known to have it, and a tier that may have it was not open",
    MissReason.TIER_NOT_ASKED.value: "no node is known to have it, and a tier that may have it fails, is busy or slow",
    MissReason.DEADLINE.value: "it did not come within the timeout",
    MissReason.SLOWER_THAN_RECOMPUTE.value: "fetching it would take longer than computing it",
    MissReason.LOOKUP_FAILED.value: "the lookup service did not answer",
    MissReason.PEER_FAILED.value: "the node that has it did not answer",
    MissReason.STALE.value: "it was evicted or cleared meanwhile",
    MissReason.CORRUPT.value: "its bytes are not those that were stored, so it is not served",
    MissReason.WINDOW.value: "it needs blocks of a window, or a state, that are not there",
    MissReason.NO_ROOM.value: "no slot could be freed to fetch it into",
    MissReason.QUOTA.value: "its tenant may hold no more",
    MissReason.DRAINING.value: "the shard is leaving",
    MissReason.DETACHED.value: "the shard let this program go",
    TOO_LONG: "a prompt is stored and found up to its 8,192nd block",
    NO_POOL: "the shard is away; the cache attaches again by itself",
}
