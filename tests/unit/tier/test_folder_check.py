"""Rules of `kvservice tier check`: every kind of damage is named, and nothing is changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvservice.cli.main import app
from kvservice.errors import TierError
from kvservice.testing.tier_contract import StartedTier, some
from kvservice.tier.block_files import name_of
from kvservice.tier.disk import DiskTier
from kvservice.tier.folder_check import check_folder
from kvservice.tier.index import ROW_BYTES
from kvservice.units import BlockKey


@pytest.fixture
def keys(tmp_path: Path) -> list[BlockKey]:
    """Of the blocks in the folder."""
    tier, items = StartedTier(DiskTier(tmp_path)), [some(number) for number in range(6)]
    tier.write(*items)
    tier.close()
    return [block.key for block, _ in items]


def names(*keys: BlockKey) -> list[str]:
    return [key.hex() for key in keys]


def test_a_whole_folder_is_sound(tmp_path: Path, keys: list[BlockKey]) -> None:
    heard = list[tuple[int, int]]()
    found = check_folder(tmp_path, lambda done, count: heard.append((done, count)))
    assert found.is_sound and (found.blocks, found.bytes) == (6, 6 * (8192 + 4096))
    assert heard[-1] == (6, 6)


def test_every_finding_is_named_and_nothing_changed(tmp_path: Path, keys: list[BlockKey]) -> None:
    paths = [tmp_path / name_of(key) for key in keys]
    whole = [path.read_bytes() for path in paths]
    paths[0].unlink()
    paths[1].write_bytes(whole[1][:-1] + bytes([whole[1][-1] ^ 1]))
    paths[2].write_bytes(whole[2].replace(b'"kvservice_block":"1"', b'"kvservice_block":"3"'))
    paths[3].write_bytes(whole[4])
    paths[5].unlink()
    paths[5].symlink_to(paths[4])
    (tmp_path / "new" / "half").write_bytes(b"")
    index = (tmp_path / "index").read_bytes()
    rows = [index[at : at + ROW_BYTES] for at in range(16, len(index), ROW_BYTES)]
    kept = b"".join(row for row in rows if row[1:17] != keys[4])
    (tmp_path / "index").write_bytes(index[:16] + kept + b"torn")
    before = {path: path.lstat().st_mtime_ns for path in sorted(tmp_path.rglob("*")) if path.name != "lock"}
    found = check_folder(tmp_path)
    assert found.missing == names(keys[0])
    assert found.damaged == names(keys[1], keys[3])
    assert found.other_versions == names(keys[2])
    assert found.orphaned == names(keys[4])
    assert found.unreadable == names(keys[5])
    assert (found.unfinished, found.index, found.blocks) == (1, "damaged after 5 rows", 1)
    assert not found.is_sound
    assert before == {path: path.lstat().st_mtime_ns for path in sorted(tmp_path.rglob("*")) if path.name != "lock"}


def test_a_file_that_the_index_describes_otherwise_is_named(tmp_path: Path, keys: list[BlockKey]) -> None:
    index = (tmp_path / "index").read_bytes()
    path = tmp_path / name_of(keys[0])
    tier = StartedTier(DiskTier(tmp_path))
    tier.write(some(0))
    tier.close()
    (tmp_path / "index").write_bytes(index)
    assert path.exists() and check_folder(tmp_path).differing == names(keys[0])


@pytest.mark.parametrize(("index", "said"), [(None, "none"), (b"KVSINDEX" + b"\x05\0\0\0" + bytes(4), "of version 5")])
def test_an_index_that_cannot_be_read_is_named(
    tmp_path: Path, keys: list[BlockKey], index: bytes | None, said: str
) -> None:
    (tmp_path / "index").unlink()
    if index is not None:
        (tmp_path / "index").write_bytes(index)
    found = check_folder(tmp_path)
    assert found.index.startswith(said) and found.orphaned == names(*keys)


def test_a_folder_without_blocks_or_in_use_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TierError, match="No such file"):
        check_folder(tmp_path / "none")
    with pytest.raises(TierError, match="no blocks of a disk tier"):
        check_folder(tmp_path)
    assert list(tmp_path.iterdir()) == []
    tier = StartedTier(DiskTier(tmp_path))
    with pytest.raises(TierError, match="another pool of this process"):
        check_folder(tmp_path)
    tier.close()


def test_the_command_tells_people_and_programs(tmp_path: Path, keys: list[BlockKey]) -> None:
    run = CliRunner()
    good = run.invoke(app, ["tier", "check", str(tmp_path)])
    assert good.exit_code == 0 and "6 whole blocks, 72.0 KiB; index: whole" in good.stdout
    for key in keys[:5]:
        (tmp_path / name_of(key)).write_bytes(b"")
    bad = run.invoke(app, ["tier", "check", str(tmp_path), "-o", "json"])
    assert bad.exit_code == 1 and json.loads(bad.stdout)["damaged"] == names(*keys[:5])
    told = run.invoke(app, ["tier", "check", str(tmp_path)])
    assert "5 damaged: wrong header, length or digest" in told.stdout and "and 2 more" in told.stdout
    assert "more" not in run.invoke(app, ["tier", "check", str(tmp_path), "-o", "wide"]).stdout
    assert run.invoke(app, ["tier", "check", str(tmp_path / "none")]).exit_code == 2
