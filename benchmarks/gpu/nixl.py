"""Stage nixl: does the NIXL that was carried here import, move host memory as the product does, and reach GPU memory?

The product registers host memory only. GPU memory is asked about for what may come.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.gpu.findings import ROOT, Stage, said_by

STAGE = Stage("nixl")
WHEELS = ROOT / ".whl"
MOVED_BYTES = 64 << 20


def install(folder: str) -> None:
    """Use the carried wheels in this process and in those that it starts."""
    wheels = sorted(map(str, WHEELS.glob("nixl*.whl")))
    if not wheels:
        STAGE.skip("NIXL is not here: run `make gpu-carry` where there is a network, and take .whl along")
    quiet = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *quiet, "--target", folder, *wheels]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        STAGE.skip(f"NIXL could not be installed: {done.stderr.strip()[-200:]}")
    sys.path.insert(0, folder)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
    importlib.invalidate_caches()


def cuda_modules() -> list[str]:
    """What UCX could use to reach GPU memory."""
    folders = [Path(folder, f"{package}.libs", "ucx") for folder in sys.path for package in ("nixl_cu12", "nixl_cu13")]
    names = {path.name for folder in folders if folder.is_dir() for path in folder.iterdir()}
    return sorted(name for name in names if "cuda" in name or "gdr" in name)


def main() -> None:
    STAGE.driver()
    from kvservice.transfer.nixl import nixl_available
    from kvservice.transfer.nixl_probe import loopback_probe

    with tempfile.TemporaryDirectory(prefix="kvservice-nixl-") as folder:
        if not nixl_available():
            install(folder)
        STAGE.attempt("UCX's modules for CUDA", cuda_modules)
        STAGE.attempt("host memory, as the product moves it", lambda: loopback_probe(60))
        STAGE.attempt("host memory into GPU memory", lambda: said_by("vram", str(MOVED_BYTES), UCX_LOG_LEVEL="warn"))


if __name__ == "__main__":
    main()
