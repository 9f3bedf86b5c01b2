"""The page `engines`: its columns name features and tests that exist, and a cell says what the last run showed."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.reference import engines
from scripts.reference.conformance import outcomes
from scripts.reference.engines import EngineColumn, columns, features, recorded_after, seen, word

NEVER_RUN = {"skip", "xfail"}  # marks of tests that show nothing


@pytest.mark.parametrize("column", columns(), ids=lambda column: column.name)
def test_each_line_of_a_column_is_a_feature_once(column: EngineColumn) -> None:
    lines = [*column.tests, *column.no, *column.not_run]
    assert set(lines) <= features().keys() and len(lines) == len(set(lines))
    assert [reason for reason in [*column.no.values(), *column.not_run.values()] if not reason.endswith(".")] == []


@pytest.mark.parametrize("column", columns(), ids=lambda column: column.name)
def test_each_test_of_a_column_is_there_and_may_run(column: EngineColumn) -> None:
    cases = [case for feature in column.tests for case in column.cases(feature)]
    assert cases and [case.shown for case in cases if case.marks & NEVER_RUN] == []


def test_what_is_recorded_belongs_to_the_page() -> None:
    """Of a version that is not locked any more, or of a test that went, nothing may be said: run `make engines`."""
    on_page = {column.name: {case.shown for f in features() for case in column.cases(f)} for column in columns()}
    recorded = seen()
    assert recorded.keys() <= on_page.keys()
    assert [name for name, tests in recorded.items() if not tests.keys() <= on_page[name]] == []


def test_the_page_says_of_which_commit_the_last_run_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "RUN", tmp_path / "run.json")
    assert "last run" not in engines.page().partition("| |")[0]
    (tmp_path / "run.json").write_text('{"commit": "0123abc", "date": "2026-01-31"}')
    assert "of commit `0123abc`, recorded on 2026-01-31" in engines.page().partition("| |")[0]


def column_of(*tests: str) -> EngineColumn:
    return EngineColumn("E", "1", "", {"again": tests}, {"draft": "It cannot."}, {"gpu": "None was there."})


def test_a_cell_says_what_the_run_showed() -> None:
    tests = ("vllm/test_output_equality.py::cold_and_warm", "vllm/test_output_equality.py::partial_prefix")
    column = column_of(*tests)
    first, second = (case.shown for case in column.cases("again"))
    assert word(column, "again", {first: "passed", second: "passed"}) == "yes"
    assert word(column, "again", {first: "passed", second: "failed"}) == "no"
    assert word(column, "again", {first: "passed", second: "skipped"}) == word(column, "again", {}) == "not run"
    assert [word(column, feature, {}) for feature in ("draft", "gpu", "windows")] == ["no", "not run", "–"]


def test_what_did_not_run_is_kept_of_this_version_only(tmp_path: Path) -> None:
    column = next(column for column in columns() if len(column.tests) > 1)
    first, second = (column.cases(feature)[0] for feature in list(column.tests)[:2])
    module = ".".join(first.path.with_suffix("").parts)
    case = f'<testcase classname="{module}" name="test_{first.name}"/>'
    (tmp_path / "lane.xml").write_text(f"<testsuites><testsuite>{case}</testsuite></testsuites>")
    before = {column.name: {second.shown: "passed", "tests/gone.py::test_gone": "passed"}, "E 0": {}}
    after = recorded_after(before, outcomes(tmp_path))
    assert after[column.name] == {first.shown: "passed", second.shown: "passed"} and "E 0" not in after
