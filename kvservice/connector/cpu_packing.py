"""How engines on this processor pack K and V within a head's cell."""

from __future__ import annotations

import platform

import torch


def cpu_packing() -> str:
    """The architecture and instruction set by which vLLM packs them: engines with another one read other bytes."""
    amx = " amx" if torch.cpu._is_amx_tile_supported() else ""  # noqa: SLF001  vLLM asks the same
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}{amx}"
