"""The name of an engine's weights: all of their bytes, or what the operator says. Imports no engine.

Several threads read a folder's files once, and their digests are kept in a cache folder, so that a restart reads
nothing. XXH3-128 tells files apart that differ by accident. It is no protection against somebody who makes two files
with one digest; he could name his weights as he likes anyway.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import xxhash

from kvservice.core.block.keys import version_term
from kvservice.errors import ConfigError, UnnamedWeights
from kvservice.private_files import make_directory, open_own
from kvservice.units import GiB, MiB, format_bytes

log = logging.getLogger("kvservice.connector")

WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".tensors"})
# All other files beside the weights are part of the name: code, what is done to images, which files are loaded. These
# are not, with the reason.
LEFT_OUT_NAMES: Mapping[str, str] = {
    r"config\.json|generation_config\.json|params\.json": "named as the engine has resolved them",
    r"tokenizer.*|vocab.*|merges\.txt|special_tokens_map\.json|added_tokens\.json|tekken\.json|.*\.tiktoken|spiece\.model"
    r"|sentencepiece.*|chat_template.*|.*\.jinja": "token ids are in the engine's hash of the input",
    r"\..*|.*\.(md|rst|pdf|png|jpe?g|gif|svg|log|lock)|(LICENSE|NOTICE|USE_POLICY).*": "words and pictures",
    r".*\.(onnx|onnx_data|h5|msgpack|ot|tflite)": "weights for others than engines",
}
# What one thread reads at a time. Large enough to keep a disk busy, small enough to share a file between threads.
PIECE_BYTES = 32 * MiB
BUFFER_BYTES = MiB  # of each thread; it fits the processor's own cache
THREADS_MAX = 8  # threads that read; more do not make a disk faster
PROGRESS_SECONDS = 10.0  # between two log lines about a long read
TALKATIVE_BYTES = GiB  # a read of this many bytes or more is logged, because it takes seconds
TERM_BYTES = 16  # 128 random bits of a term: no two engines choose the same
VERSION_CHARS_MAX = 256  # of a version's name in the fingerprint; a longer one is refused
# A file written less than this before it was read may be written again without its times showing it, so its digest is
# not kept.
SETTLED_SECONDS = 2.0
WAIT_SECONDS = 600.0  # for another engine that reads the same files; then this one reads them too
POLL_SECONDS = 0.2  # between two looks at what the other engine found
# File systems whose kernel sets ctime, here or on the server. Images (squashfs, erofs) bring it along, also under an
# overlay, and programs (FUSE) make it up, so that another model may have the same.
KEEPERS_OF_CTIME = frozenset(
    {
        "ext2",
        "ext3",
        "ext4",
        "xfs",
        "btrfs",
        "zfs",
        "f2fs",
        "bcachefs",
        "tmpfs",
        "ramfs",
        "nfs",
        "nfs4",
        "lustre",
        "ceph",
        "gpfs",
        "beegfs",
        "wekafs",
    }
)
MOUNTS = Path("/proc/self/mountinfo")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def cache_folder() -> Path:
    """The folder where digests are kept: $XDG_CACHE_HOME/kvservice, or ~/.cache/kvservice."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "kvservice"


def weights_identity(model: str, revision: str | None, commit: str | None = None, cache: Path | None = None) -> str:
    """The identity of the weights: of a file or a folder by all of its bytes, of a hub's model by its commit, which
    also names all bytes.

    May read for minutes and logs progress. Raises UnnamedWeights if nothing says which bytes they are.
    """
    path = Path(model)
    try:
        if path.is_file():
            return _named([path], cache)
        if path.is_dir():
            if not (files := weight_files(path)):
                raise UnnamedWeights(f"{model} has no weight files; {_ADVICE}")
            return _named(files, cache)
    except OSError as error:
        raise _unreadable(model, error) from error
    found = commit or _downloaded_commit(model, revision)
    if found is None:
        raise UnnamedWeights(f"nothing says which commit of {model} the engine has loaded; {_ADVICE}")
    return f"{model}@{found}"


