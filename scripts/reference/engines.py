"""docs/reference/engines.md: engine by version by feature, as the last recorded run of the tests showed it.

The rows stand in tests/engines/features.toml, and each other file of that folder is a column. After a run of the tests
`python -m scripts.reference.engines FOLDER` takes pytest's reports (JUnit) of this folder into tests/engines/seen.json:
how each test of the page ended, for the version of the engine that is locked. A test that did not run keeps what was
recorded before, and what was recorded for another version does not count. tests/engines/run.json says of which commit
the last run was, and when it was recorded.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache
from pathlib import Path

import tomllib

from scripts.reference.conformance import ROOT, Case, case_of, outcome_of, outcomes
from scripts.reference.markdown import cell

FOLDER = ROOT / "tests" / "engines"
FEATURES = FOLDER / "features.toml"
SEEN = FOLDER / "seen.json"
RUN = FOLDER / "run.json"

HEAD = """# Engines

<!-- Made from tests/engines by `make docs-reference`. Do not edit. -->

What the last recorded run of the tests showed of each engine. The version is the locked one, which the tests start or
load.

- **yes**: every test of the cell passed.
- **no**: it is not there, or a test of the cell failed; the reason is below the table.
- **not run**: its tests did not run with this version, or nothing here can run it.
- **–**: it makes no sense for this engine, or nobody has written a test.

After `make test-all` or a part of it, `make engines` records what the run showed.

"""


@dataclass(frozen=True, slots=True)
class EngineColumn:
    """One engine in one version. Each feature is in one of the three tables at most."""

    engine: str
    version: str
    how: str  # "" if the engine runs, else what of it runs
    tests: Mapping[str, tuple[str, ...]]
    no: Mapping[str, str]  # feature → reason
    not_run: Mapping[str, str]  # feature → reason

    @property
    def name(self) -> str:
        return f"{self.engine} {self.version}"

    def cases(self, feature: str) -> list[Case]:
        """Raises LookupError for a test that does not exist."""
        return [case_of(test) for test in self.tests.get(feature, ())]


@cache
def features() -> dict[str, str]:
    """Feature → its words, in the order of the page."""
    found: dict[str, str] = tomllib.loads(FEATURES.read_text(encoding="utf-8"))["features"]
    return found


@cache
def columns() -> tuple[EngineColumn, ...]:
    """Raises KeyError for a column that lacks something, LookupError for an engine that is not locked."""
    found = []
    for path in sorted(FOLDER.glob("*.toml")):
        if path != FEATURES:
            given = tomllib.loads(path.read_text(encoding="utf-8"))
            tests = {feature: tuple(names) for feature, names in given.get("tests", {}).items()}
            version = locked_version(given["lock"], given["package"])
            found.append(
                EngineColumn(
                    given["engine"], version, given.get("how", ""), tests, given.get("no", {}), given.get("not-run", {})
                )
            )
    return tuple(sorted(found, key=lambda column: (column.engine.lower(), column.version)))


def locked_version(lock: str, package: str) -> str:
    """The version of this package in a lock. Raises LookupError."""
    match = re.search(rf"^{re.escape(package)}==([^\s;]+)", (ROOT / lock).read_text(encoding="utf-8"), re.MULTILINE)
    if match is None:
        raise LookupError(f"{lock} locks no {package}")
    return match[1]


Seen = dict[str, dict[str, str]]  # column → test → how it ended


def seen() -> Seen:
    found: Seen = json.loads(SEEN.read_text(encoding="utf-8")) if SEEN.exists() else {}
    return found


def word(column: EngineColumn, feature: str, ended: Mapping[str, str]) -> str:
    """What stands in the cell. `ended`: test → passed, skipped or failed."""
    if feature in column.no:
        return "no"
    if feature in column.not_run:
        return "not run"
    found = {ended.get(case.shown, "") for case in column.cases(feature)}
    if not found:
        return "–"
    return "no" if "failed" in found else "yes" if found == {"passed"} else "not run"


def page() -> str:
    """Raises LookupError for a test that does not exist."""
    recorded, shown = seen(), columns()
    names = [f"{column.name}{f', {column.how}' if column.how else ''}" for column in shown]
    lines = [f"| | {' | '.join(names)} |", f"|---|{'---|' * len(shown)}"]
    for feature, words in features().items():
        cells = [word(column, feature, recorded.get(column.name, {})) for column in shown]
        lines.append(f"| {cell(words)} | {' | '.join(cells)} |")
    return HEAD + last_run() + "\n".join([*lines, "", *_reasons(recorded), *_shown_by()])


def last_run() -> str:
    """Which commit the last recorded run was of, in words; nothing if that is not known."""
    if not RUN.exists():
        return ""
    run = json.loads(RUN.read_text(encoding="utf-8"))
    of = f"The last run was of commit `{run['commit']}`, recorded on {run['date']}."
    return f"{of} A test that did not run then keeps\nwhat an earlier run showed.\n\n"


def _reasons(recorded: Seen) -> list[str]:
    lines = ["## Why not", "", "| engine | what | why |", "|---|---|---|"]
    for column in columns():
        for feature, words in features().items():
            reason = column.no.get(feature) or column.not_run.get(feature)
            ended = recorded.get(column.name, {})
            broken = [case.shown for case in column.cases(feature) if ended.get(case.shown) == "failed"]
            if broken:
                reason = " ".join(f"`{test}` failed." for test in broken)
            if reason:
                lines.append(f"| {column.name} | {cell(words)} | {cell(reason)} |")
    return [*lines, ""]


def _shown_by() -> list[str]:
    lines = ["## Which tests show it", "", "| engine | what | tests |", "|---|---|---|"]
    for column in columns():
        for feature, words in features().items():
            tests = " ".join(f"`{case.shown}`" for case in column.cases(feature))
            if tests:
                lines.append(f"| {column.name} | {cell(words)} | {tests} |")
    return [*lines, ""]


PAGES = {"engines.md": page}


# -- after a run of the tests ----


def recorded_after(before: Seen, ended: dict[tuple[str, str], set[str]]) -> Seen:
    """What is known now: the tests that ran, and the others as they were. Columns and tests that went are left out."""
    after: Seen = {}
    for column in columns():
        known = before.get(column.name, {})
        cases = {case.shown: case for feature in features() for case in column.cases(feature)}
        found = {shown: _worst(outcome_of(case, ended)) or known.get(shown, "") for shown, case in cases.items()}
        after[column.name] = {shown: how for shown, how in sorted(found.items()) if how}
    return after


def _worst(found: set[str]) -> str:
    return next((how for how in ("failed", "skipped", "passed") if how in found), "")


def commit_now() -> str:
    """The commit of the tree, with a mark if the tree has changes."""
    asked = ["git", "describe", "--always", "--exclude=*", "--dirty=, changed"]
    return subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description="Record what a run of the tests showed of each engine.")
    parser.add_argument("folder", type=Path, help="with reports as `pytest --junitxml` writes them")
    options = parser.parse_args()
    after = recorded_after(seen(), outcomes(options.folder))
    run = {"commit": commit_now(), "date": datetime.now(timezone.utc).date().isoformat()}
    SEEN.write_text(json.dumps(after, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    RUN.write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
    for column in columns():
        cells = [word(column, feature, after[column.name]) for feature in features()]
        print(f"{column.name}: {cells.count('yes')} yes, {cells.count('no')} no, {cells.count('not run')} not run")
    return 0


if __name__ == "__main__":
    sys.exit(main())
