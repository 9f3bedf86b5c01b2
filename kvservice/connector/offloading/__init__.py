"""A secondary tier for vLLM's OffloadingConnector: `module_path` in `secondary_tiers` names this package."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvservice.connector.offloading.tier import KVServiceTier

__all__ = ["KVServiceTier"]


def __getattr__(name: str) -> Any:
    """Imports vLLM when the tier is asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvservice.connector.offloading.tier import KVServiceTier

    return KVServiceTier