_ADVICE = 'name the weights yourself with the option "weights_version"'


def weight_files(folder: Path) -> list[Path]:
    """All files of the folder that an engine may compute with. Empty if there are no weights."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    if not any(path.suffix in WEIGHT_SUFFIXES for path in files):
        return []
    return [path for path in files if path.suffix in WEIGHT_SUFFIXES or not _is_left_out(path.name)]


def changed_since(model: str, moment: float) -> Path | None:
    """A file of this model, or a link on the way to one, that is other than at that moment. None for a hub's model.
    `moment` is in seconds since 1970. Raises UnnamedWeights if its files cannot be looked at."""
    path = Path(model).absolute()
    try:
        files = weight_files(path) if path.is_dir() else [path] if path.is_file() else []
        links = [each for each in (*path.parents, path, *files) if files and each.is_symlink()]
        changed = (each for each in links if each.lstat().st_ctime >= moment)
        return next(changed, next((each for each in files if each.stat().st_ctime >= moment), None))
    except OSError as error:
        raise _unreadable(model, error) from error


def _unreadable(model: str, error: OSError) -> UnnamedWeights:
    return UnnamedWeights(f"the weights in {model} cannot be read ({error}); {_ADVICE}")


def _is_left_out(name: str) -> bool:
    return any(re.fullmatch(names, name) for names in LEFT_OUT_NAMES)


def _named(files: Sequence[Path], cache: Path | None) -> str:
    digests = FileDigests(cache or cache_folder()).of(files)
    hasher = hashlib.sha256()
    for path, digest in zip(files, digests, strict=True):
        hasher.update(f"{len(path.name)}:{path.name}:{digest}:".encode())
    return f"xxh3:{hasher.hexdigest()[:32]}"


def _downloaded_commit(model: str, revision: str | None) -> str | None:
    """The commit that the hub's own cache names."""
    if revision and _COMMIT.fullmatch(revision):
        return revision
    folder = downloaded(model, revision)
    return folder.name if folder is not None and _COMMIT.fullmatch(folder.name) else None


