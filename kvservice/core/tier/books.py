"""The books of one tier of this node: which blocks it has, and what is evicted from it to make room. Pure.

They consist of the parts of the pool's own store: an eviction policy, accounts with quotas, and the states of a slot.
But a disk has no slabs: blocks of all sizes share one budget of bytes, and each is charged for what its file takes
there. What a codec makes of a block is known when it is written; until then it is charged for the most that may become
of it, so that the budget is never exceeded.
The books are this node's. What the tier itself has may be less at any time, and is checked when it is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvservice.core.block.tenants import Accounts
from kvservice.core.segment.blockfile import disk_room
from kvservice.core.store.eviction import EvictionPolicy
from kvservice.core.store.slots import TRANSITIONS, SlotEvent, SlotState
from kvservice.core.tier.tier_block import TierBlock
from kvservice.core.transitions import step
from kvservice.units import BlockKey

_READABLE = (SlotState.SEALED, SlotState.LEASED)


@dataclass(slots=True)
class _Entry:
    block: TierBlock
    parent: BlockKey | None
    account: str
    file_bytes: int  # that it is charged for
    state: SlotState = SlotState.FREE
    pins: int = 0  # reads under way
    is_doomed: bool = False  # it was found to be wrong while it is read: it goes when the last read ends


class TierBooks:
    """`gone(block, is_evicted)` is called for each block that leaves the books after it was readable."""

    def __init__(
        self,
        budget_bytes: int,
        policy: EvictionPolicy,
        gone: Callable[[TierBlock, bool], None],
        extra_bytes: int,
    ) -> None:
        """`extra_bytes`: most that a codec may add to a block."""
        self.budget_bytes = budget_bytes
        self.limit_bytes = budget_bytes  # below the budget while the tier itself has less room
        self.policy = policy
        self.accounts = Accounts(budget_bytes)
        self.used_bytes = 0
        self._gone = gone
        self._extra_bytes = extra_bytes
        self._entries: dict[BlockKey, _Entry] = {}
        self._writing = 0

    def __len__(self) -> int:
        """Blocks that can be read."""
        return len(self._entries) - self._writing

    def __contains__(self, key: BlockKey) -> bool:
        return self.get(key) is not None

    def get(self, key: BlockKey) -> TierBlock | None:
        """A block that can be read."""
        entry = self._entries.get(key)
        return None if entry is None or entry.state not in _READABLE or entry.is_doomed else entry.block

    def knows(self, key: BlockKey) -> bool:
        """Whether the block is here, or is being written, or has not gone yet."""
        return key in self._entries

    def keys(self) -> list[BlockKey]:
        """A snapshot of all that `knows` knows. Milliseconds for a million."""
        return list(self._entries)

    def blocks(self) -> Iterable[TierBlock]:
        """Those that can be read."""
        return (entry.block for key, entry in self._entries.items() if key in self)

    def reserve(self, block: TierBlock, parent: BlockKey | None, account: str) -> bool:
        """Make room for a block that will be written. False when there is none, also within its tenant's quota."""
        assert block.key not in self._entries
        entry = _Entry(block, parent, account, disk_room(block.payload_bytes + self._extra_bytes))
        if not self._make_room(entry):
            return False
        self._enter(entry)
        self._move(entry, SlotEvent.RESERVE)
        self._writing += 1
        return True

    def seal(self, key: BlockKey, now: float, stored_bytes: int = 0) -> None:
        """The block is written and can be read. `stored_bytes` as in TierBlock."""
        entry = self._entries[key]
        self._move(entry, SlotEvent.SEAL)
        file_bytes = disk_room(stored_bytes or entry.block.payload_bytes)
        assert file_bytes <= entry.file_bytes, "a block takes more of a tier than was reserved for it"
        self._charge(entry.account, file_bytes - entry.file_bytes)
        entry.file_bytes = file_bytes
        self._writing -= 1
        self._add_to_policy(entry, now)

    def abort(self, key: BlockKey) -> None:
        """The block was not written."""
        entry = self._entries[key]
        self._move(entry, SlotEvent.ABORT)
        self._writing -= 1
        self._leave(entry)

    def adopt(self, block: TierBlock, account: str, now: float) -> bool:
        """Take over a block that an earlier boot wrote. False when it is known, or there is no room. Ends of prompts
        come first, so they are the oldest, and make room for the beginnings."""
        entry = _Entry(block, None, account, disk_room(block.stored_bytes or block.payload_bytes))
        if block.key in self._entries or not self._make_room(entry):
            return False
        self._enter(entry)
        self._move(entry, SlotEvent.ADOPT)
        self._add_to_policy(entry, now)
        return True

    def touch(self, chain: Sequence[BlockKey], now: float) -> None:
        self.policy.touch(chain, now)

    def pin(self, key: BlockKey) -> None:
        """The block is being read: it is not evicted until `unpin`."""
        entry = self._entries[key]
        self._move(entry, SlotEvent.PIN)
        entry.pins += 1
        if entry.pins == 1:
            self.policy.pin((key,))

    def unpin(self, key: BlockKey) -> None:
        entry = self._entries[key]
        entry.pins -= 1
        if entry.pins == 0:
            self._move(entry, SlotEvent.UNPIN)
            self.policy.unpin((key,))
            if entry.is_doomed:
                self._drop(entry)

    def discard(self, key: BlockKey) -> None:
        """Take the block out, because it is wrong or unwanted; one that is being read, when that ends. Unknown blocks
        and those being written are left alone."""
        entry = self._entries.get(key)
        if entry is None or entry.state not in _READABLE:
            return
        entry.is_doomed = True
        if entry.state is SlotState.SEALED:
            self._drop(entry)

    def pinned(self) -> Counter[BlockKey]:
        """How many reads cover each block, for checks."""
        return Counter({key: entry.pins for key, entry in self._entries.items() if entry.pins})

    def writing(self) -> set[BlockKey]:
        """Blocks that are being written, for checks."""
        return {key for key, entry in self._entries.items() if entry.state is SlotState.WRITING}

    # -- inside ----

    def _make_room(self, entry: _Entry) -> bool:
        """Evict what has to go for it. False when that is not enough, also within its tenant's quota."""
        account = entry.account
        if entry.file_bytes > self.limit_bytes:
            return False
        while self.accounts.over_quota(account, entry.file_bytes):
            if not self._evict(lambda other: other == account):
                self.accounts.count(account, "quota_refused")
                return False
        while self.used_bytes + entry.file_bytes > self.limit_bytes:
            if not self._evict(self.accounts.takes_from(account, entry.file_bytes)):
                return False
        return True

    def _evict(self, may_go: Callable[[str], bool] | None) -> bool:
        victim = self.policy.victim(None, may_go)
        if victim is None:
            return False
        self.accounts.count(self._entries[victim].account, "evicted")
        self._drop(self._entries[victim], is_evicted=True)
        return True

    def _drop(self, entry: _Entry, *, is_evicted: bool = False) -> None:
        self.policy.remove(entry.block.key)
        self._move(entry, SlotEvent.EVICT)
        self._leave(entry)
        self._gone(entry.block, is_evicted)

    def _add_to_policy(self, entry: _Entry, now: float) -> None:
        block = entry.block
        self.policy.add(
            block.key,
            entry.parent,
            block.position,
            now,
            is_secondary=False,
            size_class=block.payload_bytes,
            account=entry.account,
        )

    def _enter(self, entry: _Entry) -> None:
        self._entries[entry.block.key] = entry
        self._charge(entry.account, entry.file_bytes)

    def _leave(self, entry: _Entry) -> None:
        del self._entries[entry.block.key]
        self._charge(entry.account, -entry.file_bytes)

    def _charge(self, account: str, byte_count: int) -> None:
        self.used_bytes += byte_count
        if account:
            self.accounts.used[account] += byte_count
            if not self.accounts.used[account]:  # so that tenants without blocks take no memory
                del self.accounts.used[account]

    @staticmethod
    def _move(entry: _Entry, event: SlotEvent) -> None:
        entry.state = step(TRANSITIONS, entry.state, event, f"block {entry.block.key.hex()} of a tier")

    def check_invariants(self) -> None:
        """O(blocks). Raises AssertionError that names what does not hold."""
        used: Counter[str] = Counter()
        for key, entry in self._entries.items():
            assert key == entry.block.key
            assert entry.state in (SlotState.WRITING, *_READABLE), f"the books keep a block that is {entry.state.value}"
            assert (entry.pins > 0) == (entry.state is SlotState.LEASED), "reads and state of a tier's block disagree"
            assert not entry.is_doomed or entry.pins, "a wrong block stays in the books"
            if entry.account:
                used[entry.account] += entry.file_bytes
        assert self._writing == len(self.writing()), "blocks being written down are miscounted"
        assert used == self.accounts.used, "what tenants hold in a tier does not add up"
        assert self.used_bytes == sum(entry.file_bytes for entry in self._entries.values()), "a tier's bytes are off"
        assert self.used_bytes <= self.limit_bytes <= self.budget_bytes, "a tier is above its budget"
        readable = {key for key, entry in self._entries.items() if entry.state in _READABLE}
        assert readable == set(self.policy.by_heat()), "a tier's policy knows other blocks than its books"
