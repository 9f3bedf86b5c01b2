"""One row of `kvservice doctor`."""

from __future__ import annotations

from dataclasses import dataclass

OK, WARNING, PROBLEM, ABSENT = "ok", "warning", "problem", "absent"


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    status: str  # ok, warning, problem or absent
    detail: str
    advice: str = ""  # what to do; for people
