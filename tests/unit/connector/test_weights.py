"""Weights are called by all of their bytes, read once, and by nothing that was kept of other bytes."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvservice.connector import weights
from kvservice.connector.weights import (
    FileDigests,
    Terms,
    cache_folder,
    changed_since,
    weight_files,
    weights_identity,
)
from kvservice.errors import UnnamedWeights
from kvservice.testing.eventually import eventually


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files were written a moment ago here, wherever the temporary directory lies."""
    monkeypatch.setattr(weights, "SETTLED_SECONDS", -1.0)
    monkeypatch.setattr(weights, "KEEPERS_OF_CTIME", weights.KEEPERS_OF_CTIME | {"overlay"})


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


def test_code_and_scales_are_part_of_a_model_tokenizers_are_not(model: Path, name: Callable[[Path], str]) -> None:
    before = name(model)
    (model / "tokenizer.json").write_text("{}")
    (model / "README.md").write_text("words")
    assert name(model) == before
    (model / "modeling.py").write_text("x = 1")
    assert (after := name(model)) != before
    (model / "hf_quant_config.json").write_text("{}")
    assert name(model) != after


@pytest.mark.parametrize(
    "beside",
    [
        "model.safetensors.index.json",  # which of the files are loaded
        "preprocessor_config.json",
        "video_preprocessor_config.json",  # what becomes of an image
        "an_option_of_tomorrow.json",
        "kernels.so",
        "model.tensors",
    ],
)
def test_what_lies_beside_the_weights_is_part_of_the_model(
    model: Path, name: Callable[[Path], str], beside: str
) -> None:
    """Only what is left out by name is not."""
    before = name(model)
    (model / beside).write_text("1")
    one = name(model)
    (model / beside).write_text("2")
    assert len({before, one, name(model)}) == 3


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


