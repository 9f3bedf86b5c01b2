"""When admission stops storing what nobody reuses, and when it resumes."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator

import pytest

from kvservice.core.store.admission import ACCOUNTS_MAX, PROBE_ONE_IN, WINDOW_BLOCKS_MIN, Admission
from kvservice.units import BlockKey

CHAIN = 64
WINDOW = WINDOW_BLOCKS_MIN // CHAIN  # requests


class Pool:
    """Requests of one engine against one admission; each is answered at once."""

    def __init__(self, capacity: int = 0) -> None:
        self.counters: Counter[str] = Counter()
        self.capacity = capacity
        self.admission = Admission(lambda: self.capacity, self.counters)
        self._noise = random.Random(1)
        self._ops = itertools.count(1)

    def chain(self, length: int = CHAIN) -> list[BlockKey]:
        return [BlockKey(self._noise.randbytes(16)) for _ in range(length)]

    def ask(self, chain: list[BlockKey], hit: int = 0, account: str = "") -> bool:
        op = next(self._ops)
        self.admission.on_acquire(op, account, chain)
        return self.admission.on_answer(op, hit)

    def ask_new(self, count: int, account: str = "") -> list[bool]:
        return [self.ask(self.chain(), account=account) for _ in range(count)]


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool()
    yield made
    made.admission.check_invariants()


def test_two_windows_without_reuse_end_storing_but_for_a_sample(pool: Pool) -> None:
    assert all(pool.ask_new(2 * WINDOW - 1))
    stored = pool.ask_new(2000)
    assert not pool.admission.admits("")
    assert 0.5 < stored.count(True) / (2000 / PROBE_ONE_IN) < 1.5
    assert pool.counters["admission_stopped"] == 1 and pool.counters["chains_not_admitted"] == stored.count(False)


def test_a_window_is_as_long_as_the_pool_is_large(pool: Pool) -> None:
    pool.capacity = 10 * WINDOW_BLOCKS_MIN
    assert all(pool.ask_new(20 * WINDOW - 1))
    pool.ask_new(1)
    assert not pool.admission.admits("")


def test_repetition_keeps_storing_though_nothing_was_hit_yet(pool: Pool) -> None:
    for _ in range(20):
        chains = [pool.chain() for _ in range(WINDOW)]
        assert all(pool.ask(chain) for chain in chains)
        assert all(pool.ask(chains[index]) for index in range(0, WINDOW, 4))
    assert pool.admission.admits("")


def test_hits_keep_storing(pool: Pool) -> None:
    assert all(pool.ask(pool.chain(), hit=1) for _ in range(10 * WINDOW))


def test_reads_by_other_nodes_keep_storing(pool: Pool) -> None:
    for _ in range(10 * WINDOW):
        assert pool.ask(pool.chain())
        pool.admission.on_peer_read(1)


def test_repetition_resumes_storing(pool: Pool) -> None:
    pool.ask_new(3 * WINDOW)
    assert not pool.admission.admits("")
    again = pool.chain()
    pool.ask(again)
    pool.ask(again)
    assert pool.admission.admits("") and pool.ask(pool.chain())
    assert pool.counters["admission_resumed"] == 1


def test_one_repeated_short_prompt_resumes_nothing(pool: Pool) -> None:
    pool.ask_new(20 * WINDOW)
    short = pool.chain(3)
    pool.ask(short)
    pool.ask(short)
    assert not pool.admission.admits("")


def test_each_tenant_has_its_own_admission(pool: Pool) -> None:
    chain = pool.chain()
    for _ in range(3 * WINDOW):
        pool.ask(pool.chain(), account="scan")
        assert pool.ask(chain, account="chat")
    assert not pool.admission.admits("scan") and pool.admission.admits("chat") and pool.admission.admits("new")


def test_a_request_that_is_given_up_is_forgotten(pool: Pool) -> None:
    pool.admission.on_acquire(77, "", pool.chain())
    pool.admission.forget(77)
    assert pool.admission.on_answer(77, 0), "what nobody asked about is admitted"


def test_a_tenant_that_is_forgotten_is_counted_as_resumed(pool: Pool) -> None:
    """It starts anew. The alert that storing has stopped compares the two counters."""
    pool.ask_new(2 * WINDOW, account="cold")
    for number in range(ACCOUNTS_MAX):
        pool.ask_new(1, account=str(number))
    assert pool.counters["admission_resumed"] == pool.counters["admission_stopped"] == 1


def test_a_forgotten_tenant_is_answered_as_it_was_asked(pool: Pool) -> None:
    """Between question and answer, other tenants may take the last record."""
    pool.admission.on_acquire(0, "first", pool.chain())
    for number in range(ACCOUNTS_MAX):
        pool.ask_new(1, f"tenant{number}")
    assert pool.admission.on_answer(0, 3)
