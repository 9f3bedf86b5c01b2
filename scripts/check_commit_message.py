#!/usr/bin/env python3
"""Check one commit message, as git's commit-msg hook; `make hooks` installs it.

    scripts/check_commit_message.py FILE

Ends with 1 and the reasons when the subject is missing or too long, or when no blank line follows it. It needs nothing
but Python.
"""

from __future__ import annotations

import sys
from pathlib import Path

SUBJECT_CHARS_MAX = 72  # `git log --oneline` and mail show as much of it
SCISSORS = "# ------------------------ >8 ------------------------"  # `git commit -v` puts the diff below this line
AUTOSQUASH = ("fixup! ", "squash! ", "amend! ")  # git puts them before the subject of another commit


def problems(text: str) -> list[str]:
    """What is wrong with this message, as git hands it to the hook. Empty when it is good."""
    kept = text.partition(SCISSORS)[0]
    lines = [line.rstrip() for line in kept.splitlines() if not line.startswith("#")]
    while lines and not lines[0]:
        del lines[0]
    if not lines:
        return ["there is no subject: say in the first line what is different"]
    subject = lines[0]
    for mark in AUTOSQUASH:
        subject = subject.removeprefix(mark)
    found = []
    if len(subject) > SUBJECT_CHARS_MAX and not subject.startswith("Merge "):  # git writes that one
        found.append(
            f"the subject has {len(subject)} characters, at most {SUBJECT_CHARS_MAX}: move the rest to the body"
        )
    if len(lines) > 1 and lines[1]:
        found.append("the second line is not blank: git takes it for a part of the subject")
    return found


def main(path: str) -> int:
    found = problems(Path(path).read_text(encoding="utf-8", errors="replace"))
    for problem in found:
        print(f"commit message: {problem}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