def read_of(files: list[Path], cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are read to say their digests."""
    read: set[str] = set()
    piece = weights._piece
    with monkeypatch.context() as patch:
        patch.setattr(weights, "_piece", lambda path, start: read.add(Path(path).name) or piece(path, start))
        FileDigests(cache).of(files)
    return sorted(read)


def test_a_file_that_was_just_written_is_read_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be written again within one tick of the clock that times are taken from."""
    monkeypatch.setattr(weights, "SETTLED_SECONDS", 60.0)
    files, cache = weight_files(model), tmp_path / "cache"
    assert read_of(files, cache, monkeypatch) == read_of(files, cache, monkeypatch) == [path.name for path in files]
    monkeypatch.setattr(weights, "SETTLED_SECONDS", 0.0)
    time.sleep(0.01)
    read_of(files, cache, monkeypatch)
    assert read_of(files, cache, monkeypatch) == []


@pytest.mark.parametrize(
    ("path", "is_kept"),
    [
        ("/models/m.safetensors", True),
        ("/models/image/m.safetensors", False),
        ("/models/image2/m.safetensors", True),
        ("/models/my bucket/m.safetensors", False),
        ("/etc/m.safetensors", False),
        ("/models/again/m.safetensors", False),
    ],
)
def test_times_are_believed_where_a_kernel_keeps_them(path: str, is_kept: bool) -> None:
    """An image of another model may have the same inodes and times: they are those that its maker wrote into it."""
    mounts = "\n".join(
        [
            "22 1 0:20 / / rw - overlay overlay rw",
            "23 22 8:1 / /models rw shared:1 - ext4 /dev/sda1 rw",
            "24 23 7:0 / /models/image ro - squashfs /dev/loop0 ro",
            "25 23 0:31 / /models/my\\040bucket ro - fuse.s3 s3 ro",
            "26 23 8:2 / /models/again rw - ext4 /dev/sda2 rw",
            "27 26 7:1 / /models/again ro - erofs /dev/loop1 ro",
        ]
    )
    with_overlay, weights.KEEPERS_OF_CTIME = weights.KEEPERS_OF_CTIME, weights.KEEPERS_OF_CTIME - {"overlay"}
    try:
        assert weights.keeps_ctime(path, mounts) is is_kept
        assert not weights.keeps_ctime(path, "")
    finally:
        weights.KEEPERS_OF_CTIME = with_overlay


def test_files_of_such_a_file_system_are_read_at_every_start(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, cache = weight_files(model), tmp_path / "cache"
    read_of(files, cache, monkeypatch)
    assert read_of(files, cache, monkeypatch) == []
    monkeypatch.setattr(weights, "KEEPERS_OF_CTIME", frozenset({"nothing"}))
    assert read_of(files, cache, monkeypatch) == [path.name for path in files]


def test_a_cache_that_others_can_write_is_not_touched(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever writes into it could name these weights after others', or have a file of ours emptied by a link."""
    files, cache, ours = weight_files(model), tmp_path / "cache", tmp_path / "ours"
    first = FileDigests(cache).of(files)
    ours.write_text("kept")
    (cache / "weights" / "lock").unlink()
    (cache / "weights" / "lock").symlink_to(ours)
    for entry in (cache / "weights").glob("*.json"):
        found = json.loads(entry.read_text())
        found["digest"] = "0" * 32
        stamp = weights._Stamp(*(found[key] for key in ("path", "inode", "size", "mtime_ns", "ctime_ns")))
        entry.write_text(json.dumps({**found, "seal": weights._seal(stamp, "0" * 32)}))
    cache.chmod(0o777)
    assert FileDigests(cache).of(files) == first
    assert ours.read_text() == "kept"


def test_an_engine_that_stands_still_keeps_no_other_waiting(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stands still while it reads the weights."""
    files, cache = weight_files(model), tmp_path / "cache"
    first = FileDigests(cache).of(files)
    monkeypatch.setattr(weights, "WAIT_SECONDS", 0.05)
    monkeypatch.setattr(weights, "POLL_SECONDS", 0.01)
    with (cache / "weights" / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert FileDigests(cache).of(files) == first


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
def test_a_damaged_entry_of_the_cache_costs_only_time(
    model: Path, tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    files = weight_files(model)
    wanted = FileDigests(tmp_path / "cache").of(files)
    for entry in (tmp_path / "cache" / "weights").glob("*.json"):
        damage(entry)
    assert FileDigests(tmp_path / "cache").of(files) == wanted
    assert FileDigests(tmp_path / "cache").of(files) == wanted


def test_without_a_cache_folder_weights_have_the_same_name(model: Path, tmp_path: Path) -> None:
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


def test_a_model_of_a_hub_is_called_by_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_version_is_believed_once(tmp_path: Path) -> None:
    """Without one, every term is new."""
    assert Terms(None).first() == b"", "the fingerprint names them"
    assert Terms(None).next() != Terms(None).next()
    file = tmp_path / "version"
    one, other = Terms(str(file)), Terms(str(file))
    file.write_text("step-0")
    assert one.first() == other.first() == b"", "the fingerprint names what was loaded, whatever was loaded before"
    assert one.first(lambda: "a") == other.first(lambda: "a") != one.first(lambda: "b"), "no fingerprint names it"
    assert one.next() != other.next(), "the file speaks of weights from before the start"
    file.write_text("step-1")
    assert (first := one.next()) == other.next()
    assert one.next() != other.next(), "nobody has said that the weights are the same"
    file.write_text("step-2")
    assert one.next() == other.next() != first
    file.write_text("two\nlines")
    assert one.next() != other.next()
    file.write_text("")
    assert one.next() != other.next()


def test_weights_without_a_name_are_nobody_elses_until_a_reset(tmp_path: Path) -> None:
    def nameless() -> str:
        raise UnnamedWeights("nothing says which commit it is")

    terms = Terms(str(tmp_path / "version"))
    assert terms.first(nameless) != terms.first(nameless)


def time_of_change(file: Path) -> float:
    file.touch()
    return file.stat().st_ctime


def test_a_file_or_a_link_that_changed_since_is_named(model: Path, tmp_path: Path) -> None:
    link = tmp_path / "current"
    link.symlink_to(model)

    def moment() -> float:
        """Later than what was done, by the file system's clock, which has ticks of some milliseconds."""
        marker = tmp_path / "marker"
        done = time_of_change(marker)
        eventually(lambda: time_of_change(marker) > done, "the next tick")
        return marker.stat().st_ctime

    before = moment()
    assert changed_since(str(link), before) is None and changed_since("someone/model", 0.0) is None
    (model / "config.json").write_text("[]")
    assert changed_since(str(link), before) is None, "it says nothing of weights"
    os.utime(model / "model-2.safetensors")
    assert changed_since(str(model), before) == model / "model-2.safetensors"
    before = moment()
    link.unlink()
    link.symlink_to(model)
    assert changed_since(str(model), before) is None and changed_since(str(link), before) == link


def test_unnamed_weights_say_an_option_that_each_engine_has(tmp_path: Path) -> None:
    """vLLM, SGLang and LMCache have it in settings of other names."""
    with pytest.raises(UnnamedWeights) as raised:
        weights_identity(str(tmp_path), None)
    assert raised.value.message.endswith('name the weights yourself with the option "weights_version"')


def test_files_that_cannot_be_looked_at_are_no_named_weights(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine would end at its start with any other error."""

    def gone(folder: Path) -> list[Path]:
        raise FileNotFoundError(f"No such file or directory: '{folder}'")

    monkeypatch.setattr("kvservice.connector.weights.weight_files", gone)
    with pytest.raises(UnnamedWeights, match="cannot be read"):
        changed_since(str(model), 0.0)
