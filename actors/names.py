"""Names of the service's actors: one Ray namespace a service, so that several live on one cluster."""

from __future__ import annotations

from kvservice.units import NodeId

SUPERVISOR = "supervisor"
NODE_ID_CHARS = 12
GPU_WORKER = "gpu-worker-"


def namespace(service: str) -> str:
    return f"kvservice-{service}"


def node_id(ray_node_id: str) -> NodeId:
    """The pool's name of a Ray node: short enough for socket paths, unique in any real cluster."""
    return NodeId(ray_node_id[:NODE_ID_CHARS])


def shard(node: str) -> str:
    return f"shard-{node}"


def gpu_worker(node: str, index: int) -> str:
    return f"{GPU_WORKER}{node}-{index}"


def lookup(index: int) -> str:
    return f"lookup-{index}"
