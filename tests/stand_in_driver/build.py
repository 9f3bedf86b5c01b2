"""`python -m tests.stand_in_driver.build` compiles the stand-in driver where it is older than its source."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(__file__).with_name("driver.c")
# By this name the product asks for the driver. Without an soname, a process that loads it by its path does not take it
# for the driver of everything else that asks.
LIBRARY = ROOT / "build" / "stand_in_driver" / "libcuda.so.1"


def compiler() -> str | None:
    return shutil.which(os.environ.get("CC", "cc"))


def build() -> Path:
    """Raises CalledProcessError with the compiler's words on standard error. Several at once do not meet."""
    cc = compiler()
    assert cc is not None, "the stand-in driver needs a C compiler"
    if not LIBRARY.exists() or LIBRARY.stat().st_mtime < SOURCE.stat().st_mtime:
        LIBRARY.parent.mkdir(parents=True, exist_ok=True)
        draft = LIBRARY.with_name(f"{LIBRARY.name}.{os.getpid()}")
        flags = ["-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread"]
        subprocess.run([cc, *flags, "-o", str(draft), str(SOURCE)], check=True)
        draft.replace(LIBRARY)
    return LIBRARY


if __name__ == "__main__":
    print(build())
