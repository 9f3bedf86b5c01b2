"""A block table is a dict, whatever is put in and taken out, in batches or alone, while it grows or is full."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvservice.core.directory import key_table as block_table
from kvservice.core.directory.key_table import (
    ENTRIES,
    FEW,
    OTHER_MIXER,
    PROBES,
    ROWS_MIN,
    BlockTable,
    keys_array,
    private_table,
    rows_for,
    table_bytes,
)


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def packed(numbers: list[int]) -> bytes:
    return b"".join(map(key, numbers))


@pytest.fixture(params=["native", "loop"], autouse=True)
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    """With the compiled loops, and with the plain ones. Without a compiler both are the plain ones."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "loop":
            patch.setattr(block_table, "native", None)
        yield


def check(table: BlockTable, model: dict[int, int], asked: list[int]) -> None:
    table.check_invariants()
    assert len(table) == len(model)
    wanted = [model.get(number, 0) for number in asked]
    assert table.get_many(keys_array(packed(asked))).tolist() == wanted
    assert [table.get(key(number)) for number in asked] == wanted
    positions = table.find(keys_array(packed(asked)))
    assert table.numbers_at(positions).tolist() == wanted


# Few keys that meet often, halves that are equal, and many at once.
numbers = st.one_of(st.integers(0, 40), st.integers(0, 7).map(lambda n: n << 64 | 5), st.integers(0, 2**128 - 1))
batches = st.one_of(
    st.lists(numbers, max_size=60, unique=True), st.integers(0, 3000).map(lambda n: list(range(n, n + 900)))
)
steps = st.lists(st.tuples(st.sampled_from(["put", "remove", "one", "remove one"]), batches, st.integers(1, 2**32 - 1)))


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps)
def test_table_is_a_dict(done: list[tuple[str, list[int], int]]) -> None:
    table = private_table(100_000)
    model: dict[int, int] = {}
    for kind, batch, value in done:
        if kind == "put":
            keys = keys_array(packed(batch))
            positions = table.find(keys)
            known = positions >= 0
            table.set_at(positions[known], np.full(int(known.sum()), value, np.uint32))
            assert table.insert_many(keys[~known], np.full(int((~known).sum()), value, np.uint32)).all()
            model.update(dict.fromkeys(batch, value))
        elif kind == "remove":
            positions = table.find(keys_array(packed(batch)))
            table.remove_at(positions[positions >= 0])
            for number in batch:
                model.pop(number, None)
        elif kind == "one":
            assert all(table.put(key(number), value) for number in batch[:30])
            model.update(dict.fromkeys(batch[:30], value))
        else:
            for number in batch[:30]:
                table.remove(key(number))
                model.pop(number, None)
        check(table, model, [*batch[:100], *list(model)[:100], 41, 2**127])


def test_a_walk_misses_nothing_while_the_table_grows() -> None:
    rng = np.random.default_rng(7)
    table = private_table(200_000)
    first = rng.integers(0, 2**64, size=(3000, 2), dtype=np.uint64)
    table.insert_many(first, np.ones(len(first), np.uint32))
    seen, row = set(), 0
    while row < table.walk_end:
        keys, _, _ = table.entries(row, 16)
        row += 16
        seen |= {found.tobytes() for found in keys}
        more = rng.integers(0, 2**64, size=(500, 2), dtype=np.uint64)
        if len(table) < 60_000:
            table.insert_many(more, np.full(len(more), 2, np.uint32))
    assert {found.tobytes() for found in first} <= seen
    assert table.dropped_full == 0
    table.check_invariants()


def test_table_filled_in_the_row_order_of_another_is_whole() -> None:
    rng = np.random.default_rng(11)
    first = private_table(300_000)
    keys = rng.integers(0, 2**64, size=(150_000, 2), dtype=np.uint64)
    first.insert_many(keys, np.ones(len(keys), np.uint32))
    buffer = memoryview(bytearray(table_bytes(rows_for(300_000))))
    second = BlockTable(buffer, fresh=True, mixer=OTHER_MIXER)
    for row in range(0, first.walk_end, 256):
        found, numbers, _ = first.entries(row, 256)
        assert second.insert_many(found, numbers).all()
    assert len(second) == len(keys)


