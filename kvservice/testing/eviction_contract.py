"""The rules that every EvictionPolicy must keep. Subclass, give it a `policy` fixture, and pytest runs the rules
against it.

`EvictionContract` holds for any policy. A policy that a shard uses must also keep the rules of `ChainEvictionContract`:
it knows which block depends on which, and it is asked for victims of one size or of some accounts only.
"""

from __future__ import annotations

import random

import pytest

from kvservice.core.store.eviction import EvictionPolicy
from kvservice.units import BlockKey

# the only size class of these tests; any number would do
SIZE = 1


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"))


def add_chain(
    policy: EvictionPolicy, first: int, count: int, now: float = 0.0, size_class: int = SIZE, account: str = ""
) -> list[BlockKey]:
    """Add a prompt of `count` blocks; the first has no parent. Returns the keys in the order of the chain."""
    chain = [key(first + position) for position in range(count)]
    for position, block in enumerate(chain):
        parent = chain[position - 1] if position else None
        policy.add(block, parent, position, now, is_secondary=False, size_class=size_class, account=account)
    return chain


def drain(policy: EvictionPolicy, size_class: int | None = None) -> list[BlockKey]:
    """Evict until nothing is left to evict. Returns the victims in order."""
    gone: list[BlockKey] = []
    while (victim := policy.victim(size_class)) is not None:
        assert victim not in gone, "a block is evicted once"
        policy.remove(victim)
        gone.append(victim)
    return gone


class EvictionContract:
    def test_an_empty_policy_has_no_victim(self, policy: EvictionPolicy) -> None:
        assert policy.victim(None) is None and policy.by_heat() == []

    def test_a_victim_stays_until_it_is_removed(self, policy: EvictionPolicy) -> None:
        chain = add_chain(policy, 1, 4)
        first = policy.victim(None)
        assert first in chain and policy.victim(None) == first
        assert sorted(policy.by_heat()) == sorted(chain)

    def test_every_block_can_go_and_goes_once(self, policy: EvictionPolicy) -> None:
        """A block that no victim() ever names would keep its slot for ever."""
        wanted = [block for number in range(5) for block in add_chain(policy, 100 * number, 6)]
        assert sorted(drain(policy)) == sorted(wanted)
        assert policy.by_heat() == []

    def test_a_pinned_block_is_no_victim(self, policy: EvictionPolicy) -> None:
        chain = add_chain(policy, 1, 3)
        policy.pin(chain)
        assert policy.victim(None) is None
        policy.unpin(chain[1:])
        assert sorted(drain(policy)) == sorted(chain[1:]), "those that are not pinned"
        policy.unpin(chain[:1])
        assert drain(policy) == chain[:1]

    def test_the_coldest_blocks_can_go_and_asking_changes_nothing(self, policy: EvictionPolicy) -> None:
        chain, pinned = add_chain(policy, 1, 4), add_chain(policy, 50, 1)[0]
        policy.pin([pinned])
        before = policy.victim(None)
        for count in (0, 1, 3, 100):
            found = policy.coldest(count)
            assert len(found) == len(set(found)) <= count
            assert set(found) <= set(chain), "blocks that are held and not pinned"
            assert bool(found) == (count > 0)
        assert policy.victim(None) == before
        assert sorted(policy.by_heat()) == sorted([*chain, pinned])

    def test_a_removed_block_may_come_again(self, policy: EvictionPolicy) -> None:
        """Many times: what a policy remembers of evicted blocks must not count as held."""
        for _ in range(5):
            chain = add_chain(policy, 1, 4)
            assert sorted(policy.by_heat()) == sorted(chain)
            assert sorted(drain(policy)) == sorted(chain)

    def test_touching_unknown_blocks_changes_nothing(self, policy: EvictionPolicy) -> None:
        chain = add_chain(policy, 1, 2)
        policy.touch([key(900), *chain, key(901)], 1.0)
        assert sorted(policy.by_heat()) == sorted(chain)

    def test_heat_and_time_of_use_follow_the_touches(self, policy: EvictionPolicy) -> None:
        older = add_chain(policy, 1, 1, now=10.0)
        newer = add_chain(policy, 50, 1, now=20.0)
        assert policy.by_heat() == [*newer, *older]
        policy.touch(older, 30.0)
        assert policy.by_heat() == [*older, *newer]
        assert (policy.used_at(older[0]), policy.used_at(newer[0])) == (30.0, 20.0)
        assert policy.last_touch(older[0]) > policy.last_touch(newer[0])

    def test_uses_are_counted_of_each_block_alone(self, policy: EvictionPolicy) -> None:
        """As far as a policy counts them: one that does not says 0 for ever."""
        (used,), (unused,) = add_chain(policy, 1, 1), add_chain(policy, 50, 1)
        assert policy.uses(used) == policy.uses(unused) == 0
        counts = []
        for time in range(1, 100):
            policy.touch([used], float(time))
            counts.append(policy.uses(used))
        assert counts == sorted(counts), "a use takes none back"
        assert all(count <= time for time, count in enumerate(counts, 1)), "more uses than there were"
        assert policy.uses(unused) == 0

    @pytest.mark.parametrize("seed", range(20))
    def test_random_use_loses_no_block(self, policy: EvictionPolicy, seed: int) -> None:
        """Adds, touches, pins and evictions in any order: victims are held and not pinned, and in the end all go."""
        draw = random.Random(seed)
        held: set[BlockKey] = set()
        pinned: set[BlockKey] = set()
        for step in range(300):
            match draw.randrange(5):
                case 0:
                    held.update(add_chain(policy, 100 * step, draw.randrange(1, 5), float(step)))
                case 1 if held:
                    policy.touch(draw.sample(sorted(held), min(3, len(held))), float(step))
                case 2 if held - pinned:
                    block = draw.choice(sorted(held - pinned))
                    policy.pin([block])
                    pinned.add(block)
                case 3 if pinned:
                    block = draw.choice(sorted(pinned))
                    policy.unpin([block])
                    pinned.discard(block)
                case 4:
                    victim = policy.victim(None)
                    if victim is not None:
                        assert victim in held - pinned
                        policy.remove(victim)
                        held.discard(victim)
            assert sorted(policy.by_heat()) == sorted(held)
        policy.unpin(pinned)
        assert sorted(drain(policy)) == sorted(held)


