"""Rules of tier.mark_objects: marks of clears in a store, by the tier that keeps them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvservice.core.block.marks import MARK_SECONDS, MARKS_MAX, Mark, MarkKind
from kvservice.errors import TierError
from kvservice.testing.builders import make_chain
from kvservice.tier.base import KeepsMarks
from kvservice.tier.objects import ObjectTier

NOW = float(int(time.time()))
ACME = Mark(MarkKind.TENANT, NOW - 20.0, "acme")
PROMPT = Mark(MarkKind.PROMPT, NOW - 10.5, keys=tuple(make_chain(3)))

Opened = Callable[..., ObjectTier]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    made: list[ObjectTier] = []

    def make(namespace: str = "a") -> ObjectTier:
        tier = ObjectTier(f"file://{tmp_path}", namespace)
        tier.start()
        made.append(tier)
        return tier

    yield make
    for tier in made:
        tier.close()


def marks_in(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "a" / "marks").iterdir())


def test_another_node_reads_what_one_has_kept(opened: Opened) -> None:
    one, other = opened(), opened()
    keeper: object = one
    assert isinstance(keeper, KeepsMarks) and one.load_marks() == ()
    one.keep_marks([ACME])
    one.keep_marks([PROMPT])
    assert other.load_marks() == (ACME, PROMPT)
    assert opened("b").load_marks() == (), "of another namespace"


def test_an_object_is_read_once(tmp_path: Path, opened: Opened) -> None:
    """A node asks now and then. Objects of marks never change, so that costs a listing."""
    one, other = opened(), opened()
    one.keep_marks([ACME])
    assert other.load_marks() == (ACME,)
    (path,) = marks_in(tmp_path)
    path.write_bytes(b"damaged since")
    one.keep_marks([PROMPT])
    assert other.load_marks() == (ACME, PROMPT)
    path.unlink()
    assert other.load_marks() == (PROMPT,)


def test_the_same_marks_are_one_object(tmp_path: Path, opened: Opened) -> None:
    for tier in (opened(), opened()):
        tier.keep_marks([ACME, PROMPT])
    (path,) = marks_in(tmp_path)
    assert path.name.startswith(f"{NOW - 10.5:.6f}-")


def test_marks_whose_time_is_over_are_removed(tmp_path: Path, opened: Opened) -> None:
    tier = opened()
    tier.keep_marks([Mark(MarkKind.EVERYTHING, NOW - MARK_SECONDS - 5.0)])
    tier.keep_marks([ACME])
    assert tier.load_marks() == (ACME,) and len(marks_in(tmp_path)) == 1


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: b"", lambda data: data + bytes(5 << 20)])
def test_a_damaged_object_counts_as_a_clear_until_then(
    tmp_path: Path, opened: Opened, damage: Callable[[bytes], bytes]
) -> None:
    tier = opened()
    tier.keep_marks([ACME])
    (path,) = marks_in(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    assert tier.load_marks() == (Mark(MarkKind.EVERYTHING, ACME.at),)


def test_what_is_one_too_many_counts_as_a_clear_until_then(tmp_path: Path, opened: Opened) -> None:
    tier = opened()
    tier.keep_marks([ACME])
    (path,) = marks_in(tmp_path)
    for number in range(MARKS_MAX):
        (path.parent / f"{NOW - 10_000.0 + number:.6f}-00000000.marks").write_bytes(path.read_bytes())
    found = tier.load_marks()
    assert found[0] == Mark(MarkKind.EVERYTHING, NOW - 10_000.0) and set(found[1:]) == {ACME}


def test_objects_of_others_are_left_alone(tmp_path: Path, opened: Opened) -> None:
    tier = opened()
    tier.keep_marks([ACME])
    (tmp_path / "a" / "marks" / "README").write_text("not ours")
    (tmp_path / "a" / "marks" / "v1").mkdir()
    assert tier.load_marks() == (ACME,) and len(marks_in(tmp_path)) == 3


def test_a_closed_tier_says_so(opened: Opened) -> None:
    tier = opened()
    tier.close()
    with pytest.raises(TierError, match="not open"):
        tier.keep_marks([ACME])
    with pytest.raises(TierError, match="not open"):
        tier.load_marks()


def test_a_store_that_refuses_says_why(tmp_path: Path, opened: Opened) -> None:
    tier = opened()
    (tmp_path / "a" / "marks").write_text("a file where the folder should be")
    with pytest.raises(TierError, match="cannot be used"):
        tier.keep_marks([ACME])


def test_a_store_that_fails_is_told_to_who_asks_alone(
    tmp_path: Path, opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    """A node asks once a minute: each time its log had an error of the tier, with a traceback."""
    tier = opened()
    (tmp_path / "a").rename(tmp_path / "aside")
    (tmp_path / "a").write_bytes(b"")  # no folder: every request fails
    with pytest.raises(TierError):
        tier.keep_marks([ACME])
    tier.close()  # all that is logged has been
    assert not [record for record in caplog.records if record.name == "kvservice.tier"]
