"""When a shard stops storing what nobody reuses, and when it begins again."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator

import pytest

from kvservice.core.actions import Reply
from kvservice.core.messages import AcquireResult, LocateResult, MissReason
from kvservice.core.segment.header import SlotHeader
from kvservice.core.segment.refs import BlockRef
from kvservice.core.store.admission import PROBE_ONE_IN, WINDOW_BLOCKS_MIN, Governor
from kvservice.units import BlockKey, BootEpoch, Generation, LeaseId, SlotIndex

CHAIN = 64
WINDOW = WINDOW_BLOCKS_MIN // CHAIN  # requests


class Pool:
    """Requests of one engine against a governor; each is answered at once."""

    def __init__(self, capacity: int = 0) -> None:
        self.counters: Counter[str] = Counter()
        self.capacity = capacity
        self.governor = Governor(lambda: self.capacity, self.counters)
        self._noise = random.Random(1)
        self._ops = itertools.count(1)

    def chain(self, length: int = CHAIN) -> list[BlockKey]:
        return [BlockKey(self._noise.randbytes(16)) for _ in range(length)]

    def ask(self, chain: list[BlockKey], hit: int = 0, account: str = "") -> bool:
        op = next(self._ops)
        self.governor.asked(op, account, chain)
        blocks = tuple(BlockRef(SlotIndex(i), Generation(2)) for i in range(hit))
        result = AcquireResult(LeaseId(1), blocks, 0, MissReason.NONE)
        (told,) = self.governor.tell([Reply(op, result)])
        assert isinstance(told, Reply) and isinstance(told.value, AcquireResult)
        assert told.value.blocks == blocks
        return told.value.stores

    def ask_new(self, count: int, account: str = "") -> list[bool]:
        return [self.ask(self.chain(), account=account) for _ in range(count)]


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool()
    yield made
    made.governor.check_invariants()


def test_two_windows_in_which_nothing_comes_twice_end_storing_but_for_a_sample(pool: Pool) -> None:
    assert all(pool.ask_new(2 * WINDOW - 1))
    stored = pool.ask_new(2000)
    assert not pool.governor.stores("")
    assert 0.5 < stored.count(True) / (2000 / PROBE_ONE_IN) < 1.5
    assert pool.counters["storing_stopped"] == 1 and pool.counters["chains_not_stored"] == stored.count(False)


def test_a_window_is_as_long_as_the_pool_is_large(pool: Pool) -> None:
    pool.capacity = 10 * WINDOW_BLOCKS_MIN
    assert all(pool.ask_new(20 * WINDOW - 1))
    pool.ask_new(1)
    assert not pool.governor.stores("")


def test_what_comes_again_within_two_windows_keeps_storing_though_nothing_was_hit_yet(pool: Pool) -> None:
    for _ in range(20):
        chains = [pool.chain() for _ in range(WINDOW)]
        assert all(pool.ask(chain) for chain in chains)
        assert all(pool.ask(chains[index]) for index in range(0, WINDOW, 4))
    assert pool.governor.stores("")


def test_hits_keep_storing(pool: Pool) -> None:
    assert all(pool.ask(pool.chain(), hit=1) for _ in range(10 * WINDOW))


def test_reads_by_other_nodes_keep_storing(pool: Pool) -> None:
    header = SlotHeader.__new__(SlotHeader)
    located = LocateResult(BootEpoch(1), LeaseId(1), 1.0, (header, None))  # type: ignore[arg-type]
    for _ in range(10 * WINDOW):
        assert pool.ask(pool.chain())
        pool.governor.tell([Reply(0, located)])


def test_repetition_begins_it_again_while_nothing_is_stored(pool: Pool) -> None:
    pool.ask_new(3 * WINDOW)
    assert not pool.governor.stores("")
    again = pool.chain()
    pool.ask(again)
    pool.ask(again)
    assert pool.governor.stores("") and pool.ask(pool.chain())
    assert pool.counters["storing_resumed"] == 1


def test_one_accident_does_not(pool: Pool) -> None:
    pool.ask_new(20 * WINDOW)
    short = pool.chain(3)
    pool.ask(short)
    pool.ask(short)
    assert not pool.governor.stores("")


def test_tenants_are_judged_apart(pool: Pool) -> None:
    chain = pool.chain()
    for _ in range(3 * WINDOW):
        pool.ask(pool.chain(), account="scan")
        assert pool.ask(chain, account="chat")
    assert not pool.governor.stores("scan") and pool.governor.stores("chat") and pool.governor.stores("new")


def test_a_request_that_is_given_up_is_forgotten(pool: Pool) -> None:
    pool.governor.asked(77, "", pool.chain())
    pool.governor.forget(77)
    reply = Reply(77, AcquireResult(LeaseId(0), (), 0, MissReason.NONE))
    assert pool.governor.tell([reply]) == [reply]