class ChainEvictionContract(EvictionContract):
    @pytest.mark.parametrize("seed", range(20))
    def test_the_coldest_blocks_are_the_next_victims(self, policy: EvictionPolicy, seed: int) -> None:
        """In their order, also where a prefix can go only after what hangs on it."""
        draw = random.Random(seed)
        for number in range(12):
            shared = add_chain(
                policy, 100 * number, draw.randrange(1, 4), float(number), size_class=draw.choice((1, 2))
            )
            for fork in range(draw.randrange(3)):
                block = key(100 * number + 50 + fork)
                policy.add(
                    block, shared[-1], len(shared), float(number), is_secondary=draw.random() < 0.3, size_class=1
                )
            if draw.random() < 0.5:
                policy.touch(shared[: draw.randrange(1, 4)], float(number))
            if draw.random() < 0.2:
                policy.pin(shared[:1])
        found = policy.coldest(1000)
        assert policy.coldest(5) == found[:5] and policy.coldest(1000) == found
        assert found == drain(policy)

    def test_a_suffix_goes_before_the_prefix_it_hangs_on(self, policy: EvictionPolicy) -> None:
        chain = add_chain(policy, 1, 6)
        assert drain(policy) == chain[::-1]

    def test_a_prefix_of_two_prompts_outlives_both(self, policy: EvictionPolicy) -> None:
        prefix = add_chain(policy, 1, 2)
        for number in (50, 60):
            policy.add(key(number), prefix[-1], 2, 1.0, is_secondary=False, size_class=SIZE)
        assert set(drain(policy)[:2]) == {key(50), key(60)}

    def test_the_parent_of_a_block_is_known(self, policy: EvictionPolicy) -> None:
        first, second = add_chain(policy, 1, 2)
        assert policy.parent_of(first) is None and policy.parent_of(second) == first

    def test_a_fetched_copy_goes_before_a_primary(self, policy: EvictionPolicy) -> None:
        """Unless its primary goes: then it is the one that counts."""
        policy.add(key(1), None, 0, 0.0, is_secondary=False, size_class=SIZE)
        policy.add(key(2), None, 0, 0.0, is_secondary=True, size_class=SIZE)
        assert policy.victim(None) == key(2)
        policy.make_primary(key(2))
        assert policy.victim(None) == key(1)

    def test_copies_in_front_of_a_gap_go_before_primaries(self, policy: EvictionPolicy) -> None:
        """The fetched beginning of a prompt makes room for what is computed behind it. What is left of it is of no
        more use, and would take room for as long as the rest of the prompt stays."""
        chain = [key(number) for number in range(1, 9)]
        policy.touch(chain, 1.0)
        for position in range(4):
            parent = chain[position - 1] if position else None
            policy.add(chain[position], parent, position, 1.0, is_secondary=True, size_class=SIZE)
        for gone in (chain[3], chain[2]):
            assert policy.victim(None) == gone
            policy.remove(gone)
        for position in range(4, 8):
            policy.add(chain[position], chain[position - 1], position, 1.0, is_secondary=False, size_class=SIZE)
        found = policy.coldest(100)
        assert found[:2] == [chain[1], chain[0]] and found == drain(policy)

    def test_a_victim_has_the_size_that_is_asked_for(self, policy: EvictionPolicy) -> None:
        small, large = add_chain(policy, 1, 2, size_class=1), add_chain(policy, 50, 2, size_class=2)
        assert policy.victim(3) is None
        assert sorted(drain(policy, 2)) == sorted(large)
        assert sorted(drain(policy)) == sorted(small)

    def test_a_victim_is_of_an_account_that_may_lose_blocks(self, policy: EvictionPolicy) -> None:
        ours = add_chain(policy, 1, 2, account="ours")
        add_chain(policy, 50, 2, account="theirs")
        assert policy.victim(None, lambda account: account == "ours") in ours
        assert policy.victim(None, lambda account: False) is None
