"""The default eviction policy against a search through everything it knows: whatever is claimed, in any order."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kvservice.core.block.window_groups import WINDOW_BIT
from kvservice.core.store import guard, orders, stretches, worth, worths
from kvservice.core.store.guard import Rule
from kvservice.core.store.worth import GuardedWorth
from kvservice.units import BlockKey

CHAINS = 8
BLOCKS = 12


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"))


def best_of_all(
    policy: GuardedWorth, size: int | None, may_go: Callable[[str], bool] | None, pinned: set[BlockKey]
) -> BlockKey | None:
    """The victim, found by looking at every stretch."""
    found = []
    for stretch in dict.fromkeys(policy._tree.of.values()):
        shelf = stretch.shelf
        if shelf is None or not stretch.is_leaf or stretch.keys[stretch.held - 1] in pinned:
            continue
        if size in (None, shelf.size_class) and (may_go is None or may_go(shelf.account)):
            found.append((not shelf.is_secondary, shelf.order.rank(stretch), stretch))
    return min(found)[2].keys[min(found)[2].held - 1] if found else None


class World:
    """Chains of which some begin alike, and a caller who does with them whatever he likes. With `is_honest`, he says
    the truth about parents, positions and chains."""

    def __init__(self, seed: int, *, is_honest: bool) -> None:
        self.draw = random.Random(seed)
        self.is_honest = is_honest
        self.policy = GuardedWorth()
        self.held: set[BlockKey] = set()
        self.pinned: set[BlockKey] = set()
        self.chains = [[key(1000 * chain + index) for index in range(BLOCKS)] for chain in range(CHAINS)]
        for chain in range(1, CHAINS):
            shared = self.draw.randrange(10)
            self.chains[chain][:shared] = self.chains[self.draw.randrange(chain)][:shared]

    def touch(self, now: float) -> None:
        chain = list(self.draw.choice(self.chains)[: self.draw.randrange(1, BLOCKS + 1)])
        if not self.is_honest and self.draw.random() < 0.3:
            chain = self.draw.sample([block for each in self.chains for block in each], self.draw.randrange(1, 8))
        if not self.is_honest and self.draw.random() < 0.2:
            chain += chain[:2]
        self.policy.touch(chain, now)

    def add(self, now: float) -> None:
        draw, chain = self.draw, self.draw.choice(self.chains)
        first = draw.randrange(BLOCKS)
        if draw.random() < 0.6:
            first = next((index for index, block in enumerate(chain) if block not in self.held), 0)
        for index in range(first, min(BLOCKS, first + draw.randrange(1, 6))):
            if chain[index] in self.held:
                return
            parent, position, size, account = (chain[index - 1] if index else None), index, 1, ""
            if not self.is_honest and draw.random() < 0.1:
                parent = draw.choice([parent, None, chain[(index + 3) % BLOCKS]])
                position = draw.choice([index, 0, 5, WINDOW_BIT + index])
            if not self.is_honest and draw.random() < 0.3:
                size, account = draw.choice([1, 1, 2]), draw.choice(["", "a", "b"])
            is_secondary = not self.is_honest and draw.random() < 0.2
            self.policy.add(
                chain[index], parent, position, now, is_secondary=is_secondary, size_class=size, account=account
            )
            self.held.add(chain[index])
            self.policy.check_invariants()

    def pin(self, now: float) -> None:
        if self.held - self.pinned:
            block = self.draw.choice(sorted(self.held - self.pinned))
            self.policy.pin([block])
            self.pinned.add(block)

    def unpin(self, now: float) -> None:
        if self.pinned:
            block = self.draw.choice(sorted(self.pinned))
            self.policy.unpin([block])
            self.pinned.discard(block)

    def take_out(self, now: float) -> None:
        """By force, wherever the block lies."""
        if not self.is_honest and self.held - self.pinned:
            block = self.draw.choice(sorted(self.held - self.pinned))
            self.policy.remove(block)
            self.held.discard(block)

    def evict(self, now: float) -> None:
        for _ in range(self.draw.randrange(4)):
            size = self.draw.choice([None, 1, 2])
            may_go = self.draw.choice([None, lambda account: account != "a"])
            victim = self.policy.victim(size, may_go)
            assert victim == best_of_all(self.policy, size, may_go, self.pinned)
            if victim is not None:
                self.policy.remove(victim)
                self.held.discard(victim)

    def make_primary(self, now: float) -> None:
        if self.held:
            self.policy.make_primary(self.draw.choice(sorted(self.held)))

    def drain(self) -> list[BlockKey]:
        gone = []
        while (victim := self.policy.victim(None)) is not None:
            self.policy.remove(victim)
            self.policy.check_invariants()
            gone.append(victim)
        return gone


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that takes thousands of prompts happens soon."""
    monkeypatch.setattr(orders, "GARBAGE_MIN", 4)
    monkeypatch.setattr(stretches, "GARBAGE_MIN", 4)


@pytest.mark.parametrize("is_honest", [True, False])
@pytest.mark.parametrize("seed", range(30))
def test_the_victim_is_the_best_leaf_and_all_can_go(
    seed: int, is_honest: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worth, "GONE_MIN", (5, 20, 100)[seed % 3])
    monkeypatch.setattr(worths, "LEARN_MIN", (5, 50)[seed % 2])
    monkeypatch.setattr(guard, "MARGIN", (0.0, -1.0, 1.0)[seed % 3])  # -1: the rule changes with almost every prompt
    world = World(seed, is_honest=is_honest)
    world.policy._guard.rule = list(Rule)[seed % 5 % 3]  # with the margin of 1 it stays
    steps = (world.touch, world.touch, world.add, world.pin, world.unpin, world.take_out, world.evict)
    for number in range(200):
        world.draw.choice((*steps, world.make_primary))(float(number))
        world.policy.check_invariants()
        assert sorted(world.policy.by_heat()) == sorted(world.held)
    coldest = world.policy.coldest(1000)
    assert world.policy.coldest(3) == coldest[:3]
    first = world.drain()
    assert first == coldest, "what is the coldest goes first, in that order"
    world.policy.unpin(world.pinned)
    assert sorted(first + world.drain()) == sorted(world.held)