def downloaded(name: str, revision: str | None = None) -> Path | None:
    """The folder where the hub's own cache has what is published under this name. None without one. Uses no network."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except (HFValidationError, OSError):
        return None


# -- the bytes of files ----


@dataclass(frozen=True, slots=True)
class _Stamp:
    """What identifies the content of a file. A file that still has all of it has not been written since, because no
    program can set ctime back."""

    path: str  # resolved
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, path: Path) -> _Stamp:
        real = path.resolve(strict=True)
        with real.open("rb") as file:  # opening asks a file server, while looking uses what it said up to a minute ago
            stat = os.fstat(file.fileno())
        return cls(str(real), stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


def keeps_ctime(path: str, mounts: str) -> bool:
    """Whether a kernel sets the times of change at this resolved path. `mounts` is the text of MOUNTS."""
    found, kind = "", ""
    for line in mounts.splitlines():
        words, _, rest = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), words.split()[4])
        if len(point) >= len(found) and Path(path).is_relative_to(point):
            found, kind = point, rest.split()[0]
    return kind in KEEPERS_OF_CTIME


class FileDigests:
    """Digests of whole files, kept in `folder` as one small file each. A folder that cannot be used, or that others can
    write, is not trusted and costs only time."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder.absolute() / "weights"
        self._is_usable = False
        self._clock = clock

    def of(self, files: Sequence[Path]) -> list[str]:
        """The digests in the order of `files`; reads what is not known. Raises OSError, or UnnamedWeights if a file
        changes while it is read."""
        with self._one_reader():
            stamps = [_Stamp.of(path) for path in files]
            mounts = _read_mounts()
            may_keep = {stamp for stamp in stamps if self._is_usable and keeps_ctime(stamp.path, mounts)}
            known = [self._load(stamp) if stamp in may_keep else None for stamp in stamps]
            to_read = [stamp for stamp, digest in zip(stamps, known, strict=True) if digest is None]
            read = dict(zip(to_read, self._read_all(to_read), strict=True))
            for path, stamp in zip(files, stamps, strict=True):
                if _Stamp.of(path) != stamp:
                    raise UnnamedWeights(f"{path} changes while it is read; {_ADVICE}")
            settled = time.time_ns() - int(SETTLED_SECONDS * 1e9)
            for stamp, digest in read.items():
                if stamp in may_keep and max(stamp.mtime_ns, stamp.ctime_ns) < settled:
                    self._save(stamp, digest)
            if read and self._is_usable:
                self._forget_gone()
        return [read.get(stamp) or str(digest) for stamp, digest in zip(stamps, known, strict=True)]

    def _read_all(self, stamps: Sequence[_Stamp]) -> list[str]:
        total = sum(stamp.size for stamp in stamps)
        if not stamps:
            return []
        if total >= TALKATIVE_BYTES:
            log.info("naming the weights: reading %s once, in %s", format_bytes(total), Path(stamps[0].path).parent)
        pieces = [(stamp.path, start) for stamp in stamps for start in range(0, stamp.size, PIECE_BYTES)]
        found: dict[tuple[str, int], bytes] = {}
        begun = told = self._clock()
        done = 0
        with ThreadPoolExecutor(min(THREADS_MAX, os.cpu_count() or 1), "kvservice-weights") as threads:
            for piece, (digest, size) in zip(pieces, threads.map(lambda p: _piece(*p), pieces), strict=True):
                found[piece] = digest
                done += size
                if (now := self._clock()) - told >= PROGRESS_SECONDS:
                    told = now
                    log.info("naming the weights: %s of %s read", format_bytes(done), format_bytes(total))
        if total >= TALKATIVE_BYTES:
            seconds = max(self._clock() - begun, 1e-9)
            log.info("naming the weights: done, %.1f GB/s", total / seconds / 1e9)
        digests = []
        for stamp in stamps:
            hasher = xxhash.xxh3_128(stamp.size.to_bytes(8, "big"))
            for start in range(0, stamp.size, PIECE_BYTES):
                hasher.update(found[stamp.path, start])
            digests.append(hasher.hexdigest())
        return digests

    # -- the cache ----

    def _entry(self, stamp: _Stamp) -> Path:
        return self._folder / f"{hashlib.sha256(stamp.path.encode()).hexdigest()[:32]}.json"

    def _load(self, stamp: _Stamp) -> str | None:
        """The kept digest. None if it is not exactly what `_save` wrote for this file as it is now."""
        try:
            with os.fdopen(open_own(self._entry(stamp)), "rb") as file:
                found = json.loads(file.read())
        except (OSError, ValueError, ConfigError):
            return None
        if not isinstance(found, dict) or not isinstance(digest := found.pop("digest", None), str):
            return None
        seal = found.pop("seal", None)
        return digest if found == asdict(stamp) and seal == _seal(stamp, digest) else None

    def _save(self, stamp: _Stamp, digest: str) -> None:
        entry = {**asdict(stamp), "digest": digest, "seal": _seal(stamp, digest)}
        try:
            with tempfile.NamedTemporaryFile("w", dir=self._folder, delete=False) as file:
                json.dump(entry, file)
            Path(file.name).replace(self._entry(stamp))
        except OSError as error:
            log.warning("the digest of %s is not kept (%s); the next start reads the file again", stamp.path, error)

    def _forget_gone(self) -> None:
        """Remove the digests of files that are gone, so that the folder does not grow for ever."""
        with contextlib.suppress(OSError):
            for entry in self._folder.glob("*.json"):
                try:
                    is_gone = not Path(json.loads(entry.read_bytes())["path"]).exists()
                except (OSError, ValueError, KeyError, TypeError):
                    is_gone = True
                if is_gone:
                    entry.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _one_reader(self) -> Iterator[None]:
        """Lock, so that of engines that start together on one machine the first reads and the others use what it
        kept."""
        try:
            make_directory(self._folder)
            file = (self._folder / "lock").open("w")
        except (OSError, ConfigError) as error:
            log.warning("digests of weights are not kept (%s); every start reads the files", error)
            yield
            return
        self._is_usable = True
        with file:
            self._wait_for(file)
            yield

    def _wait_for(self, file: IO[str]) -> None:
        """Wait for the lock, but not for ever. Reading at the same time costs only time, so an engine that hangs keeps
        no other from starting."""
        deadline = self._clock() + WAIT_SECONDS
        is_told = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if self._clock() >= deadline:
                    log.warning("naming the weights: the other engine does not finish, so this one reads too")
                    return
                if not is_told:
                    is_told = True
                    log.info("naming the weights: another engine reads them, waiting for it")
                time.sleep(POLL_SECONDS)
            else:
                return


