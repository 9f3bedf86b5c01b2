"""Overviews of a service that is not there, for tests of what shows them."""

from __future__ import annotations

from collections.abc import Sequence

from kvservice.client.eviction_overview import EvictionOverview
from kvservice.client.lookup_overview import LookupOverview
from kvservice.client.mirror_overview import MirrorOverview
from kvservice.client.overview import (
    EngineOverview,
    FingerprintDifference,
    Flow,
    HitWindow,
    ModelHits,
    ModelOverview,
    NodeOverview,
    Overview,
    RefusedEngine,
    SlowestRequest,
    hit_window,
    pool_usage,
    sum_pools,
    sum_windows,
)
from kvservice.client.tier_overview import TierOverview, sum_tiers, tiers_of
from kvservice.core.block.tenants import TenantUsage
from kvservice.core.messages import TierFigures
from kvservice.core.store.slots import SHOWN_STATES
from kvservice.units import GiB, MiB
from kvservice.wire.figures import encode_tiers
from kvservice.wire.v1 import shard_pb2

# Of each disk that `make_tiers` makes.
DISK_COUNTERS = {
    "tier_disk_hit_blocks": 3600,
    "tier_disk_written_bytes": 5 * GiB,
    "tier_disk_read_bytes": 2 * GiB,
    "tier_disk_busy": 6,
    "tier_disk_dropped_evicted": 4,
    "tier_disk_read_corrupt": 3,
}
MODEL = "meta-llama/Llama-3.3-70B-Instruct"
HOSTS = ("gpu-a.rack1", "gpu-b.rack1", "gpu-c.rack2")


def make_windows(asked: int) -> tuple[HitWindow, ...]:
    """Three of four blocks were hits, two of them local."""
    spans = (("start", 7423.0, asked), ("10m", 600.0, asked // 8), ("1m", 60.0, asked // 80))
    return tuple(
        hit_window(
            name,
            seconds,
            {
                "asked_blocks": count,
                "hit_local_blocks": count // 2,
                "hit_remote_blocks": count // 4,
                "hit_bytes": count * MiB,
                "stored_bytes": count * MiB // 4,
                "fetched_bytes": count * MiB // 4,
            },
        )
        for name, seconds, count in spans
    )


def make_tiers(asked: int = 80_000) -> tuple[TierOverview, ...]:
    """A disk with 7 blocks that gave 4.5 % of what was asked, and an object store that cannot be used."""
    disk = TierFigures("disk", "open", "", False, 7, 3 * GiB, 1024 * GiB, 2)
    objects = TierFigures("objects", "failed", "no credentials", is_shared=True)
    reply = shard_pb2.StatsReply(tiers=encode_tiers((disk, objects)))
    return tiers_of(reply, {**DISK_COUNTERS, "asked_blocks": asked})


def make_node(number: int, asked: int = 80_000, state: str = "ok") -> NodeOverview:
    """A node that uses 48 of 64 GiB. A silent one says nothing."""
    silent = state == "silent"
    sizes = dict.fromkeys(SHOWN_STATES, 0)
    if not silent:
        sizes |= {"free": 16 * GiB, "reserved": 2 * GiB, "writing": GiB, "sealed": (40 - number) * GiB}
        sizes["leased"] = (5 + number) * GiB
    slots = {name: size // (2 * MiB) for name, size in sizes.items()}
    asked = asked * (number + 1)
    return NodeOverview(
        node_id=f"526d7a5fe83{number}",
        host="" if silent else HOSTS[number % len(HOSTS)],
        address=f"10.0.0.{4 + number}:34123",
        epoch=1764000000 + number,
        state=state,
        error="deadline exceeded" if silent else "",
        uptime_seconds=0.0 if silent else 7423.0,
        transport="nixl",
        version="0.1.0",
        pool=pool_usage(sum(sizes.values()), slots, sizes),
        windows=() if silent else make_windows(asked),
        evictions={"pressure": 0 if silent else 120},
        tenants=(),
        counters={
            "acquires": asked // 100,
            "asked_blocks": asked,
            "hit_local_blocks": asked // 2,
            "hit_remote_blocks": asked // 4,
            "hit_bytes": asked * MiB,
            "stored_bytes": asked * MiB // 4,
            "fetched_bytes": asked * MiB // 4,
            "served_bytes": asked * MiB // 4,
        },
        lookup_keys=23_000,
        mirror=MirrorOverview(69_000, 4 * MiB, 2, 0.3, 1200, {"stale": 2}),
        eviction=None if silent else EvictionOverview("worth", 3, {"lru": 0.38, "s3-fifo": 0.402, "worth": 0.412}),
    )


def make_overview(nodes: Sequence[NodeOverview] | None = None, model: str = MODEL, tenant: str = "search") -> Overview:
    """Two well nodes and a silent one; each of the first two has an engine."""
    found = tuple([make_node(0), make_node(1), make_node(2, state="silent")] if nodes is None else nodes)
    well = [node for node in found if node.state != "silent"]
    engines = tuple(
        EngineOverview(node.node_id, f"a{index}b3c4d5", model, "", tenant, "d88a09957b84", 16, 4000.0, 8200.0)
        for index, node in enumerate(well)
    )
    first, second = found[0].node_id, found[1].node_id
    differences = (FingerprintDifference("block_tokens", "16", "32"), FingerprintDifference("dtype", "bfloat16", "fp8"))
    return Overview(
        service="prod",
        at=1764000000.0,
        restricted=False,
        pool=sum_pools([node.pool for node in found]),
        windows=sum_windows(window for node in found for window in node.windows),
        nodes=found,
        engines=engines,
        models=(ModelOverview("", model, "d88a09957b84", len(engines), tuple(node.node_id for node in well)),),
        hits=(ModelHits(model, tenant, 1000, 500, 200, 50, 0.75),),
        refused=(RefusedEngine(second, model, "", 184.0, differences, 3, "other fingerprint"),),
        flows=(Flow(first, second, 21 * GiB, 9e9), Flow(second, first, 12 * GiB, 8e9)),
        evictions={"pressure": 240, "slab_moved": 0, "quota": 2, "cleared": 5, "aged": 3},
        tenants=(TenantUsage(tenant, 40 * GiB, 64 * GiB, 12, {"quota_refused": 3}),),
        slowest=(
            SlowestRequest(first, "cmpl-6f2a9c0e1", model, tenant, 12.0, 0.9, 120, 90, 20, "deadline"),
            SlowestRequest(second, "cmpl-1b2c3d4e5", model, tenant, 42.0, 0.3, 60, 60, 0, "none"),
        ),
        lookups=(
            LookupOverview("10.0.0.4:7400", 0, 2, 69_000, 2, ""),
            LookupOverview("10.0.0.5:7400", 0, 0, 0, 0, "unavailable"),
        ),
        problems=(
            "lookup partition 10.0.0.5:7400: unavailable",
            "node 526d7a5fe832 at 10.0.0.6:34123: deadline exceeded",
        ),
        tiers=sum_tiers(tier for node in found for tier in node.tiers),
    )
