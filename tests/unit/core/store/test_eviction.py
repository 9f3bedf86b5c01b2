"""Rules of core.store.eviction: who goes first, and that everybody can go in the end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvservice.core.store.eviction import LeafFirstLru
from kvservice.core.store.worth import GuardedWorth
from kvservice.units import BlockKey

SIZE = 1
Policy = LeafFirstLru | GuardedWorth


@pytest.fixture(params=[LeafFirstLru, GuardedWorth])
def policy(request: pytest.FixtureRequest) -> Policy:
    """Where nothing is learnt, the default chooses as LRU does."""
    made: Policy = request.param()
    return made


def key(name: str) -> BlockKey:
    return BlockKey(name.encode().ljust(16, b"."))


def names(found: list[BlockKey]) -> str:
    return "".join(chr(one[0]) for one in found)


def add(
    policy: Policy,
    name: str,
    parent: str = "",
    position: int = 0,
    *,
    is_secondary: bool = False,
    size: int = SIZE,
) -> None:
    policy.add(key(name), key(parent) if parent else None, position, 0.0, is_secondary=is_secondary, size_class=size)
    policy.check_invariants()


def add_chain(policy: Policy, chain: str, start: int = 0, *, is_secondary: bool = False) -> None:
    for position in range(start, len(chain)):
        add(policy, chain[position], chain[position - 1] if position else "", position, is_secondary=is_secondary)


def touch(policy: Policy, chain: str) -> None:
    policy.touch([key(name) for name in chain], 0.0)
    policy.check_invariants()


def drain(policy: Policy, size: int = SIZE) -> str:
    """Evict until nothing can be evicted."""
    out: list[BlockKey] = []
    while (victim := policy.victim(size)) is not None:
        assert policy.victim(size) == victim, "asking twice must not change the answer"
        policy.remove(victim)
        policy.check_invariants()
        out.append(victim)
    return names(out)


def test_leaves_go_before_their_prefix(policy: Policy) -> None:
    add_chain(policy, "abcd")
    assert drain(policy) == "dcba"


def test_the_least_recent_leaf_goes_first(policy: Policy) -> None:
    for name in "xyz":
        add(policy, name)
    touch(policy, "x")
    assert drain(policy) == "yzx"


def test_secondary_copies_go_before_primary_ones_however_recent(policy: Policy) -> None:
    add(policy, "o")
    add(policy, "c", is_secondary=True)
    touch(policy, "c")
    assert drain(policy) == "co"


def test_a_primary_leaf_goes_before_a_secondary_parent(policy: Policy) -> None:
    """The secondary copy has a resident child."""
    add_chain(policy, "a", is_secondary=True)
    add_chain(policy, "ab", start=1)
    add(policy, "z")
    touch(policy, "ab")
    assert drain(policy) == "zba"


def test_a_pinned_block_and_its_prefix_are_never_victims(policy: Policy) -> None:
    add_chain(policy, "abc")
    policy.pin([key("b")])
    assert drain(policy) == "c"
    policy.unpin([key("b")])
    assert drain(policy) == "ba"


def test_a_block_pinned_between_question_and_answer_is_skipped(policy: Policy) -> None:
    add(policy, "a")
    add(policy, "b")
    assert policy.victim(SIZE) == key("a")
    policy.pin([key("a")])
    assert policy.victim(SIZE) == key("b")


def test_a_block_stored_behind_a_pinned_one_can_go(policy: Policy) -> None:
    add_chain(policy, "ab")
    policy.pin([key("b")])
    assert policy.victim(SIZE) is None, "asked while the end of the chain is pinned"
    add_chain(policy, "abc", start=2)
    assert drain(policy) == "c"
    policy.unpin([key("b")])
    assert drain(policy) == "ba"


def test_a_block_that_was_used_while_it_was_pinned_is_named_once(policy: Policy) -> None:
    add(policy, "a")
    policy.pin([key("a")])
    assert policy.victim(SIZE) is None
    touch(policy, "a")
    policy.unpin([key("a")])
    assert policy.coldest(10) == [key("a")]


def test_touching_a_new_leaf_keeps_its_ancestors(policy: Policy) -> None:
    """The engine that made the leaf had its prefix in its own memory and never asked for it."""
    add_chain(policy, "abc")
    for name in "xyz":
        add(policy, name)
    add(policy, "d", "c", 3)
    policy.remove(key("d"))
    assert drain(policy) == "xyzcba"


def test_equally_recent_blocks_go_from_the_end_of_the_chain() -> None:
    """Adopted blocks know no parents; their positions keep the order right."""
    policy = LeafFirstLru()
    for position, name in ((1, "b"), (0, "a"), (2, "c")):
        add(policy, name, position=position)
    policy._tick = 10
    for entry in policy._entries.values():
        entry.tick = 10
        entry.parent = None
    for name, entry in list(policy._entries.items()):
        policy._offer(name, entry)
    assert drain(policy) == "cba"


def test_a_chain_is_linked_when_it_is_touched(policy: Policy) -> None:
    for position, name in ((2, "c"), (1, "b"), (0, "a")):
        add(policy, name, position=position)
    touch(policy, "abc")
    add(policy, "z")
    assert drain(policy) == "cbaz"


def test_orphans_are_linked_when_their_parent_comes_back(policy: Policy) -> None:
    add(policy, "b", "a", 1)
    add(policy, "c", "b", 2)
    add(policy, "a")
    assert drain(policy) == "cba"


def test_an_orphan_that_left_is_not_counted_as_a_child() -> None:
    policy = LeafFirstLru()
    add(policy, "b", "a", 1)
    policy.remove(key("b"))
    policy.check_invariants()
    add(policy, "a")
    assert drain(policy) == "a"
    assert not policy._orphans


def test_of_two_orphans_of_one_parent_the_other_stays_one() -> None:
    policy = LeafFirstLru()
    add(policy, "b", "a", 1)
    add(policy, "c", "a", 1)
    policy.remove(key("b"))
    policy.check_invariants()
    add(policy, "a")
    assert drain(policy) == "ca" and not policy._orphans


def test_a_prefix_torn_out_by_force_finds_its_children_again(policy: Policy) -> None:
    add_chain(policy, "abc")
    policy.remove(key("b"))  # its slab went to another model
    policy.check_invariants()
    add(policy, "b", "a", 1)
    assert drain(policy) == "cba"


def test_size_classes_do_not_give_up_blocks_for_each_other(policy: Policy) -> None:
    add(policy, "a", size=1)
    add(policy, "b", size=2)
    assert policy.victim(3) is None
    assert drain(policy, 2) == "b"
    assert drain(policy, 1) == "a"


@pytest.mark.parametrize("position", [0, 2, 3])
def test_a_child_at_the_wrong_position_is_not_linked(policy: Policy, position: int) -> None:
    add(policy, "a")
    add(policy, "b", "a", position)
    assert sorted(drain(policy)) == ["a", "b"]


def test_blocks_that_are_each_others_parent_can_be_evicted(policy: Policy) -> None:
    """What an engine says about parents is not checked by anybody: it must not make a slot unusable for ever."""
    add(policy, "x", "p", 5)
    add(policy, "p", "x", 6)
    assert sorted(drain(policy)) == ["p", "x"]


def test_a_block_that_is_its_own_parent_can_be_evicted(policy: Policy) -> None:
    add(policy, "a", "a", 1)
    assert drain(policy) == "a"


def test_touching_a_reversed_chain_does_not_link_it(policy: Policy) -> None:
    add_chain(policy, "abc")
    touch(policy, "cba")
    assert drain(policy) == "cba"


def test_touches_do_not_pile_up_memory() -> None:
    policy = LeafFirstLru()
    for position in range(10):
        add(policy, chr(97 + position))
    for _ in range(1000):
        touch(policy, "abcdefghij")
    assert sum(len(heap) for heap in policy._heaps.values()) <= 64 + 4 * 10 + 1
    assert len(drain(policy)) == 10


def test_the_last_used_is_the_hottest_and_a_prefix_comes_first(policy: Policy) -> None:
    add_chain(policy, "ab")
    policy.add(key("x"), None, 0, 7.0, is_secondary=True, size_class=SIZE)
    assert names(policy.by_heat()) == "xab"
    policy.touch([key("a"), key("b")], 9.0)
    assert names(policy.by_heat()) == "abx" and names(policy.coldest(5)) == "xba"
    assert (policy.used_at(key("a")), policy.used_at(key("x"))) == (9.0, 7.0)
    assert policy.last_touch(key("b")) > policy.last_touch(key("x"))
    assert (policy.parent_of(key("b")), policy.parent_of(key("a"))) == (key("a"), None)
    policy.make_primary(key("x"))
    policy.make_primary(key("x"))
    assert names(policy.coldest(1)) == "x" == drain(policy)[0]


def test_what_is_pinned_is_not_among_the_coldest(policy: Policy) -> None:
    add_chain(policy, "abc")
    add(policy, "z")
    policy.pin([key("b")])
    assert names(policy.coldest(9)) == "cz" and names(policy.coldest(0)) == ""


def test_only_accounts_that_may_lose_blocks_are_asked(policy: Policy) -> None:
    for name, account in (("a", "one"), ("b", "two")):
        policy.add(key(name), None, 0, 0.0, is_secondary=False, size_class=SIZE, account=account)
    assert policy.victim(None, lambda account: account == "two") == key("b")
    assert policy.victim(None, lambda account: False) is None
    policy.touch([], 1.0)
    policy.check_invariants()


operations = st.lists(
    st.tuples(
        st.sampled_from(["add", "remove", "touch", "pin", "unpin"]),
        st.integers(0, 7),
        st.integers(-1, 7),
        st.integers(0, 4),
        st.booleans(),
    ),
    max_size=60,
)


@given(operations)
def test_whatever_is_claimed_everything_can_be_evicted(
    steps: list[tuple[str, int, int, int, bool]],
) -> None:
    policy = LeafFirstLru()
    held: dict[int, bool] = {}  # pinned?
    for what, one, other, position, flag in steps:
        name = chr(97 + one)
        if what == "add" and one not in held:
            add(policy, name, chr(97 + other) if other >= 0 else "", position, is_secondary=flag)
            held[one] = False
        elif what == "remove" and held.get(one) is False:
            policy.remove(key(name))
            del held[one]
        elif what == "touch":
            touch(policy, "".join(chr(97 + index % 8) for index in range(one, one + position)))
        elif what in ("pin", "unpin") and held.get(one) is (what == "unpin"):
            (policy.pin if what == "pin" else policy.unpin)([key(name)])
            held[one] = what == "pin"
        policy.check_invariants()
        victim = policy.victim(SIZE)
        assert victim is None or held[victim[0] - 97] is False
    for one, pinned in held.items():
        if pinned:
            policy.unpin([key(chr(97 + one))])
    assert len(drain(policy)) == len(held)


def test_storing_a_prompt_takes_time_linear_in_its_length() -> None:
    """Each new leaf makes its prefix as recent as itself: walking up the whole chain for each would be quadratic."""

    class Counting(LeafFirstLru):
        offers = 0

        def _offer(self, key: BlockKey, entry: object) -> None:
            self.offers += 1
            super()._offer(key, entry)  # type: ignore[arg-type]

    policy = Counting()
    chain = [BlockKey(number.to_bytes(16, "big")) for number in range(2000)]
    for position, one in enumerate(chain):
        policy.add(one, chain[position - 1] if position else None, position, 0.0, is_secondary=False, size_class=SIZE)
    assert policy.offers < 3 * len(chain)


def test_people_are_told_of_uses_where_they_are_counted() -> None:
    counted, uncounted = GuardedWorth(), LeafFirstLru()
    for policy in (counted, uncounted):
        add_chain(policy, "a")
        touch(policy, "a")
        touch(policy, "a")
    assert (counted.uses(key("a")), uncounted.uses(key("a"))) == (2, 0)
