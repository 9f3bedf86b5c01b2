"""Admission: decides whether blocks are worth storing. Pure; part of the shard's state.

Storing a prompt costs a copy and a digest. For a workload that never repeats a prompt, that cost buys nothing. So
admission stops when nothing is reused, and resumes when prompts repeat.

Every request names its whole chain, whether or not its blocks are stored. So a repetition is seen even while nothing
is stored. Every sixteenth block of a chain is remembered for two windows, each as long as the pool has slots: a block
that repeats later than that would have been evicted anyway. One chain in sixteen, chosen by its first block, is always
admitted. It serves readers on other nodes: their reads are counted here, but their requests are not seen.

Counting a sample exactly is the idea of SHARDS (Waldspurger et al., FAST '15). An estimate of all distinct keys
(HyperLogLog) of the same size errs by one percent, which is as large as the shares that are compared here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvservice.core.bounded_table import BoundedTable
from kvservice.units import BlockKey

SAMPLE_STRIDE = 16  # one block in 16 of a chain is remembered: a 16th of the memory, exact for that sample
WINDOW_BLOCKS_MIN, WINDOW_BLOCKS_MAX = 1024, 1 << 20  # a tiny pool needs samples; a huge one keeps 65,536 keys a window
STOP_SHARE = 0.005  # admission stops when a smaller share of a whole window's blocks was requested again or used
STOP_WINDOWS = 2  # and only after so many windows in a row, because a new service has nothing to repeat yet
RESUME_SHARE = 0.01  # admission resumes from this share on; it is above STOP_SHARE, so that admission does not flap
RESUME_SAMPLES = 4  # and after so many repeated samples, because fewer may be chance
ACCOUNTS_MAX = 1024  # tenants with a record of their own; the one used longest ago starts anew, and is admitted
PROBE_ONE_IN = 16  # of the chains that are not admitted, one in 16 is stored nevertheless

assert STOP_SHARE < RESUME_SHARE
assert WINDOW_BLOCKS_MIN >= SAMPLE_STRIDE * RESUME_SAMPLES, "a window must have samples enough to resume"
assert 256 % PROBE_ONE_IN == 0, "chains are chosen by one byte of a key"


@dataclass(slots=True)
class _TenantReuse:
    """What one tenant requested, and how much of it was reused. Counts are of the current window."""

    admits: bool = True
    asked: int = 0  # blocks requested
    used: int = 0  # of them, those served, here or to another node
    sampled: int = 0
    repeated: int = 0
    windows_without: int = 0  # consecutive windows without reuse
    seen: set[BlockKey] = field(default_factory=set)
    seen_before: set[BlockKey] = field(default_factory=set)  # sampled in the previous window

    def share(self) -> float:
        return max(self.repeated / max(1, self.sampled), self.used / max(1, self.asked))


class Admission:
    """One for a shard. It decides for each tenant separately. `capacity` returns the pool's slots at present."""

    def __init__(self, capacity: Callable[[], int], counters: Counter[str]) -> None:
        self._capacity = capacity
        self._counters = counters
        # By account. One that was dropped starts anew.
        self._reuse: BoundedTable[str, _TenantReuse] = BoundedTable(ACCOUNTS_MAX, self._resume)
        self._open: dict[int, tuple[str, bool]] = {}  # by op: the account, and whether the chain is admitted

    def on_acquire(self, op: int, account: str, chain: Sequence[BlockKey]) -> None:
        """A request begins. `on_answer` or `forget` ends it."""
        reuse = self._reuse.get(account) or self._reuse.put(account, _TenantReuse())
        sample = chain[::SAMPLE_STRIDE]
        reuse.asked += len(chain)
        reuse.sampled += len(sample)
        reuse.repeated += sum(key in reuse.seen or key in reuse.seen_before for key in sample)
        reuse.seen.update(sample)
        self._decide(reuse)
        admitted = reuse.admits or chain[0][0] % PROBE_ONE_IN == 0
        self._counters["chains_not_admitted"] += not admitted
        self._open[op] = (account, admitted)

    def on_answer(self, op: int, promised: int) -> bool:
        """A request is answered with `promised` blocks. Returns whether its engine should store the chain's rest."""
        if op not in self._open:
            return True
        account, admitted = self._open.pop(op)
        reuse = self._reuse.get(account)
        if reuse is not None:
            reuse.used += promised
        return admitted

    def on_peer_read(self, blocks: int) -> None:
        """Another node reads blocks. The tenant they help is not known here, so they count for every account."""
        for _, reuse in self._reuse.items():
            reuse.used += blocks

    def forget(self, op: int) -> None:
        """Nobody waits for this request's answer any more."""
        self._open.pop(op, None)

    def admits(self, account: str) -> bool:
        """Whether every chain of this account is stored now, and not only one in PROBE_ONE_IN."""
        reuse = self._reuse.get(account)
        return reuse is None or reuse.admits

    def _decide(self, reuse: _TenantReuse) -> None:
        window = min(max(self._capacity(), WINDOW_BLOCKS_MIN), WINDOW_BLOCKS_MAX)
        is_no_accident = reuse.repeated >= RESUME_SAMPLES or reuse.used >= RESUME_SAMPLES * SAMPLE_STRIDE
        if is_no_accident and reuse.share() >= RESUME_SHARE:
            self._resume(reuse)
        if reuse.asked < window:
            return
        reuse.windows_without = reuse.windows_without + 1 if reuse.share() < STOP_SHARE else 0
        if reuse.admits and reuse.windows_without >= STOP_WINDOWS:
            reuse.admits = False
            self._counters["admission_stopped"] += 1
        reuse.asked = reuse.used = reuse.sampled = reuse.repeated = 0
        reuse.seen, reuse.seen_before = set(), reuse.seen

    def _resume(self, reuse: _TenantReuse) -> None:
        self._counters["admission_resumed"] += not reuse.admits
        reuse.admits = True

    def check_invariants(self) -> None:
        for name, reuse in self._reuse.items():
            assert 0 <= reuse.repeated <= reuse.sampled <= reuse.asked, f"{name} repeats more than it asks"
            assert len(reuse.seen) <= reuse.sampled, f"{name} remembers more than it asked"
