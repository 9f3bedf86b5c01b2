"""Kinds of blocks: those of one kind are expected to be used again alike. The counts say how (core.store.worths).

The uses of a block say little about a conversation. Its blocks live and die together, but the first were used at every
turn, and the newest never again. So a block that one conversation uses is judged by the conversation: by its turns and
its last pause. A block that was used more often than its conversation has turns is shared, for example a system prompt.
It is judged by itself: by its uses and the time between the last two. So is the beginning of a chain that was asked for
again, as a sort of its own.

Prompts with a hint of a client are kinds of their own. So a hint counts for what it has proved to be worth: if prompts
that are called last turns go on like others, the hint soon changes nothing. Pure.
"""

from __future__ import annotations

from enum import IntEnum

PAUSES = 9  # steps of the time between two uses: each is four times as long as the one before
PRIVATE, SHARED, HEADS = 0, 5, 10  # first sorts: five steps of turns or uses each
SORTS = 15  # three times five
HINTED = SORTS * PAUSES  # the first kind of prompts with a hint: for each hint five steps of turns
# Uses of a block that are counted. Where prompts part at many places, blocks that were all used so often are one
# stretch again. What was used so often is shared, however many turns a conversation has.
USES_MAX = 255
_BITS_MAX = 2 * (PAUSES - 1)  # two bits of a time make a step


class Expected(IntEnum):
    """What a client expects of a prompt."""

    NOTHING_SAID = 0
    LAST_TURN = 1  # nobody continues it
    LATER = 2  # not for a while
    SOON = 3  # in the next minutes
    SHARED = 4  # other engines will ask for it


KINDS = HINTED + (len(Expected) - 1) * (SHARED - PRIVATE)  # five steps of turns for each thing to expect


def kind_of(
    uses: int,
    turn: int,
    pause: int,
    last_turn: int,
    last_pause: int,
    expected: Expected = Expected.NOTHING_SAID,
) -> int:
    """The kind of a block with so many uses, that was new in this turn of its conversation.

    Args:
        pause: the step of the time between its last two uses; 0 when it was used once.
        last_turn: the turn in which the last block of its chain was new.
        last_pause: the pause of the last block of its chain that has one.
    """
    is_shared = uses > last_turn - turn or uses >= USES_MAX
    if expected and not is_shared:
        return HINTED + (expected - 1) * (SHARED - PRIVATE) + min(last_turn.bit_length(), SHARED - PRIVATE - 1)
    if is_shared or (turn == 0 and uses):
        sort = (SHARED if is_shared else HEADS) + min(uses.bit_length(), 5) - 1
        return sort * PAUSES + pause
    return (PRIVATE + min(last_turn.bit_length(), 4)) * PAUSES + (last_pause if last_turn else 0)


def expected_of(kind: int) -> Expected:
    """What was expected of the prompts of this kind."""
    return Expected.NOTHING_SAID if kind < HINTED else Expected(1 + (kind - HINTED) // (SHARED - PRIVATE))


def sort_of(kind: int) -> int:
    """The sort of a kind; with a hint, that of blocks like these without one."""
    return kind // PAUSES if kind < HINTED else PRIVATE + (kind - HINTED) % (SHARED - PRIVATE)


def pause_of(ticks: int) -> int:
    """The step of a time between two uses."""
    return (min(ticks.bit_length(), _BITS_MAX - 1) + 1) // 2


_EXPECTED = {
    Expected.LAST_TURN: "its last, as a client said",
    Expected.LATER: "needed later, as a client said",
    Expected.SOON: "needed soon, as a client said",
    Expected.SHARED: "shared, as a client said",
}


def describe_kind(kind: int) -> str:
    """What is common to the blocks of a kind, in words."""
    if kind >= HINTED:
        return f"{_of_turns(sort_of(kind))}, {_EXPECTED[expected_of(kind)]}"
    sort, pause = divmod(kind, PAUSES)
    if sort == PRIVATE:
        return _of_turns(sort)
    what = _of_turns(sort) if sort < SHARED else _of_uses(sort)
    lowest, highest = 4**pause // 4, 4**pause - 1
    return f"{what}, the last two {_range(lowest, highest, is_last=pause == PAUSES - 1)} prompts apart"


def _of_turns(sort: int) -> str:
    if sort == PRIVATE:
        return "a block of a prompt that nobody has continued"
    least, most = 1 << sort - PRIVATE - 1, (1 << sort - PRIVATE) - 1  # the last turn, counted from 0
    return f"a block of a conversation of {_range(least + 1, most + 1, is_last=sort == SHARED - 1)} turns"


def _of_uses(sort: int) -> str:
    step = (sort - SHARED) % (HEADS - SHARED)
    uses = _range(1 << step, (2 << step) - 1, is_last=step == HEADS - SHARED - 1)
    times = "once" if step == 0 else f"{uses} times"
    return f"{'a shared block' if sort < HEADS else 'a block of the beginning of a prompt'}, used again {times}"


def _range(least: int, most: int, *, is_last: bool) -> str:
    if is_last:
        return f"{least:,} or more"
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"
