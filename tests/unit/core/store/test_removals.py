"""What an engine hears of blocks that left the pool."""

from __future__ import annotations

from kvservice.core.messages import Removed
from kvservice.core.store.removals import NOTHING, REMOVALS_MAX, Removals
from kvservice.units import AttachmentId, BlockKey

ONE, OTHER = AttachmentId(1), AttachmentId(2)


def is_gone(key: BlockKey) -> bool:
    return False


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"))


def test_each_engine_hears_of_a_removed_block_once() -> None:
    removals = Removals()
    removals.listen(ONE, "")
    removals.listen(OTHER, "")
    removals.add(key(1), "")
    assert removals.take(ONE, is_gone) == Removed((key(1),))
    assert removals.take(ONE, is_gone) is NOTHING
    assert removals.take(OTHER, is_gone) == Removed((key(1),))


def test_engine_that_did_not_ask_hears_nothing() -> None:
    removals = Removals()
    removals.add(key(1), "")
    assert removals.take(ONE, is_gone) is NOTHING


def test_blocks_of_another_tenant_are_not_told() -> None:
    removals = Removals()
    removals.listen(ONE, "acme")
    removals.add(key(1), "other")
    assert removals.take(ONE, is_gone) is NOTHING


def test_engine_that_fetches_too_late_hears_how_many_it_missed() -> None:
    removals = Removals()
    removals.listen(ONE, "")
    for number in range(REMOVALS_MAX + 3):
        removals.add(key(number), "")
    found = removals.take(ONE, is_gone)
    assert (found.keys[0], len(found.keys), found.lost) == (key(3), REMOVALS_MAX, 3)


def test_attachment_that_ended_keeps_nothing() -> None:
    removals = Removals()
    removals.listen(ONE, "")
    removals.end(ONE)
    removals.add(key(1), "")
    assert removals.take(ONE, is_gone) is NOTHING


def test_a_block_that_is_there_again_is_not_heard_of() -> None:
    """The answer would come behind that of the Seal which brought it back."""
    removals = Removals()
    removals.listen(ONE, "")
    removals.add(key(1), "")
    removals.add(key(2), "")
    assert removals.take(ONE, key(1).__eq__) == Removed((key(2),))
    removals.add(key(1), "")
    assert removals.take(ONE, is_gone) == Removed((key(1),))
