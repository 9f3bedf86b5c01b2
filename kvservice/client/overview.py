"""What one sees of a service: one tree of values, gathered from all its parts.

`kvservice status`, `kvservice top` and the console show this tree, and `as_json` is its form for programs. A reading
asks every lookup partition for the nodes and every shard for its figures, in parallel. Everything runs on the caller's
loop. Nothing is raised for parts that do not answer; they are problems of the overview.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import grpc

from kvservice.aio import ask_each
from kvservice.client.channels import Channels
from kvservice.client.clocks import ClockReading, clock_problems
from kvservice.client.eviction_overview import EvictionOverview, eviction_of
from kvservice.client.lookup_overview import LookupOverview
from kvservice.client.mirror_overview import MirrorOverview, mirror_of
from kvservice.client.tier_overview import OPEN, UNUSABLE, DriftOverview, TierOverview, drifts_of, sum_tiers, tiers_of
from kvservice.core.block.tenants import TenantUsage
from kvservice.core.explain.evictions import EvictionCause
from kvservice.core.messages import UsageRow
from kvservice.core.store.blocks import EVICTED
from kvservice.core.store.slots import SHOWN_STATES
from kvservice.errors import ConfigError, InvalidRequest
from kvservice.wire.calls import call_in_time
from kvservice.wire.figures import check_figures
from kvservice.wire.status import connect_hint, readable
from kvservice.wire.v1 import lookup_pb2, lookup_pb2_grpc, shard_pb2, shard_pb2_grpc

CALL_SECONDS = 3.0  # for one RPC; a part that takes longer is shown as a problem
AT_ONCE_MAX = 32  # nodes asked in parallel, so that a large service is asked in seconds with few calls at a time
SLOWEST_SHOWN = 16  # requests of the whole service; more do not help a reader
OK, DRAINING, SILENT = "ok", "draining", "silent"
_EVICTIONS = (  # a shard serves on after these
    EvictionCause.PRESSURE,
    EvictionCause.SLAB_MOVED,
    EvictionCause.QUOTA,
    EvictionCause.CLEARED,
    EvictionCause.AGED,
    EvictionCause.CORRUPT,
)


@dataclass(frozen=True, slots=True)
class StateUsage:
    state: str  # one of SHOWN_STATES
    slots: int
    bytes: int  # free: with the slabs that are not assigned to a block size yet, which have no slots
    percent: float  # of the pool's bytes


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """How a pool's memory is used. Slots that engines hold for their stores (reserved) count as used."""

    total_bytes: int
    used_bytes: int
    free_bytes: int
    overhead_bytes: int  # headers, and what is left over at the end of slabs
    used_percent: float
    states: tuple[StateUsage, ...]  # one for each of SHOWN_STATES, in that order


@dataclass(frozen=True, slots=True)
class HitWindow:
    """What happened within a window of time. Blocks are counted when they are promised to an engine."""

    name: str  # "start", "10m" or "1m"
    seconds: float  # that are really covered: of several nodes, those of the oldest
    acquires: int
    asked_blocks: int
    hit_local_blocks: int
    hit_remote_blocks: int
    hit_tier_blocks: int  # brought back from a tier below the memory
    hit_rate: float | None  # of the asked blocks, 0 to 1; None when none was asked
    local_hit_rate: float | None
    remote_hit_rate: float | None
    tier_hit_rate: float | None
    stored_bytes: int  # by engines
    hit_bytes: int  # promised to engines
    pulled_bytes: int  # read from other nodes
    served_bytes: int  # leased to other nodes for reading
    evicted_blocks: int


@dataclass(frozen=True, slots=True)
class NodeOverview:
    node_id: str
    host: str  # name of its machine; "" when it did not answer
    address: str
    epoch: int
    state: str  # OK, DRAINING or SILENT
    error: str  # why it is silent
    uptime_seconds: float
    transport: str
    version: str
    pool: PoolUsage
    windows: tuple[HitWindow, ...]
    evictions: dict[str, int]  # blocks by cause
    tenants: tuple[TenantUsage, ...]
    counters: dict[str, int]
    lookup_keys: int  # blocks that the directory has of it
    mirror: MirrorOverview | None
    tiers: tuple[TierOverview, ...] = ()  # below its memory
    pins: int = 0  # prompts that are pinned by name
    pinned_bytes: int = 0
    eviction: EvictionOverview | None = None  # None for a policy of one rule

    @property
    def label(self) -> str:
        """The name for people: the machine's, and the id when it says something else."""
        return self.node_id if self.host in ("", self.node_id) else f"{self.host} ({self.node_id})"


