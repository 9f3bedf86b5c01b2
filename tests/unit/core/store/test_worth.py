"""Rules of core.store.worth: what is found on traffic that LRU is bad at, and what it may cost where LRU is right."""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache

import pytest

from kvservice.core.block.window_groups import WINDOW_BIT
from kvservice.core.store import worth
from kvservice.core.store.eviction import EvictionPolicy, LeafFirstLru
from kvservice.core.store.guard import Rule
from kvservice.core.store.kinds import USES_MAX, Expected
from kvservice.core.store.reasons import NOT_BY_WORTH, describe_reason
from kvservice.core.store.shadows import ShadowFifo
from kvservice.core.store.worth import GuardedWorth, RuleState
from kvservice.units import BlockKey

Prompt = tuple[int, ...]


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"))


def add(policy: EvictionPolicy, number: int, parent: int | None, position: int, account: str = "") -> None:
    above = None if parent is None else key(parent)
    policy.add(key(number), above, position, 0.0, is_secondary=False, size_class=1, account=account)


def hit_rate(policy: EvictionPolicy, prompts: Sequence[Prompt], capacity: int, count_from: int = 0) -> float:
    """Serve prompts as a node does: a hit is a prefix, and all the rest is stored."""
    held: set[BlockKey] = set()
    hits = asked = 0
    for number, prompt in enumerate(prompts):
        chain = [key(block) for block in prompt]
        policy.touch(chain, float(number))
        found = next((index for index, block in enumerate(chain) if block not in held), len(chain))
        if number >= count_from:
            hits, asked = hits + found, asked + len(chain)
        for index in range(found, len(chain)):
            if chain[index] in held:
                continue
            if len(held) == capacity:
                victim = policy.victim(None)
                assert victim is not None
                policy.remove(victim)
                held.discard(victim)
            parent = chain[index - 1] if index else None
            held.add(chain[index])
            policy.add(chain[index], parent, index, float(number), is_secondary=False, size_class=1)
    return hits / asked


def rounds(prompts: int, blocks: int, times: int) -> list[Prompt]:
    work = [tuple(range(100 * number, 100 * number + blocks)) for number in range(prompts)]
    return work * times


def conversations(seed: int, count: int, turns: float = 4) -> Iterator[tuple[float, Prompt]]:
    """(when, prompt): a prompt that grows from turn to turn, over one of three beginnings."""
    draw = random.Random(seed)
    names = iter(range(1_000_000, 1 << 40))
    for _ in range(count):
        at, chain = draw.random() * count, [draw.randrange(3)]
        while True:
            chain += [next(names) for _ in range(1 + int(draw.expovariate(0.4)))]
            yield at, tuple(chain)
            if draw.random() < 1 / turns:
                break
            at += draw.expovariate(0.05)


def in_time(*sources: Iterator[tuple[float, Prompt]]) -> list[Prompt]:
    return [prompt for _, prompt in sorted(event for source in sources for event in source)]


def test_of_a_round_larger_than_the_cache_a_part_is_found() -> None:
    """LRU evicts exactly what comes next, and finds nothing."""
    prompts = rounds(prompts=100, blocks=4, times=12)
    found = hit_rate(GuardedWorth(), prompts, 200, 600)
    assert hit_rate(LeafFirstLru(), prompts, 200, 600) == 0 and found > 0.3


def test_a_batch_that_is_read_twice_soon_is_kept() -> None:
    """One batch of most of the cache. Who has learnt that old blocks are worth less must not give it up."""
    plain = in_time(conversations(1, 700))
    batch = [tuple(range(number * 100, number * 100 + 5)) for number in range(1000, 1140)]
    prompts = [*plain[:400], *batch, *batch, *plain[400:]]
    assert hit_rate(GuardedWorth(), prompts, 1000) > hit_rate(LeafFirstLru(), prompts, 1000) - 0.01


@pytest.mark.parametrize("seed", range(3))
def test_conversations_beside_scans_are_kept(seed: int) -> None:
    scans = ((float(number), tuple(range(10**9 + 100 * number, 10**9 + 100 * number + 12))) for number in range(900))
    prompts = in_time(conversations(seed, 900), scans)
    lru = hit_rate(LeafFirstLru(), prompts, 400, 900)
    assert hit_rate(GuardedWorth(), prompts, 400, 900) > lru + 0.01


def test_the_same_history_chooses_the_same_victims() -> None:
    prompts = in_time(conversations(2, 400))
    assert len({hit_rate(GuardedWorth(), prompts, 100) for _ in range(2)}) == 1


