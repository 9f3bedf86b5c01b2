"""Habits of the project hold: links lead somewhere, hooks and workflows call what is there, `make help` lists all."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from scripts.check_commit_message import SUBJECT_CHARS_MAX, problems
from scripts.check_links import broken_links, pages

ROOT = Path(__file__).resolve().parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z][a-z-]*):(?!=)", MAKEFILE, re.MULTILINE))


def test_every_link_of_every_page_leads_somewhere() -> None:
    assert not broken_links(pages(ROOT))


@pytest.mark.parametrize(
    "link", ["[a](gone.md)", "[a](#no-such-heading)", "[a](other.md#gone)", "![a](gone.png)", "[a]: gone.md"]
)
def test_a_broken_link_is_found_with_its_line(tmp_path: Path, link: str) -> None:
    page = tmp_path / "page.md"
    (tmp_path / "other.md").write_text("# There\n")
    page.write_text(f"# One\n\n[fine](other.md#there) and [here](#one)\n\n{link}\n")
    (found,) = broken_links([page])
    assert found.startswith(f"{page}:5: ")


def test_headings_have_the_names_that_github_gives_them(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# What `up` does, and [why](https://example.com)\n## Twice\n## Twice\n```\n# no heading\n[no](link)\n```\n"
        "[a](#what-up-does-and-why) [b](#twice-1) [c](https://example.com/gone#x)\n"
    )
    assert broken_links([page]) == []


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("", "there is no subject"),
        ("# only a comment\n", "there is no subject"),
        ("x" * (SUBJECT_CHARS_MAX + 1), "has 73 characters"),
        ("Subject\nbody at once", "second line is not blank"),
        ("x" * SUBJECT_CHARS_MAX + "\n\nbody", None),
        ("\n# comment\nSubject\n# comment\n\nbody", None),
        ("fixup! " + "x" * SUBJECT_CHARS_MAX, None),
        (f"Merge branch '{'x' * SUBJECT_CHARS_MAX}'", None),
        ("Subject\n# ------------------------ >8 ------------------------\ndiff --git a b", None),
    ],
)
def test_a_commit_message_is_judged_by_its_first_lines(message: str, said: str | None) -> None:
    found = problems(message)
    assert len(found) == (said is not None)
    assert said is None or said in found[0]


def test_git_refuses_a_message_once_the_hook_is_installed(tmp_path: Path) -> None:
    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        who = ("-c", "user.name=a", "-c", "user.email=a@example.com")
        free = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
        return subprocess.run(["git", *who, *arguments], cwd=tmp_path, env=free, capture_output=True, text=True)

    assert git("init", "--quiet").returncode == 0
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    for _ in range(2):  # again is fine
        subprocess.run(["scripts/install-hooks.sh"], cwd=tmp_path, check=True, capture_output=True)
    refused = git("commit", "--allow-empty", "--message", "x" * 80)
    assert refused.returncode == 1 and "has 80 characters" in refused.stderr
    assert git("commit", "--allow-empty", "--message", "Short enough").returncode == 0
    (tmp_path / ".git" / "hooks" / "commit-msg").write_text("#!/bin/sh\n# somebody else's\n")
    again = subprocess.run(["scripts/install-hooks.sh"], cwd=tmp_path, check=False, capture_output=True, text=True)
    assert again.returncode == 1 and "is there already" in again.stderr


@pytest.mark.parametrize("path", sorted((ROOT / ".github/workflows").glob("*.yml")), ids=lambda path: path.name)
def test_workflows_only_call_what_everybody_can_call(path: Path) -> None:
    jobs = yaml.safe_load(path.read_text())["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert commands
    for command in commands:
        word, *rest = command.split()
        assert command == ".ci/run" or (word == "make" and set(rest) <= TARGETS)


def test_hooks_before_a_commit_call_programs_that_are_there() -> None:
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    for hook in repo["hooks"]:
        program = Path(hook["entry"].split()[0])
        found = Path(sys.executable).with_name(program.name) if program.parts[0] == ".venv" else ROOT / program
        assert os.access(found, os.X_OK), program


def test_make_help_lists_every_target_in_a_group() -> None:
    alone = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # under make, it says so
    said = subprocess.run(["make", "help"], cwd=ROOT, env=alone, capture_output=True, text=True, check=True).stdout
    (phony,) = re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    assert set(re.findall(r"^  make ([a-z-]+) +\S", said, re.MULTILINE)) == set(phony.split()) == TARGETS
    assert re.findall(r"^\w+$", said, re.MULTILINE) == ["Work", "Test", "Run", "Measure", "Release"]
    assert said.startswith("Work\n")