@dataclass(frozen=True, slots=True)
class EngineOverview:
    node_id: str
    engine_id: str  # the beginning of its id
    model: str
    namespace: str
    tenant: str
    fingerprint: str  # the beginning of its digest, in hex
    block_tokens: int
    attached_seconds: float
    prefill_tokens_per_second: float | None  # None = not measured yet
    pid: int = 0  # of the process that is connected; 0 = not known: it is in another pid namespace


@dataclass(frozen=True, slots=True)
class ModelOverview:
    """Engines that share blocks: one model, namespace and fingerprint."""

    namespace: str
    model: str
    fingerprint: str
    engines: int
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModelHits(UsageRow):
    """Blocks of one model and tenant, since the start of each shard."""

    hit_rate: float | None  # None when no block was asked for


@dataclass(frozen=True, slots=True)
class FingerprintDifference:
    field: str
    attached: str  # the value of the engine that was there
    refused: str  # the value of the engine that was refused


@dataclass(frozen=True, slots=True)
class RefusedEngine:
    """An engine that serves without the cache, because its blocks would not fit those of the attached ones."""

    node_id: str
    model: str
    namespace: str
    age_seconds: float
    differences: tuple[FingerprintDifference, ...]
    more_differences: int
    message: str


@dataclass(frozen=True, slots=True)
class Flow:
    """Bytes that one node read from another."""

    source: str
    target: str
    bytes: int  # since the target's shard started
    bytes_per_second: float  # of a pull, as measured; 0 = not measured


@dataclass(frozen=True, slots=True)
class SlowestRequest:
    node_id: str
    request_id: str
    model: str
    tenant: str
    age_seconds: float
    took_seconds: float
    asked_blocks: int
    local_blocks: int
    fetched_blocks: int
    miss: str  # value of core.messages.MissReason


@dataclass(frozen=True, slots=True)
class Overview:
    service: str
    at: float  # Unix time of the reading
    restricted: bool  # the service has tenants and no token was given: `refused` and `slowest` are left out
    pool: PoolUsage  # of all nodes
    windows: tuple[HitWindow, ...]  # of all nodes
    nodes: tuple[NodeOverview, ...]
    engines: tuple[EngineOverview, ...]
    models: tuple[ModelOverview, ...]
    hits: tuple[ModelHits, ...]  # by model and tenant, the most asked first
    refused: tuple[RefusedEngine, ...]
    flows: tuple[Flow, ...]
    evictions: dict[str, int]  # of all nodes: blocks by cause
    tenants: tuple[TenantUsage, ...]  # of all nodes
    slowest: tuple[SlowestRequest, ...]
    lookups: tuple[LookupOverview, ...]
    problems: tuple[str, ...]
    tiers: tuple[TierOverview, ...] = ()  # of all nodes, by name
    drifts: tuple[DriftOverview, ...] = ()  # by node and model
    clocks: tuple[ClockReading, ...] = ()  # of the nodes that answered

    @property
    def is_alive(self) -> bool:
        """Whether any part of the service answered."""
        return any(node.state != SILENT for node in self.nodes) or any(not lookup.error for lookup in self.lookups)


def as_json(overview: Overview) -> dict[str, Any]:
    """The overview in values that json.dumps takes, with stable keys."""
    return asdict(overview)


async def gather_overview(
    channels: Channels,
    service: str,
    lookup_addresses: Sequence[str],
    known: Mapping[str, str] | None = None,
    timeout: float = CALL_SECONDS,
) -> Overview:
    """Ask every lookup partition, and every shard that these or `known` (node -> address) name. A node that is silent
    for the directory is asked too: it may hang, or be cut off from the directory alone. Channels to others are closed.

    The token of the channels is of the tenant that looks. Without one in a service with tenants, the overview is
    restricted. Takes at most twice `timeout`, and longer for more than AT_ONCE_MAX silent nodes.
    """
    answers = await asyncio.gather(*[_ask_lookup(channels, address, timeout) for address in lookup_addresses])
    rows = [row for _, reply in answers if reply is not None for row in reply.nodes]
    keys_of: Counter[str] = Counter()
    for row in rows:
        keys_of[row.node.node_id] += row.block_count
    hidden, alive = [
        {row.node.node_id: row.node.peer_address for row in rows if row.alive is wanted} for wanted in (False, True)
    ]
    addresses = {**hidden, **(known or {}), **alive}
    shards = await ask_each(
        lambda node: _ask_shard(channels, node, addresses[node], timeout), sorted(addresses), AT_ONCE_MAX
    )
    channels.keep_only({*lookup_addresses, *addresses.values()})
    return _overview(service, [lookup for lookup, _ in answers], shards, keys_of)


