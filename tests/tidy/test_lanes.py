"""However tests are marked, a run in lanes runs each of them once; what fails on a busy machine only is run again."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

from tests.lanes import LANES, Lane, may_run_again, steady

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


@pytest.mark.parametrize(
    ("test", "may"),
    [
        ("tests/unit/cli/test_cli.py::test_logs_are_found_where_they_are_written", True),
        ("tests/integration/test_mirror.py::test_mirror_follows_a_lookup_partition_that_moves[a_byte]", True),
        ("tests/property/test_directory.py::TestDirectory::runTest", False),  # it computes
        ("tests/integration/test_shard_failures.py::test_no_byte_is_wrong_while_shards_die_and_return", False),
        ("tests/vllm/test_two_engines.py::test_tokens_are_equal_after_a_remote_hit", False),
        ("tests/integration/test_mirror.py", False),  # could not be collected
    ],
)
def test_what_time_cannot_explain_is_not_run_again(test: str, may: bool) -> None:
    assert may_run_again(test) is may


@pytest.mark.parametrize(
    ("failing", "name", "code", "unsteady"),
    [
        ("flag.exists()", "it_waits", 0, ["tests/unit/test_it.py::test_it_waits"]),
        ("False", "it_waits", 1, []),
        ("flag.exists()", "no_byte_is_wrong", 1, []),
    ],
    ids=["failed_once", "fails", "of_the_promise"],
)
def test_what_failed_is_run_again(
    failing: str, name: str, code: int, unsteady: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "tests" / "unit"
    folder.mkdir(parents=True)
    folder.joinpath("test_it.py").write_text(
        f"import pathlib\n\ndef test_{name}():\n    flag = pathlib.Path({str(tmp_path / 'flag')!r})\n"
        f"    passes = {failing}\n    flag.touch()\n    assert passes\n\ndef test_that_passes():\n    pass\n"
    )
    lane = Lane("units", "not slow", ("unit",))
    monkeypatch.setattr("tests.lanes.ROOT", tmp_path)
    monkeypatch.setattr("tests.lanes.REPORTS", tmp_path / "reports")
    monkeypatch.setattr("tests.lanes.LANES", (lane,))
    codes = {lane.name: lane.start([], dict(os.environ), None).wait()}
    assert codes == {"units": pytest.ExitCode.TESTS_FAILED}
    assert steady(codes, [], dict(os.environ)) == unsteady
    assert codes == {"units": code}


def wants(expression: str, marked: set[str]) -> bool:
    return bool(Expression.compile(expression).evaluate(lambda name: name in marked))
