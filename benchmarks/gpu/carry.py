"""`python -m benchmarks.gpu.carry`: prepares what `make gpu` needs on a machine without a network.

`.whl` gets NIXL's wheel without what the service does not use, and the packages of the service that such a machine may
lack. `.gpu` gets the commit, which a copy of the files without `.git` cannot tell. Both are ignored by git. Run it
last, on the tree that is taken along.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from benchmarks.report import COMMIT_NOTE, ROOT, commit

REQUIREMENTS = ROOT / "requirements" / "cuda.in"
FOLDER = ROOT / ".whl"
# What the service imports, besides what comes with torch, transformers and pytest. Locked in CUDA_LOCK.
PACKAGES = (
    "annotated-types",
    "grpcio",
    "grpcio-health-checking",
    "grpcio-reflection",
    "prometheus-client",
    "protobuf",
    "pydantic",
    "pydantic-core",
    "typing-inspection",
    "xxhash",
)
CUDA_LOCK = ROOT / "requirements" / "cuda-py311.lock"
# The expert-parallel extensions are half of the wheel; the plugins are for object stores and vendors' storage.
LEFT_OUT = re.compile(r"^nixl_ep[_/]|libucx_perftest|\.scripts/|libplugin_(GPUNETIO|INFINIA|GUSLI|OBJ|AZURE|LIBFABRIC)")


def slim(wheel: Path, folder: Path) -> Path:
    """Write the wheel without the files of LEFT_OUT, under the same name, so that pip installs it. Returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / wheel.name
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as new:
        for item in old.infolist():
            data = old.read(item)
            if item.filename.endswith(".dist-info/RECORD"):
                lines = data.decode().splitlines(keepends=True)
                data = "".join(line for line in lines if not LEFT_OUT.search(line.split(",")[0])).encode()
            if not LEFT_OUT.search(item.filename):
                new.writestr(item, data, zipfile.ZIP_DEFLATED, 9)
    return target


def wanted() -> str:
    """The version of NIXL that the CUDA image has."""
    [line] = [line for line in REQUIREMENTS.read_text().splitlines() if line.startswith("nixl-cu13==")]
    return line


def locked() -> list[str]:
    """The requirements of PACKAGES, as the CUDA image has them."""
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)", CUDA_LOCK.read_text(), re.MULTILINE))
    return [f"{name}=={pinned[name]}" for name in PACKAGES]


def fetch(requirements: list[str], python: str, folder: str) -> None:
    """Download wheels for that Python. Raises CalledProcessError."""
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:", "--dest", folder]
    platform = ["--python-version", python, "--implementation", "cp"]
    for tag in ("manylinux_2_28", "manylinux_2_17", "manylinux2014"):
        platform += ["--platform", f"{tag}_x86_64"]
    subprocess.run([sys.executable, "-m", "pip", "download", *options, *platform, *requirements], check=True)


def download(requirement: str, python: str, folder: str) -> Path:
    """Download one wheel. Raises CalledProcessError."""
    fetch([requirement], python, folder)
    [wheel] = Path(folder).glob("*.whl")
    return wheel


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="3.12", help="Python version of the other machine")
    given = parser.parse_args()
    shutil.rmtree(FOLDER, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        whole = download(wanted(), given.python, folder)
        made = slim(whole, FOLDER)
        sizes = [path.stat().st_size / (1 << 20) for path in (made, whole)]
    fetch(locked(), given.python, str(FOLDER))
    total = sum(path.stat().st_size for path in FOLDER.iterdir()) / (1 << 20)
    COMMIT_NOTE.parent.mkdir(exist_ok=True)
    COMMIT_NOTE.write_text(commit() + "\n")
    print(f"{made.relative_to(ROOT)}: {sizes[0]:.1f} MiB of {sizes[1]:.1f}; {total:.1f} MiB in {FOLDER.name}")
    print(f"take .gpu and .whl along; there: make gpu PART=1, then make gpu PART=2; commit {commit()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