async def _ask_lookup(
    channels: Channels, address: str, timeout: float
) -> tuple[LookupOverview, lookup_pb2.LookupStatsReply | None]:
    stub = lookup_pb2_grpc.LookupServiceStub(channels.get(address))
    try:
        reply = readable(await call_in_time(stub.LookupStats, lookup_pb2.LookupStatsRequest(), timeout), address)
    except grpc.aio.AioRpcError as error:
        return LookupOverview(address, 0, 0, 0, 0, _short(error)), None
    except InvalidRequest as error:
        return LookupOverview(address, 0, 0, 0, 0, error.message), None
    alive = sum(row.alive for row in reply.nodes)
    return LookupOverview(address, reply.partition, reply.partition_count, reply.key_count, alive, ""), reply


async def _ask_shard(channels: Channels, node_id: str, address: str, timeout: float) -> _NodeAnswer:
    stub = shard_pb2_grpc.AdminServiceStub(channels.get(address))
    asked_at = time.time()
    try:
        metadata = channels.metadata_for(address)
        reply = await call_in_time(stub.Stats, shard_pb2.StatsRequest(), timeout, metadata)
        reply = check_figures(reply, address)
    except grpc.aio.AioRpcError as error:
        return _NodeAnswer(node_id, address, error=_short(error))
    except (ConfigError, InvalidRequest) as error:
        return _NodeAnswer(node_id, address, error=error.message)
    return _NodeAnswer(node_id, address, reply, asked_at=asked_at, heard_at=time.time())


@dataclass(frozen=True, slots=True)
class _NodeAnswer:
    node_id: str
    address: str
    reply: shard_pb2.StatsReply = field(default_factory=shard_pb2.StatsReply)  # empty when there is an error
    error: str = ""
    asked_at: float = 0.0  # Unix times of this machine
    heard_at: float = 0.0


def _overview(
    service: str, lookups: Sequence[LookupOverview], shards: Sequence[_NodeAnswer], keys_of: Mapping[str, int]
) -> Overview:
    nodes = tuple(_node(answer, keys_of.get(answer.node_id, 0)) for answer in shards)
    engines = tuple(engine for answer in shards for engine in _engines(answer))
    slowest = sorted((slow for answer in shards for slow in _slowest(answer)), key=lambda slow: -slow.took_seconds)
    evictions: Counter[str] = Counter()
    for node in nodes:
        evictions.update(node.evictions)
    clocks = tuple(
        ClockReading.of(node.label, answer.reply.wall_seconds, answer.asked_at, answer.heard_at)
        for node, answer in zip(nodes, shards, strict=True)
        if answer.reply.wall_seconds
    )
    return Overview(
        service,
        time.time(),
        any(answer.reply.restricted for answer in shards),
        sum_pools([node.pool for node in nodes]),
        sum_windows(window for node in nodes for window in node.windows),
        nodes,
        engines,
        _models(engines),
        _hits(row for answer in shards for row in answer.reply.hits),
        tuple(sorted((one for answer in shards for one in _refused(answer)), key=lambda one: one.age_seconds)),
        tuple(
            Flow(peer.node_id, answer.node_id, peer.pulled_bytes, peer.bytes_per_second)
            for answer in shards
            for peer in answer.reply.pulls
            if peer.pulled_bytes
        ),
        dict(evictions),
        _sum_tenants(tenant for node in nodes for tenant in node.tenants),
        tuple(slowest[:SLOWEST_SHOWN]),
        tuple(lookups),
        (*_problems(lookups, nodes), *clock_problems(clocks)),
        sum_tiers(tier for node in nodes for tier in node.tiers),
        tuple(drift for answer in shards for drift in drifts_of(answer.node_id, answer.reply)),
        clocks,
    )


