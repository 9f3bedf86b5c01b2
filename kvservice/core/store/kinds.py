"""Kinds of blocks: those of one kind are expected to be used again alike. The counts say how (core.store.worths).

How often a block was used does not tell in a conversation: its blocks live and die together, but its newest were never
used again and its first at every turn. So a block that is used by one conversation only is judged by the conversation:
by its turns and its last pause. A block that was used more often than its conversation went on is shared, for example
a system prompt, and is judged by itself: by its uses and the time between the last two. So is the beginning of a chain
that was asked for again, apart. Pure.
"""

from __future__ import annotations

PAUSES = 9  # steps of the time between two uses: each is four times as long as the one before
PRIVATE, SHARED, HEADS = 0, 5, 10  # first sorts: five steps of turns or uses each
SORTS = 15  # three times five
KINDS = SORTS * PAUSES
_BITS_MAX = 2 * (PAUSES - 1)  # two bits of a time make a step


def kind_of(uses: int, turn: int, interval: int, last_turn: int, last_interval: int) -> int:
    """The kind of a block with so many uses, that was new in this turn of its conversation.

    Args:
        interval: ticks between its last two uses; 0 when it was used once.
        last_turn: the turn in which the last block of its chain was new.
        last_interval: the interval of the last block of its chain that has one.
    """
    is_shared = uses > last_turn - turn
    if is_shared or (turn == 0 and uses):
        sort = (SHARED if is_shared else HEADS) + min(uses.bit_length(), 5) - 1
        return sort * PAUSES + pause_of(interval)
    return (PRIVATE + min(last_turn.bit_length(), 4)) * PAUSES + (pause_of(last_interval) if last_turn else 0)


def pause_of(ticks: int) -> int:
    """The step of a time between two uses."""
    return (min(ticks.bit_length(), _BITS_MAX - 1) + 1) // 2


def describe_kind(kind: int) -> str:
    """What is common to the blocks of a kind, in words."""
    sort, pause = divmod(kind, PAUSES)
    if sort == PRIVATE:
        return "a block of a prompt that nobody has continued"
    first = sort - PRIVATE if sort < SHARED else (sort - SHARED) % (HEADS - SHARED) + 1
    least, most = 1 << first - 1, (1 << first) - 1  # turns or uses: numbers of so many bits
    if sort < SHARED:
        what = f"a block of a conversation of {_range(least + 1, most + 1, is_last=first == SHARED - 1)} turns"
    else:
        times = f"used again {_range(least, most, is_last=first == HEADS - SHARED)} times".replace("1 times", "once")
        what = f"a shared block, {times}" if sort < HEADS else f"a block of the beginning of a prompt, {times}"
    lowest, highest = 4**pause // 4, 4**pause - 1
    return f"{what}, the last two {_range(lowest, highest, is_last=pause == PAUSES - 1)} prompts apart"


def _range(least: int, most: int, *, is_last: bool) -> str:
    if is_last:
        return f"{least:,} or more"
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"
