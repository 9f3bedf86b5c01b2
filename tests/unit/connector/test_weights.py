"""Weights are called by all of their bytes, read once, and by nothing that was kept of other bytes."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvservice.connector import weights
from kvservice.connector.weights import FileDigests, Terms, cache_folder, weight_files, weights_identity
from kvservice.errors import UnnamedWeights


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model-1.safetensors").write_bytes(os.urandom(3_000_000))
    (folder / "model-2.safetensors").write_bytes(os.urandom(100))
    return folder


@pytest.fixture
def name(tmp_path: Path) -> Callable[[Path], str]:
    return lambda path: weights_identity(str(path), None, None, tmp_path / "cache")


@pytest.mark.parametrize("at", [0, 1_500_000, 2_999_999])
def test_one_other_byte_anywhere_is_another_model(model: Path, name: Callable[[Path], str], at: int) -> None:
    before = name(model)
    with (model / "model-1.safetensors").open("r+b") as file:
        file.seek(at)
        old = file.read(1)
        file.seek(at)
        file.write(bytes([old[0] ^ 1]))
    assert name(model) != before


def test_pieces_of_a_file_are_not_taken_for_one_another(
    model: Path, name: Callable[[Path], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "PIECE_BYTES", 1000)
    data = (model / "model-1.safetensors").read_bytes()
    before = name(model)
    (model / "model-1.safetensors").write_bytes(data[1000:2000] + data[:1000] + data[2000:])
    assert name(model) != before
    (model / "model-1.safetensors").write_bytes(data)
    assert name(model) == before, "found again, byte for byte"


def test_code_and_scales_that_come_with_a_model_are_part_of_it_and_tokenizers_are_not(
    model: Path, name: Callable[[Path], str]
) -> None:
    before = name(model)
    (model / "tokenizer.json").write_text("{}")
    (model / "README.md").write_text("words")
    assert name(model) == before
    (model / "modeling.py").write_text("x = 1")
    assert (after := name(model)) != before
    (model / "hf_quant_config.json").write_text("{}")
    assert name(model) != after


def test_copies_are_one_model_and_so_is_a_file_of_its_own(
    model: Path, name: Callable[[Path], str], tmp_path: Path
) -> None:
    copy = tmp_path / "elsewhere"
    copy.mkdir()
    for path in model.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    assert name(copy) == name(model)
    single = tmp_path / "model.gguf"
    single.write_bytes(b"weights")
    before = name(single)
    single.write_bytes(b"Weights")
    assert name(single) != before


def test_files_are_read_once_and_again_when_they_were_written(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    piece = weights._piece
    monkeypatch.setattr(weights, "_piece", lambda path, start: read.append(Path(path).name) or piece(path, start))
    files = weight_files(model)
    first = FileDigests(tmp_path / "cache").of(files)
    assert sorted(read) == ["model-1.safetensors", "model-2.safetensors"]
    assert FileDigests(tmp_path / "cache").of(files) == first
    assert len(read) == 2
    stat = files[1].stat()
    files[1].write_bytes(os.urandom(100))
    os.utime(files[1], ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as tools do that keep a file's time
    assert FileDigests(tmp_path / "cache").of(files) != first
    assert read[2:] == ["model-2.safetensors"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda entry: entry.write_text(entry.read_text()[:-5]),
        lambda entry: entry.write_bytes(b""),
        lambda entry: entry.write_bytes(os.urandom(200)),
        lambda entry: entry.write_text("[1]"),
        lambda entry: entry.write_text(json.dumps({**json.loads(entry.read_text()), "digest": "0" * 32})),
        lambda entry: entry.write_text(json.dumps({**json.loads(entry.read_text()), "size": 1})),
        lambda entry: (entry.unlink(), entry.mkdir()),
    ],
)
def test_a_damaged_entry_of_the_cache_costs_time_and_nothing_else(
    model: Path, tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    files = weight_files(model)
    wanted = FileDigests(tmp_path / "cache").of(files)
    for entry in (tmp_path / "cache" / "weights").glob("*.json"):
        damage(entry)
    assert FileDigests(tmp_path / "cache").of(files) == wanted
    assert FileDigests(tmp_path / "cache").of(files) == wanted


def test_without_a_folder_for_the_cache_the_weights_have_the_same_name(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    found = [weights_identity(str(model), None, None, tmp_path / place) for place in ("file", "cache")]
    assert found[0] == found[1]


def test_entries_of_files_that_are_gone_go_as_well(model: Path, tmp_path: Path) -> None:
    files = weight_files(model)
    FileDigests(tmp_path / "cache").of(files)
    files[1].unlink()
    (model / "model-3.safetensors").write_bytes(b"new")
    FileDigests(tmp_path / "cache").of(weight_files(model))
    assert len(list((tmp_path / "cache" / "weights").glob("*.json"))) == 2


def test_a_file_that_changes_while_it_is_read_has_no_name(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    piece = weights._piece

    def written_meanwhile(path: str, start: int) -> tuple[bytes, int]:
        found = piece(path, start)
        Path(path).write_bytes(b"other")
        return found

    monkeypatch.setattr(weights, "_piece", written_meanwhile)
    with pytest.raises(UnnamedWeights, match=r"changes while it is read.*weights_version"):
        weights_identity(str(model), None, None, tmp_path / "cache")
    assert not list((tmp_path / "cache" / "weights").glob("*.json"))


def test_engines_that_start_together_read_once(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    piece = weights._piece
    monkeypatch.setattr(weights, "_piece", lambda path, start: read.append(path) or piece(path, start))
    found: list[list[str]] = []
    threads = [
        threading.Thread(target=lambda: found.append(FileDigests(tmp_path / "cache").of(weight_files(model))))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 4
    assert len(read) == 2
    assert all(one == found[0] for one in found)


def test_a_long_reading_says_how_far_it_is(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(weights, "TALKATIVE_BYTES", 1000)
    monkeypatch.setattr(weights, "PIECE_BYTES", 1_000_000)
    seconds = iter(range(0, 1000, 11))
    with caplog.at_level(logging.INFO, "kvservice.connector"):
        FileDigests(tmp_path / "cache", clock=lambda: float(next(seconds))).of(weight_files(model))
    said = [record.getMessage() for record in caplog.records]
    assert "reading 2.9 MiB once" in said[0]
    assert sum(" of 2.9 MiB read" in line for line in said) == 4
    assert said[-1].endswith("GB/s")


def test_a_model_of_a_hub_is_called_by_its_commit_and_by_nothing_less(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    assert weights_identity("team/model", None, commit) == f"team/model@{commit}"
    assert weights_identity("team/model", commit) == f"team/model@{commit}"
    with pytest.raises(UnnamedWeights, match=r"which commit of team/model-of-nobody.*weights_version"):
        weights_identity("team/model-of-nobody", "main")


def test_a_folder_without_weights_has_no_name(tmp_path: Path) -> None:
    with pytest.raises(UnnamedWeights, match="has no weight files"):
        weights_identity(str(tmp_path), None)


def test_the_cache_is_where_the_user_keeps_his(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "kvservice"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder() == Path.home() / ".cache" / "kvservice"


def test_a_version_is_believed_once_and_without_one_every_term_is_new(tmp_path: Path) -> None:
    assert Terms(None).first() == b"", "the fingerprint names them"
    assert Terms(None).next() != Terms(None).next()
    file = tmp_path / "version"
    one, other = Terms(file), Terms(file)
    assert one.first() != other.first(), "there is no version yet"
    file.write_text("step-1")
    assert (first := one.next()) == other.next()
    assert one.next() != other.next(), "nobody has said that the weights are the same"
    file.write_text("step-2")
    assert one.next() == other.next() != first
    file.write_text("two\nlines")
    assert one.next() != other.next()
    file.write_text("")
    assert one.next() != other.next()