def test_full_table_refuses_keys_and_keeps_those_it_has() -> None:
    buffer = memoryview(bytearray(table_bytes(ROWS_MIN)))
    table = BlockTable(buffer, fresh=True)
    room = (ROWS_MIN + PROBES - 1) * ENTRIES
    kept = [number for number in range(room + 200) if table.put(key(number), number + 1)]
    assert room * 0.8 < len(kept) <= room and table.dropped_full == room + 200 - len(kept)
    check(table, {number: number + 1 for number in kept}, list(range(room + 200)))
    keys = keys_array(packed(list(range(10_000, 10_000 + room))))
    table.insert_many(keys, np.ones(len(keys), np.uint32))
    table.check_invariants()


def test_rows_for_so_many_keys_hold_them() -> None:
    rng = np.random.default_rng(3)
    for count in (FEW, 5000, 60_000):
        table = BlockTable(memoryview(bytearray(table_bytes(rows_for(count)))), fresh=True)
        keys = rng.integers(0, 2**64, size=(count, 2), dtype=np.uint64)
        assert table.insert_many(keys, np.ones(count, np.uint32)).all()


@pytest.mark.parametrize("seed", range(20))
def test_reader_of_torn_memory_neither_fails_nor_loops(seed: int) -> None:
    noise = np.random.default_rng(seed).integers(0, 256, size=table_bytes(ROWS_MIN * 3), dtype=np.uint8)
    reader = BlockTable(memoryview(noise.tobytes()), fresh=False)
    asked = np.random.default_rng(seed).integers(0, 2**64, size=(300, 2), dtype=np.uint64)
    assert reader.get_many(asked).tolist() == [0] * 300
    assert [reader.get(one.tobytes()) for one in asked] == [0] * 300


def test_native_loops_refuse_sizes_that_do_not_fit() -> None:
    native = pytest.importorskip("kvservice.core.directory._probe", reason="installed without a compiler")
    find, insert = native.find, native.insert
    body = memoryview(bytearray(table_bytes(ROWS_MIN)))[64:]
    keys, numbers = bytes(160), np.zeros(10, np.uint32)
    find(body, ROWS_MIN, 1, keys, numbers, None)
    for rows, asked, room in ((ROWS_MIN + 1, keys, numbers), (0, keys, numbers), (ROWS_MIN, keys, numbers[:9])):
        with pytest.raises(ValueError, match="fit"):
            find(body, rows, 1, asked, room, None)
    with pytest.raises(ValueError, match="fit"):
        find(body, ROWS_MIN, 1, keys, None, np.zeros(9, np.int64))
    with pytest.raises((TypeError, OverflowError)):
        find(body, -1, 1, keys, numbers, None)
    with pytest.raises(TypeError):
        find(body, ROWS_MIN, keys)
    done = np.zeros(10, np.bool_)
    assert insert(body, ROWS_MIN, 1, keys[:16], numbers + 1, done) == 1
    for rows, values, room in (
        (ROWS_MIN + 1, numbers, done),
        (ROWS_MIN, numbers[:9], done),
        (ROWS_MIN, numbers, done[:9]),
    ):
        with pytest.raises(ValueError, match="fit"):
            insert(body, rows, 1, keys, values, room)
    with pytest.raises(BufferError):
        insert(body.toreadonly(), ROWS_MIN, 1, keys, numbers, done)
    with pytest.raises(TypeError):
        insert(body, ROWS_MIN, 1, keys, numbers)


def test_a_reader_finds_every_key_at_each_step_of_growing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are in their new rows before these are in use, and leave their old rows after that."""
    buffer = memoryview(bytearray(table_bytes(4 * ROWS_MIN)))
    table = BlockTable(buffer, fresh=True)
    there: list[int] = []
    looked = 0

    def look(step: str) -> None:
        nonlocal looked
        looked += 1
        reader = BlockTable(buffer, fresh=False)
        missing = int((reader.get_many(keys_array(packed(there))) == 0).sum())
        assert not missing, f"{missing} of {len(there)} keys are not found {step}"

    insert, clear, split = table._insert, table._clear, table._split

    def splitting(rows: int, count: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(table, "_insert", lambda *a: (look("before they are copied"), insert(*a))[1])
            patch.setattr(table, "_clear", lambda *a: (look("before they are cleared"), clear(*a))[1])
            split(rows, count)
        look("afterwards")

    monkeypatch.setattr(table, "_split", splitting)
    for number in range(0, 900, 30):
        batch = list(range(number, number + 30))
        table.insert_many(keys_array(packed(batch)), np.ones(len(batch), np.uint32))
        there += batch
    assert looked >= 6, "it did not grow"
