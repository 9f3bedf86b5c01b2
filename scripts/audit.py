"""audit.py [--strict] FILE...: check that locked packages are pinned, hashed, recent and without known advisories.

The first three are checked here, from the files alone. For the last one, pip-audit asks PyPI's advisory service, then
OSV. A mirror may answer and know almost none of the packages: such an answer does not count. Without an answer the
audit says so and passes. With --strict, which is for releases, it fails.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import tomllib
from packaging.version import Version

FLOORS = Path(__file__).parent.parent / "requirements/floors.toml"
SERVICES = ("pypi", "osv")
KNOWN_SHARE_MIN = 0.8  # Of the packages; no service knows local builds and renamed ones. With fewer it is no answer.
ASK_SECONDS = 120  # for one service; it takes seconds when it answers at all
_LINE = re.compile(r"(?P<name>[A-Za-z0-9_.-]+)==(?P<version>\S+) --hash=sha256:[0-9a-f]{64}")


class NoAnswer(Exception):
    """No advisory service gave a useful answer. The text says why."""


def locked(path: Path) -> tuple[dict[str, Version], list[str]]:
    """Read a lock file. Returns the version of each package, and what is wrong with the lines."""
    versions: dict[str, Version] = {}
    problems: list[str] = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None:
            problems.append(f"{path}:{number}: not NAME==VERSION with one sha256: {line[:80]}")
            continue
        versions[match["name"].lower().replace("_", "-")] = Version(match["version"])
    if not versions:
        problems.append(f"{path}: locks nothing")
    return versions, problems


def below_floors(versions: dict[str, Version], floors: dict[str, dict[str, str]]) -> list[str]:
    return [
        f"{name} {versions[name]} is below {floor['at_least']} ({floor['because']})"
        for name, floor in sorted(floors.items())
        if name in versions and versions[name] < Version(floor["at_least"])
    ]


def advisories(answer: dict[str, Any]) -> list[str]:
    """The advisories in pip-audit's JSON. Raises NoAnswer when its service knows too few of the packages."""
    rows = answer["dependencies"]
    known = [row for row in rows if "skip_reason" not in row]
    if len(known) < KNOWN_SHARE_MIN * len(rows):
        raise NoAnswer(f"the service knows {len(known)} of {len(rows)} packages")
    return [
        f"{row['name']} {row['version']}: {found['id']}, fixed in {', '.join(found['fix_versions']) or 'none yet'}"
        for row in known
        for found in row["vulns"]
    ]


def ask(lines: list[str], service: str) -> dict[str, Any]:
    """Ask one service about these packages. Blocks for at most ASK_SECONDS. Raises NoAnswer."""
    command = [sys.executable, "-m", "pip_audit", "--disable-pip", "--require-hashes", "--format", "json"]
    command += ["--vulnerability-service", service, "--progress-spinner", "off", "--timeout", "10", "--requirement"]
    try:
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write("\n".join(lines))
            file.flush()
            done = subprocess.run([*command, file.name], capture_output=True, text=True, timeout=ASK_SECONDS)
        answer: dict[str, Any] = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"{service} did not answer within {ASK_SECONDS} s") from None
    except ValueError:
        said = done.stderr.strip().splitlines() or ["no answer"]
        raise NoAnswer(f"{service}: {said[-1][:120]}") from None
    return answer


def known_advisories(lines: list[str]) -> list[str]:
    """Ask the services in turn until one answers. Raises NoAnswer when none does."""
    reasons = []
    for service in SERVICES:
        try:
            return [found for batch in batches(lines) for found in advisories(ask(batch, service))]
        except NoAnswer as reason:
            reasons.append(str(reason))
    raise NoAnswer("; ".join(reasons))


def batches(lines: list[str]) -> list[list[str]]:
    """Divide the lines so that no list names a package twice, because pip-audit takes each name once."""
    made: list[dict[str, str]] = []
    for line in lines:
        name = line.partition("==")[0].lower().replace("_", "-")
        free = next((batch for batch in made if name not in batch), None)
        if free is None:
            made.append(free := {})
        free[name] = line
    return [list(batch.values()) for batch in made]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--strict", action="store_true", help="fail when no advisory service can be reached")
    parser.add_argument("--offline", action="store_true", help="ask nobody")
    options = parser.parse_args(arguments)
    floors = tomllib.loads(FLOORS.read_text())
    problems: list[str] = []
    lines: dict[str, None] = {}  # a package that several files lock is asked about once
    for path in options.files:
        versions, wrong = locked(path)
        problems += wrong + [f"{path}: {text}" for text in below_floors(versions, floors)]
        lines |= dict.fromkeys(line for line in path.read_text().splitlines() if _LINE.fullmatch(line))
    said = "advisories were not asked for"
    if not options.offline:
        try:
            problems += known_advisories(list(lines))
            said = "no advisory is known"
        except NoAnswer as reason:
            said = f"whether there are ADVISORIES IS NOT KNOWN: {reason}"
            problems += ["no advisory service answered, and --strict was given"] if options.strict else []
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    print(f"{len(lines)} packages{'' if problems else ' are pinned, hashed and above their floors'}; {said}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