def _problems(lookups: Sequence[LookupOverview], nodes: Sequence[NodeOverview]) -> list[str]:
    problems = [f"lookup partition {lookup.address}: {lookup.error}" for lookup in lookups if lookup.error]
    problems += [f"node {node.label} at {node.address}: {node.error}" for node in nodes if node.error]
    problems += [
        f"tier {tier.name} of node {node.label} is not used: {tier.detail}"
        for node in nodes
        for tier in node.tiers
        if tier.state == UNUSABLE
    ]
    problems += [
        f"tier {tier.name} of node {node.label} does not take every block, and is still read: {tier.detail}"
        for node in nodes
        for tier in node.tiers
        if tier.state == OPEN and tier.detail
    ]
    problems += [
        f"node {node.label} reads no blocks of other machines by {node.transport}: that takes NIXL there (pip install "
        "nixl-cu12), and the transport auto or nixl"
        for node in nodes
        if node.transport and "nixl" not in node.transport and any(each.host not in ("", node.host) for each in nodes)
    ]
    return problems


def _node(answer: _NodeAnswer, lookup_keys: int) -> NodeOverview:
    reply = answer.reply
    counters = dict(sorted(reply.counters.items()))
    return NodeOverview(
        answer.node_id,
        reply.host,
        answer.address,
        reply.node.epoch,
        SILENT if answer.error else DRAINING if reply.draining else OK,
        answer.error,
        reply.uptime_seconds,
        reply.transport,
        reply.version,
        _pool(reply),
        tuple(hit_window(window.name, window.seconds, window.counters) for window in reply.windows),
        {cause.value: counters.get(EVICTED[cause], 0) for cause in _EVICTIONS},
        tuple(
            TenantUsage(
                row.name,
                row.used_bytes,
                row.quota_bytes,
                row.in_flight,
                dict(sorted(row.counters.items())),
                row.disk_used_bytes,
                row.disk_quota_bytes,
            )
            for row in reply.tenants
        ),
        counters,
        lookup_keys,
        mirror_of(counters),
        tiers_of(reply, counters),
        counters.get("pins", 0),
        counters.get("pinned_bytes", 0),
        eviction_of(counters),
    )


def _pool(reply: shard_pb2.StatsReply) -> PoolUsage:
    unassigned = reply.slab_free_count * reply.slab_bytes
    sizes = {state: reply.slot_bytes.get(state, 0) for state in SHOWN_STATES}
    sizes["free"] += unassigned
    return pool_usage(
        reply.slab_count * reply.slab_bytes, {state: reply.slots.get(state, 0) for state in SHOWN_STATES}, sizes
    )


def pool_usage(total_bytes: int, slots: Mapping[str, int], sizes: Mapping[str, int]) -> PoolUsage:
    """The usage of a pool with so many slots and bytes in each state. `sizes["free"]` includes unassigned slabs."""
    used = sum(sizes[state] for state in SHOWN_STATES if state != "free")
    return PoolUsage(
        total_bytes,
        used,
        sizes["free"],
        total_bytes - used - sizes["free"],
        _percent(used, total_bytes),
        tuple(
            StateUsage(state, slots[state], sizes[state], _percent(sizes[state], total_bytes)) for state in SHOWN_STATES
        ),
    )


def sum_pools(pools: Sequence[PoolUsage]) -> PoolUsage:
    slots: Counter[str] = Counter(dict.fromkeys(SHOWN_STATES, 0))
    sizes: Counter[str] = Counter(dict.fromkeys(SHOWN_STATES, 0))
    for pool in pools:
        slots.update({usage.state: usage.slots for usage in pool.states})
        sizes.update({usage.state: usage.bytes for usage in pool.states})
    return pool_usage(sum(pool.total_bytes for pool in pools), slots, sizes)


def hit_window(name: str, seconds: float, counters: Mapping[str, int]) -> HitWindow:
    """A window from what a shard's counters grew by."""
    asked = counters.get("asked_blocks", 0)
    local, remote, tier = (counters.get(f"hit_{source}_blocks", 0) for source in ("local", "remote", "tier"))
    return HitWindow(
        name,
        seconds,
        counters.get("acquires", 0),
        asked,
        local,
        remote,
        tier,
        (local + remote + tier) / asked if asked else None,
        local / asked if asked else None,
        remote / asked if asked else None,
        tier / asked if asked else None,
        counters.get("stored_bytes", 0),
        counters.get("hit_bytes", 0),
        counters.get("fetched_bytes", 0),
        counters.get("served_bytes", 0),
        counters.get("evicted_primary", 0) + counters.get("evicted_secondary", 0),
    )


