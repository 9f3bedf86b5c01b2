"""Which nodes the directory knows, what state each is in, and what an announcement of a node may do.

Owns epochs, sequences and heartbeat deadlines. Owns no keys: `directory` keeps those and applies each effect. Pure; one
caller at a time.

    syncing  a full announcement is under way; the keys that have arrived are visible
    alive    announced in full, and heartbeats arrive
    stalled  syncing, but silent for `hide_seconds`: hidden; it continues where it stopped
    suspect  alive, but silent for `hide_seconds`: hidden; its next update makes it visible again
    dead     forgotten: it left, was silent for `forget_seconds`, or a newer epoch replaced it. Only the epoch and the
             last sequence are remembered, so that no older announcement is taken
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from kvservice.core.messages import Holder
from kvservice.core.transitions import step
from kvservice.errors import Exhausted, Forbidden
from kvservice.units import NodeId

# A node that sends nothing for this long is hidden: three heartbeats of a second. A shorter time would hide nodes that
# only pause; a longer one sends readers to dead nodes.
HIDE_SECONDS = 3.0
FORGET_SECONDS = 30.0  # its keys are forgotten after this; until then it need not announce them again
MISSED_MAX = 3  # heartbeats that a node may miss before it is hidden
MEMBERS_MAX = 16_384  # nodes known at once, including dead ones; above it new ones are refused with Exhausted
assert HIDE_SECONDS < FORGET_SECONDS


def patience(heartbeat_seconds: float) -> tuple[float, float]:
    """(hide_seconds, forget_seconds) for nodes that send a heartbeat every `heartbeat_seconds`."""
    factor = max(1.0, MISSED_MAX * heartbeat_seconds / HIDE_SECONDS)
    return factor * HIDE_SECONDS, factor * FORGET_SECONDS


class AnnounceOutcome(Enum):
    """The answer to one announcement."""

    APPLIED = "applied"
    RESYNC = "resync"  # send a full announcement
    STALE_EPOCH = "stale_epoch"  # a newer boot of this node is known: stop announcing


class MemberState(Enum):
    SYNCING = "syncing"
    ALIVE = "alive"
    STALLED = "stalled"
    SUSPECT = "suspect"
    DEAD = "dead"


class MemberEvent(Enum):
    BEGIN = "begin"  # first update of a full announcement
    UPDATE = "update"  # the next in sequence, or the last one again; also a heartbeat
    END = "end"  # last update of a full announcement
    LATE = "late"  # silent for hide_seconds
    EXPIRE = "expire"  # silent for forget_seconds
    LEAVE = "leave"
    REPLACE = "replace"  # an announcement of a newer epoch of the node


_S, _E = MemberState, MemberEvent
# A node that was never heard of starts as DEAD. A pair that is absent here is a bug.
TRANSITIONS: dict[tuple[MemberState, MemberEvent], MemberState] = {
    (_S.DEAD, _E.BEGIN): _S.SYNCING,
    (_S.DEAD, _E.LEAVE): _S.DEAD,
    (_S.DEAD, _E.REPLACE): _S.DEAD,
    (_S.SYNCING, _E.BEGIN): _S.SYNCING,
    (_S.SYNCING, _E.UPDATE): _S.SYNCING,
    (_S.SYNCING, _E.END): _S.ALIVE,
    (_S.SYNCING, _E.LATE): _S.STALLED,
    (_S.SYNCING, _E.LEAVE): _S.DEAD,
    (_S.SYNCING, _E.REPLACE): _S.DEAD,
    (_S.ALIVE, _E.BEGIN): _S.SYNCING,
    (_S.ALIVE, _E.UPDATE): _S.ALIVE,
    (_S.ALIVE, _E.END): _S.ALIVE,
    (_S.ALIVE, _E.LATE): _S.SUSPECT,
    (_S.ALIVE, _E.LEAVE): _S.DEAD,
    (_S.ALIVE, _E.REPLACE): _S.DEAD,
    (_S.STALLED, _E.BEGIN): _S.SYNCING,
    (_S.STALLED, _E.UPDATE): _S.SYNCING,
    (_S.STALLED, _E.END): _S.ALIVE,
    (_S.STALLED, _E.EXPIRE): _S.DEAD,
    (_S.STALLED, _E.LEAVE): _S.DEAD,
    (_S.STALLED, _E.REPLACE): _S.DEAD,
    (_S.SUSPECT, _E.BEGIN): _S.SYNCING,
    (_S.SUSPECT, _E.UPDATE): _S.ALIVE,
    (_S.SUSPECT, _E.END): _S.ALIVE,
    (_S.SUSPECT, _E.EXPIRE): _S.DEAD,
    (_S.SUSPECT, _E.LEAVE): _S.DEAD,
    (_S.SUSPECT, _E.REPLACE): _S.DEAD,
}
VISIBLE = frozenset({MemberState.SYNCING, MemberState.ALIVE})


@dataclass(slots=True)
class Member:
    """One node. Mutable: it is the table's own record."""

    holder: Holder
    state: MemberState
    last_sequence: int  # of the last announcement taken in this epoch; 0 = none
    heard_at: float  # when the last valid announcement came
    proof: bytes = b""  # digest of the announcer's proof
    shown_since: int = 0  # version of the table when it last became visible

    @property
    def is_visible(self) -> bool:
        return self.state in VISIBLE


