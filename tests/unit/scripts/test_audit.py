"""The audit of the locked packages: it fails for what is wrong, and takes no silence for an answer."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts/audit.py"
HASH = "--hash=sha256:" + "ab" * 32
ROW = {"name": "jinja2", "version": "3.1.6", "vulns": []}


@pytest.fixture(scope="module")
def audit() -> Any:
    spec = importlib.util.spec_from_file_location("audit", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "line, complaint",
    [
        (f"jinja2==3.1.6 {HASH}", None),
        (f"jinja2==3.1.5 {HASH}", "below 3.1.6"),
        ("jinja2==3.1.6", "not NAME==VERSION"),
        (f"jinja2>=3.1.6 {HASH}", "not NAME==VERSION"),
        ("# nothing", "locks nothing"),
    ],
)
def test_lines_are_pinned_hashed_and_above_their_floors(
    audit: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, complaint: str | None
) -> None:
    lock = tmp_path / "some.lock"
    lock.write_text(line + "\n")
    assert audit.main(["--offline", str(lock)]) == (0 if complaint is None else 1)
    assert (complaint or "") in capsys.readouterr().err


def test_an_advisory_fails_the_audit(
    audit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Silence fails only a strict one."""
    lock = tmp_path / "some.lock"
    lock.write_text(f"jinja2==3.1.6 {HASH}\n")
    answer: dict[str, Any] = {"dependencies": [ROW]}
    monkeypatch.setattr(audit, "ask", lambda lines, service: answer)
    assert audit.main(["--strict", str(lock)]) == 0
    answer["dependencies"] = [{**ROW, "vulns": [{"id": "CVE-1", "fix_versions": ["4"]}]}]
    assert audit.main([str(lock)]) == 1
    assert "jinja2 3.1.6: CVE-1, fixed in 4" in capsys.readouterr().err
    answer["dependencies"] = [{"name": "jinja2", "skip_reason": "not found"}]
    assert audit.main([str(lock)]) == 0
    assert "NOT KNOWN" in capsys.readouterr().out
    assert audit.main(["--strict", str(lock)]) == 1


def test_versions_of_two_locks_are_asked_about_apart(audit: Any) -> None:
    assert audit.batches(["a==1 x", "b==1 x", "a==2 x", "a==3 x"]) == [["a==1 x", "b==1 x"], ["a==2 x"], ["a==3 x"]]
