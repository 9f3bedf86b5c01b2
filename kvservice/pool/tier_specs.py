"""The tiers that a pool is configured with, as values. Nothing is opened here."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

from kvservice.aio import DaemonThreads, in_thread
from kvservice.codec.base import EXTRA_BYTES_MAX
from kvservice.core.block.engine_names import NAMES_SUFFIX
from kvservice.core.tier.rules import TierRules, WriteMoment

DISK, OBJECTS = "disk", "objects"  # what people and metrics call our tiers
NONE = "none"  # the setting of a tier without a codec
# For a disk to say how much is free, which a network mount that is gone never does. Counting what the disk holds takes
# longer with millions of files, so each further step of it has as much time.
FREE_SECONDS = 10.0
MARKS_SUFFIX = ".marks"  # of the file beside a disk's folder: pool.mark_files
FREE_SHARE = 0.9  # of what is free: the index and the other users of the file system need room too


class TierSettings(Protocol):
    """kvservice.config.ServiceConfig and the options of an embedded pool have these settings."""

    @property
    def disk_path(self) -> str: ...
    @property
    def disk_bytes(self) -> int: ...
    @property
    def disk_write(self) -> Literal["evicted", "stored", "reused"]: ...
    @property
    def disk_codec(self) -> str: ...
    @property
    def disk_io(self) -> Literal["auto", "direct", "buffered", "nixl-posix", "gds"]: ...
    @property
    def objects_url(self) -> str: ...
    @property
    def objects_write(self) -> Literal["evicted", "stored", "reused"]: ...
    @property
    def objects_codec(self) -> str: ...
    @property
    def objects_namespace(self) -> str: ...
    @property
    def codec_key_file(self) -> str: ...


@dataclass(frozen=True, slots=True)
class TierSpec:
    """One tier of a pool."""

    name: str  # DISK, OBJECTS
    place: str  # the directory of this pool alone, or the URL of the store
    budget_bytes: int  # most that its blocks may take; 0 = no bound
    write: Literal["evicted", "stored", "reused"]  # when a block is written down
    codec: str  # NONE, or a name
    namespace: str = ""  # of an object store
    io: str = "auto"  # of a disk: tier.disk_io.DiskIO
    unusable: str = ""  # why a disk is not touched as the pool starts

    @property
    def is_late(self) -> bool:
        """Whether such a disk is used once it answers: how much of it is known without asking it."""
        return bool(self.unusable and self.budget_bytes)


def rules_of(spec: TierSpec) -> TierRules:
    """What the core knows of the tier."""
    extra_bytes = 0 if spec.codec == NONE else EXTRA_BYTES_MAX
    return TierRules(spec.name, spec.name == OBJECTS, spec.budget_bytes, WriteMoment(spec.write), extra_bytes)


def disk_bytes(tiers: Iterable[TierSpec]) -> int:
    """What the blocks of the disk among these tiers may take; 0 = there is none."""
    return sum(tier.budget_bytes for tier in tiers if tier.name == DISK)


@dataclass(slots=True)
class DiskWalk:
    """Through the files of a disk, as another thread sees it."""

    files: int = 0


async def find_tiers(settings: TierSettings, owner: str) -> tuple[TierSpec, ...]:
    """`tier_specs`, with a disk that is not touched when that stops answering: a pool starts without it, and says so.
    Waits for a disk with many files as long as it goes on answering."""
    walk = DiskWalk()
    finding = asyncio.ensure_future(
        in_thread(partial(_reached, settings, owner, walk), DaemonThreads("kvservice-find-tiers"))
    )
    try:
        seen = -1
        while not finding.done() and walk.files > seen:
            seen = walk.files
            await asyncio.wait([finding], timeout=FREE_SECONDS)
        if finding.done():
            return finding.result()
        reason = f"it did not answer within {FREE_SECONDS:.0f} s"
    except OSError as error:
        reason = error.strerror or str(error)
    finally:
        finding.cancel()
    until = "it answers" if settings.disk_bytes else "the next start"
    return tuple(
        replace(spec, unusable=f"{spec.place} is not used before {until}: {reason}") if spec.name == DISK else spec
        for spec in tier_specs(settings, owner, lambda place: 0)
    )


def _reached(settings: TierSettings, owner: str, walk: DiskWalk) -> tuple[TierSpec, ...]:
    """`tier_specs`, once the disk has shown the files that a start reads before all else. Raises OSError."""
    found = tier_specs(settings, owner, lambda place: free_bytes(place, walk))
    read_beside(found)
    return found


def read_beside(tiers: Sequence[TierSpec]) -> None:
    """Read the beginning of the files that lie beside these disks. Blocks, as long as a disk hangs. Raises OSError."""
    for path in (*marks_beside(tiers), *names_beside(tiers)):
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            file.read(1)


def marks_beside(tiers: Sequence[TierSpec]) -> tuple[Path, ...]:
    """Where the marks lie that outlive the memory: beside the folders of disks."""
    return tuple(Path(tier.place + MARKS_SUFFIX) for tier in _usable_disks(tiers))


def names_beside(tiers: Sequence[TierSpec]) -> tuple[Path, ...]:
    """Where the names lie that engines have for the blocks: beside the folders of disks."""
    return tuple(Path(tier.place + NAMES_SUFFIX) for tier in _usable_disks(tiers))


def _usable_disks(tiers: Iterable[TierSpec]) -> Iterator[TierSpec]:
    return (tier for tier in tiers if tier.name == DISK and not tier.unusable)


def tier_specs(settings: TierSettings, owner: str, free: Callable[[Path], int]) -> tuple[TierSpec, ...]:
    """The tiers that these settings name, nearest first. `owner` is the path of this pool below `disk_path`, where no
    other pool writes. `free` says how much the disk's blocks may take; it may block."""
    found: list[TierSpec] = []
    place = disk_folder(settings, owner)
    if place is not None:
        budget = settings.disk_bytes or free(place)
        found.append(TierSpec(DISK, str(place), budget, settings.disk_write, settings.disk_codec, io=settings.disk_io))
    if settings.objects_url:
        write, codec = settings.objects_write, settings.objects_codec
        found.append(TierSpec(OBJECTS, settings.objects_url, 0, write, codec, settings.objects_namespace))
    return tuple(found)


def disk_folder(settings: TierSettings, owner: str) -> Path | None:
    """Where the disk tier of this pool is; None without one."""
    return Path(settings.disk_path) / owner if settings.disk_path else None


def free_bytes(place: Path, walk: DiskWalk) -> int:
    """Nine tenths of what is free for this directory, which need not exist. Its own files count as free: they are the
    blocks of an earlier start. Blocks for seconds where many lie."""
    there = next(each for each in (place, *place.parents) if each.exists())
    return int((shutil.disk_usage(there).free + _held_bytes(place, walk)) * FREE_SHARE)


def _held_bytes(place: Path, walk: DiskWalk) -> int:
    total, folders = 0, [str(place)]
    while folders:
        with contextlib.suppress(FileNotFoundError, PermissionError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                    continue
                with contextlib.suppress(FileNotFoundError):  # erased meanwhile
                    total += entry.stat(follow_symlinks=False).st_size
                walk.files += 1
    return total
