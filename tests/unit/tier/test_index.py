"""Rules of tier.index: what was written is found, and nothing else is believed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvservice.core.tier.tier_block import TierBlock
from kvservice.tier import index as index_module
from kvservice.tier.index import (
    INDEX_NAME,
    ROW_BYTES,
    IndexLog,
    pack_erased,
    pack_head,
    pack_row,
    parse_index,
    read_index,
)
from kvservice.units import BlockKey, SpanRoute


def a_block(number: int) -> TierBlock:
    key = BlockKey(number.to_bytes(16, "big"))
    return TierBlock(
        key, 4096 + number, number << 40, number, SpanRoute(number), 5, bytes(range(16)), 1.7e9 + number, 9 * number
    )


BLOCKS = [a_block(number) for number in range(1, 6)]
LOG = pack_head() + b"".join(map(pack_row, BLOCKS))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield descriptor
    os.close(descriptor)


def test_rows_are_applied_in_their_order() -> None:
    again = replace(BLOCKS[1], digest=99, fingerprint=b"")
    found = parse_index(LOG + pack_erased(BLOCKS[0].key) + pack_row(again) + pack_erased(BlockKey(bytes(16))))
    assert found.is_whole and found.rows == 8
    assert found.blocks == {block.key: block for block in [again, *BLOCKS[2:]]}


def test_every_flipped_bit_ends_the_log_there() -> None:
    for bit in range(8 * 16, 8 * len(LOG), 131):
        data = bytearray(LOG)
        data[bit // 8] ^= 1 << bit % 8
        found = parse_index(data)
        assert not found.is_whole
        assert list(found.blocks.values()) == BLOCKS[: (bit // 8 - 16) // ROW_BYTES], bit


def test_a_torn_row_ends_the_log() -> None:
    found = parse_index(LOG[:-1])
    assert not found.is_whole and list(found.blocks.values()) == BLOCKS[:-1]


@pytest.mark.parametrize(
    ("data", "version"),
    [(b"", None), (b"KVSINDEX", None), (b"x" * 100, None), (b"KVSINDEX\x01" + bytes(90), 1), (bytes(16), None)],
)
def test_what_is_no_log_of_this_version_has_no_blocks(data: bytes, version: int | None) -> None:
    found = parse_index(data)
    assert (found.blocks, found.is_whole, found.version) == ({}, False, version)


def test_a_log_is_read_again(folder: int) -> None:
    log = IndexLog(folder, BLOCKS)
    log.append([pack_row(a_block(9)), pack_erased(BLOCKS[0].key)], 0)
    log.close()
    found = read_index(folder)
    assert found.is_whole and list(found.blocks.values()) == [*BLOCKS[1:], a_block(9)]
    assert log.failed == 0


def test_a_log_that_has_grown_is_written_anew(folder: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "ROWS_EXTRA", 10)
    log = IndexLog(folder, BLOCKS)
    for _ in range(40):
        log.append([pack_row(BLOCKS[0])], 0)
    assert (tmp_path / INDEX_NAME).stat().st_size < 16 + 30 * ROW_BYTES
    log.append([pack_row(a_block(9))], 1)
    log.close()
    assert set(read_index(folder).blocks) == {block.key for block in [*BLOCKS, a_block(9)]}


def test_a_damaged_log_is_not_read_with_every_row(folder: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "ROWS_EXTRA", 10)
    log, reads = IndexLog(folder, BLOCKS), list[int]()
    (tmp_path / INDEX_NAME).write_bytes(b"damaged")
    monkeypatch.setattr(index_module, "read_index", lambda place: reads.append(place) or read_index(place))
    for _ in range(100):
        log.append([pack_row(BLOCKS[0])], 0)
    log.close()
    assert 1 <= len(reads) <= 5


def test_a_log_that_cannot_be_written_costs_nothing(folder: int, tmp_path: Path) -> None:
    """The next start finds the files by their names."""
    (tmp_path / f"{INDEX_NAME}.new").mkdir()
    log = IndexLog(folder, BLOCKS)
    log.append([pack_row(a_block(9))], 1)
    assert log.failed == 6
    log.close()
    assert read_index(folder).version is None


def torn_write(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:-1]))


def test_rows_that_found_no_room_are_appended_later(folder: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log ended at the first of them, and each later start read the headers of all files since."""
    log = IndexLog(folder, BLOCKS)
    torn_write(monkeypatch)
    log.append([pack_row(a_block(9)), pack_row(a_block(10))], 2)
    log.append([pack_erased(a_block(9).key)], -1)
    assert read_index(folder).is_whole
    monkeypatch.undo()
    log.append([pack_row(a_block(11))], 1)
    found = read_index(folder)
    assert found.is_whole and list(found.blocks.values()) == [*BLOCKS, a_block(10), a_block(11)] and not log.failed


def test_a_log_whose_disk_stays_full_ends(folder: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "ROWS_WAITING_MAX", 3)
    log = IndexLog(folder, BLOCKS)
    torn_write(monkeypatch)
    for number in range(5):
        log.append([pack_row(a_block(10 + number))], 1)
    monkeypatch.undo()
    log.append([pack_row(a_block(20))], 1)
    assert log.failed == 6
    assert list(read_index(folder).blocks.values())[: len(BLOCKS)] == BLOCKS
