"""The rows of `kvservice doctor` about tiers: the disk of `disk_path` and the store of `objects_url`, and what is wrong
with the tiers of shards that run.

Disk and store are really written and read, beside the blocks that lie there, and nothing is left behind.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvservice.cli.doctor_check import ABSENT, OK, PROBLEM, WARNING, Check
from kvservice.units import format_bytes

if TYPE_CHECKING:
    from kvservice.client.overview import NodeOverview

FREE_SHARE_MIN = 0.05  # of a disk; with less left, file systems get slow and fragment
DRIVE_WRITES_MAX = 1.0  # a day: what makers grant most drives for servers that are made for reading
WEAR_SECONDS_MIN = 3600.0  # since the boot; what was written in less says nothing about a day
SECTOR_BYTES = 512  # the unit of /sys/dev/block/*/stat and size, whatever the drive's own sectors are
DAY_SECONDS = 86_400.0  # of 24 hours, as in a drive's endurance
BLOCK_DEVICES = Path("/sys/dev/block")
WEAR_ADVICE = "write less: disk_write reused; or a larger drive; docs/disk-worth.md says what a trace would write"


@dataclass(frozen=True, slots=True)
class Wear:
    """What everybody wrote to a block device since the machine started."""

    written_bytes: int
    device_bytes: int
    seconds: float

    @property
    def drive_writes_a_day(self) -> float:
        return self.written_bytes / self.device_bytes / self.seconds * DAY_SECONDS


def disk_tier() -> Iterator[Check]:
    from kvservice.config import load_config
    from kvservice.errors import KVServiceError
    from kvservice.private_files import check_directory
    from kvservice.tier.disk import DiskTier
    from kvservice.tier.disk_io import DiskIO

    config = load_config()
    if not config.disk_path:
        detail = "disk_path is not set: a shard started here loses what its memory evicts"
        yield Check("disk_tier", ABSENT, detail, "docs/howto/tiers.md")
        return
    path = Path(config.disk_path)
    there = next(each for each in (path, *path.parents) if each.exists())
    try:
        if there == path:
            check_directory(path)
        with tempfile.TemporaryDirectory(prefix=".kvservice-doctor-", dir=there) as folder:
            tier = DiskTier(Path(folder) / "blocks", io=DiskIO(config.disk_io))
            tier.start()
            try:
                found, refused = tier.describe(), tier.counters()["io_refused"]
            finally:
                tier.close()
    except (KVServiceError, OSError) as error:
        reason = error.message if isinstance(error, KVServiceError) else f"{there}: {error.strerror or error}"
        yield Check("disk_tier", PROBLEM, f"disk_path {path} cannot be used: {reason}", "choose another disk_path")
        return
    how = "O_DIRECT" if found["direct"] else "through the page cache"
    advice = "" if found["direct"] else "a local ext4 or XFS file system is read without a copy by the kernel"
    detail = f"{path} on {found['file_system']}: a block written and read back, {how} ({found['disk_io']})"
    if refused and config.disk_io != DiskIO.AUTO.value:
        detail += f"; disk_io {config.disk_io} does not work there"
        advice = "choose another disk_io, or a file system that can do it; the log of a shard's start says why"
    yield Check("disk_tier", OK if found["direct"] and not advice else WARNING, detail, advice)
    yield _room(there, config.disk_bytes, _bytes_in(path))
    yield _wear(there)


def _bytes_in(path: Path) -> int:
    """What the files below a folder take; 0 if there is none."""
    found = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):  # a shard that runs has erased it meanwhile
                found += os.lstat(os.path.join(folder, name)).st_blocks * SECTOR_BYTES  # noqa: PTH118  of many files
    return found


def _room(path: Path, wanted: int, held: int) -> Check:
    """`held`: bytes of blocks that lie there already."""
    usage = shutil.disk_usage(path)
    detail = f"{format_bytes(usage.free)} of {format_bytes(usage.total)} are free at {path}"
    if wanted > usage.free + held:
        advice = "choose a smaller disk_bytes, or a larger disk; a full disk takes no more blocks and loses none"
        return Check("disk_room", WARNING, f"{detail}; disk_bytes is {format_bytes(wanted)}", advice)
    if usage.free < FREE_SHARE_MIN * usage.total:
        return Check("disk_room", WARNING, detail, "make room, or set disk_bytes to what the disk can spare")
    return Check("disk_room", OK, detail)


def _wear(path: Path) -> Check:
    wear = read_wear(path)
    if wear is None:
        return Check("disk_wear", ABSENT, f"the kernel does not say what is written to the device below {path}")
    rate = wear.drive_writes_a_day
    detail = (
        f"{format_bytes(wear.written_bytes)} written to a device of {format_bytes(wear.device_bytes)} in "
        f"{wear.seconds / 3600:.1f} h, by everybody: {rate:.2f} drive writes a day"
    )
    if wear.seconds >= WEAR_SECONDS_MIN and rate > DRIVE_WRITES_MAX:
        return Check("disk_wear", WARNING, detail, WEAR_ADVICE)
    return Check("disk_wear", OK, detail)


def read_wear(path: Path, devices: Path = BLOCK_DEVICES) -> Wear | None:
    """What was written since the boot to the device that `path` lies on; None where the kernel does not say."""
    number = path.stat().st_dev
    device = devices / f"{os.major(number)}:{os.minor(number)}"
    try:
        written = int((device / "stat").read_text().split()[6]) * SECTOR_BYTES
        size = int((device / "size").read_text()) * SECTOR_BYTES
    except (OSError, ValueError, IndexError):
        return None
    return Wear(written, size, time.clock_gettime(time.CLOCK_BOOTTIME)) if size else None


def object_store() -> Iterator[Check]:
    from kvservice.config import load_config
    from kvservice.errors import KVServiceError
    from kvservice.tier.objects import ObjectTier

    config = load_config()
    if not config.objects_url:
        detail = "objects_url is not set: a shard started here shares no object store"
        yield Check("object_store", ABSENT, detail, "docs/howto/tiers.md")
        return
    began = time.monotonic()
    tier = ObjectTier(config.objects_url, config.objects_namespace)
    try:
        tier.start()
    except KVServiceError as error:
        advice = "check objects_url, the credentials in the environment and the network; docs/howto/object-store.md"
        yield Check("object_store", PROBLEM, error.message, advice)
        return
    seconds = time.monotonic() - began
    tier.close()
    yield Check(
        "object_store", OK, f"{config.objects_url}: an object written, read and deleted in {seconds * 1000:.0f} ms"
    )


def troubles(service: str, node: NodeOverview) -> Iterator[Check]:
    """Yields what is wrong with the tiers of a node. Those that are well have no row."""
    from kvservice.cli.status import NOT_DECODED
    from kvservice.client.tier_overview import OPEN, UNUSABLE, not_decoded

    for tier in node.tiers:
        name = f"{tier.name} of {service}"
        if tier.state == UNUSABLE:
            advice = "restart its shard when the cause is gone; docs/howto/alerts.md#kvservicetierdown"
            yield Check(name, PROBLEM, f"{node.label} does not use it: {tier.detail}", advice)
        elif tier.state == OPEN and tier.detail:
            detail = f"{node.label} does not write every block there: {tier.detail}"
            yield Check(name, WARNING, detail, "make room there; docs/howto/alerts.md#kvservicetierwritesfail")
        if lost := not_decoded(tier):
            yield Check(name, WARNING, f"{node.label}: {lost}", NOT_DECODED)
