"""Ray's nodes as processes of this machine, for the tests that need a cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import psutil
import ray
from ray.cluster_utils import Cluster

from kvservice.actors import deploy

ATTEMPTS = 3


@contextlib.contextmanager
def ray_nodes(*nodes: dict[str, Any]) -> Iterator[Cluster]:
    """A cluster of these nodes, the head first, with this process as its driver; all of it is gone afterwards."""
    cluster = _started(nodes)
    try:
        deploy.connect(cluster.address)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def _started(nodes: tuple[dict[str, Any], ...]) -> Cluster:
    """Again when Ray gives up: it gives processes of its own half a minute, too little on a busy machine."""
    earlier = _children()
    for attempt in range(1, ATTEMPTS + 1):
        try:
            cluster = Cluster(initialize_head=True, head_node_args={**nodes[0], "include_dashboard": False})
            for node in nodes[1:]:
                cluster.add_node(**node)
            return cluster
        except Exception as error:  # which one says nothing: Ray raises plain ones
            for process in _children() - earlier:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            if attempt == ATTEMPTS:
                raise
            print(f"Ray did not start, attempt {attempt} of {ATTEMPTS}: {error}", flush=True)
    raise AssertionError("unreachable")


def _children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))