def _read_mounts() -> str:
    """The text of MOUNTS. Empty if it cannot be read, so that nothing is trusted."""
    try:
        return MOUNTS.read_text()
    except (OSError, ValueError):
        return ""


def _seal(stamp: _Stamp, digest: str) -> str:
    """A checksum that shows whether an entry was damaged."""
    return xxhash.xxh3_64(f"{stamp}{digest}".encode()).hexdigest()


def _piece(path: str, start: int) -> tuple[bytes, int]:
    """The digest of up to PIECE_BYTES from `start` on, and how many bytes that were."""
    hasher, done = xxhash.xxh3_128(), 0
    view = memoryview(bytearray(min(BUFFER_BYTES, PIECE_BYTES)))
    with Path(path).open("rb", buffering=0) as file:
        while rest := PIECE_BYTES - done:
            count = os.preadv(file.fileno(), [view[:rest]], start + done)
            if not count:
                break
            hasher.update(view[:count])
            done += count
    return hasher.digest(), done


# -- what they are called after a change in place ----


class Terms:
    """Names the weights of an engine whose weights are changed in place: by a random term, which no other engine has,
    or by the text that the operator wrote into a file, which all engines with the same text share."""

    def __init__(self, version_file: str | None) -> None:
        self._file = None if version_file is None else Path(version_file).expanduser()
        self._read: _Stamp | None = None  # the file as it was last read

    def first(self, name: Callable[[], str] | None = None) -> bytes:
        """The term of the weights that the engine was started with. The text in the file at that time belongs to
        weights that an engine had before, for example this one before it crashed.

        Empty if the fingerprint names them. It cannot where a file does, whose engines share whatever they started
        with: there `name` says what they are, and may raise UnnamedWeights.
        """
        if self._file is None:
            return b""
        with contextlib.suppress(OSError):
            self._read = _Stamp.of(self._file)
        if name is None:
            return b""
        try:
            return version_term(f"started with {name()}")
        except UnnamedWeights as error:
            log.warning("%s; this engine shares with nobody until the next reset", error.message)
            return os.urandom(TERM_BYTES)

    def next(self) -> bytes:
        """The term of the weights that the engine has from now on. Reads one small file."""
        if (version := self._version()) is None:
            return os.urandom(TERM_BYTES)
        log.info("the weights are version %r from here on", version)
        return version_term(version)

    def _version(self) -> str | None:
        """The version in the file. None if the file was not written again: the old version is not that of weights that
        may have changed since."""
        if self._file is None:
            return None
        try:
            stamp = _Stamp.of(self._file)
            version = self._file.read_text().strip()
        except (OSError, ValueError) as error:
            log.warning(
                "weights_version_file cannot be read (%s); this engine shares with nobody until the next reset", error
            )
            return None
        if stamp == self._read or not is_version(version):
            log.warning(
                "weights_version_file %s was not written again with a version; this engine shares with nobody until it "
                "is, before a reset",
                self._file,
            )
            return None
        self._read = stamp
        return version


def is_version(text: str) -> bool:
    """Whether the text is 1 to 256 printable characters."""
    return 0 < len(text) <= VERSION_CHARS_MAX and text.isprintable()
