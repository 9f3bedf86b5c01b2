"""Finds the eviction policy that a pool is configured with: one of ours, or one that another package installs."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from kvservice.core.store.eviction import POLICIES, EvictionPolicy
from kvservice.errors import ConfigError
from kvservice.plugins import EVICTION, load

METHODS = tuple(name for name, what in vars(EvictionPolicy).items() if callable(what) and not name.startswith("_"))


def find_policy(name: str) -> Callable[[], EvictionPolicy]:
    """A factory of the policy with this name; a pool calls it once.

    Raises ConfigError for an unknown name, and for a policy of another package that fails or lacks a method.
    """
    if name in POLICIES:
        return POLICIES[name]
    factory = load(EVICTION, name)
    try:
        policy = factory()
    except Exception as error:  # code of other packages
        raise ConfigError(f"eviction policy {name!r} cannot be made: {type(error).__name__}: {error}") from error
    missing = [method for method in METHODS if not callable(getattr(policy, method, None))]
    if missing:
        raise ConfigError(f"eviction policy {name!r} has no method {', '.join(missing)}: see docs/plugins.md")
    return cast(Callable[[], EvictionPolicy], factory)
