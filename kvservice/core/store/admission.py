"""Stops storing where nothing is reused, and begins again when something is. Pure; part of the shard's state.

Storing a prompt costs a copy and a digest. A workload that never repeats itself pays that for nothing, so the shard
watches what its engines ask for: every request names its whole chain, whether or not anything of it is stored, so a
repetition is seen also while nothing is. Every sixteenth block of a chain is remembered for two windows, each as long
as the pool is large: what is repeated later than that would have been evicted. One chain of sixteen, chosen by its
first block, is stored all the while, for readers on other nodes, whose requests are not seen here but whose reads are.

Counting a sample exactly is the idea of SHARDS (Waldspurger et al., FAST '15); an estimate of all distinct keys
(HyperLogLog) of the same size errs by one percent, which is as much as is to be told apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from kvservice.core.actions import Action, Reply
from kvservice.core.messages import AcquireResult, LocateResult
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
class _Account:
    stores: bool = True
    asked: int = 0  # blocks, in this window
    used: int = 0  # of them served, here or to another node
    sampled: int = 0
    repeated: int = 0
    windows_without: int = 0  # reuse, in a row
    seen: set[BlockKey] = field(default_factory=set)
    seen_before: set[BlockKey] = field(default_factory=set)

    def share(self) -> float:
        return max(self.repeated / max(1, self.sampled), self.used / max(1, self.asked))


class Governor:
    """One for a shard; tenants are judged apart. `capacity`: slots of the pool now."""

    def __init__(self, capacity: Callable[[], int], counters: Counter[str]) -> None:
        self._capacity = capacity
        self._counters = counters
        self._accounts: Recent[str, _Account] = Recent(ACCOUNTS_MAX)  # one that is forgotten is judged anew
        self._open: dict[int, tuple[str, bool]] = {}  # by op: whose it is, whether its chain is stored

    def asked(self, op: int, account: str, chain: Sequence[BlockKey]) -> None:
        """A request begins. Its answer ends it, or `forget`."""
        of = self._accounts.get(account) or self._accounts.put(account, _Account())
        sample = chain[::SAMPLE_STRIDE]
        of.asked += len(chain)
        of.sampled += len(sample)
        of.repeated += sum(key in of.seen or key in of.seen_before for key in sample)
        of.seen.update(sample)
        self._judge(of)
        keeps = of.stores or chain[0][0] % PROBE_ONE_IN == 0
        self._counters["chains_not_stored"] += not keeps
        self._open[op] = (account, keeps)

    def tell(self, actions: Sequence[Action]) -> list[Action]:
        """The shard's actions, with what engines are to store said in their answers."""
        return [self._told(action) if isinstance(action, Reply) else action for action in actions]

    def _told(self, reply: Reply) -> Reply:
        if isinstance(reply.value, LocateResult):  # whose blocks another node reads is not known here
            count = sum(handle is not None for handle in reply.value.handles)
            for _, of in self._accounts.items():
                of.used += count
        if not isinstance(reply.value, AcquireResult) or reply.op not in self._open:
            return reply
        account, keeps = self._open.pop(reply.op)
        if (asker := self._accounts.get(account)) is not None:
            asker.used += len(reply.value.blocks)
        return reply if keeps else Reply(reply.op, replace(reply.value, stores=False))

    def forget(self, op: int) -> None:
        """Nobody waits for this request's answer."""
        self._open.pop(op, None)

    def stores(self, account: str) -> bool:
        of = self._accounts.get(account)
        return of is None or of.stores

    def _judge(self, of: _Account) -> None:
        window = min(max(self._capacity(), WINDOW_BLOCKS_MIN), WINDOW_BLOCKS_MAX)
        is_no_accident = of.repeated >= RESUME_SAMPLES or of.used >= RESUME_SAMPLES * SAMPLE_STRIDE
        if not of.stores and is_no_accident and of.share() >= RESUME_SHARE:
            of.stores = True
            self._counters["storing_resumed"] += 1
        if of.asked < window:
            return
        of.windows_without = of.windows_without + 1 if of.share() < STOP_SHARE else 0
        if of.stores and of.windows_without >= STOP_WINDOWS:
            of.stores = False
            self._counters["storing_stopped"] += 1
        of.asked = of.used = of.sampled = of.repeated = 0
        of.seen, of.seen_before = set(), of.seen

    def check_invariants(self) -> None:
        for name, of in self._accounts.items():
            assert 0 <= of.repeated <= of.sampled <= of.asked, f"{name} repeats more than it asks"
            assert len(of.seen) <= of.sampled, f"{name} remembers more than it asked"
