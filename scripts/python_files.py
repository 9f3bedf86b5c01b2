"""python_files.py REQUIREMENTS FOLDER: the Python files of locked wheels, without what is compiled in them.

For looking at a version of vLLM that has no build for CPUs: its scheduler and connector code is Python, and imports
without its kernels. The metadata calls the version a CPU build, as vLLM chooses its platform by that.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path


def main(requirements: Path, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    with tempfile.TemporaryDirectory(dir=folder) as downloaded:
        subprocess.run([*pip, "--require-hashes", "--dest", downloaded, "--requirement", str(requirements)], check=True)
        for wheel in Path(downloaded).glob("*.whl"):
            unpack(wheel, folder)


def unpack(wheel: Path, folder: Path) -> None:
    name, version = wheel.name.split("-")[:2]
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            if member.endswith(".py"):
                archive.extract(member, folder)
    metadata = folder / f"{name}-{version}+cpu.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}+cpu\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
