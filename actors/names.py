"""The names of the service's actors. Each service has a Ray namespace, so that several can live on one cluster."""

from __future__ import annotations

from kvservice.units import NodeId

SUPERVISOR = "supervisor"
NODE_ID_CHARS = 12  # of a Ray node's 56: short enough for socket paths, and 48 bits are unique in any real cluster
GPU_WORKER = "gpu-worker-"


def namespace(service: str) -> str:
    return f"kvservice-{service}"


def node_id(ray_node_id: str) -> NodeId:
    """The pool's name for a Ray node: its first characters."""
    return NodeId(ray_node_id[:NODE_ID_CHARS])


def shard(node: str) -> str:
    return f"shard-{node}"


def gpu_worker(node: str, index: int) -> str:
    return f"{GPU_WORKER}{node}-{index}"


def lookup(index: int) -> str:
    return f"lookup-{index}"
