"""The tiers that a pool is configured with, as values. Nothing is opened here."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

from kvservice.aio import DaemonThreads, in_thread, within
from kvservice.core.tier.rules import TierRules, WriteMoment

log = logging.getLogger("kvservice.pool")

DISK, OBJECTS = "disk", "objects"  # what people and metrics call our tiers
FREE_SECONDS = 10.0  # for a disk to say how much is free: a network mount that is gone says it never
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


@dataclass(frozen=True, slots=True)
class TierSpec:
    """One tier of a pool."""

    name: str  # DISK, OBJECTS
    place: str  # the directory of this pool alone, or the URL of the store
    budget_bytes: int  # most that its blocks may take; 0 = no bound
    write: Literal["evicted", "stored", "reused"]  # when a block is written down
    codec: str  # "none", or a name
    namespace: str = ""  # of an object store
    io: str = "auto"  # of a disk: tier.disk_io.DiskIO


def rules_of(spec: TierSpec) -> TierRules:
    """What the core knows of the tier."""
    return TierRules(spec.name, spec.name == OBJECTS, spec.budget_bytes, WriteMoment(spec.write))


def disk_bytes(tiers: Iterable[TierSpec]) -> int:
    """What the blocks of the disk among these tiers may take; 0 = there is none."""
    return sum(tier.budget_bytes for tier in tiers if tier.name == DISK)


async def find_tiers(settings: TierSettings, owner: str) -> tuple[TierSpec, ...]:
    """`tier_specs`, without the disk when that does not answer in time: a pool starts without it."""
    threads = DaemonThreads("kvservice-find-tiers")
    try:
        return await within(FREE_SECONDS, in_thread(partial(_reached, settings, owner), threads))
    except (asyncio.TimeoutError, OSError) as error:
        reason = str(error) or f"it did not answer within {FREE_SECONDS:.0f} s"
        log.error("disk_unusable", extra={"path": settings.disk_path, "reason": reason})
        return tuple(spec for spec in tier_specs(settings, owner, lambda place: 0) if spec.name != DISK)


def _reached(settings: TierSettings, owner: str) -> tuple[TierSpec, ...]:
    """`tier_specs`, once the disk has shown what was cleared: a start reads that before all else. Raises OSError."""
    found = tier_specs(settings, owner)
    for path in marks_beside(found):
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            file.read(1)
    return found


def marks_beside(tiers: Sequence[TierSpec]) -> tuple[Path, ...]:
    """Where the marks lie that outlive the memory: beside the folders of disks."""
    return tuple(Path(tier.place + MARKS_SUFFIX) for tier in tiers if tier.name == DISK)


def tier_specs(settings: TierSettings, owner: str, free: Callable[[Path], int] | None = None) -> tuple[TierSpec, ...]:
    """The tiers that these settings name, nearest first. `owner` is the path of this pool below `disk_path`, where no
    other pool writes. Blocks for a moment: it asks how much is free, and for seconds where many blocks lie."""
    found: list[TierSpec] = []
    place = disk_folder(settings, owner)
    if place is not None:
        budget = settings.disk_bytes or (free or free_bytes)(place)
        found.append(TierSpec(DISK, str(place), budget, settings.disk_write, settings.disk_codec, io=settings.disk_io))
    if settings.objects_url:
        write, codec = settings.objects_write, settings.objects_codec
        found.append(TierSpec(OBJECTS, settings.objects_url, 0, write, codec, settings.objects_namespace))
    return tuple(found)


def disk_folder(settings: TierSettings, owner: str) -> Path | None:
    """Where the disk tier of this pool is; None without one."""
    return Path(settings.disk_path) / owner if settings.disk_path else None


def free_bytes(place: Path) -> int:
    """Nine tenths of what is free for this directory, which need not exist. Its own files count as free: they are the
    blocks of an earlier start."""
    there = next(each for each in (place, *place.parents) if each.exists())
    return int((shutil.disk_usage(there).free + _held_bytes(place)) * FREE_SHARE)


def _held_bytes(place: Path) -> int:
    total = 0
    for folder, _, names in os.walk(place):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # erased meanwhile
                total += Path(folder, name).stat().st_size
    return total
