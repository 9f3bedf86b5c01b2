"""The storage back end for SGLang's HiCache: `module_path` names this package. Only this folder imports SGLang."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvservice.connector.sglang.backend import HiCacheKVService

__all__ = ["HiCacheKVService"]


def __getattr__(name: str) -> Any:
    """Imports SGLang when the class is asked for, so that its naming rules can be used without SGLang."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvservice.connector.sglang.backend import HiCacheKVService

    return HiCacheKVService
