"""Rules of core.block.marks and freshness: what a mark covers, how long it is kept, and files that are damaged."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvservice.core.block.keys import KEYS_PER_REQUEST_MAX
from kvservice.core.block.marks import (
    CLOCK_SKEW_SECONDS,
    MARK_SECONDS,
    MARKED_KEYS_MAX,
    MARKS_MAX,
    BlockScopes,
    Mark,
    MarkKind,
    Marks,
    check_mark,
    covers,
    pack_marks,
    unpack_marks,
)
from kvservice.core.store.freshness import NAMES_MAX, Freshness
from kvservice.errors import InvalidRequest
from kvservice.testing.builders import make_chain
from kvservice.units import NAME_CHARS_MAX, BlockKey

A, B = make_chain(2)
KNOWN = BlockScopes(A, "acme", frozenset({("prod", "llama")}))
UNKNOWN = BlockScopes(A, "", None)
PRINT = b"f" * 16


@pytest.mark.parametrize(
    ("mark", "known", "unknown"),
    [
        (Mark(MarkKind.EVERYTHING, 1.0), True, True),
        (Mark(MarkKind.TENANT, 1.0, "acme"), True, True),
        (Mark(MarkKind.TENANT, 1.0, "other"), False, True),
        (Mark(MarkKind.MODEL, 1.0, "llama"), True, True),
        (Mark(MarkKind.MODEL, 1.0, "qwen"), False, True),
        (Mark(MarkKind.NAMESPACE, 1.0, "prod"), True, True),
        (Mark(MarkKind.NAMESPACE, 1.0, ""), False, True),
        (Mark(MarkKind.PROMPT, 1.0, keys=(A, B)), True, True),
        (Mark(MarkKind.PROMPT, 1.0, keys=(B,)), False, False),
    ],
)
def test_a_mark_covers_what_may_be_meant(mark: Mark, known: bool, unknown: bool) -> None:
    """The table of a shard's marks says the same as the mark itself."""
    marks = Marks()
    marks.add([mark])
    for block, wanted in ((KNOWN, known), (UNKNOWN, unknown)):
        assert covers(mark, block) == wanted == (marks.cleared_at(block) == 1.0)


def test_a_clear_of_a_namespace_reaches_those_below_it() -> None:
    """An engine of SGLang has its states, and pages that one rank can read, in namespaces below its own."""
    below = BlockScopes(A, "acme", frozenset({("prod/mamba/R0/2", "llama")}))
    for name, is_covered in {"prod": True, "prod/mamba": True, "prod/mam": False, "mamba": False, "": False}.items():
        marks, mark = Marks(), Mark(MarkKind.NAMESPACE, 1.0, name)
        marks.add([mark])
        assert covers(mark, below) == is_covered == (marks.cleared_at(below) == 1.0)


def test_the_latest_of_equal_marks_counts() -> None:
    marks = Marks()
    early, late = Mark(MarkKind.MODEL, 1.0, "llama"), Mark(MarkKind.MODEL, 2.0, "llama")
    marks.add([early, late, early])
    assert (marks.all(), len(marks), marks.cleared_at(KNOWN)) == ((late,), 1, 2.0)


def test_an_old_mark_is_forgotten() -> None:
    marks = Marks()
    marks.add([Mark(MarkKind.MODEL, 10.0, "llama"), Mark(MarkKind.TENANT, 20.0, "acme")])
    marks.expire(10.0 + MARK_SECONDS - 1)
    assert len(marks) == 2
    marks.expire(10.0 + MARK_SECONDS)
    assert marks.cleared_at(KNOWN) == 20.0 and len(marks) == 1


def test_with_too_many_marks_the_oldest_cover_everything() -> None:
    marks = Marks()
    marks.add([Mark(MarkKind.EVERYTHING, 0.5)])
    marks.add(Mark(MarkKind.MODEL, float(number), str(number)) for number in range(1, MARKS_MAX + 10))
    assert len(marks) == MARKS_MAX
    assert marks.all()[0] == Mark(MarkKind.EVERYTHING, 10.0)
    assert marks.cleared_at(KNOWN) == 10.0


