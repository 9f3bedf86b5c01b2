"""A cluster-wide KV cache for LLM inference.

    pool = kvservice.connect()
    cache = pool.attach("my-model", kvservice.Layout(block_tokens=16, shape=(30, 2, 3, 16, 64)))
    cache.put(tokens, blocks)
    with cache.get(tokens) as hit:
        use(hit.view)

docs/reference/python.md says what these promise. Importing this package loads nothing; a name does when it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvservice.version import __version__ as __version__

if TYPE_CHECKING:
    from kvservice.api.attached import PutResult as PutResult
    from kvservice.api.explanation import ExplainedBlocks as ExplainedBlocks
    from kvservice.api.explanation import RequestExplanation as RequestExplanation
    from kvservice.api.hit import Hit as Hit
    from kvservice.api.layout import Layout as Layout
    from kvservice.api.pool import AsyncCache as AsyncCache
    from kvservice.api.pool import AsyncPool as AsyncPool
    from kvservice.api.pool import Cache as Cache
    from kvservice.api.pool import Pool as Pool
    from kvservice.api.pool import connect as connect
    from kvservice.api.pool import connect_async as connect_async
    from kvservice.errors import ConfigError as ConfigError
    from kvservice.errors import FingerprintMismatch as FingerprintMismatch
    from kvservice.errors import InvalidRequest as InvalidRequest
    from kvservice.errors import KVServiceError as KVServiceError
    from kvservice.errors import LeaseLost as LeaseLost
    from kvservice.errors import Refused as Refused
    from kvservice.errors import SegmentError as SegmentError
    from kvservice.errors import Unavailable as Unavailable

_HOMES = {
    "AsyncCache": "kvservice.api.pool",
    "AsyncPool": "kvservice.api.pool",
    "Cache": "kvservice.api.pool",
    "ConfigError": "kvservice.errors",
    "ExplainedBlocks": "kvservice.api.explanation",
    "FingerprintMismatch": "kvservice.errors",
    "Hit": "kvservice.api.hit",
    "InvalidRequest": "kvservice.errors",
    "KVServiceError": "kvservice.errors",
    "Layout": "kvservice.api.layout",
    "LeaseLost": "kvservice.errors",
    "Pool": "kvservice.api.pool",
    "PutResult": "kvservice.api.attached",
    "Refused": "kvservice.errors",
    "RequestExplanation": "kvservice.api.explanation",
    "SegmentError": "kvservice.errors",
    "Unavailable": "kvservice.errors",
    "connect": "kvservice.api.pool",
    "connect_async": "kvservice.api.pool",
}
__all__ = [
    "AsyncCache",
    "AsyncPool",
    "Cache",
    "ConfigError",
    "ExplainedBlocks",
    "FingerprintMismatch",
    "Hit",
    "InvalidRequest",
    "KVServiceError",
    "Layout",
    "LeaseLost",
    "Pool",
    "PutResult",
    "Refused",
    "RequestExplanation",
    "SegmentError",
    "Unavailable",
    "__version__",
    "connect",
    "connect_async",
]


def __getattr__(name: str) -> object:
    """Loads a public name at its first use."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'kvservice' has no attribute {name!r}")
    from importlib import import_module

    found = globals()[name] = getattr(import_module(home), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
