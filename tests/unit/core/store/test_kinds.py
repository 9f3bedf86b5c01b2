"""Rules of core.store.kinds: a conversation is judged as a whole, what is shared by itself."""

from __future__ import annotations

import pytest

from kvservice.core.store.kinds import (
    HEADS,
    HINTED,
    KINDS,
    PAUSES,
    PRIVATE,
    SHARED,
    SORTS,
    USES_MAX,
    Expected,
    expected_of,
    kind_of,
    pause_of,
    sort_of,
)


def test_the_blocks_of_a_conversation_are_of_one_kind() -> None:
    """Those of its first turn were used three times, those of its last not yet."""
    kinds = {kind_of(uses=3 - turn, turn=turn, pause=2, last_turn=3, last_pause=3) for turn in (1, 2, 3)}
    assert len(kinds) == 1 and sort_of(kinds.pop()) == PRIVATE + 2


def test_the_pause_of_a_conversation_tells_its_kind() -> None:
    assert kind_of(0, 1, 0, 1, 2) != kind_of(0, 1, 0, 1, 5)


def test_a_new_prompt_is_of_one_kind_whatever_it_hangs_on() -> None:
    assert kind_of(0, 0, 0, 0, 5) == kind_of(0, 0, 0, 0, 0)


def test_used_more_often_than_its_conversation_is_shared() -> None:
    assert sort_of(kind_of(uses=4, turn=0, pause=1, last_turn=3, last_pause=2)) == SHARED + 2
    assert sort_of(kind_of(uses=1, turn=2, pause=1, last_turn=2, last_pause=2)) == SHARED


def test_what_is_used_most_often_is_shared_whatever_the_turns() -> None:
    assert sort_of(kind_of(uses=USES_MAX, turn=1, pause=1, last_turn=9 * USES_MAX, last_pause=2)) == SHARED + 4


def test_the_beginning_of_a_chain_that_returned_is_apart() -> None:
    assert sort_of(kind_of(uses=3, turn=0, pause=1, last_turn=3, last_pause=2)) == HEADS + 1


@pytest.mark.parametrize(("ticks", "pause"), [(0, 0), (1, 1), (2, 1), (3, 1), (4, 2), (15, 2), (16, 3), (10**9, 8)])
def test_a_pause_is_four_times_the_one_before(ticks: int, pause: int) -> None:
    assert pause_of(ticks) == pause < PAUSES


def test_every_kind_has_a_place() -> None:
    most = kind_of(10**6, 0, PAUSES - 1, 3, PAUSES - 1), kind_of(USES_MAX - 1, 0, PAUSES - 1, 10**7, 0)
    assert max(most) == HINTED - 1 and sort_of(HINTED - 1) == SORTS - 1
    assert kind_of(0, 10**6, 0, 10**6, 3, max(Expected)) == KINDS - 1


@pytest.mark.parametrize("expected", list(Expected)[1:])
def test_prompts_with_a_hint_are_kinds_of_their_own(expected: Expected) -> None:
    kinds = [kind_of(0, turn, 2, turn, 2, expected) for turn in (0, 1, 3, 7, 15)]
    assert len(set(kinds)) == 5 and all(expected_of(kind) is expected for kind in kinds)
    assert [sort_of(kind) for kind in kinds] == [PRIVATE + step for step in range(5)]
    assert [sort_of(kind_of(0, turn, 2, turn, 2)) for turn in (0, 1, 3, 7, 15)] == [sort_of(kind) for kind in kinds]


def test_what_is_shared_is_judged_by_itself_whatever_is_said() -> None:
    assert kind_of(4, 0, 1, 3, 2, Expected.LAST_TURN) == kind_of(4, 0, 1, 3, 2)