def test_with_too_many_keys_the_oldest_cover_everything() -> None:
    marks = Marks()
    keys = [BlockKey(number.to_bytes(16, "big")) for number in range(MARKED_KEYS_MAX + 1)]
    parts = [keys[start : start + 8000] for start in range(0, len(keys), 8000)]
    marks.add(Mark(MarkKind.PROMPT, 1.0 + number, keys=tuple(part)) for number, part in enumerate(parts))
    assert (
        marks.all()[0] == Mark(MarkKind.EVERYTHING, 1.0) and marks.cleared_at(BlockScopes(keys[8000], "", None)) == 2.0
    )


@pytest.mark.parametrize(
    "mark",
    [
        Mark(MarkKind.MODEL, float("nan"), "x"),
        Mark(MarkKind.MODEL, -1.0, "x"),
        Mark(MarkKind.MODEL, 1.0),
        Mark(MarkKind.TENANT, 1.0),
        Mark(MarkKind.MODEL, 1.0, "x" * (NAME_CHARS_MAX + 1)),
        Mark(MarkKind.PROMPT, 1.0),
        Mark(MarkKind.PROMPT, 1.0, "name", keys=(A,)),
        Mark(MarkKind.PROMPT, 1.0, keys=(BlockKey(b"short"),)),
        Mark(MarkKind.PROMPT, 1.0, keys=(A,) * (KEYS_PER_REQUEST_MAX + 1)),
        Mark(MarkKind.MODEL, 1.0, "x", keys=(A,)),
        Mark(MarkKind.EVERYTHING, 1.0, "x"),
    ],
)
def test_a_mark_that_makes_no_sense_is_refused(mark: Mark) -> None:
    with pytest.raises(InvalidRequest):
        check_mark(mark)


marks_of_a_file = st.lists(
    st.one_of(
        st.builds(
            Mark,
            st.sampled_from([MarkKind.TENANT, MarkKind.MODEL]),
            st.floats(0, 1e10),
            st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20),
        ),
        st.builds(
            lambda at, keys: Mark(MarkKind.PROMPT, at, keys=tuple(map(BlockKey, keys))),
            st.floats(0, 1e10),
            st.lists(st.binary(min_size=16, max_size=16), min_size=1, max_size=4),
        ),
    ),
    max_size=5,
)


@given(marks_of_a_file)
def test_a_file_of_marks_is_read_as_it_was_written(marks: list[Mark]) -> None:
    assert unpack_marks(pack_marks(marks)) == tuple(marks)


@given(marks_of_a_file, st.integers(0, 1 << 16), st.integers(1, 255))
def test_a_damaged_file_is_no_file(marks: list[Mark], place: int, change: int) -> None:
    data = bytearray(pack_marks(marks))
    data[place % len(data)] ^= change
    assert unpack_marks(bytes(data)) is None
    assert unpack_marks(bytes(data[: place % len(data)])) is None


@pytest.mark.parametrize(
    "body",
    [
        b"OTHERKIN" + bytes([1, 0, 0, 0, 0, 0, 0, 0]),
        b"KVSMARKS" + bytes([9, 0, 0, 0, 0, 0, 0, 0]),
        b"KVSMARKS" + bytes([1, 0, 0, 0, 0, 9, 0, 0]),
        b"KVSMARKS" + bytes([1, 0, 0, 0, 1, 0, 0, 0]),
        b"KVSMARKS" + bytes([1, 0, 0, 0, 1, 0, 0, 0]) + bytes([9]) + bytes(14),
        b"KVSMARKS" + bytes([1, 0, 0, 0, 1, 0, 0, 0]) + bytes([3]) + bytes(8) + bytes([1, 0, 255]) + bytes(4),
        b"KVSMARKS" + bytes([1, 0, 0, 0, 1, 0, 0, 0]) + bytes([3]) + bytes(14),
        b"KVSMARKS" + bytes([1, 0, 0, 0, 0, 0, 0, 0, 0]),
        b"KVSMARKS" + bytes([1, 0, 0, 0, 1, 0, 0, 0]) + bytes([4]) + bytes(10) + bytes([9, 0, 0, 0]),
    ],
)
def test_a_whole_file_with_something_else_in_it_is_refused(body: bytes) -> None:
    assert unpack_marks(body + zlib.crc32(body).to_bytes(4, "little")) is None


