"""Why the default policy let a block go, in a number that the eviction history keeps, and in words. Pure."""

from __future__ import annotations

from kvservice.core.store.kinds import KINDS, describe_kind
from kvservice.core.store.worths import AGE_STARTS, AGES

NOT_BY_WORTH = 0  # another rule chose, or another policy
REASONS = 1 + 2 * KINDS * AGES  # numbers: none, and for primary and secondary copies one for each kind and age
assert REASONS <= 1 << 16, "the eviction history keeps a reason in two bytes"


def reason_of(kind: int, age: int, *, is_secondary: bool) -> int:
    """The reason why a block of this kind and age was worth least."""
    return 1 + (is_secondary * KINDS + kind) * AGES + age


def describe_reason(reason: int) -> str:
    """A reason in words; "" for `NOT_BY_WORTH`."""
    if reason == NOT_BY_WORTH:
        return ""
    kind_and_copy, age = divmod(reason - 1, AGES)
    is_secondary, kind = divmod(kind_and_copy, KINDS)
    among = "of the copies of blocks that another node has" if is_secondary else "of the blocks that could go"
    return f"{among} it was expected to bring the fewest hits: {describe_kind(kind)}, not used for {_prompts(age)}"


def _prompts(age: int) -> str:
    first = AGE_STARTS[age]
    if age + 1 == AGES:
        return f"{first:,} prompts or more"
    last = AGE_STARTS[age + 1] - 1
    if first == last:
        return f"{first} prompt" if first == 1 else f"{first} prompts"
    return f"{first:,} to {last:,} prompts"
