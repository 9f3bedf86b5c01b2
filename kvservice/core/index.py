"""The directory of one lookup shard: which live node holds which block key. Pure, with one caller.

Every node has a bit; a key maps to the bits of its holders. A node whose keys are to be forgotten (it died, left,
restarted, or announces itself anew) simply gets another bit, and the old one is masked out of every answer at once;
`sweep` takes it out of the keys later, a bounded number per call, and only then is it given to somebody else. So the
loss of a node with a million blocks costs nothing at the moment it happens. One key takes about 110 bytes.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, repeat

from kvservice.core.ghosts import Cause, Ghost, GhostTable
from kvservice.core.membership import FORGET_SECONDS, HIDE_SECONDS, Membership, MemberState, Outcome
from kvservice.core.messages import Holder, HolderRun
from kvservice.units import BlockKey, NodeId

__all__ = ["Change", "DirectoryIndex", "NodeSummary", "Outcome", "longest_prefix"]

KEY_COUNT_MAX = 16_000_000
INTERNED_MAX = 65_536
LOST_MAX = 131_072  # keys remembered of nodes that are gone: 3.8 MB


@dataclass(frozen=True, slots=True)
class Change:
    """What an announcement or a timeout changed, for watchers. With `reset`, forget all keys of the node first."""

    node: Holder
    added: Sequence[BlockKey] = ()
    removed: Sequence[BlockKey] = ()
    reset: bool = False


@dataclass(frozen=True, slots=True)
class NodeSummary:
    node: Holder
    state: MemberState
    block_count: int
    heartbeat_age_seconds: float
    visible: bool


def longest_prefix(runs: Sequence[HolderRun]) -> int:
    """How many keys from index 0 on have some holder: a gap ends the hit."""
    end = 0
    for run in runs:
        if run.start != end:
            break
        end += run.count
    return end


class DirectoryIndex:
    """`changes` collects what watchers want to know while `record_changes` is set; the caller takes them out."""

    def __init__(
        self,
        hide_seconds: float = HIDE_SECONDS,
        forget_seconds: float = FORGET_SECONDS,
        key_count_max: int = KEY_COUNT_MAX,
    ) -> None:
        self._membership = Membership(hide_seconds, forget_seconds)
        self._key_count_max = key_count_max
        self._masks: dict[BlockKey, int] = {}  # bits of holders, live or not yet swept; never 0
        self._interned: dict[int, int] = {}  # one object per distinct mask, however many keys have it
        self._bit_of: dict[NodeId, int] = {}  # index of the bit of every node that is not forgotten
        self._block_counts: dict[NodeId, int] = {}
        self._free_bits: list[int] = []  # heap: low bits make small masks
        self._bit_count = 0
        self._retired = 0  # bits to sweep
        self._sweeping: list[BlockKey] = []  # keys that this pass has not looked at yet
        self._sweeping_bits = 0  # what this pass removes; 0 = no pass under way
        self._lost_bits: dict[int, tuple[NodeId, Cause, float]] = {}  # of retired bits, until they are swept
        self._lost = GhostTable(LOST_MAX)  # keys that nobody holds any more because their node went
        self._answers: dict[int, tuple[Holder, ...]] = {}  # live holders by mask, valid for _answers_version
        self._answers_version = -1
        self.record_changes = False
        self.changes: list[Change] = []
        self.counters: Counter[str] = Counter()

    def __len__(self) -> int:
        """Keys in memory, those not yet swept included."""
        return len(self._masks)

    @property
    def membership(self) -> Membership:
        return self._membership

    def apply(
        self,
        node: Holder,
        sequence: int,
        added: Sequence[BlockKey] = (),
        removed: Sequence[BlockKey] = (),
        *,
        full_begin: bool = False,
        full_end: bool = False,
        leaving: bool = False,
        now: float,
        proof: bytes = b"",
    ) -> Outcome:
        """Take one announcement of a node. Removals come after additions. Raises Exhausted for too many nodes,
        Forbidden for one that belongs to another `proof`."""
        self.expire(now)
        verdict = self._membership.hear(
            node, sequence, full_begin=full_begin, full_end=full_end, leaving=leaving, now=now, proof=proof
        )
        if verdict.forget:
            self._retire(node.node_id, Cause.DRAIN if leaving else Cause.RESTARTED, now)
        if verdict.apply:
            bit = self._bit(node.node_id)
            self._add(node.node_id, bit, added)
            self._remove(node.node_id, bit, removed)
        if self.record_changes and (verdict.forget or (verdict.apply and (added or removed))):
            if verdict.apply:
                self.changes.append(Change(node, added, removed, reset=verdict.forget))
            else:
                self.changes.append(Change(node, reset=True))
        return verdict.outcome

    def resolve(self, keys: Sequence[BlockKey], now: float) -> list[HolderRun]:
        """Who holds these keys, as runs of consecutive keys with the same live holders; keys nobody holds are left
        out. Does not change the index, apart from what is due by time."""
        self.expire(now)
        self._refresh_answers()
        answers = self._answers
        runs: list[HolderRun] = []
        start = end = 0
        current: tuple[Holder, ...] = ()
        for mask, group in groupby(map(self._masks.get, keys, repeat(0))):
            holders = answers.get(mask)
            if holders is None:
                holders = self._answer(mask)
            if holders is not current:  # equal sets of live holders are one object, see _answer
                if current:
                    runs.append(HolderRun(start, end - start, current))
                start, current = end, holders
            end += len(list(group))
        if current:
            runs.append(HolderRun(start, end - start, current))
        return runs

    def expire(self, now: float) -> None:
        """Hide and forget nodes by time."""
        for member in self._membership.expire(now):
            self._retire(member.holder.node_id, Cause.OWNER_DIED, now)
            if self.record_changes:
                self.changes.append(Change(member.holder, reset=True))

    def sweep(self, limit: int) -> int:
        """Take forgotten bits out of up to `limit` keys. Returns how many were looked at; 0 when nothing is left."""
        if not self._sweeping_bits:
            if not self._retired:
                return 0
            self._sweeping = list(self._masks)
            self._sweeping_bits = self._retired
        batch = self._sweeping[-limit:]
        del self._sweeping[-limit:]
        masks, gone = self._masks, self._sweeping_bits
        for key in batch:
            mask = masks.get(key, 0)
            if mask & gone:
                kept = mask & ~gone
                if kept:
                    masks[key] = self._intern(kept)
                else:
                    del masks[key]
                    node_id, cause, at = self._lost_bits[mask.bit_length() - 1]
                    self._lost.add(key, cause, node_id, at)
        if not self._sweeping:
            self._finish_sweep()
        return max(1, len(batch))

    def recall_lost(self, keys: Sequence[BlockKey], now: float) -> dict[BlockKey, Ghost]:
        """Which of these keys were lost with a node, and nobody else has them. Slow: for people."""
        self.expire(now)
        found = {key: ghost for key, ghost in self._lost.find(keys, now).items() if key not in self._masks}
        for key in keys:
            mask = self._masks.get(key, 0)
            if mask and not mask & ~self._retired:  # not swept yet
                node_id, cause, at = self._lost_bits[mask.bit_length() - 1]
                found[key] = Ghost(cause, at, node_id)
        return found

    @property
    def is_swept(self) -> bool:
        return not self._retired

    def held_by(self, keys: Sequence[BlockKey]) -> dict[NodeId, list[BlockKey]]:
        """The given keys by node, for snapshots; also of nodes that are hidden."""
        found: dict[NodeId, list[BlockKey]] = {}
        bits = [(node_id, 1 << bit) for node_id, bit in self._bit_of.items()]
        for key in keys:
            mask = self._masks.get(key, 0)
            for node_id, bit in bits:
                if mask & bit:
                    found.setdefault(node_id, []).append(key)
        return found

    def keys(self) -> list[BlockKey]:
        """A snapshot of all keys in memory."""
        return list(self._masks)

    def find_node(self, node_id: NodeId, now: float) -> Holder | None:
        """A live node by its id."""
        self.expire(now)
        member = self._membership.get(node_id)
        return member.holder if member is not None and self._membership.is_visible(node_id) else None

    def nodes(self, now: float) -> list[NodeSummary]:
        """Every node that is not forgotten."""
        self.expire(now)
        return [
            NodeSummary(
                member.holder,
                member.state,
                self._block_counts.get(member.holder.node_id, 0),
                now - member.heard_at,
                self._membership.is_visible(member.holder.node_id),
            )
            for member in self._membership.members()
        ]

    def all_counters(self) -> dict[str, int]:
        return dict(self.counters + self._membership.counters)

    # -- keys and bits ----

    def _add(self, node_id: NodeId, bit: int, added: Sequence[BlockKey]) -> None:
        room = self._key_count_max - len(self._masks)
        if len(added) > room:
            self.counters["keys_dropped_full"] += len(added) - max(0, room)
            added = added[: max(0, room)]
        masks = self._masks
        merged_of: dict[int, int] = {}
        new = 0
        for key in added:
            mask = masks.get(key, 0)
            merged = merged_of.get(mask)
            if merged is None:
                merged = merged_of[mask] = self._intern(mask | bit)
            if merged != mask:
                masks[key] = merged
                new += 1
        self._block_counts[node_id] = self._block_counts.get(node_id, 0) + new
        self.counters["keys_added"] += new

    def _remove(self, node_id: NodeId, bit: int, removed: Sequence[BlockKey]) -> None:
        masks = self._masks
        gone = 0
        for key in removed:
            mask = masks.get(key, 0)
            if mask & bit:
                gone += 1
                if mask == bit:
                    del masks[key]
                else:
                    masks[key] = self._intern(mask ^ bit)
        if gone:
            self._block_counts[node_id] -= gone
        self.counters["keys_removed"] += gone

    def _bit(self, node_id: NodeId) -> int:
        index = self._bit_of.get(node_id)
        if index is None:
            if self._free_bits:
                index = heapq.heappop(self._free_bits)
            else:
                index = self._bit_count
                self._bit_count += 1
            self._bit_of[node_id] = index
            self._answers_version = -1
        return 1 << index

    def _retire(self, node_id: NodeId, cause: Cause, now: float) -> None:
        """Forget every key of the node, in no time."""
        index = self._bit_of.pop(node_id, None)
        if index is None:
            return
        if self._block_counts.pop(node_id, 0):
            self._retired |= 1 << index
            self._lost_bits[index] = (node_id, cause, now)
        else:
            heapq.heappush(self._free_bits, index)  # no key has this bit
        self._answers_version = -1

    def _finish_sweep(self) -> None:
        for index in range(self._sweeping_bits.bit_length()):
            if self._sweeping_bits >> index & 1:
                heapq.heappush(self._free_bits, index)
                self._lost_bits.pop(index, None)
        self._retired &= ~self._sweeping_bits
        self._sweeping_bits = 0
        self._answers_version = -1
        self.counters["sweeps_finished"] += 1

    def _intern(self, mask: int) -> int:
        if len(self._interned) >= INTERNED_MAX:
            self._interned.clear()
        return self._interned.setdefault(mask, mask)

    # -- answers ----

    def _refresh_answers(self) -> None:
        if self._answers_version != self._membership.version:
            self._answers = {0: ()}
            self._answers_version = self._membership.version
        elif len(self._answers) > INTERNED_MAX:
            self._answers = {0: ()}

    def _answer(self, mask: int) -> tuple[Holder, ...]:
        """Live holders of a mask; equal sets give the same object."""
        live = 0
        holders: list[Holder] = []
        for node_id, index in self._bit_of.items():
            if mask >> index & 1 and self._membership.is_visible(node_id):
                member = self._membership.get(node_id)
                assert member is not None
                live |= 1 << index
                holders.append(member.holder)
        if live not in self._answers:
            self._answers[live] = tuple(sorted(holders, key=lambda holder: holder.node_id))
        answer = self._answers[mask] = self._answers[live]
        return answer

    def check_invariants(self) -> None:
        """Recounts everything. O(keys × nodes)."""
        self._membership.check_invariants()
        owned = 0
        for node_id, index in self._bit_of.items():
            assert not owned >> index & 1, f"bit {index} has two owners"
            owned |= 1 << index
            member = self._membership.get(node_id)
            assert member is not None, f"{node_id} has a bit but is not a member"
            assert member.state is not MemberState.DEAD, f"{node_id} is dead and has a bit"
            held = sum(mask >> index & 1 for mask in self._masks.values())
            assert held == self._block_counts.get(node_id, 0), f"{node_id} holds {held} keys, counter says otherwise"
        free = sum(1 << index for index in self._free_bits)
        assert len(set(self._free_bits)) == len(self._free_bits), "a bit is free twice"
        assert not owned & free, "a bit is owned and free"
        assert not owned & self._retired, "a bit is owned and retired"
        assert not free & self._retired, "a bit is free and retired"
        assert owned | free | self._retired == (1 << self._bit_count) - 1, "a bit is lost"
        assert sum(1 << index for index in self._lost_bits) == self._retired, "a lost node is not remembered"
        assert self._sweeping_bits & ~self._retired == 0, "a sweep takes bits that are in use"
        for key, mask in self._masks.items():
            assert mask, f"{key.hex()} has no holder"
            assert mask & ~(owned | self._retired) == 0, f"{key.hex()} has a bit that is free"
        if self._sweeping_bits:
            waiting = set(self._sweeping)
            for key, mask in self._masks.items():
                assert not mask & self._sweeping_bits or key in waiting, f"the sweep missed {key.hex()}"
