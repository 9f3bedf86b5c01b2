"""The page `conformance`: each mechanism has a status, and a test that exists and can run, or a reason."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from scripts.reference.conformance import Mechanism, Status, case_of, cases, not_shown, outcomes, subjects
from tests.conformance.plants import PLANTS, Plant

ROWS = [row for subject in subjects() for row in subject.mechanisms]
MECHANISMS_MIN = 230  # of the public projects that this one is held to
NEVER_RUN = {"skip", "xfail", "gpu"}  # marks of tests that show nothing in a build without a GPU


def test_no_mechanism_is_left_out() -> None:
    assert len(ROWS) >= MECHANISMS_MIN
    for subject in subjects():
        counted = Counter(row.what for row in subject.mechanisms)
        assert [what for what, count in counted.items() if count > 1] == [], subject.title


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.what)
def test_a_mechanism_that_is_here_has_tests_that_run(row: Mechanism) -> None:
    cases = [case_of(test) for test in row.tests]
    if row.status is Status.YES:
        assert cases and not row.why
        assert [case.shown for case in cases if case.marks & NEVER_RUN] == []


@pytest.mark.parametrize("row", [row for row in ROWS if row.status is not Status.YES], ids=lambda row: row.what)
def test_what_is_missing_is_said_in_one_sentence(row: Mechanism) -> None:
    assert row.why.endswith(".") and ". " not in row.why


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.scenario)
def test_a_plant_changes_one_place_of_the_product(plant: Plant) -> None:
    assert plant.mutant().path.parts[0] == "kvservice"
    assert case_of(plant.scenario).path.name in plant.scenario


def test_each_example_has_a_plant_that_it_must_notice() -> None:
    planted = {case_of(plant.scenario) for plant in PLANTS}
    files = {case.path for case in planted if case.path.parts[1] == "conformance"}
    examples = {case for found in cases().values() for case in found if case.path in files}
    assert {case.shown for case in examples - planted if "xfail" not in case.marks} == set()


REPORT = """<testsuites><testsuite>{}</testsuite></testsuites>"""


def report(folder: Path, *, without: str = "", ended: str = "") -> None:
    """A report in which every test of a row that says yes passed, but for this one."""
    found = []
    for row in ROWS:
        for case in map(case_of, row.tests if row.status is Status.YES else ()):
            module = ".".join(case.path.with_suffix("").parts)
            if module.startswith("kvservice"):
                module = "tests.contract.test_pool_ports.TestPool"
            name = case.name if case.name[0].isupper() else f"test_{case.name}"
            place, name = (f"{module}.{name}", "runTest") if name[0] == "T" else (module, name)
            if case.name != without:
                found.append(f'<testcase classname="{place}" name="{name}[a-b]"/>')
            elif ended:
                found.append(f'<testcase classname="{place}" name="{name}">{ended}</testcase>')
    (folder / "lane.xml").write_text(REPORT.format("".join(found)))


@pytest.mark.parametrize(
    ("ended", "says"), [("", "did not run"), ("<skipped/>", "was skipped"), ("<failure/>", "failed")]
)
def test_a_run_that_does_not_show_a_row_is_noticed(tmp_path: Path, ended: str, says: str) -> None:
    report(tmp_path)
    assert not_shown(outcomes(tmp_path)) == []
    one = "simple_cpu_offload_walk_through"
    report(tmp_path, without=one, ended=ended)
    problems = not_shown(outcomes(tmp_path))
    assert problems and all(one in problem and says in problem for problem in problems)


def test_tests_that_were_left_out_by_their_mark_may_be_missing(tmp_path: Path) -> None:
    slow = next(case for row in ROWS for case in map(case_of, row.tests) if "vllm" in case.marks)
    report(tmp_path, without=slow.name)
    assert not_shown(outcomes(tmp_path))
    assert not_shown(outcomes(tmp_path), ["vllm"]) == []