def sum_windows(windows: Iterable[HitWindow]) -> tuple[HitWindow, ...]:
    """One window for each name, in the order in which the names appear first."""
    counters: dict[str, Counter[str]] = {}
    seconds: dict[str, float] = {}
    for window in windows:
        counters.setdefault(window.name, Counter()).update(
            acquires=window.acquires,
            asked_blocks=window.asked_blocks,
            hit_local_blocks=window.hit_local_blocks,
            hit_remote_blocks=window.hit_remote_blocks,
            hit_tier_blocks=window.hit_tier_blocks,
            stored_bytes=window.stored_bytes,
            hit_bytes=window.hit_bytes,
            fetched_bytes=window.pulled_bytes,
            served_bytes=window.served_bytes,
            evicted_primary=window.evicted_blocks,
        )
        seconds[window.name] = max(seconds.get(window.name, 0.0), window.seconds)
    return tuple(hit_window(name, seconds[name], counted) for name, counted in counters.items())


def _engines(answer: _NodeAnswer) -> list[EngineOverview]:
    return [
        EngineOverview(
            answer.node_id,
            row.engine,
            row.model,
            row.namespace,
            row.tenant,
            row.fingerprint,
            row.block_tokens,
            row.attached_seconds,
            row.block_tokens / row.seconds_per_block if row.seconds_per_block > 0 else None,
            row.pid,
        )
        for row in answer.reply.engines
    ]


def _models(engines: Iterable[EngineOverview]) -> tuple[ModelOverview, ...]:
    nodes: dict[tuple[str, str, str], list[str]] = {}
    for engine in engines:
        nodes.setdefault((engine.namespace, engine.model, engine.fingerprint), []).append(engine.node_id)
    return tuple(ModelOverview(*name, len(on), tuple(sorted(set(on)))) for name, on in sorted(nodes.items()))


def _hits(rows: Iterable[shard_pb2.ModelHits]) -> tuple[ModelHits, ...]:
    found: dict[tuple[str, str], list[tuple[int, int, int, int]]] = {}
    for row in rows:
        counts = (row.asked_blocks, row.hit_local_blocks, row.hit_remote_blocks, row.hit_tier_blocks)
        found.setdefault((row.model, row.tenant), []).append(counts)
    hits = []
    for name, of_nodes in found.items():
        asked, local, remote, tier = (sum(counts) for counts in zip(*of_nodes, strict=True))
        rate = (local + remote + tier) / asked if asked else None
        hits.append(ModelHits(*name, asked, local, remote, tier, rate))
    return tuple(sorted(hits, key=lambda one: -one.asked_blocks))


def _refused(answer: _NodeAnswer) -> list[RefusedEngine]:
    return [
        RefusedEngine(
            answer.node_id,
            row.model,
            row.namespace,
            row.age_seconds,
            tuple(FingerprintDifference(field.name, field.attached, field.refused) for field in row.differences),
            max(row.difference_count - len(row.differences), 0),
            row.message,
        )
        for row in answer.reply.refused
    ]


def _slowest(answer: _NodeAnswer) -> list[SlowestRequest]:
    return [
        SlowestRequest(
            answer.node_id,
            row.request_id,
            row.model,
            row.tenant,
            row.age_seconds,
            row.took_seconds,
            row.asked_blocks,
            row.local_blocks,
            row.fetched_blocks,
            row.miss,
        )
        for row in answer.reply.slowest
    ]


def _sum_tenants(tenants: Iterable[TenantUsage]) -> tuple[TenantUsage, ...]:
    found: dict[str, list[TenantUsage]] = {}
    for tenant in tenants:
        found.setdefault(tenant.name, []).append(tenant)
    return tuple(
        TenantUsage(
            name,
            sum(row.used_bytes for row in rows),
            sum(row.quota_bytes for row in rows),
            sum(row.in_flight for row in rows),
            dict(sum((Counter(row.counters) for row in rows), Counter())),
            sum(row.disk_used_bytes for row in rows),
            sum(row.disk_quota_bytes for row in rows),
        )
        for name, rows in found.items()
    )


def _percent(part: int, whole: int) -> float:
    return 100 * part / whole if whole else 0.0


def _short(error: grpc.aio.AioRpcError) -> str:
    """'unavailable' or 'deadline exceeded': the code says more to an operator than gRPC's text, unless that is about
    TLS, a token or a wrong address."""
    details = error.details() or ""
    name = error.code().name.lower().replace("_", " ")
    said = details if error.code() is grpc.StatusCode.UNAUTHENTICATED else connect_hint(details)
    return f"{name}: {said}" if said else name
