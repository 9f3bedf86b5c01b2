"""The table of keys: without its compiled loops, and nearly full. Its contents: tests/property/test_block_table.py."""

from __future__ import annotations

import sys
from random import Random
from types import ModuleType

import pytest

from kvservice.core.block.keys import pack_keys
from kvservice.core.directory import key_table
from kvservice.core.directory.holder_table import HolderTable
from kvservice.core.directory.key_table import BlockTable, table_bytes
from kvservice.units import BlockKey


@pytest.mark.parametrize("found", [None, ModuleType("_probe")], ids=["no compiler", "older build"])
def test_loops_of_another_build_are_not_used(monkeypatch: pytest.MonkeyPatch, found: ModuleType | None) -> None:
    """Then the loops in Python do the work."""
    monkeypatch.setitem(sys.modules, "kvservice.core.directory._probe", found)  # type: ignore[arg-type]
    monkeypatch.delattr("kvservice.core.directory._probe", raising=False)
    assert key_table._native() is None


@pytest.mark.parametrize("compiled", [True, False])
def test_keys_that_lie_behind_their_row_are_removed_one_by_one(monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    """A row counts the keys that it had no room for: a lookup goes on behind it until they are gone."""
    if not compiled:
        monkeypatch.setattr(key_table, "native", None)
    rows = key_table.ROWS_MIN
    holders = HolderTable(BlockTable(memoryview(bytearray(table_bytes(rows))), fresh=True), rows * key_table.ENTRIES)
    bit, noise = holders.take_bit(), Random(1)
    chain = [BlockKey(noise.randbytes(16)) for _ in range(rows * key_table.ENTRIES)]
    assert holders.add(bit, pack_keys(chain)) > len(chain) // 2
    kept = [key for key in chain if holders.mask(key)]
    for number, key in enumerate(kept):
        assert holders.remove(bit, key) == 1
        assert not holders.mask(key)
        assert all(holders.mask(other) for other in kept[number + 1 :: 97])
    assert not len(holders)
    holders.check_invariants()
