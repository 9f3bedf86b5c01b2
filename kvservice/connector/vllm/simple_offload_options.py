"""Options of vLLM's SimpleCPUOffloadConnector by the names that they have here, so that its configurations go on
working with another connector's name in them."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from kvservice.errors import ConfigError

log = logging.getLogger("kvservice.connector")

BACKEND = "kv_offload_backend"


def in_our_words(given: Mapping[str, object], ranks: int) -> dict[str, object]:
    """The keys of kv_connector_extra_config without those of SimpleCPUOffloadConnector. `ranks` is the number of the
    engine's workers, which share one pool here. Raises ConfigError for values that make no sense, and where both names
    of one option are given."""
    found = dict(given)
    whole, each = found.pop("cpu_bytes_to_use", None), found.pop("cpu_bytes_to_use_per_rank", None)
    if each is not None:  # vLLM, too, lets it win
        _put(found, "memory", "cpu_bytes_to_use_per_rank", _bytes("cpu_bytes_to_use_per_rank", each) * ranks)
    elif whole is not None:
        _put(found, "memory", "cpu_bytes_to_use", _bytes("cpu_bytes_to_use", whole))
    lazy = found.pop("lazy_offload", None)
    if lazy is not None:
        if not isinstance(lazy, bool):
            raise ConfigError(
                f"lazy_offload is {lazy!r:.100}; give true or false, or offload 'lazy'", key="lazy_offload"
            )
        _put(found, "offload", "lazy_offload", "evicting" if lazy else "eager")
    _disk_in_our_words(found, ranks)
    return found


def _disk_in_our_words(found: dict[str, object], ranks: int) -> None:
    """The disk of the back end `disk` is here the tier below the memory."""
    backend = found.pop(BACKEND, None)
    if backend not in (None, "cpu", "disk"):
        raise ConfigError(f"{BACKEND} is {backend!r:.100}; give 'cpu' or 'disk'", key=BACKEND)
    if backend == "disk" and not found.get("disk_path"):
        raise ConfigError(f"{BACKEND} 'disk' needs disk_path: give a directory", key="disk_path")
    if backend == "cpu" or not found.get("disk_path"):  # vLLM, too, leaves out what is for a disk
        left_out = [key for key in ("disk_path", "disk_capacity_bytes", "use_page_cache") if found.pop(key, None)]
        if left_out:
            log.warning("no disk is asked for: %s left out", ", ".join(left_out))
    if found.pop("disk_buffer_slots", None) is not None:
        log.info("disk_buffer_slots is left out: the shard makes its buffers for the disk itself")
    if (capacity := found.pop("disk_capacity_bytes", None)) is not None:
        _put(found, "disk_bytes", "disk_capacity_bytes", _bytes("disk_capacity_bytes", capacity) * ranks)
    if (cached := found.pop("use_page_cache", None)) is not None:
        if not isinstance(cached, bool):
            raise ConfigError(
                f"use_page_cache is {cached!r:.100}; give true or false, or disk_io", key="use_page_cache"
            )
        _put(found, "disk_io", "use_page_cache", "buffered" if cached else "auto")


def _bytes(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ConfigError(f"{key} is {value!r:.100}; give a number of bytes above 0, or memory as a size", key=key)
    return value


def _put(found: dict[str, object], ours: str, theirs: str, value: object) -> None:
    if ours in found:
        raise ConfigError(f"{theirs} is another name of {ours}: give one of them", key=ours)
    found[ours] = value
