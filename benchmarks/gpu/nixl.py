"""Stage nixl: does the NIXL that was carried here import, move host memory as the product does, and reach GPU memory?

The product registers host memory only. GPU memory is asked about for what may come.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.gpu.findings import Stage, said_by

STAGE = Stage("nixl")
MOVED_BYTES = 64 << 20


def cuda_modules() -> list[str]:
    """What UCX could use to reach GPU memory."""
    folders = [Path(folder, f"{package}.libs", "ucx") for folder in sys.path for package in ("nixl_cu12", "nixl_cu13")]
    names = {path.name for folder in folders if folder.is_dir() for path in folder.iterdir()}
    return sorted(name for name in names if "cuda" in name or "gdr" in name)


def main() -> None:
    STAGE.driver()
    from kvservice.transfer.nixl import nixl_available
    from kvservice.transfer.nixl_probe import loopback_probe

    if not nixl_available():
        STAGE.skip("NIXL is not here: run `make gpu-carry` where there is a network, and take .whl along")
    STAGE.attempt("UCX's modules for CUDA", cuda_modules)
    STAGE.attempt("host memory, as the product moves it", lambda: loopback_probe(60))
    STAGE.attempt("host memory into GPU memory", lambda: said_by("vram", str(MOVED_BYTES), UCX_LOG_LEVEL="warn"))


if __name__ == "__main__":
    main()
