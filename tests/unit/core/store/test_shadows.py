"""Rules of core.store.shadows: what S3-FIFO would have held."""

from __future__ import annotations

import random
from collections.abc import Sequence

from kvservice.core.store.shadows import ShadowFifo
from kvservice.core.store.stretches import Group, Stretch, StretchTree
from kvservice.replay.policies import S3Fifo
from kvservice.units import BlockKey


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"))


class Shadow(ShadowFifo):
    """Of a cache of `limit` blocks, asked in numbers."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.tree = StretchTree(lambda upper, lower: self.after_cut(upper))

    def ask(self, *blocks: int) -> int:
        hits = self.use(self.tree.walk([key(block) for block in blocks], Group(0, 0, 0.0)))
        self.shrink(self.limit)
        self.check()
        return hits

    def holds(self, block: int) -> bool:
        stretch = self.tree.of[key(block)]
        return key(block) in stretch.keys[: stretch.shadow_fifo]

    def check(self) -> None:
        stretches: Sequence[Stretch] = list(dict.fromkeys(self.tree.of.values()))
        for queue, is_new in ((self._small, True), (self._main, False)):
            assert queue.count == sum(one.shadow_fifo for one in stretches if one.is_new is is_new)
        assert self.count <= self.limit


def test_what_was_used_once_goes_first_and_from_its_end() -> None:
    shadow = Shadow(10)
    for _ in range(2):
        shadow.ask(1, 2, 3, 4)
    shadow.ask(11, 12, 13, 14)
    shadow.ask(21, 22, 23, 24)
    assert all(map(shadow.holds, (1, 2, 3, 4, 11, 12, 21, 22, 23, 24)))
    assert shadow.ask(11, 12, 13, 14) == 2


def test_what_comes_back_soon_is_kept_and_later_is_new() -> None:
    shadow = Shadow(10)
    shadow.ask(1)
    for block in range(100, 112):
        shadow.ask(block)
    assert shadow.ask(1) == 0, "the small queue let it go"
    for block in range(200, 220):
        shadow.ask(block)
    assert shadow.ask(1) == 1, "the main queue has it"
    shadow.ask(2)
    for block in range(300, 330):
        shadow.ask(block)
    assert shadow.ask(2) == 0
    for block in range(400, 420):
        shadow.ask(block)
    assert shadow.ask(2) == 0, "it had been away for longer than the cache is large"


def test_prompts_that_part_keep_what_they_have_in_common() -> None:
    shadow = Shadow(12)
    assert shadow.ask(1, 2, 3, 4) == 0
    assert shadow.ask(1, 2, 5, 6) == 2
    for block in range(100, 112):
        shadow.ask(block)
    assert shadow.ask(1, 2, 7) == 2


def test_of_single_blocks_it_finds_what_the_textbook_finds() -> None:
    draw = random.Random(1)
    blocks = [int(5000 * draw.random() ** 3) for _ in range(20_000)]
    shadow, hits, textbook_hits = Shadow(500), 0, 0
    textbook, held = S3Fifo(), set[BlockKey]()
    for now, block in enumerate(blocks):
        hits += shadow.use(shadow.tree.walk([key(block)], Group(0, 0, 0.0)))
        shadow.shrink(500)
        name = key(block)
        textbook_hits += name in held
        textbook.touch([name], float(now))
        if name not in held:
            if len(held) == 500:
                victim = textbook.victim(None)
                assert victim is not None
                textbook.remove(victim)
                held.discard(victim)
            textbook.add(name, None, 0, float(now), is_secondary=False, size_class=1)
            held.add(name)
    shadow.check()
    assert 0.2 < textbook_hits / len(blocks) < 0.9
    assert abs(hits - textbook_hits) < 0.01 * len(blocks)


def test_queues_do_not_pile_up_what_is_forgotten() -> None:
    """A pool that is never full forgets blocks that were never stored."""
    shadow = ShadowFifo()
    tree = StretchTree(lambda upper, lower: shadow.after_cut(upper))
    for number in range(3000):
        found = tree.walk([key(number)], Group(0, number, 0.0))
        shadow.use(found)
        if number >= 10:
            shadow.forget(tree.of[key(number - 10)])
    assert shadow.count == 10 and len(shadow._small) <= 256
