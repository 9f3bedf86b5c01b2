"""The nodes whose shards were drained, kept in Ray's control plane for a supervisor that is restarted.

Blocks for one call to the control plane, which raises what Ray raises when that is away.
"""

from __future__ import annotations

import json

from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

from kvservice.actors import names
from kvservice.core.bounded_table import NODES_MAX

KEY = b"drained"


class DrainedNodes:
    """The last Ray nodes whose shards were drained. One supervisor at a time writes them."""

    def __init__(self, service: str) -> None:
        self._namespace = names.namespace(service).encode()
        self._nodes: tuple[str, ...] | None = None  # None = not read yet

    def read(self) -> tuple[str, ...]:
        if self._nodes is None:
            kept = _internal_kv_get(KEY, namespace=self._namespace)
            self._nodes = () if kept is None else tuple(json.loads(kept))
        return self._nodes

    def add(self, ray_node: str) -> None:
        self._write((*self.read(), ray_node)[-NODES_MAX:])

    def clear(self) -> None:
        self._write(())

    def _write(self, nodes: tuple[str, ...]) -> None:
        _internal_kv_put(KEY, json.dumps(nodes).encode(), namespace=self._namespace)
        self._nodes = nodes
