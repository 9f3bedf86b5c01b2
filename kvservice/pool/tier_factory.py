"""Makes the tiers that a pool is configured with: ours, or one that another package installs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

from kvservice.errors import TierError
from kvservice.plugins import TIERS, check_methods, load
from kvservice.pool.coders import Coders, check_codecs
from kvservice.pool.tier_specs import DISK, OBJECTS, TierSettings, TierSpec, read_beside
from kvservice.tier.base import Tier


def open_coders(settings: TierSettings, *, has_tenants: bool = False) -> Coders:
    """The codecs of the tiers that these settings name. Checks that they and tiers of other packages can be used.

    May import, which takes seconds. Raises ConfigError.
    """
    used = [settings.disk_codec] if settings.disk_path else []
    used += [settings.objects_codec] if settings.objects_url else []
    if settings.objects_url:
        find_tier(settings.objects_url)
    check_codecs(used, has_keys=has_tenants or bool(settings.codec_key_file))
    return Coders(settings.codec_key_file)


def tier_makers(specs: tuple[TierSpec, ...], coders: Coders) -> Mapping[str, Callable[[], Tier]]:
    """What makes each tier, by its name. PoolTiers calls them on the thread that starts the tier."""
    return {spec.name: partial(make_tier, spec, coders) for spec in specs}


def make_tier(spec: TierSpec, coders: Coders) -> Tier:
    """The tier, not started. Imports what it needs, which takes a while. Raises TierError, or ConfigError for a codec
    or a tier of another package that cannot be used."""
    if spec.is_late:
        try:
            read_beside([replace(spec, unusable="")])
        except OSError as error:
            raise TierError(f"{spec.place}: {error.strerror or error}", transient=True) from error
    elif spec.unusable:
        raise TierError(spec.unusable)
    coder = coders.make(spec.codec)
    if spec.name == DISK:
        from kvservice.tier.disk import DiskTier
        from kvservice.tier.disk_io import DiskIO

        return DiskTier(Path(spec.place), coder, io=DiskIO(spec.io))
    assert spec.name == OBJECTS, spec.name
    if (factory := find_tier(spec.place)) is not None:
        return factory(spec.place, spec.namespace, coder)
    from kvservice.tier.objects import ObjectTier

    return ObjectTier(spec.place, spec.namespace, coder)


def find_tier(url: str) -> Callable[..., Tier] | None:
    """What makes the tier of another package that has the name of this URL's scheme; None for a tier of ours.

    Raises ConfigError for a scheme that nobody offers, and for a tier that lacks a method. Imports the other package.
    """
    from kvservice.tier.object_store import SCHEMES

    scheme = url.partition("://")[0].lower()
    if scheme in SCHEMES:
        return None
    factory = load(TIERS, scheme, SCHEMES)
    check_methods(TIERS, scheme, factory, Tier)
    return cast(Callable[..., Tier], factory)
