"""Admission: decides whether blocks are worth storing. Pure; part of the shard's state.

Storing a prompt costs a copy and a digest. A workload that never repeats itself pays that for nothing. So admission
stops where nothing is reused, and resumes when prompts repeat.

Every request names its whole chain, whether or not anything of it is stored. A repetition is therefore seen also while
nothing is stored. Every sixteenth block of a chain is remembered for two windows, each as long as the pool is large: a
block that is repeated later than that would have been evicted. One chain of sixteen, chosen by its first block, is
always admitted. It serves readers on other nodes, whose reads are seen here but whose requests are not.

Counting a sample exactly is the idea of SHARDS (Waldspurger et al., FAST '15). An estimate of all distinct keys
(HyperLogLog) of the same size errs by one percent, which is as large as the difference that is looked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvservice.core.recent import Recent
from kvservice.units import BlockKey

SAMPLE_STRIDE = 16  # blocks of a chain for one that is remembered
WINDOW_BLOCKS_MIN, WINDOW_BLOCKS_MAX = 1024, 1 << 20
STOP_SHARE = 0.005  # of the blocks of a whole window, asked again or used
STOP_WINDOWS = 2  # in a row: a new service has nothing to repeat yet
RESUME_SHARE = 0.01
RESUME_SAMPLES = 4  # repetitions that are no accident
ACCOUNTS_MAX = 1024
PROBE_ONE_IN = 16  # chains that are stored nevertheless


@dataclass(slots=True)
class _TenantReuse:
    """What one tenant asked for, and how much of it was reused. Counts are of the current window."""

    admits: bool = True
    asked: int = 0  # blocks
    used: int = 0  # of them served, here or to another node
    sampled: int = 0
    repeated: int = 0
    windows_without: int = 0  # reuse, in a row
    seen: set[BlockKey] = field(default_factory=set)
    seen_before: set[BlockKey] = field(default_factory=set)  # in the window before

    def share(self) -> float:
        return max(self.repeated / max(1, self.sampled), self.used / max(1, self.asked))


class Admission:
    """One for a shard. Each tenant is decided on by itself. `capacity`: slots of the pool now."""

    def __init__(self, capacity: Callable[[], int], counters: Counter[str]) -> None:
        self._capacity = capacity
        self._counters = counters
        self._reuse: Recent[str, _TenantReuse] = Recent(ACCOUNTS_MAX)  # by account; a forgotten one starts anew
        self._open: dict[int, tuple[str, bool]] = {}  # by op: its account, and whether its chain is admitted

    def on_acquire(self, op: int, account: str, chain: Sequence[BlockKey]) -> None:
        """A request begins. Its reply ends it, or `forget`."""
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
        """The request is answered with so many blocks. Whether its engine is to store the rest of the chain."""
        if op not in self._open:
            return True
        account, admitted = self._open.pop(op)
        reuse = self._reuse.get(account)
        if reuse is not None:
            reuse.used += promised
        return admitted

    def on_peer_read(self, blocks: int) -> None:
        """Another node reads blocks. Whose engines they help is not known here, so they count for every account."""
        for _, reuse in self._reuse.items():
            reuse.used += blocks

    def forget(self, op: int) -> None:
        """Nobody waits for this request's reply."""
        self._open.pop(op, None)

    def admits(self, account: str) -> bool:
        """Whether all chains of this account are stored now, and not only the sample."""
        reuse = self._reuse.get(account)
        return reuse is None or reuse.admits

    def _decide(self, reuse: _TenantReuse) -> None:
        window = min(max(self._capacity(), WINDOW_BLOCKS_MIN), WINDOW_BLOCKS_MAX)
        is_no_accident = reuse.repeated >= RESUME_SAMPLES or reuse.used >= RESUME_SAMPLES * SAMPLE_STRIDE
        if not reuse.admits and is_no_accident and reuse.share() >= RESUME_SHARE:
            reuse.admits = True
            self._counters["admission_resumed"] += 1
        if reuse.asked < window:
            return
        reuse.windows_without = reuse.windows_without + 1 if reuse.share() < STOP_SHARE else 0
        if reuse.admits and reuse.windows_without >= STOP_WINDOWS:
            reuse.admits = False
            self._counters["admission_stopped"] += 1
        reuse.asked = reuse.used = reuse.sampled = reuse.repeated = 0
        reuse.seen, reuse.seen_before = set(), reuse.seen

    def check_invariants(self) -> None:
        for name, reuse in self._reuse.items():
            assert 0 <= reuse.repeated <= reuse.sampled <= reuse.asked, f"{name} repeats more than it asks"
            assert len(reuse.seen) <= reuse.sampled, f"{name} remembers more than it asked"