@dataclass(frozen=True, slots=True)
class AnnounceEffect:
    """What the directory must do with the node's keys, in this order: `forget` the old ones, `apply` the new ones."""

    outcome: AnnounceOutcome
    forget: bool = False
    apply: bool = False


APPLY = AnnounceEffect(AnnounceOutcome.APPLIED, apply=True)
DUPLICATE = AnnounceEffect(AnnounceOutcome.APPLIED)
RESYNC = AnnounceEffect(AnnounceOutcome.RESYNC)
STALE = AnnounceEffect(AnnounceOutcome.STALE_EPOCH)


class Membership:
    """`version` grows whenever the set of visible nodes, or the address of one, may have changed."""

    def __init__(self, hide_seconds: float = HIDE_SECONDS, forget_seconds: float = FORGET_SECONDS) -> None:
        assert 0 < hide_seconds < forget_seconds
        self._hide_seconds = hide_seconds
        self._forget_seconds = forget_seconds
        self._members: dict[NodeId, Member] = {}
        self._next_deadline = math.inf  # before this time no node changes its state by itself
        self.version = 0
        self.counters: Counter[str] = Counter()

    def get(self, node_id: NodeId) -> Member | None:
        return self._members.get(node_id)

    def members(self) -> Iterable[Member]:
        """All nodes that are not forgotten."""
        return [member for member in self._members.values() if member.state is not MemberState.DEAD]

    def is_visible(self, node_id: NodeId) -> bool:
        member = self._members.get(node_id)
        return member is not None and member.is_visible

    def hear(
        self,
        node: Holder,
        sequence: int,
        *,
        full_begin: bool,
        full_end: bool,
        leaving: bool,
        now: float,
        proof: bytes = b"",
    ) -> AnnounceEffect:
        """Check one announcement and move the member to its new state.

        Raises Exhausted when too many nodes are known, Forbidden when the node belongs to another proof.
        """
        member = self._owned(node.node_id, proof)
        if member is not None and node.epoch < member.holder.epoch:
            self.counters["announce_stale_epoch"] += 1
            return STALE
        if member is None:
            if not (full_begin or leaving):
                self.counters["announce_resync_unknown"] += 1
                return RESYNC
            member = self._admit(node, now, proof)
        replaced = node.epoch > member.holder.epoch
        if replaced:
            self._move(member, MemberEvent.REPLACE)
            member.holder, member.last_sequence = node, 0
        effect = self._hear_current(member, node, sequence, full_begin, full_end, leaving, now)
        return AnnounceEffect(effect.outcome, forget=True, apply=effect.apply) if replaced else effect

    def _hear_current(
        self, member: Member, node: Holder, sequence: int, full_begin: bool, full_end: bool, leaving: bool, now: float
    ) -> AnnounceEffect:
        """Handle an announcement of the member's own epoch."""
        known = member.state is not MemberState.DEAD
        repeated = sequence == member.last_sequence
        # A repeated beginning is applied again. If it is the same update, that changes nothing. If a second announcer
        # of this boot sent it, whose sequences start anew, it is a new one.
        if repeated and (leaving or (known and not full_begin)):
            if known:
                self._move(member, MemberEvent.UPDATE)
                self._heard(member, node, now)
            self.counters["announce_duplicate"] += 1
            return DUPLICATE
        if sequence <= member.last_sequence and not (repeated and known):
            # It was sent before what is known and arrived after it: applying it would bring removed keys back.
            self.counters["announce_resync_replay"] += 1
            return RESYNC
        if leaving:
            self._move(member, MemberEvent.LEAVE)
            member.last_sequence = sequence
            self.counters["members_left"] += 1
            return AnnounceEffect(AnnounceOutcome.APPLIED, forget=True)
        if not full_begin and not known:
            self.counters["announce_resync_unknown"] += 1
            return RESYNC
        if not full_begin and sequence != member.last_sequence + 1:
            self.counters["announce_resync_gap"] += 1
            return RESYNC
        self._move(member, MemberEvent.BEGIN if full_begin else MemberEvent.UPDATE)
        if full_end:
            self._move(member, MemberEvent.END)
            self.counters["full_announcements"] += 1
        member.last_sequence = sequence
        self._heard(member, node, now)
        return AnnounceEffect(AnnounceOutcome.APPLIED, forget=True, apply=True) if full_begin else APPLY

    def expire(self, now: float) -> list[Member]:
        """Hide and forget nodes whose time is over. Returns those forgotten now. Cheap when none is due."""
        if now < self._next_deadline:
            return []
        forgotten: list[Member] = []
        deadline = math.inf
        for member in self.members():
            silent = now - member.heard_at
            if member.is_visible and silent >= self._hide_seconds:
                self._move(member, MemberEvent.LATE)
                self.counters["members_hidden"] += 1
            if not member.is_visible and silent >= self._forget_seconds:
                self._move(member, MemberEvent.EXPIRE)
                self.counters["members_forgotten"] += 1
                forgotten.append(member)
            else:
                deadline = min(deadline, self._due_at(member))
        self._next_deadline = deadline
        return forgotten

    def _due_at(self, member: Member) -> float:
        """When it is hidden, or forgotten, if it stays silent."""
        return member.heard_at + (self._hide_seconds if member.is_visible else self._forget_seconds)

    def _owned(self, node_id: NodeId, proof: bytes) -> Member | None:
        """The member of this id, after a check that the announcer owns it. Raises Forbidden.

        A node belongs to whoever announced it first, until it is forgotten. What is remembered of a dead node, such as
        its epoch, counts for its owner only: a forged epoch must not outlive the forger.
        """
        member = self._members.get(node_id)
        if member is None or member.proof == proof:
            return member
        if member.state is not MemberState.DEAD:
            self.counters["announce_forbidden"] += 1
            raise Forbidden(
                f"node {node_id} is announced by another process: give nodes different names; a node that has lost its "
                "runtime directory is accepted when the directory has forgotten it",
                node=node_id,
            )
        del self._members[node_id]
        return None

    def _admit(self, node: Holder, now: float, proof: bytes) -> Member:
        if len(self._members) >= MEMBERS_MAX:
            dead = [member for member in self._members.values() if member.state is MemberState.DEAD]
            if not dead:
                raise Exhausted(f"the directory knows {MEMBERS_MAX} nodes already", member_count_max=MEMBERS_MAX)
            del self._members[min(dead, key=lambda member: member.heard_at).holder.node_id]
        member = self._members[node.node_id] = Member(node, MemberState.DEAD, 0, now, proof)
        return member

    def _heard(self, member: Member, node: Holder, now: float) -> None:
        if member.holder != node:
            member.holder = node
            self.version += 1
        member.heard_at = now
        self._next_deadline = min(self._next_deadline, now + self._hide_seconds)

    def _move(self, member: Member, event: MemberEvent) -> None:
        target = step(TRANSITIONS, member.state, event, f"member {member.holder.node_id}")
        if target is not member.state:
            self.version += 1
        if target in VISIBLE and not member.is_visible:
            member.shown_since = self.version
        member.state = target

    def check_invariants(self) -> None:
        assert len(self._members) <= MEMBERS_MAX
        for node_id, member in self._members.items():
            assert member.holder.node_id == node_id
            if member.state is MemberState.DEAD:
                continue
            assert member.last_sequence > 0, f"{node_id} is {member.state} without an announcement"
            assert self._next_deadline <= self._due_at(member), f"{node_id} would be noticed too late"
