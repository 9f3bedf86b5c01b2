"""A level 2 of `lmcache server` in the pool: its L2 adapter, which alone imports LMCache.

lmcache server … --l2-adapter '{"type": "plugin", "module_path": "kvservice.connector.lmcache",
  "class_name": "KVServiceL2Adapter", "adapter_params": {"weights_version": "v1"}}'
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvservice.connector.lmcache.adapter import KVServiceL2Adapter as KVServiceL2Adapter


def __getattr__(name: str) -> object:
    """Loads the adapter, and with it LMCache, when it is used."""
    if name != "KVServiceL2Adapter":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvservice.connector.lmcache.adapter import KVServiceL2Adapter

    return KVServiceL2Adapter
