"""The table of keys without its compiled loops. What a table holds is tested in tests/property/test_block_table.py."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from kvservice.core.directory import key_table


@pytest.mark.parametrize("found", [None, ModuleType("_probe")], ids=["no compiler", "older build"])
def test_loops_of_another_build_are_not_used(monkeypatch: pytest.MonkeyPatch, found: ModuleType | None) -> None:
    """Then the loops in Python do the work."""
    monkeypatch.setitem(sys.modules, "kvservice.core.directory._probe", found)  # type: ignore[arg-type]
    monkeypatch.delattr("kvservice.core.directory._probe", raising=False)
    assert key_table._native() is None
