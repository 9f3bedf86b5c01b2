"""However tests are marked, a run in lanes runs each of them once."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

from tests.lanes import LANES

TESTS = Path(__file__).resolve().parents[1]
DECIDING = ("ray", "vllm", "sglang", "netns", "sim")  # the markers that the lanes' expressions name
MARKER = re.compile(rf"pytest\.mark\.({'|'.join(DECIDING)})\b")
WHOLE_FILE = re.compile(r"^pytestmark = .*?(?=^\S|\Z)", re.MULTILINE | re.DOTALL)


def test_lanes_ask_for_the_deciding_markers_only() -> None:
    named = {word for lane in LANES for word in re.findall(r"[a-z_]+", lane.markers)} - {"not", "and", "or"}
    assert named == set(DECIDING)


@pytest.mark.parametrize("path", sorted(TESTS.rglob("test_*.py")), ids=lambda path: str(path.relative_to(TESTS)))
def test_every_test_is_in_exactly_one_lane(path: Path) -> None:
    """Also one whose markers are any part of those that its file uses."""
    source = path.read_text()
    always = set(MARKER.findall("".join(WHOLE_FILE.findall(source))))
    sometimes = sorted(set(MARKER.findall(source)) - always)
    folder = path.relative_to(TESTS).parts[0]
    for count in range(len(sometimes) + 1):
        for some in itertools.combinations(sometimes, count):
            marked = always | set(some)
            lanes = [lane.name for lane in LANES if folder in lane.folders and wants(lane.markers, marked)]
            assert len(lanes) == 1, f"a test of {folder} marked {sorted(marked)} is in the lanes {lanes}"


def wants(expression: str, marked: set[str]) -> bool:
    return bool(Expression.compile(expression).evaluate(lambda name: name in marked))
