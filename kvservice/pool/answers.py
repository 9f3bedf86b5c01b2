"""What a pool says of itself, for status, metrics, explain and tests. Asking changes nothing and does not wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvservice.core.drain.sender import DrainProgress
from kvservice.core.explain.counter_windows import CounterWindow, CounterWindows
from kvservice.core.explain.records import Explanation, HistoryEntry
from kvservice.core.messages import CodecDrift, EngineKind, PoolStats, TierFigures
from kvservice.core.segment.geometry import Geometry
from kvservice.core.shard import ShardState
from kvservice.pool.runtime_ports import MemoryPort, PoolConfig, PullerPort
from kvservice.pool.tier_specs import disk_bytes
from kvservice.pool.tiers import PoolTiers, TierStatus
from kvservice.units import BlockKey, BootEpoch, SpanRoute

DRIFTS_MAX = 64  # models whose drift is told, the worst first: it bounds the metric series of one shard


class PoolAnswers:
    """The questions of a PoolRuntime. Ask them on its loop."""

    def __init__(
        self,
        config: PoolConfig,
        segment: MemoryPort,
        puller: PullerPort | None,
        state: ShardState,
        tiers: PoolTiers,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._segment = segment
        self._puller = puller
        self._state = state
        self._tiers = tiers
        self._clock = clock
        self._fenced: str | None = None
        self._opened_at = clock()
        self._windows = CounterWindows(self._opened_at)

    def drain_progress(self) -> DrainProgress:
        return self._state.progress(self._clock())

    def explain(self, request_id: str, account: str | None = None) -> tuple[Explanation, tuple[EngineKind, ...], float]:
        """(what is known of the request, the kinds of attached engines, the time on its clock).
        With an account, only of that tenant."""
        now = self._clock()
        return self._state.explain(request_id, now, account), self._state.engine_stats(account).engines, now

    def block_history(self, keys: tuple[BlockKey, ...], age_seconds: float) -> tuple[tuple[HistoryEntry, ...], float]:
        """(what became of these blocks here, for a moment `age_seconds` ago, the time on its clock).
        Takes milliseconds: only for questions of people."""
        now = self._clock()
        return self._state.block_history(keys, now, now - age_seconds), now

    def now(self) -> float:
        """The time on the clock of everything that the pool says."""
        return self._clock()

    @property
    def state(self) -> ShardState:
        """The core's state, to look at and not to change."""
        return self._state

    @property
    def epoch(self) -> BootEpoch:
        return self._state.epoch

    @property
    def disk_bytes(self) -> int:
        """What blocks on the disk below this pool may take; 0 = it has none."""
        return disk_bytes(self._config.tiers)

    @property
    def geometry(self) -> Geometry:
        return self._segment.geometry

    @property
    def transport_name(self) -> str:
        return "none" if self._puller is None else self._puller.name

    @property
    def fenced(self) -> str | None:
        return self._fenced

    def describe_transport(self) -> bytes:
        return b"" if self._puller is None else self._puller.describe()

    def tier_states(self) -> tuple[TierStatus, ...]:
        return self._tiers.states()

    def inventory(self) -> list[tuple[BlockKey, SpanRoute]]:
        """Every block with its route, for a full announcement."""
        return self._state.inventory()

    def stats(self) -> PoolStats:
        counters = self._state.all_counters()
        if self._puller is not None:
            counters.update({f"transfer_{name}": count for name, count in self._puller.counters().items()})
        counters.update(self._tiers.counters())
        pins = self._state.pins(self._clock())
        counters.update(pins=len(pins), pinned_bytes=sum(pin.bytes for pin in pins))
        rule = self._state.eviction_rule
        counters.update({} if rule is None else rule.figures())
        slots = self._state.slot_usage()
        return PoolStats(
            self._config.node_id,
            self._state.epoch,
            self._segment.geometry.segment_bytes,
            self._segment.geometry.slab_count,
            self._state.free_slab_count,
            {state: count for state, (count, _) in slots.items()},
            counters,
            self._state.draining,
            self._state.tenants(),
            self._state.model_usage(),
            {state: size for state, (_, size) in slots.items()},
            tuple(self._tier_figures()),
            self._drifts(),
            self._state.secondary_bytes,
        )

    def _drifts(self) -> tuple[CodecDrift, ...]:
        found = self._config.coders.guard.figures()
        worst = sorted(found, key=lambda one: (not one.is_off, -max(one.keys, one.values) / one.limit, one.model))
        return tuple(worst[:DRIFTS_MAX])

    def _tier_figures(self) -> Iterator[TierFigures]:
        usage = {tier.name: tier for tier in self._state.tier_usage()}
        for state in self._tiers.states():
            if (tier := usage.get(state.name)) is None:
                yield TierFigures(state.name, state.phase.value, state.detail)
                continue
            yield TierFigures(
                state.name,
                state.phase.value,
                state.detail,
                tier.is_shared,
                tier.blocks,
                tier.used_bytes,
                tier.budget_bytes,
                tier.waiting,
            )

    def windows(self) -> tuple[CounterWindow, ...]:
        return self._windows.read(self._clock(), self._state.all_counters())

    def accounting(self) -> tuple[dict[str, int], int, str, int, int]:
        """(slots by state, capacity, violation or '', leases, attachments), after a full check."""
        violation = ""
        try:
            self._state.check_invariants()
        except AssertionError as error:
            violation = str(error) or "an invariant does not hold"
        counts = self._state.slot_counts()
        return counts, self._state.capacity, violation, self._state.lease_count, self._state.attachment_count

    @property
    def uptime_seconds(self) -> float:
        return self._clock() - self._opened_at

    @property
    def is_new(self) -> bool:
        """Whether no earlier boot left anything here."""
        return not self._segment.existed

    def is_linked(self) -> bool:
        """Whether engines that attach find this pool's memory at its path."""
        return self._segment.is_linked()
