"""Rules of core.block.fingerprint: equal exactly when every field is, and the difference can be read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvservice.core.block.fingerprint import FIELD_CHARS_MAX, FIELDS_MAX, Fingerprint
from kvservice.errors import InvalidRequest

fields = st.dictionaries(st.text(min_size=1, max_size=5), st.text(max_size=5), min_size=1, max_size=6)


def test_order_of_fields_does_not_matter() -> None:
    one, other = Fingerprint.of({"a": 1, "b": 2}), Fingerprint.of({"b": 2, "a": 1})
    assert one == other
    assert one.digest == other.digest


@given(fields, fields)
def test_digests_are_equal_exactly_when_fields_are(one: dict[str, str], other: dict[str, str]) -> None:
    assert (Fingerprint.of(one).digest == Fingerprint.of(other).digest) == (one == other)


def test_a_namespace_is_a_field_and_the_empty_one_is_none() -> None:
    plain = Fingerprint.of({"dtype": "bfloat16"})
    assert plain.within("") == plain
    assert plain.within("a").difference(plain.within("b")) == "namespace: a here, b there"
    assert len({plain.digest, plain.within("a").digest, plain.within("b").digest}) == 3


def test_moving_a_character_between_fields_changes_the_digest() -> None:
    assert Fingerprint.of({"ab": "c"}).digest != Fingerprint.of({"a": "bc"}).digest
    assert Fingerprint.of({"a": "b", "c": "d"}).digest != Fingerprint.of({"a": "bc", "d": ""}).digest


def test_difference_names_each_field_with_both_values() -> None:
    ours = Fingerprint.of({"dtype": "bf16", "model": "m", "only": 1})
    theirs = Fingerprint.of({"dtype": "fp16", "model": "m", "new": 2})
    assert ours.difference(theirs) == (
        "dtype: bf16 here, fp16 there; new: (absent) here, 2 there; only: 1 here, (absent) there"
    )


@given(fields, fields)
def test_difference_is_empty_exactly_for_equal_fingerprints(one: dict[str, str], other: dict[str, str]) -> None:
    assert (Fingerprint.of(one).difference(Fingerprint.of(other)) == "") == (one == other)


def test_digest_is_32_bytes() -> None:
    assert len(Fingerprint.of({"a": "b"}).digest) == 32


@pytest.mark.parametrize(
    "bad",
    [
        {},
        {"": "value"},
        {"name": "v" * (FIELD_CHARS_MAX + 1)},
        {"n" * (FIELD_CHARS_MAX + 1): "value"},
        {str(number): "" for number in range(FIELDS_MAX + 1)},
    ],
)
def test_empty_or_oversized_fingerprints_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest):
        Fingerprint.of(bad)


def test_the_largest_allowed_fingerprint_is_accepted() -> None:
    assert Fingerprint.of({str(number): "v" * FIELD_CHARS_MAX for number in range(FIELDS_MAX)}).digest


def test_a_few_differences_are_told_and_how_many_there_are() -> None:
    """The models have little in common."""
    one, other = (Fingerprint.of({f"field{number:02}": f"{name} {number}" for number in range(30)}) for name in "ab")
    told = one.difference(other)
    assert told.startswith("field00: a 0 here, b 0 there; field01")
    assert told.endswith("; and 18 more fields")
    assert told.count(" here, ") == 12
