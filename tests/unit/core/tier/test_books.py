"""The books of a tier: bytes, quotas, reads under way, and blocks that turn out to be wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvservice.core.block.tenants import TenantLimits, tag_of
from kvservice.core.segment.blockfile import disk_room
from kvservice.core.store.worth import GuardedWorth
from kvservice.core.tier.books import TierBooks
from kvservice.core.tier.tier_block import TierBlock
from kvservice.testing.builders import make_chain
from kvservice.units import BlockKey, SpanRoute

SIZE = 10_000
FILE = disk_room(SIZE)
CHAIN = make_chain(8)


def block_of(key: BlockKey, position: int = 0, account: str = "", size: int = SIZE) -> TierBlock:
    return TierBlock(key, size, 7, position, SpanRoute(3), tag_of(account))


class Books(TierBooks):
    """Remembers what went."""

    def __init__(self, room: int, extra_bytes: int = 0) -> None:
        self.went: list[BlockKey] = []
        super().__init__(room * FILE, GuardedWorth(), lambda block, _: self.went.append(block.key), extra_bytes)

    def write(self, key: BlockKey, account: str = "", now: float = 0.0, stored_bytes: int = 0) -> bool:
        if not self.reserve(block_of(key, account=account), None, account):
            return False
        self.seal(key, now, stored_bytes)
        self.check_invariants()
        return True


def test_a_block_is_there_when_it_is_written_and_not_before() -> None:
    books = Books(2)
    assert books.reserve(block_of(CHAIN[0]), None, "")
    assert CHAIN[0] not in books and books.knows(CHAIN[0]) and len(books) == 0
    books.check_invariants()
    books.seal(CHAIN[0], 1.0)
    assert books.get(CHAIN[0]) == block_of(CHAIN[0]) and len(books) == 1
    assert [block.key for block in books.blocks()] == [CHAIN[0]]


def test_a_write_that_failed_gives_its_room_back() -> None:
    books = Books(1)
    assert books.reserve(block_of(CHAIN[0]), None, "") and books.used_bytes == FILE
    books.abort(CHAIN[0])
    assert not books.knows(CHAIN[0]) and books.used_bytes == 0 and not books.went
    books.check_invariants()


def test_the_coldest_block_makes_room_and_is_reported() -> None:
    books = Books(2)
    for now, key in enumerate(CHAIN[:2]):
        books.write(key, now=float(now))
    books.touch([CHAIN[0]], 5.0)
    assert books.write(CHAIN[2])
    assert books.went == [CHAIN[1]]
    assert CHAIN[0] in books and CHAIN[1] not in books


def test_blocks_of_all_sizes_share_one_budget() -> None:
    books = Books(3)
    for key in CHAIN[:3]:
        books.write(key)
    assert books.reserve(block_of(CHAIN[3], size=2 * SIZE), None, "")
    assert len(books.went) == 2 and books.used_bytes <= books.budget_bytes


def test_a_block_larger_than_the_tier_is_not_written() -> None:
    books = Books(1)
    books.write(CHAIN[0])
    assert not books.reserve(block_of(CHAIN[1], size=2 * SIZE), None, "")
    assert not books.went, "nothing is evicted for nothing"


def test_a_block_that_is_read_or_written_is_not_evicted() -> None:
    books = Books(2)
    books.write(CHAIN[0])
    books.pin(CHAIN[0])
    books.pin(CHAIN[0])
    assert books.reserve(block_of(CHAIN[1]), None, "")
    assert not books.reserve(block_of(CHAIN[2]), None, ""), "one is read, one is written"
    books.unpin(CHAIN[0])
    assert books.pinned() == {CHAIN[0]: 1} and books.writing() == {CHAIN[1]}
    books.check_invariants()
    assert not books.reserve(block_of(CHAIN[2]), None, ""), "another read is under way"
    books.unpin(CHAIN[0])
    assert books.reserve(block_of(CHAIN[2]), None, "") and books.went == [CHAIN[0]]


def test_a_wrong_block_goes_when_its_last_read_ends() -> None:
    books = Books(2)
    books.write(CHAIN[0])
    books.pin(CHAIN[0])
    books.discard(CHAIN[0])
    assert CHAIN[0] not in books and books.knows(CHAIN[0]) and not books.went, "somebody still reads it"
    books.check_invariants()
    books.unpin(CHAIN[0])
    assert books.went == [CHAIN[0]] and not books.knows(CHAIN[0])


def test_what_is_not_there_or_not_written_cannot_be_discarded() -> None:
    books = Books(2)
    books.write(CHAIN[0])
    books.reserve(block_of(CHAIN[1]), None, "")
    for key in CHAIN[:3]:
        books.discard(key)
    assert books.went == [CHAIN[0]] and books.writing() == {CHAIN[1]}


def test_ends_of_found_prompts_make_room_first() -> None:
    """For beginnings, which are found after them, and for what is written later: a hit ends at what is missing."""
    books, prompts = Books(9), [make_chain(6, first) for first in ("one", "two", "three")]
    for position in reversed(range(6)):
        for chain in prompts:
            assert books.adopt(block_of(chain[position], position), "", 1.0)
    books.check_invariants()
    assert set(books.keys()) == {key for chain in prompts for key in chain[:3]}
    assert not books.adopt(block_of(prompts[0][0]), "", 1.0), "it is known"
    for key in CHAIN[:3]:
        assert books.write(key, now=2.0)
    assert set(books.keys()) == {*CHAIN[:3], *(key for chain in prompts for key in chain[:2])}


def test_a_tenant_at_its_quota_evicts_its_own_blocks() -> None:
    books = Books(4)
    books.accounts.set_limits({"a": TenantLimits(2 * FILE), "b": TenantLimits()})
    books.write(CHAIN[0], "b")
    for key in CHAIN[1:4]:
        assert books.write(key, "a")
    assert books.went == [CHAIN[1]] and books.accounts.used == {"a": 2 * FILE, "b": FILE}
    assert books.adopt(block_of(CHAIN[5]), "a", 1.0)
    assert books.accounts.used == {"a": 2 * FILE, "b": FILE}, "a found block is within the quota, too"


def test_a_tenant_without_a_block_to_evict_is_refused() -> None:
    books = Books(4)
    books.accounts.set_limits({"a": TenantLimits(FILE)})
    books.write(CHAIN[0], "a")
    books.pin(CHAIN[0])
    assert not books.write(CHAIN[1], "a")
    assert books.accounts.counters["a"]["quota_refused"] == 1


def test_a_protected_tenant_keeps_its_blocks() -> None:
    books = Books(2)
    books.accounts.set_limits({"a": TenantLimits(FILE), "b": TenantLimits()})
    books.write(CHAIN[0], "a")
    books.write(CHAIN[1], "b")
    assert books.write(CHAIN[2], "b") and books.went == [CHAIN[1]]
    books.pin(CHAIN[2])
    assert not books.write(CHAIN[3], "b"), "only the tenant within its quota has blocks that could go"


def test_a_block_counts_whole_until_it_is_written() -> None:
    """Nobody knows what a codec makes of it, and the budget is never exceeded."""
    books = Books(2)
    assert books.reserve(block_of(CHAIN[0]), None, "") and books.used_bytes == FILE
    books.seal(CHAIN[0], 1.0, 5_000)
    assert books.used_bytes == disk_room(5_000) == 12_288, "its header, and whole pages"
    books.check_invariants()
    books.discard(CHAIN[0])
    assert books.used_bytes == 0, "it frees what it took"


def test_blocks_that_were_stored_smaller_make_room() -> None:
    books = Books(2)
    assert all(books.write(key, stored_bytes=100) for key in CHAIN[:3])
    assert not books.went and books.used_bytes == 3 * disk_room(100)
    assert books.write(CHAIN[3]) and books.went == [CHAIN[0]], "one of them is enough"


def test_a_codec_that_adds_bytes_does_not_exceed_the_budget() -> None:
    books = Books(2, extra_bytes=4096)
    assert books.write(CHAIN[0], stored_bytes=SIZE + 4096) and books.used_bytes == FILE + 4096
    assert books.reserve(block_of(CHAIN[1]), None, "") and books.went == [CHAIN[0]]
    books.check_invariants()


def test_a_quota_counts_what_blocks_take() -> None:
    books = Books(9)
    books.accounts.set_limits({"a": TenantLimits(2 * FILE)})
    assert all(books.write(key, "a", stored_bytes=100) for key in CHAIN[:3])
    assert not books.went and books.accounts.used == {"a": 3 * disk_room(100)}


def test_found_blocks_count_what_they_were_stored_in() -> None:
    books = Books(1)
    small = [replace(block_of(key), stored_bytes=100) for key in CHAIN[:2]]
    assert all(books.adopt(block, "", 1.0) for block in small)
    assert books.used_bytes == 2 * disk_room(100)
    books.check_invariants()


@pytest.mark.parametrize("broken", ["bytes", "policy"])
def test_books_that_do_not_add_up_are_noticed(broken: str) -> None:
    books = Books(2)
    books.write(CHAIN[0])
    if broken == "bytes":
        books.used_bytes += 1
    else:
        books.policy.remove(CHAIN[0])
    with pytest.raises(AssertionError):
        books.check_invariants()
