"""The table of all metrics that a shard exports, and the Prometheus collector that reads them from its figures.

What a shard counts by name gets its words here, in COUNTERS or GAUGES; a figure of another kind is a line of _SHARD, or
of the table of its rows. Nothing else is to be written for /metrics and docs/reference/metrics.md. Status, the console
and the wire carry counters by name.

Every counter of the table is exported from the start, as 0. Prometheus' `increase` misses the first event of a counter
that appears together with it, so an alert would miss that event too. A counter that is not in the table is exported
under kvservice_events_total with its name as a label. The endpoint and `read` run on threads of prometheus_client.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client.core import InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from kvservice.core.block.tenants import TenantUsage
from kvservice.core.messages import CodecDrift, MissReason, PoolStats, TierFigures, UsageRow
from kvservice.core.store.guard import PPM, RULE_FIGURE, Rule
from kvservice.observe.events import SHARD_EVENTS
from kvservice.observe.figures import ExportedFigure, counter, gauge, metrics
from kvservice.observe.timings import Timings

# A shard's number that can fall as well -> help text. Exported as kvservice_<name>.
GAUGES: Mapping[str, str] = {
    "pins": "prompts that are pinned by name",
    "pinned_bytes": "bytes of their blocks",
    "mirror_keys": "keys in the node's mirror of the directory",
    "mirror_bytes": "shared memory that the mirror takes",
    "mirror_live_partitions": "lookup partitions whose part of the mirror is fresh",
}
MIRROR_AGE_MS = "mirror_age_ms"  # exported as kvservice_mirror_age_seconds, in Prometheus' unit
# Counter of a shard -> help text. Exported as kvservice_<name>_total.
COUNTERS: Mapping[str, str] = {
    "acquires": "calls of engines that asked for a prefix",
    "asked_blocks": "blocks of those prefixes that the engines did not hold themselves",
    "hit_local_blocks": "blocks promised from this node's own slots",
    "hit_remote_blocks": "blocks promised after fetching them from another node",
    "hit_tier_blocks": "blocks promised after bringing them back from a tier",
    "window_hit_local_blocks": "blocks of window groups that hits used from this node's slots",
    "window_hit_remote_blocks": "blocks of window groups that hits used after fetching them",
    "hit_bytes": "bytes of the promised blocks",
    "stored_bytes": "bytes of the blocks that engines stored",
    "served_bytes": "bytes of the blocks leased to other nodes for reading",
    "blocks_sealed": "blocks that became readable, whether stored here or fetched",
    "blocks_adopted": "blocks of an earlier boot found intact in the segment",
    "adopt_dropped": "slots of an earlier boot that failed verification",
    "fetched_blocks": "blocks fetched from other nodes and verified",
    "fetched_bytes": "bytes of the fetched blocks",
    "fetches_started": "fetches from other nodes that were started",
    "fetches_failed": "fetches that brought nothing",
    "fetch_not_worthwhile": "blocks not fetched because computing them was estimated to be faster",
    "pull_ok": "pulled blocks whose digest, generation and epoch matched",
    "pull_stale": "pulled blocks that had been replaced at their source",
    "pull_corrupt": "pulled blocks whose digest did not match",
    "pull_failed": "pulled blocks that did not arrive",
    "pull_stuck": "pulled blocks that may still arrive late: their slots are quarantined",
    "peer_located_blocks": "blocks leased to other nodes for reading",
    "peer_absent_blocks": "blocks that other nodes asked for and that were not here",
    "evicted_primary": "evicted blocks that were computed on this node",
    "evicted_secondary": "evicted blocks that had been fetched from another node",
    "evicted_pressure": "blocks evicted for another block of their size",
    "evicted_slab_moved": "blocks evicted with their slab, which was needed for blocks of another size",
    "evicted_quota": "blocks evicted for another block of their tenant, which is at its quota",
    "evicted_cleared": "blocks that `kvservice clear` dropped",
    "evicted_aged": "blocks dropped because they were older than max_age_seconds",
    "evicted_corrupt": "blocks dropped because a reader found them damaged in memory, and the shard did too",
    "eviction_rule_changes": "times that the eviction policy changed its rule",
    "slots_reserved": "slots given to engines for writing",
    "admission_stopped": "times that admission stopped storing all but a sample, because nothing was reused",
    "admission_resumed": "times that admission resumed storing",
    "chains_not_admitted": "requests whose blocks were not stored because nothing is reused",
    "reserve_shortfall": "slots that engines asked for and did not get because the pool was full",
    "drains_begun": "drains that this shard began",
    "drains_done": "drains that it completed",
    "drain_blocks_handed": "blocks that other nodes took over in a drain",
    "drain_blocks_lost": "blocks that no other node had after a drain, as far as is known",
    "takeover_blocks_offered": "blocks that other nodes offered to this one, because they leave or are short of memory",
    "takeover_blocks_held": "offered blocks that were here already",
    "takeover_blocks_taken": "offered blocks that were read and kept",
    "takeover_bytes": "bytes of the blocks that were taken over",
    "takeovers_overdue": "take-overs dropped because the leaving node never said which blocks it leased",
    "spill_blocks_offered": "cold blocks offered to nodes that accept what others evict",
    "spill_blocks_taken": "offered cold blocks that such a node holds now",
    "spill_blocks_evicted": "cold blocks that were evicted before they could be offered",
    "spill_blocks_dropped": "cold blocks that were not offered because too many waited",
    "spill_refused": "offers of cold blocks to a node that was full, or did not answer",
    "slots_quarantined": "slots quarantined because a process might still write into them",
    "slabs_moved": "slabs handed from one block size to another",
    "seal_duplicate": "stored blocks that the pool held already",
    "seal_stale": "seals refused because their reservation had ended",
    "segments_replaced": "times that the segment's file was found removed and was made again",
    "attaches": "attaches of engines",
    "attach_fingerprint_refused": "engines refused because of their fingerprint",
    "attach_overtaken": "attaches refused because a later one of the same engine had been answered",
    "attachments_lost": "engines that vanished without detaching",
    "leases_granted": "read leases granted",
    "leases_released": "read leases given back",
    "leases_expired": "read leases that ran out",
    "quota_refused": "slots that tenants did not get because of their quota",
    "in_flight_refused": "slots that tenants did not get because too many of their slots were being filled",
    "calls_unauthenticated": "calls without a tenant's token, or with a wrong one",
    "engine_strangers": "connections of other users, turned away at the socket for engines",
    "engine_pauses": "times that an engine asked faster than it was served, and its connection was not read from",
    "engines_silent": "connections of engines that answered no heartbeat, as of stopped processes, and were ended",
    "attachments_revoked": "engines detached because the rights of their tenant changed",
    "lookup_calls": "lookups that the shard made",
    "lookup_rpcs": "RPCs that those lookups took",
    "lookup_incomplete": "lookups to which some lookup partition gave no answer",
    "mirror_answers": "lookups answered from the node's mirror of the directory, without an RPC",
    "mirror_keys_taken": "keys added to or removed from the mirror",
    "mirror_streams": "watch streams opened to feed the mirror",
    "lookup_skipped": "RPCs not sent because the lookup partition had failed repeatedly",
    "digested_bytes": "bytes of blocks whose digests were computed when they were sealed",
    "transfer_blocks": "blocks that the transport moved",
    "transfer_connects": "connections to other nodes",
    "transfer_connect_failed": "connections to other nodes that failed",
    "transfer_reads_failed": "reads that the transport reported as failed",
}
# Why the prefix of an acquire was cut short.
REASONS = tuple(reason.value for reason in MissReason if reason is not MissReason.NONE)
# First words of counters whose last words are a reason -> help text. Exported as kvservice_<words>_total{reason}.
CUTS: Mapping[str, str] = {
    "acquires_cut": "acquires that were promised less than they asked for, by the reason at the first missing block",
    "window_acquires_cut": "the same for the window groups of such an acquire, by the reason at the first one",
}
# Counters tier_<name>_<words> of a shard -> help text. Exported as kvservice_tier_<words>_total{tier}.
TIER_COUNTERS: Mapping[str, str] = {
    "hit_blocks": "blocks promised to engines after bringing them back from this tier",
    "written_blocks": "blocks written down into the tier",
    "written_bytes": "their bytes, as codecs left them: for the endurance of a disk",
    "write_failed": "blocks that the tier could not write",
    "dropped_full": "blocks not written because too many waited already",
    "dropped_evicted": "blocks that left the memory before they were written",
    "dropped_no_room": "blocks not written because the tier could make no room",
    "read_blocks": "blocks brought back from the tier and verified",
    "read_bytes": "their bytes",
    "read_stale": "reads of blocks that the tier no longer had, or that were not those asked for",
    "read_corrupt": "reads of blocks whose digest did not match; they are erased",
    "read_failed": "reads that failed or came too late",
    "erased": "blocks erased from the tier, to make room or because they must go",
    "busy": "times that the tier was not asked, because it owed an answer or too much was being read from it",
    "refused": "reads and writes refused because the tier is not open",
    "start_failed": "starts of the tier that failed",
}
TRANSPORTS = ("nixl", "shm")  # their byte counters are exported from the start, as 0
_PREFIX = "kvservice_"
_TRANSPORT_BYTES = ("transfer_", "_bytes")  # transfer_<transport>_bytes


class ShardCollector(Collector):
    """Reads one shard. `read` returns its numbers now, and `timings` its latencies; None if it cannot answer."""

    def __init__(
        self,
        service: str,
        read: Callable[[], PoolStats | None],
        timings: Callable[[], Timings | None] = lambda: None,
    ) -> None:
        self._service = service
        self._read = read
        self._timings = timings
        self._host = socket.gethostname()

    def collect(self) -> Iterator[Metric]:
        found = self._read()
        if found is None:
            return
        names = ("service", "node")
        place: tuple[str, ...] = (self._service, found.node_id)
        info = InfoMetricFamily(f"{_PREFIX}node", "the machine of a node, to join with by its name; 1", labels=names)
        info.add_metric(place, {"host": self._host})
        yield info
        yield from metrics(_PREFIX, _SHARD, names, {place: found})
        usage = {(*place, row.model, row.tenant): row for row in found.usage}
        yield from metrics(_PREFIX, _USAGE, (*names, "model", "tenant"), usage)
        if found.tenants:
            tenants = {(*place, row.name): row for row in found.tenants}
            yield from metrics(_PREFIX, _TENANTS, (*names, "tenant"), tenants)
        if found.tiers:
            tiers = {(*place, row.name): row for row in found.tiers}
            yield from metrics(_PREFIX, _TIERS, (*names, "tier"), tiers)
            yield from metrics(_PREFIX, _TIERS_COUNTED, names, {place: found})
        if found.drifts:
            drifts = {(*place, row.model): row for row in reversed(found.drifts)}  # of a model's, the worst: the first
            yield from metrics(_PREFIX, _DRIFTS, (*names, "model"), drifts)
        if (timings := self._timings()) is not None:
            yield from timings.collect(names, place)


def transport_of(counter: str) -> str | None:
    """The transport of a byte counter: 'nixl' for 'transfer_nixl_bytes'. None for counters of something else."""
    head, tail = _TRANSPORT_BYTES
    return counter[len(head) : -len(tail)] if counter.startswith(head) and counter.endswith(tail) else None


def _counted(name: str) -> Callable[[PoolStats], int]:
    return lambda shard: shard.counters.get(name, 0)


def _by_reason(name: str) -> Callable[[PoolStats], Mapping[str, int]]:
    return lambda shard: {reason: shard.counters.get(f"{name}_{reason}", 0) for reason in REASONS}


def _by_tier(name: str) -> Callable[[PoolStats], Mapping[str, int]]:
    return lambda shard: {row.name: shard.counters.get(f"tier_{row.name}_{name}", 0) for row in shard.tiers}


def _by_transport(shard: PoolStats) -> Mapping[str, int]:
    moved = {transport: count for name, count in shard.counters.items() if (transport := transport_of(name))}
    return dict.fromkeys(TRANSPORTS, 0) | moved


def _ruling(shard: PoolStats) -> Mapping[str, int]:
    place = shard.counters.get(RULE_FIGURE)
    return {rule.value: at == place for at, rule in enumerate(Rule) if rule.hits_figure in shard.counters}


def _shadow_hits(shard: PoolStats) -> Mapping[str, float]:
    found = shard.counters
    return {rule.value: found[rule.hits_figure] / PPM for rule in Rule if rule.hits_figure in found}


def _events(shard: PoolStats) -> Mapping[str, int]:
    """Every counter without a metric of its own; those that are known by name also while they are 0."""
    own = (
        {f"{name}_{reason}" for name in CUTS for reason in REASONS}
        | {f"tier_{row.name}_{name}" for name in TIER_COUNTERS for row in shard.tiers}
        | COUNTERS.keys()
        | GAUGES.keys()
        | {MIRROR_AGE_MS, RULE_FIGURE}
        | {rule.hits_figure for rule in Rule}
    )
    rest = {name: count for name, count in shard.counters.items() if name not in own and not transport_of(name)}
    return _by_name({**dict.fromkeys((name for name in SHARD_EVENTS if "*" not in name), 0), **rest})


def _by_name(counts: Mapping[str, int]) -> Mapping[str, int]:
    return dict(sorted(counts.items()))


_SHARD: Sequence[ExportedFigure[PoolStats]] = (
    gauge("segment_bytes", "shared memory of the pool", lambda shard: shard.segment_bytes),
    gauge("slabs", "slabs of the segment", lambda shard: shard.slab_count),
    gauge("slabs_free", "slabs that are not assigned to a block size", lambda shard: shard.slab_free_count),
    gauge("boot_epoch", "grows with every start of the shard", lambda shard: shard.epoch),
    *(gauge(name, text, _counted(name)) for name, text in GAUGES.items()),
    gauge("draining", "1 while the shard takes no new work", lambda shard: shard.draining),
    gauge(
        "mirror_age_seconds",
        "seconds since the last message of the lookup partition that has been silent longest",
        lambda shard: shard.counters.get(MIRROR_AGE_MS, 0) / 1e3,
    ),
    gauge("eviction_rule", "1 for the rule that chooses who is evicted, 0 for the others", _ruling, "rule"),
    gauge(
        "eviction_shadow_hit_ratio",
        "share of the blocks asked for of late that a pool of this size would have held under this rule",
        _shadow_hits,
        "rule",
    ),
    gauge("slots", "slots by state", lambda shard: _by_name(shard.slots), "state"),
    gauge(
        "slot_bytes",
        "bytes of the blocks that fit into these slots, by state",
        lambda shard: _by_name(shard.slot_bytes),
        "state",
    ),
    *(counter(name, text, _counted(name)) for name, text in COUNTERS.items()),
    *(counter(name, text, _by_reason(name), "reason") for name, text in CUTS.items()),
    counter("transfer_bytes", "bytes fetched, by transport", _by_transport, "transport"),
    counter("events", "all other counters, by name", _events, "event"),
)
_USAGE: Sequence[ExportedFigure[UsageRow]] = (
    counter("model_asked_blocks", "blocks asked for, by model and tenant", lambda row: row.asked_blocks),
    counter(
        "model_hit_blocks",
        "of these, the promised ones, by source: local, peer, tier",
        lambda row: {"local": row.hit_local_blocks, "peer": row.hit_remote_blocks, "tier": row.hit_tier_blocks},
        "source",
    ),
)
_TENANTS: Sequence[ExportedFigure[TenantUsage]] = (
    gauge("tenant_used_bytes", "bytes charged to a tenant", lambda row: row.used_bytes),
    gauge("tenant_quota_bytes", "most bytes that a tenant may hold, 0 = no limit", lambda row: row.quota_bytes),
    gauge("tenant_in_flight", "slots that a tenant is filling now", lambda row: row.in_flight),
    counter("tenant_events", "what tenants were refused, by event", lambda row: _by_name(row.counters), "event"),
)
_TIERS: Sequence[ExportedFigure[TierFigures]] = (
    gauge("tier_open", "1 while the tier is used, else 0", lambda row: row.state == "open"),
    gauge("tier_blocks", "blocks in the tier, of a shared one those that this node knows of", lambda row: row.blocks),
    gauge("tier_used_bytes", "bytes of these blocks", lambda row: row.used_bytes),
    gauge("tier_budget_bytes", "bytes that its blocks may take, 0 = no bound", lambda row: row.budget_bytes),
    gauge("tier_waiting_blocks", "blocks that wait to be written", lambda row: row.waiting_blocks),
)
_TIERS_COUNTED: Sequence[ExportedFigure[PoolStats]] = tuple(
    counter(f"tier_{name}", text, _by_tier(name), "tier") for name, text in TIER_COUNTERS.items()
)
_DRIFTS: Sequence[ExportedFigure[CodecDrift]] = (
    gauge(
        "codec_drift",
        "the largest drift of a block that a lossy codec has stored, by what drifts: keys, values",
        lambda row: {"keys": row.keys, "values": row.values},
        "of",
    ),
    gauge("codec_drift_limit", "the drift that switches it off", lambda row: row.limit),
    gauge("codec_off", "1 when it is switched off for the model", lambda row: row.is_off),
    counter("codec_lossy_blocks", "blocks that it has encoded", lambda row: row.blocks),
)
