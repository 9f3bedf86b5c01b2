"""Rules of core.store.stretches: prompts that part cut a stretch, and nothing is forgotten that something hangs on."""

from __future__ import annotations

import pytest

from kvservice.core.block.window_groups import WINDOW_BIT
from kvservice.core.store.stretches import Group, Stretch, StretchTree, UseLine
from kvservice.units import BlockKey


class Tree(StretchTree):
    """Asked in letters: one for each block."""

    def __init__(self) -> None:
        self.cuts: list[str] = []
        super().__init__(lambda upper, lower: self.cuts.append(f"{letters(upper)}|{letters(lower)}"))
        self.tick = 0

    def ask(self, chain: str) -> list[str]:
        self.tick += 1
        group = Group(0, self.tick, 0.0)
        found = self.walk([key(name) for name in chain], group)
        for stretch in found:
            if stretch.group is not group:
                stretch.group.count -= len(stretch.keys)
                stretch.group = group
                group.count += len(stretch.keys)
            self.queue(stretch)
        self.check_invariants()
        return [letters(stretch) for stretch in found]

    def hold(self, name: str, count: int) -> None:
        stretch = self.of[key(name)]
        self.resident_count += count - stretch.held
        if stretch.above is not None:
            stretch.above.held_below += (count > 0) - (stretch.held > 0)
        stretch.held = count
        self.check_invariants()

    def forget_down_to(self, limit: int) -> str:
        for stretch in self.to_forget(limit, self.tick + 1):
            self.forget(stretch)
            self.check_invariants()
        return "".join(sorted(chr(one[0]) for one in self.of))


def key(name: str) -> BlockKey:
    return BlockKey(name.encode() * 16)


def letters(stretch: Stretch) -> str:
    return "".join(chr(one[0]) for one in stretch.keys)


def test_a_prompt_is_one_stretch_until_another_one_parts_from_it() -> None:
    tree = Tree()
    assert tree.ask("abcdef") == ["abcdef"]
    assert tree.ask("abcdef") == ["abcdef"] and not tree.cuts
    assert tree.ask("abcxy") == ["abc", "xy"] and tree.cuts == ["abc|def"]
    assert tree.ask("abcdef") == ["abc", "def"]


def test_a_shorter_prompt_cuts_what_goes_on() -> None:
    tree = Tree()
    tree.ask("abcd")
    assert tree.ask("ab") == ["ab"] and tree.cuts == ["ab|cd"]


def test_a_part_from_the_middle_is_a_stretch_of_its_own() -> None:
    tree = Tree()
    tree.ask("abcdef")
    assert tree.ask("cd") == ["cd"] and tree.cuts == ["ab|cdef", "cd|ef"]
    assert tree.ask("abcdef") == ["ab", "cd", "ef"]


def test_what_a_prompt_adds_hangs_on_what_it_extends() -> None:
    tree = Tree()
    tree.ask("ab")
    assert tree.ask("abcd") == ["ab", "cd"]
    assert tree.of[key("c")].above is tree.of[key("b")] and tree.of[key("c")].position == 2


def test_a_block_that_a_prompt_names_twice_counts_once() -> None:
    tree = Tree()
    assert tree.ask("abcab") == ["abc"]
    assert tree.ask("abcabx") == ["abc", "x"]


def test_positions_that_do_not_follow_are_not_linked() -> None:
    """Otherwise two blocks could each be the other's parent, and never be evicted."""
    tree = Tree()
    tree.ask("abc")
    tree.ask("cba")
    assert [tree.of[key(name)].above for name in "a"] == [None]
    assert tree.of[key("b")].above is tree.of[key("a")]


def test_a_chain_is_linked_when_it_is_asked_for() -> None:
    tree = Tree()
    group = Group(0, 1, 0.0)
    lower = tree.make([key("b")], 1, None, group)
    upper = tree.make([key("a")], 0, None, group)
    assert tree.ask("ab") == ["a", "b"] and lower.above is upper


def test_a_cut_keeps_what_is_resident_and_what_hangs_below() -> None:
    tree = Tree()
    tree.ask("abcd")
    tree.ask("abcdef")
    tree.hold("a", 3)
    tree.ask("ab")
    upper, lower = tree.of[key("a")], tree.of[key("c")]
    assert (upper.held, lower.held, upper.held_below, upper.below, lower.below) == (2, 1, 1, 1, 1)
    assert upper.precedence == 0 and lower.precedence == -2


def test_a_block_can_be_singled_out() -> None:
    tree = Tree()
    tree.ask("abcde")
    assert letters(tree.single_out(key("c"))) == "c" and tree.cuts == ["abc|de", "ab|c"]
    assert letters(tree.single_out(key("c"))) == "c"
    tree.check_invariants()


def test_window_blocks_are_no_links_of_a_chain() -> None:
    tree = Tree()
    tree.ask("ab")
    window = tree.single_out(key("b"))
    tree.unlink(window)
    tree.unlink(window)
    window.move_to(WINDOW_BIT + 3)
    assert tree.ask("abc") == ["a", "b", "c"], "what comes behind it stands where it was asked for"
    assert window.above is None and tree.of[key("c")].above is None and tree.of[key("c")].position == 2
    window.held, window.held_below = 1, 1
    assert window.is_leaf, "whatever claims to hang on it"


def test_nothing_is_forgotten_that_something_hangs_on() -> None:
    tree = Tree()
    tree.ask("ab")
    tree.ask("abcd")
    tree.ask("xy")
    tree.ask("uv")
    assert tree.forget_down_to(6) == "abuvxy"
    assert tree.forget_down_to(5) == "uvxy"
    assert tree.forget_down_to(0) == ""


def test_what_was_asked_for_just_now_is_not_forgotten() -> None:
    tree = Tree()
    tree.ask("ab")
    tree.ask("xy")
    assert [letters(stretch) for stretch in tree.to_forget(3, before=2)] == ["ab"]
    assert list(tree.to_forget(0, before=2)) == []


def test_resident_blocks_are_not_forgotten_until_they_are_gone() -> None:
    tree = Tree()
    tree.ask("abcd")
    tree.hold("a", 2)
    tree.ask("xy")
    assert tree.forget_down_to(2) == "abxy"
    assert tree.forget_down_to(0) == "ab"
    tree.hold("a", 0)
    tree.queue_again(tree.of[key("a")])
    tree.queue_again(tree.of[key("a")])
    assert tree.forget_down_to(0) == ""


def test_a_line_names_the_longest_unused_until_it_is_empty() -> None:
    line = UseLine()
    assert line.first() is None
    first, second = (Stretch([key(name)], 0, number, Group(0, number, 0.0)) for number, name in enumerate("ab"))
    line.used(first)
    line.used(second)
    assert line.first() is first
    first.group = Group(0, 2, 0.0)
    line.used(first)
    assert line.first() is second, "its first use is outdated"
    line.drop_first()
    assert line.first() is first
    line.drop_first()
    assert line.first() is None


def test_a_miscount_is_noticed() -> None:
    tree = Tree()
    tree.ask("abc")
    tree.of[key("a")].held = 1
    with pytest.raises(AssertionError, match="resident blocks are miscounted"):
        tree.check_invariants()