def test_a_chain_may_repeat_a_block() -> None:
    policy = GuardedWorth()
    policy.touch([key(1), key(2), key(1), key(2)], 0.0)
    for position, number in enumerate((1, 2)):
        add(policy, number, number - 1 or None, position)
    policy.touch([key(1), key(1), key(2), key(1)], 1.0)
    policy.check_invariants()
    assert (policy.uses(key(1)), policy.uses(key(2))) == (1, 1)
    assert policy.coldest(5) == [key(2), key(1)]


def test_a_block_stored_late_is_as_old_as_the_question_for_it() -> None:
    """Other prompts come while an engine computes a block."""
    policy = GuardedWorth()
    policy.touch([key(1)], 0.0)
    policy.touch([key(2)], 1.0)
    add(policy, 2, None, 0)
    add(policy, 1, None, 0)
    assert policy.last_touch(key(1)) < policy.last_touch(key(2)) and policy.coldest(1) == [key(1)]


def test_a_block_that_returns_without_a_question_is_used_now() -> None:
    policy = GuardedWorth()
    for number in (1, 2):
        add(policy, number, None, 0)
    policy.remove(key(1))
    add(policy, 3, None, 0)
    policy.remove(key(2))
    add(policy, 1, None, 0)
    assert policy.coldest(3) == [key(3), key(1)] and policy.uses(key(1)) == 1
    policy.check_invariants()


def test_a_prefix_is_as_recent_as_what_is_stored_below_it() -> None:
    """An engine that has the prefix in its own memory never asks for it."""
    policy = GuardedWorth()
    policy.touch([key(1), key(2)], 0.0)
    for position, number in enumerate((1, 2)):
        add(policy, number, number - 1 or None, position)
    policy.touch([key(9)], 0.0)
    add(policy, 9, None, 0)
    add(policy, 3, 2, 2)
    policy.check_invariants()
    policy.remove(key(3))
    assert policy.coldest(3) == [key(9), key(2), key(1)]


def test_blocks_of_two_accounts_of_one_chain_lie_apart() -> None:
    policy = GuardedWorth()
    policy.touch([key(1), key(2), key(3)], 0.0)
    for position, (number, account) in enumerate(((1, "one"), (2, "one"), (3, "two"))):
        add(policy, number, number - 1 or None, position, account)
    assert policy.victim(None, lambda account: account == "one") is None, "what hangs below belongs to the other"
    policy.remove(key(3))
    assert policy.victim(None, lambda account: account == "one") == key(2)
    policy.check_invariants()


def test_of_a_windows_blocks_the_earlier_ones_go_first() -> None:
    """Also those that were asked for before they were known to be of a window."""
    policy = GuardedWorth()
    policy.touch([key(number) for number in range(5)], 0.0)
    for number in (1, 2, 3):
        policy.add(key(number), None, WINDOW_BIT + number, 0.0, is_secondary=False, size_class=1)
        policy.check_invariants()
    assert policy.coldest(5) == [key(1), key(2), key(3)]
    assert policy.parent_of(key(2)) is None


def test_gone_blocks_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worth, "GONE_MIN", 50)
    policy = GuardedWorth()
    for number in range(100):
        policy.touch([key(10 * number + index) for index in range(10)], 0.0)
        policy.check_invariants()
    assert len(policy._tree.of) == 50


def test_it_says_who_rules_and_why() -> None:
    policy = GuardedWorth()
    assert policy.rule().hit_rates == dict.fromkeys(Rule, 0.0)
    hit_rate(policy, rounds(prompts=100, blocks=4, times=12), 200)
    found = policy.rule()
    assert found.rule is not Rule.LRU and found.switches
    assert found.hit_rates[found.rule] > found.hit_rates[Rule.LRU] + 0.1


def test_a_victim_has_a_reason_if_worth_chose_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShadowFifo, "use", lambda self, found: 0)  # S3-FIFO would find as much here
    policy = GuardedWorth()
    add(policy, 10**6, None, 0)
    assert policy.victim(None) is not None and policy.reason(key(10**6)) == NOT_BY_WORTH
    hit_rate(policy, rounds(prompts=100, blocks=4, times=12), 200)
    victim = policy.victim(None)
    assert victim is not None and policy.rule().rule is Rule.WORTH
    said = describe_reason(policy.reason(victim))
    assert "expected to bring the fewest hits: a shared block, used again 8 to 15 times, the last two 64 to" in said


def test_what_is_exported_of_the_rule() -> None:
    rule = RuleState(Rule.WORTH, 3, {Rule.LRU: 0.25, Rule.S3_FIFO: 0.3, Rule.WORTH: 0.5})
    assert rule.figures() == {
        "eviction_rule": 2,
        "eviction_rule_changes": 3,
        "eviction_lru_hits_ppm": 250_000,
        "eviction_s3_fifo_hits_ppm": 300_000,
        "eviction_worth_hits_ppm": 500_000,
    }


