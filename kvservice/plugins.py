"""Finds parts that other packages bring: eviction policies, tiers and codecs, each by its name.

A package offers one with an entry point in the group's name. What the entry point names has an attribute
`interface_version`, the version of the interface that it was written for; another version is refused. docs/plugins.md
shows a whole package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from kvservice.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PluginGroup:
    name: str  # of the entry points
    what: str  # one of them, for people
    interface_version: int  # the version that this kvservice calls


EVICTION = PluginGroup("kvservice.eviction", "eviction policy", 1)
TIERS = PluginGroup("kvservice.tiers", "tier", 1)
CODECS = PluginGroup("kvservice.codecs", "codec", 1)


def load(group: PluginGroup, name: str, ours: Iterable[str]) -> Callable[[], object]:
    """What the entry point `name` of this group makes its part with. Imports the other package, so it may block.

    `ours` are the names that need no package; an unknown name may be one of them, misspelt.

    Raises ConfigError when no package or several offer that name, when the package cannot be imported, and when it was
    written for another version of the interface.
    """
    found = list(entry_points(group=group.name, name=name))
    if not found:
        installed = ", ".join(sorted({point.name for point in entry_points(group=group.name)})) or "none"
        raise ConfigError(
            f"no package offers the {group.what} {name!r}: correct the name, or install its package for this Python; "
            f"built in: {', '.join(ours)}; installed in group {group.name}: {installed}",
            key=name,
        )
    if len(found) > 1:
        raise ConfigError(
            f"{' and '.join(sorted(_package(point) for point in found))} both offer the {group.what} {name!r}: "
            "uninstall one of them",
            key=name,
        )
    return _checked(group, found[0])


def made(group: PluginGroup, name: str, factory: Callable[[], object], interface: type) -> object:
    """What the factory makes. Raises ConfigError when that fails, or when it lacks a method of the interface."""
    try:
        part = factory()
    except Exception as error:  # other people's code
        raise ConfigError(f"{group.what} {name!r} cannot be made: {type(error).__name__}: {error}", key=name) from error
    check_methods(group, name, part, interface)
    return part


def check_methods(group: PluginGroup, name: str, part: object, interface: type) -> None:
    """Raises ConfigError when this part, or its class, lacks a method of the interface."""
    missing = [method for method in methods_of(interface) if not callable(getattr(part, method, None))]
    if missing:
        raise ConfigError(f"{group.what} {name!r} has no method {', '.join(missing)}: see docs/plugins.md", key=name)


def methods_of(interface: type) -> list[str]:
    return [name for name, what in vars(interface).items() if callable(what) and not name.startswith("_")]


def _checked(group: PluginGroup, point: EntryPoint) -> Callable[[], object]:
    what = f"{group.what} {point.name!r} of {_package(point)}"
    try:
        made = point.load()
    except Exception as error:  # other people's code, while it is imported
        raise ConfigError(f"{what} cannot be imported: {type(error).__name__}: {error}", key=point.name) from error
    version = getattr(made, "interface_version", None)
    if version != group.interface_version:
        raise ConfigError(
            f"{what} is written for interface version {version}, and this kvservice calls version "
            f"{group.interface_version}: install a release of that package for this kvservice",
            key=point.name,
        )
    if not callable(made):
        raise ConfigError(f"{what} is not callable: its entry point must name a class or a function", key=point.name)
    factory: Callable[[], object] = made
    return factory


def _package(point: EntryPoint) -> str:
    return "an unknown package" if point.dist is None else f"{point.dist.name} {point.dist.version}"
