"""Finds the eviction policy that a pool is configured with: one of ours, or one that another package installs."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from kvservice.core.store.eviction import POLICIES, EvictionPolicy
from kvservice.plugins import EVICTION, load, made


def find_policy(name: str) -> Callable[[], EvictionPolicy]:
    """A factory of the policy with this name; a pool calls it once.

    Raises ConfigError for an unknown name, and for a policy of another package that fails or lacks a method.
    """
    if name in POLICIES:
        return POLICIES[name]
    factory = load(EVICTION, name, POLICIES)
    made(EVICTION, name, factory, EvictionPolicy)
    return cast(Callable[[], EvictionPolicy], factory)
