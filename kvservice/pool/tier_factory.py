"""Makes the tiers that a pool is configured with: ours, or one that another package installs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from kvservice.pool.tier_specs import DISK, OBJECTS, TierSpec
from kvservice.tier.base import Tier


def tier_makers(specs: tuple[TierSpec, ...]) -> Mapping[str, Callable[[], Tier]]:
    """What makes each tier, by its name. PoolTiers calls them on the thread that starts the tier."""
    return {spec.name: partial(make_tier, spec) for spec in specs}


def make_tier(spec: TierSpec) -> Tier:
    """The tier, not started. Imports what it needs, which takes a while. Raises TierError."""
    if spec.name == DISK:
        from kvservice.tier.disk import DiskTier
        from kvservice.tier.disk_io import DiskIO

        return DiskTier(Path(spec.place), io=DiskIO(spec.io))
    assert spec.name == OBJECTS, spec.name
    from kvservice.tier.objects import ObjectTier

    return ObjectTier(spec.place, spec.namespace)
