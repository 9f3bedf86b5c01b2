"""Write requirements/cpu-py311.lock or cuda-py311.lock from pip's own resolution report.

`make lock` resolves requirements/*.in with pip's dry run and gives its JSON report to this script. The lock lists each
distribution with its exact version and SHA-256. It is installed with --no-deps, so that an install is the same on every
machine, and nothing else comes in.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

# Left out of the CPU lock. The first three are built for another torch, and importing transformers fails beside them.
# With Triton, vLLM chooses a model runner that needs a GPU.
LEFT_OUT = frozenset({"torchvision", "torchaudio", "torchcodec", "triton"})

HEADER = """\
# CPython 3.11, Linux x86_64. Made by `make lock` from requirements/{kind}.in; do not edit.
# Install with: pip install --no-deps --require-hashes -r requirements/{kind}-py311.lock
"""


def main(lock_path: str, *report_paths: str) -> None:
    items = [item for path in report_paths for item in json.loads(Path(path).read_text())["install"]]
    lines: list[str] = []
    kind = Path(lock_path).name.partition("-")[0]
    for item in items:
        name = item["metadata"]["name"].lower().replace("_", "-")
        if kind == "cpu" and name in LEFT_OUT:
            continue
        version = item["metadata"]["version"]
        digest = item["download_info"]["archive_info"]["hashes"]["sha256"]
        lines.append(f"{name}=={version} --hash=sha256:{digest}")
    Path(lock_path).write_text(HEADER.format(kind=kind) + "\n".join(sorted(lines)) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