def test_by_s3_fifo_the_pool_gives_up_what_its_shadow_gave_up() -> None:
    """What is read once goes before what was read twice, however long ago that was. Only the first block that needs
    room is chosen by age: the policy has learnt just then how large the pool is."""
    policy = GuardedWorth()
    policy._guard.rule = Rule.S3_FIFO
    policy._guard.compare = lambda asked, found: False  # type: ignore[method-assign]
    often = [tuple(range(10 * number, 10 * number + 10)) for number in range(5)]
    once = [tuple(range(1000 + 10 * number, 1010 + 10 * number)) for number in range(60)]
    assert hit_rate(policy, [*often, *often, *once, *often], 100, 70) >= 0.8
    assert hit_rate(LeafFirstLru(), [*often, *often, *once, *often], 100, 70) == 0.0
    policy.check_invariants()


def test_use_does_not_pile_up_memory() -> None:
    """Nothing is evicted and nothing is forgotten here, but what was listed once more is outdated."""
    policy = GuardedWorth()
    for number in range(3000):
        policy.touch([key(number % 10)], 0.0)
        if number < 10:
            add(policy, number, None, 0)
    lines = (policy._lru._line, policy._tree._oldest, policy._fifo._small, policy._fifo._main)
    assert all(len(line) <= 256 for line in lines)
    assert sum(map(len, policy._worth.order._cells.values())) <= 256


def test_where_nothing_comes_back_the_oldest_goes() -> None:
    """Worths are all nought then. A batch that is read twice at once must not find itself evicted first."""
    scans = [tuple(range(100 * number, 100 * number + 10)) for number in range(600)]
    batch = [tuple(range(100 * number, 100 * number + 10)) for number in range(1000, 1010)]
    assert hit_rate(GuardedWorth(), [*scans, *batch, *batch], 200, 610) == 1.0


def restarted(blocks: int) -> GuardedWorth:
    """A policy that was told, one by one, of a chain that an earlier boot left. It begins at position 1."""
    found = GuardedWorth()
    for number in range(blocks):
        add(found, number, None, number + 1)
        found.check_invariants()
    return found


def stretches(policy: GuardedWorth) -> int:
    return len({id(policy._tree.of[one]) for one in policy.by_heat()})


def test_blocks_of_an_earlier_boot_become_one_stretch_when_used() -> None:
    policy = restarted(8)
    assert stretches(policy) == 8
    policy.touch([key(number) for number in range(6)], 1.0)
    policy.check_invariants()
    assert stretches(policy) == 3, "two were not asked for"
    assert [policy.parent_of(key(number)) for number in range(6)] == [None, *(key(number) for number in range(5))]
    assert policy.coldest(8)[:2] == [key(7), key(6)], "what nobody asked for goes first"
    assert policy.coldest(8)[2:] == [key(number) for number in range(5, -1, -1)]


def test_stretches_with_another_history_stay_apart() -> None:
    policy = restarted(4)
    policy.touch([key(0), key(1)], 1.0)
    policy.touch([key(number) for number in range(4)], 2.0)
    policy.check_invariants()
    assert stretches(policy) == 2
    policy.remove(key(3))
    policy.touch([key(number) for number in range(4)], 3.0)
    policy.check_invariants()
    assert stretches(policy) == 2, "the end is gone, and was here when it was asked for"


def test_a_prefix_that_is_used_often_enough_is_one_stretch() -> None:
    """However many prompts end within it: else each use of it would cost as many steps as there are ends."""
    policy, shared = GuardedWorth(), [key(number) for number in range(20)]
    policy.touch(shared, 0.0)
    for number in range(20):
        add(policy, number, number - 1 if number else None, number)
    found = []
    for time in range(USES_MAX + 1):
        policy.touch(shared[: 1 + time % 19], float(time))
        policy.touch(shared, float(time))
        found.append(stretches(policy))
    policy.check_invariants()
    assert found[18] == 20 and found[-1] == 1
    assert policy.uses(key(0)) == policy.uses(key(19)) == USES_MAX


def test_what_an_earlier_boot_left_goes_like_other_blocks() -> None:
    """Pinned ones stay, and the last block of a chain goes first once the chain is known."""
    policy = restarted(3)
    policy.pin([key(2)])
    assert policy.victim(1) == key(1)
    policy.unpin([key(2)])
    assert policy.victim(1) == key(2)
    add(policy, 100, None, 0)  # begins a prompt, and is newer
    policy.check_invariants()
    add(policy, 50, None, 5)
    policy.check_invariants()
    order = []
    while (victim := policy.victim(1)) is not None:
        order.append(victim)
        policy.remove(victim)
        policy.check_invariants()
    assert order[:3] == [key(2), key(1), key(0)] and set(order[3:]) == {key(50), key(100)}


