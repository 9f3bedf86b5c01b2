"""The vLLM connector: `kv_connector_module_path` names this package. Only this folder imports vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvservice.connector.vllm.connector import KVServiceConnector

__all__ = ["KVServiceConnector"]


def __getattr__(name: str) -> Any:
    """Imports vLLM when the connector is asked for, so that routers can use the naming rules without vLLM."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvservice.connector.vllm.connector import KVServiceConnector

    return KVServiceConnector
