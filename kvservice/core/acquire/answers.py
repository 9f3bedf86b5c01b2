"""Answers of Acquire: the one place that makes, counts and records them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvservice.core.acquire.acquisition import Acquisition
from kvservice.core.acquire.hinted import Hinted
from kvservice.core.actions import Reply
from kvservice.core.context import ShardContext
from kvservice.core.explain.usage import UsageTable
from kvservice.core.messages import AcquireResult, MissReason
from kvservice.core.store.slots import Slot, refs_of
from kvservice.core.tier.rules import is_tier, name_of_tier
from kvservice.units import LeaseId, NodeId

# What becomes of blocks that are held instead of leased: (call, slots pinned for it, how many of them are of the chain,
# why it ended there, now).
OnHold = Callable[[int, list[Slot], int, MissReason, float], None]


class Answers:
    """Leases what was promised, replies, counts and records. `on_hold` takes over what is for nobody who reads."""

    def __init__(self, shard: ShardContext, hinted: Hinted, on_hold: OnHold) -> None:
        self._shard = shard
        self._hinted = hinted
        self._on_hold = on_hold
        self.usage = UsageTable()

    def answer(
        self,
        op: int,
        main: Acquisition,
        promised: Sequence[Slot],
        fetched: int,
        reason: MissReason,
        now: float,
        windows: Sequence[Sequence[Slot]] = (),
    ) -> None:
        """Lease the promised blocks, which are pinned, and answer the call. `main` is the acquisition of its chain."""
        slots = [*promised, *(slot for window in windows for slot in window)] if windows else list(promised)
        if main.request.hold_seconds:
            self._on_hold(op, slots, len(promised), reason, now)
            return
        lease = self._shard.lease(("engine", int(main.attachment)), slots, now)
        if main.request.hints.pin_seconds:
            self._hinted.promised(main.account, slots, main.request.hints.pin_seconds, now)
        end = main.request.skip + len(promised)
        sources = [origin for index, origin in main.origins.items() if index < end] if main.origins else []
        brought = sum(map(is_tier, sources))
        self._count(main, len(promised), fetched, brought, reason)
        for source in sources:
            if is_tier(source):
                self._shard.counters[f"tier_{name_of_tier(source)}_hit_blocks"] += 1
        in_windows = sum(slot.payload_bytes for window in windows for slot in window) if windows else 0
        self._shard.counters["hit_bytes"] += len(promised) * main.payload_bytes + in_windows
        self._shard.records.answered(
            op, len(promised), main.origins, reason, main.miss_node, now, main.found_until, main.handed_from
        )
        skipped, request = 0, main.request
        while skipped < request.skip and request.keys[skipped] in self._shard.store:
            skipped += 1
        refs = refs_of(promised)
        window_refs = tuple(map(refs_of, windows)) if windows else ()
        admitted, far = self._shard.admission.on_answer(op, len(refs)), _farthest(sources)
        result = AcquireResult(lease, refs, fetched, reason, window_refs, admitted, skipped, brought, far)
        self._shard.emit(Reply(op, result))

    def answer_tail(
        self, op: int, part: Acquisition, promised: Sequence[Slot], fetched: int, index: int, now: float
    ) -> None:
        """Lease the one block that was chosen among the names of a tail, or nothing if it did not come. It counts as a
        tail and not as a block: hit rates are of whole blocks."""
        if not promised:
            self.no_tail(op, part.reason)
            return
        lease = self._shard.lease(("engine", int(part.attachment)), promised, now)
        sources = list(part.origins.values())
        source = "remote" if fetched else "tier" if sources else "local"
        self._shard.counters[f"tails_found_{source}"] += 1
        self._shard.counters["hit_bytes"] += part.payload_bytes
        found = AcquireResult(
            lease,
            refs_of(promised),
            fetched,
            MissReason.NONE,
            tier_count=len(sources) - fetched,
            farthest=_farthest(sources),
            tail_index=index,
        )
        self._shard.emit(Reply(op, found))

    def no_tail(self, op: int, reason: MissReason) -> None:
        self._shard.counters[f"tails_missed_{reason.value}"] += 1
        self._promise_nothing(op, reason)

    def refuse(self, op: int, now: float) -> None:
        """Answer with nothing, because this node is leaving. The answer is not counted."""
        self._shard.records.answered(op, 0, {}, MissReason.DRAINING, str(self._shard.node_id), now)
        self._promise_nothing(op, MissReason.DRAINING)

    def _promise_nothing(self, op: int, reason: MissReason) -> None:
        self._shard.emit(Reply(op, AcquireResult(LeaseId(0), (), 0, reason)))

    def _count(self, main: Acquisition, promised: int, fetched: int, brought: int, reason: MissReason) -> None:
        counters = self._shard.counters
        asked = len(main.request.keys) - main.request.skip
        counters["acquires"] += 1
        counters["asked_blocks"] += asked
        local = promised - fetched - brought
        counters["hit_local_blocks"] += local
        counters["hit_remote_blocks"] += fetched
        counters["hit_tier_blocks"] += brought
        self.usage.add(self._shard.model_of(main.attachment), main.account, asked, local, fetched, brought)
        if reason is not MissReason.NONE:
            counters[f"acquires_cut_{reason.value}"] += 1


def _farthest(sources: Sequence[NodeId]) -> str:
    """The source that takes longest, as people know it: a shared tier, a tier of this node, another node, or none."""
    if not sources:
        return ""
    names = {name_of_tier(node) if is_tier(node) else "peer" for node in sources}
    return max(names, key=lambda name: (name == "objects", name != "peer", name), default="")