def test_many_blocks_of_an_earlier_boot_hold_nobody_up() -> None:
    """Found blocks are not sorted anew as they grow older: entries of the order stay few."""
    policy = GuardedWorth()
    for number in range(3000):
        add(policy, number, None, 1 + number % 50)
    for prompt in range(300):
        policy.touch([key(10_000 + prompt)], float(prompt))
        add(policy, 10_000 + prompt, None, 0)
    listed = [list(shelf.order.in_order()) for shelf in policy._all_shelves()]
    assert sum(map(len, listed)) == 300
    policy.check_invariants()


def chats(seed: int, count: int) -> Iterator[tuple[str, Prompt, bool]]:
    """(account, prompt, whether it is the last turn): always forty conversations, of four turns in the mean."""
    draw = random.Random(seed)
    running: list[tuple[str, list[int]]] = []
    for number in range(count):
        if len(running) < 40:
            running.append(("ab"[number % 2], [1000 * number + block for block in range(8)]))
        account, chain = running[draw.randrange(len(running))]
        is_last = draw.random() < 0.25
        yield account, tuple(chain), is_last
        chain += [1000 * number + 500 + block for block in range(4)]
        if is_last:
            running.remove((account, chain))


@cache
def hit_rates(hint: Callable[[str, bool], Expected], *, has_tenants: bool = False) -> dict[str, float]:
    """By account, of chats whose clients say this of each turn."""
    policy, held = GuardedWorth(), set[BlockKey]()
    hits, asked = Counter[str](), Counter[str]()
    for number, (account, prompt, is_last) in enumerate(chats(1, 2000)):
        chain = [key(block) for block in prompt]
        policy.expect(hint(account, is_last))
        policy.touch(chain, float(number))
        found = next((index for index, block in enumerate(chain) if block not in held), len(chain))
        hits[account] += found
        asked[account] += len(chain)
        for block in prompt[found:]:
            if len(held) == 300:
                victim = policy.victim(None)
                assert victim is not None
                policy.remove(victim)
                held.discard(victim)
            if key(block) not in held:
                held.add(key(block))
                index = prompt.index(block)
                add(policy, block, prompt[index - 1] if index else None, index, account if has_tenants else "")
    policy.check_invariants()
    return {account: hits[account] / asked[account] for account in sorted(asked)}


def say_nothing(account: str, is_last: bool) -> Expected:
    return Expected.NOTHING_SAID


def say_what_is_true(account: str, is_last: bool) -> Expected:
    return Expected.LAST_TURN if is_last else Expected.SOON


@pytest.mark.parametrize("has_tenants", [False, True])
def test_hints_that_are_true_find_more(has_tenants: bool) -> None:
    with_hints, without = (hit_rates(say, has_tenants=has_tenants) for say in (say_what_is_true, say_nothing))
    assert all(with_hints[account] > without[account] + 0.05 for account in "ab"), (with_hints, without)


@pytest.mark.parametrize("said", list(Expected)[1:])
def test_hints_that_say_nothing_true_cost_nothing(said: Expected) -> None:
    lies, without = hit_rates(lambda *_: said), hit_rates(say_nothing)
    assert sum(lies.values()) / 2 > sum(without.values()) / 2 - 0.01, (lies, without)


def test_hints_are_believed_for_what_followed() -> None:
    """Clients who mistake one for the other are of the same use."""
    mistaken = hit_rates(lambda _, is_last: Expected.SOON if is_last else Expected.LAST_TURN)
    assert min(mistaken.values()) > max(hit_rates(say_nothing).values()) + 0.05


def test_no_tenant_keeps_another_ones_blocks_out_with_hints() -> None:
    """Both do the same. One needs all of it soon, as it says."""
    loud = hit_rates(lambda account, _: Expected.SOON if account == "a" else Expected.NOTHING_SAID, has_tenants=True)
    without = hit_rates(say_nothing, has_tenants=True)
    assert loud["b"] > without["b"] - 0.01, (loud, without)


def test_what_goes_leaves_no_cycle(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy shard never looks for cycles of what was once frozen (kvservice.garbage), so each would stay for ever."""
    monkeypatch.setattr(worth, "GONE_MIN", 100)
    policy = GuardedWorth()
    gc.collect()
    gc.disable()
    try:
        for number in range(200):
            policy.touch([key(4 * number)], float(number))
            for block in range(4):
                parent = None if block == 0 else 4 * number + block - 1
                add(policy, 4 * number + block, parent, block, account=f"tenant {number}")
            for _ in range(4):
                victim = policy.victim(None)
                assert victim is not None
                policy.remove(victim)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        kinds = Counter(type(one).__name__ for one in gc.garbage if type(one).__module__.startswith("kvservice"))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not kinds
