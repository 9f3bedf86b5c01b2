"""What an overview says of the mirror of one node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_FALLBACK = "mirror_fallback_"


@dataclass(frozen=True, slots=True)
class MirrorOverview:
    """A node's mirror of the directory."""

    keys: int
    bytes: int
    live_partitions: int
    age_seconds: float
    answers: int
    fallbacks: dict[str, int]  # lookups left to the lookup partitions, by reason


def mirror_of(counters: Mapping[str, int]) -> MirrorOverview | None:
    """None where there is no mirror, or when the node did not answer."""
    if "mirror_keys" not in counters:
        return None
    return MirrorOverview(
        counters["mirror_keys"],
        counters.get("mirror_bytes", 0),
        counters.get("mirror_live_partitions", 0),
        counters.get("mirror_age_ms", 0) / 1e3,
        counters.get("mirror_answers", 0),
        {name.removeprefix(_FALLBACK): count for name, count in counters.items() if name.startswith(_FALLBACK)},
    )
