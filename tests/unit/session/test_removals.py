"""The inbox of what left the pool."""

from __future__ import annotations

from kvservice.session.removals import KEYS_MAX, RemovalInbox
from kvservice.units import BlockKey

KEY = BlockKey(bytes(16))


def test_removed_blocks_are_taken_once() -> None:
    inbox = RemovalInbox()
    inbox.add([KEY])
    assert inbox.take() == [KEY]
    assert inbox.take() == []


def test_blocks_without_a_name_make_all_of_them_gone() -> None:
    inbox = RemovalInbox()
    inbox.add([KEY], lost=1)
    assert inbox.take() is None
    assert inbox.take() == []


def test_lost_pool_makes_all_blocks_gone() -> None:
    inbox = RemovalInbox()
    inbox.add_all()
    assert inbox.take() is None


def test_inbox_that_nobody_empties_is_bounded() -> None:
    inbox = RemovalInbox()
    inbox.add([KEY] * (KEYS_MAX + 1))
    assert inbox.take() is None
