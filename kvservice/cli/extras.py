"""Says what to install when a command needs a library of an extra that is not there."""

from __future__ import annotations

from kvservice.errors import ConfigError

# Module → the extras that bring it.
EXTRAS = {
    "aiohttp": ("proxy", "console"),
    "cryptography": ("certs",),
    "nixl_cu12": ("nixl",),
    "ray": ("ray",),
    "textual": ("top",),
    "vllm": ("vllm",),
}


def missing_extra(error: ModuleNotFoundError) -> ConfigError | None:
    """The error for the user, or None if the module belongs to no extra."""
    module = (error.name or "").partition(".")[0]
    extras = EXTRAS.get(module)
    return None if extras is None else ConfigError(f"this needs {module}. {how_to_install(*extras)}", key=extras[0])


def how_to_install(*extras: str) -> str:
    """Which extra it is, and the command that adds what is in it. It names the libraries and not kvservice itself,
    which no package index has."""
    wanted = requirements(extras[0])
    command = f": pip install {' '.join(repr(each) for each in wanted)}" if wanted else ""
    return f"It comes with the extra {' or '.join(map(repr, extras))} of kvservice{command}"


def requirements(extra: str) -> list[str]:
    """What the installed package says is in this extra; nothing if its metadata is older or not there."""
    import importlib.metadata  # a tenth of the time that `kvservice --help` takes

    try:
        declared = importlib.metadata.requires("kvservice") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    mark = f'extra == "{extra}"'
    return [text.partition(";")[0].strip() for text in declared if mark in text.replace("'", '"')]
