"""The directory of one lookup partition: which live nodes hold which block keys. Pure; one caller at a time.

Every node has a bit, and a key maps to the bits of its holders (core.directory.holder_table). When a node's keys must
be forgotten (it died, left, restarted or announces everything again), it gets another bit. The old bit is masked out of
every answer at once, and `sweep` removes it from the keys later. So the loss of a node with a million blocks costs
nothing at the moment when it happens. One key takes 37 to 57 bytes. Keys are passed packed, so that none of them is a
Python object.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvservice.core.block.keys import KEY_BYTES, pack_keys
from kvservice.core.directory.holder_table import HolderTable, bits_of
from kvservice.core.directory.key_table import private_table
from kvservice.core.directory.membership import (
    FORGET_SECONDS,
    HIDE_SECONDS,
    AnnounceOutcome,
    Membership,
    MemberState,
)
from kvservice.core.explain.evictions import Eviction, EvictionCause, EvictionHistory
from kvservice.core.messages import Holder, HolderRun
from kvservice.units import BlockKey, NodeId

__all__ = ["AnnounceOutcome", "Change", "Directory", "NodeSummary"]

# Keys of one partition: below 1 GB of memory. At the limit further keys are dropped and counted (keys_dropped_full), so
# their blocks are not found on other nodes.
KEY_COUNT_MAX = 16_000_000
ANSWERS_MAX = 65_536  # sets of holders with a remembered answer; with more, all are forgotten and built again
LOST_MAX = 131_072  # keys remembered of nodes that are gone: 4.8 MB. The oldest are forgotten first.


@dataclass(frozen=True, slots=True)
class Change:
    """What an announcement or a timeout changed, for watchers. Keys are packed.

    With `reset`, all earlier keys of the node are forgotten first. While `hidden`, none of its keys counts.
    """

    node: Holder
    added: bytes = b""
    removed: bytes = b""
    reset: bool = False
    hidden: bool = False


@dataclass(frozen=True, slots=True)
class NodeSummary:
    """One node of the directory, for statistics."""

    node: Holder
    state: MemberState
    block_count: int
    heartbeat_age_seconds: float
    visible: bool


class Directory:
    """While `record_changes` is set, `changes` collects what watchers must hear; the caller removes them."""

    def __init__(
        self,
        hide_seconds: float = HIDE_SECONDS,
        forget_seconds: float = FORGET_SECONDS,
        key_count_max: int = KEY_COUNT_MAX,
    ) -> None:
        self._membership = Membership(hide_seconds, forget_seconds)
        self._holders = HolderTable(private_table(key_count_max), key_count_max)
        self._bit_of: dict[NodeId, int] = {}  # index of the bit of every node that is not forgotten
        self._node_of: dict[int, NodeId] = {}  # the same, by bit
        self._block_counts: dict[NodeId, int] = {}
        self._lost_bits: dict[int, tuple[NodeId, EvictionCause, float]] = {}  # retired bits that are not swept yet
        self._lost = EvictionHistory(LOST_MAX)  # keys whose last holder is gone
        self._answers: dict[int, tuple[Holder, ...]] = {}  # live holders by mask, valid for _answers_version
        self._answers_version = -1
        self._told: dict[NodeId, tuple[Holder, bool]] = {}  # what watchers know of each node: address and visibility
        self._told_version = -1
        self.record_changes = False
        self.changes: list[Change] = []
        self.counters: Counter[str] = Counter()

    def __len__(self) -> int:
        """Keys in memory, including those not swept yet."""
        return len(self._holders)

    def apply(
        self,
        node: Holder,
        sequence: int,
        added: Sequence[BlockKey] | bytes = b"",
        removed: Sequence[BlockKey] | bytes = b"",
        *,
        full_begin: bool = False,
        full_end: bool = False,
        leaving: bool = False,
        now: float,
        proof: bytes = b"",
    ) -> AnnounceOutcome:
        """Take one announcement of a node. Keys are listed or packed; removals are applied after additions.

        Raises Exhausted when too many nodes are known, Forbidden when the node belongs to another `proof`.
        """
        self.expire(now)
        effect = self._membership.hear(
            node, sequence, full_begin=full_begin, full_end=full_end, leaving=leaving, now=now, proof=proof
        )
        if effect.forget:
            self._retire(node.node_id, EvictionCause.DRAIN if leaving else EvictionCause.RESTARTED, now)
        more, less = _packed(added), _packed(removed)
        if effect.apply:
            bit = self._bit(node.node_id)
            self._add(node.node_id, bit, more)
            self._remove(node.node_id, bit, less)
        if effect.forget or (effect.apply and (more or less)):
            change = Change(node, more, less, effect.forget) if effect.apply else Change(node, reset=True, hidden=True)
            self._record(change)
        self._tell_visibility()
        return effect.outcome

    def resolve(self, keys: Sequence[BlockKey] | bytes, now: float) -> list[HolderRun]:
        """The holders of these keys, listed or packed, as runs of consecutive keys with the same live holders.

        Keys without a live holder are left out. Changes nothing but what is due by time.
        """
        self.expire(now)
        self._refresh_answers()
        packed = _packed(keys)
        runs: list[HolderRun] = []
        start = 0
        current: tuple[Holder, ...] = ()
        for head, mask in [*self._holders.runs(packed), (len(packed) // KEY_BYTES, -1)]:
            holders = () if mask < 0 else self._answer(mask)
            if holders is not current or mask < 0:  # `_answer` returns one object for equal sets of live holders
                if current:
                    runs.append(HolderRun(start, head - start, current))
                start, current = head, holders
        return runs

    def expire(self, now: float) -> None:
        """Hide and forget nodes whose time is over."""
        for member in self._membership.expire(now):
            self._retire(member.holder.node_id, EvictionCause.OWNER_DIED, now)
            self._record(Change(member.holder, reset=True, hidden=True))
        self._tell_visibility()

    def sweep(self, limit: int) -> int:
        """Remove forgotten bits from up to `limit` keys. Returns how many keys it visited; 0 when none is left."""
        swept = self._holders.sweep(limit)
        if swept is None:
            return 0
        for key, bit in swept.lost:  # noted here, because the sweep touches each of them anyway
            node_id, cause, at = self._lost_bits[bit]
            self._lost.add(key, cause, node_id, at)
        if swept.freed:
            for bit in swept.freed:
                self._lost_bits.pop(bit, None)
            self._answers_version = -1
            self.counters["sweeps_finished"] += 1
        return swept.looked_at

    def find_lost(self, keys: Sequence[BlockKey], now: float, as_of: float) -> dict[BlockKey, Eviction]:
        """Those of the keys that were lost with their last node, before `as_of`.

        A node may have stored them again since. Slow: only for questions of people.
        """
        self.expire(now)
        found = self._lost.find(keys, now, as_of)
        for key in keys:
            mask = self._holders.mask(key)
            if mask and not mask & ~self._holders.retired:  # not swept yet
                node_id, cause, at = self._lost_bits[mask.bit_length() - 1]
                found[key] = Eviction(cause, at, node_id)
        return found

    def snapshot(self, row: int, limit: int) -> tuple[dict[NodeId, bytes], int | None]:
        """One piece of everything: packed keys by node, including hidden nodes, and the `row` of the next piece.

        A piece has at most `limit` keys, or one row. Begin with row 0; the next row is None at the end. Changes between
        two pieces may or may not be included.
        """
        step = self._holders.table.rows_of(row, limit)
        found: dict[NodeId, list[bytes]] = {}
        for mask, packed in self._holders.rows(row, step):
            for bit in bits_of(mask):
                if bit in self._node_of:
                    found.setdefault(self._node_of[bit], []).append(packed)
        end = row + step >= self._holders.table.walk_end
        return {node_id: b"".join(parts) for node_id, parts in found.items()}, None if end else row + step

    def find_node(self, node_id: NodeId, now: float) -> Holder | None:
        """The live node with this id, or None."""
        self.expire(now)
        member = self._membership.get(node_id)
        return member.holder if member is not None and member.is_visible else None

    def nodes(self, now: float) -> list[NodeSummary]:
        """Every node that is not forgotten."""
        self.expire(now)
        return [
            NodeSummary(
                member.holder,
                member.state,
                self._block_counts.get(member.holder.node_id, 0),
                now - member.heard_at,
                member.is_visible,
            )
            for member in self._membership.members()
        ]

    def shown_since(self, node_id: NodeId) -> int:
        """A number that changes when the node was hidden or forgotten and is shown again."""
        member = self._membership.get(node_id)
        return 0 if member is None else member.shown_since

    def is_hidden(self, node_id: NodeId) -> bool:
        return not self._membership.is_visible(node_id)

    def all_counters(self) -> dict[str, int]:
        return dict(self.counters + self._membership.counters)

    # -- keys and bits ----

    def _add(self, node_id: NodeId, bit: int, packed: bytes) -> None:
        before = self._holders.dropped_full
        new = self._holders.add(bit, packed)
        if self._holders.dropped_full > before:
            self.counters["keys_dropped_full"] += self._holders.dropped_full - before
        self._block_counts[node_id] = self._block_counts.get(node_id, 0) + new
        self.counters["keys_added"] += new

    def _remove(self, node_id: NodeId, bit: int, packed: bytes) -> None:
        gone = self._holders.remove(bit, packed)
        if gone:
            self._block_counts[node_id] -= gone
        self.counters["keys_removed"] += gone

    def _bit(self, node_id: NodeId) -> int:
        bit = self._bit_of.get(node_id)
        if bit is None:
            bit = self._bit_of[node_id] = self._holders.take_bit()
            self._node_of[bit] = node_id
            self._answers_version = -1
        return bit

    def _retire(self, node_id: NodeId, cause: EvictionCause, now: float) -> None:
        """Forget every key of the node, in constant time."""
        bit = self._bit_of.pop(node_id, None)
        if bit is None:
            return
        del self._node_of[bit]
        has_keys = self._block_counts.pop(node_id, 0) > 0
        self._holders.retire(bit, has_keys=has_keys)
        if has_keys:
            self._lost_bits[bit] = (node_id, cause, now)
        self._answers_version = -1

    # -- watchers ----

    def _record(self, change: Change) -> None:
        if self.record_changes:
            self.changes.append(change)

    def _tell_visibility(self) -> None:
        """Record the nodes that were hidden, came back or changed address since the last call."""
        if self._told_version == self._membership.version:
            return
        self._told_version = self._membership.version
        before, self._told = self._told, {}
        for member in self._membership.members():
            node = member.holder
            now = self._told[node.node_id] = (node, member.is_visible)
            known = before.get(node.node_id)
            if known is not None and known != now:
                self._record(Change(node, hidden=not now[1]))

    # -- answers ----

    def _refresh_answers(self) -> None:
        if self._answers_version != self._membership.version:
            self._answers = {0: ()}
            self._answers_version = self._membership.version
        elif len(self._answers) > ANSWERS_MAX:
            self._answers = {0: ()}

    def _answer(self, mask: int) -> tuple[Holder, ...]:
        """The live holders in a mask. Equal sets of holders give the same object."""
        known = self._answers.get(mask)
        if known is not None:
            return known
        live = 0
        holders: list[Holder] = []
        for index in bits_of(mask & ~self._holders.retired):
            member = self._membership.get(self._node_of[index])
            assert member is not None
            if member.is_visible:
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
        held = self._holders.check_invariants()
        for node_id, bit in self._bit_of.items():
            assert not owned >> bit & 1, f"bit {bit} has two owners"
            owned |= 1 << bit
            member = self._membership.get(node_id)
            assert member is not None, f"{node_id} has a bit but is not a member"
            assert member.state is not MemberState.DEAD, f"{node_id} is dead and has a bit"
            count = held.get(bit, 0)
            assert count == self._block_counts.get(node_id, 0), f"{node_id} holds {count} keys, counter says otherwise"
        retired = self._holders.retired
        assert not owned & retired, "a bit is owned and retired"
        assert owned | self._holders.free | retired == (1 << self._holders.bit_count) - 1, "a bit is lost"
        assert not owned & self._holders.free, "a bit is owned and free"
        assert sum(1 << bit for bit in self._lost_bits) == retired, "a lost node is not remembered"


def _packed(keys: Sequence[BlockKey] | bytes) -> bytes:
    return keys if isinstance(keys, bytes) else pack_keys(keys)
