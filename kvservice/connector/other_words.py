"""Options of vLLM's SimpleCPUOffloadConnector by the names that they have here, so that its configurations go on
working with another connector's name in them."""

from __future__ import annotations

from collections.abc import Mapping

from kvservice.errors import ConfigError


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
    return found


def _bytes(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ConfigError(f"{key} is {value!r:.100}; give a number of bytes above 0, or memory as a size", key=key)
    return value


def _put(found: dict[str, object], ours: str, theirs: str, value: object) -> None:
    if ours in found:
        raise ConfigError(f"{theirs} is another name of {ours}: give one of them", key=ours)
    found[ours] = value