# -- freshness --


def test_a_block_from_before_a_clear_is_not_accepted() -> None:
    """A few seconds more: clocks differ."""
    freshness = Freshness(wall_offset=1000.0)
    freshness.learn({PRINT: frozenset({("prod", "llama")})})
    block = freshness.scopes(A, "acme", PRINT)
    assert freshness.accepts(block, 0.0, 5.0) and not freshness.not_before(block, 5.0)
    freshness.clear([Mark(MarkKind.MODEL, 1005.0, "llama")], 5.0)
    after = 1005.0 + CLOCK_SKEW_SECONDS
    assert freshness.not_before(block, 100.0) == after
    assert [freshness.accepts(block, at, 100.0) for at in (0.0, 1005.0, after - 0.1, after)] == [False] * 3 + [True]
    assert not freshness.accepts(block, 1101.0 + CLOCK_SKEW_SECONDS, 100.0), "its clock is wrong"
    assert freshness.accepts(freshness.scopes(A, "acme", b"g" * 16), 0.0, 100.0) is False, "its model is not known"


def test_what_was_under_way_at_a_clear_is_known_by_its_beginning() -> None:
    freshness = Freshness()
    block = freshness.scopes(A, "acme", PRINT)
    assert not freshness.was_cleared(block, 0.0)
    freshness.clear([Mark(MarkKind.TENANT, 7.0, "acme")], 50.0)
    assert [freshness.was_cleared(block, since) for since in (49.0, 50.0, 51.0)] == [True, True, False]


def test_a_fingerprint_of_too_many_names_goes_with_every_clear() -> None:
    """Somebody names each of a thousand runs."""
    freshness = Freshness()
    for number in range(NAMES_MAX):
        freshness.learn({PRINT: frozenset({("", f"run {number}")})})
    assert freshness.scopes(A, "acme", PRINT).names is not None
    for number in range(NAMES_MAX, 1000):
        freshness.learn({PRINT: frozenset({("", f"run {number}")})})
    assert len(freshness.names()[PRINT]) == NAMES_MAX + 1
    freshness.clear([Mark(MarkKind.MODEL, 1.0, "run 999")], 1.0)
    assert freshness.not_before(freshness.scopes(A, "acme", PRINT), 1.0)
    freshness.learn(freshness.names())
    assert freshness.scopes(A, "acme", PRINT).names is None, "also after a restart"


def test_two_models_with_one_fingerprint_go_together() -> None:
    """Their blocks have the same names."""
    freshness = Freshness()
    freshness.learn({PRINT: frozenset({("prod", "llama")})})
    freshness.learn({PRINT: frozenset({("test", "llama")})})
    freshness.clear([Mark(MarkKind.NAMESPACE, 7.0, "test")], 50.0)
    assert freshness.marks.cleared_at(freshness.scopes(A, "", PRINT)) == 7.0


def test_the_age_limit_counts_like_a_clear() -> None:
    freshness = Freshness(max_age_seconds=60.0, wall_offset=1000.0)
    block = freshness.scopes(A, "", b"")
    assert [freshness.accepts(block, at, 100.0) for at in (0.0, 1039.0, 1040.0)] == [False, False, True]
