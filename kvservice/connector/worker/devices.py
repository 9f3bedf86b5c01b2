"""The kinds of device whose engines cannot use the cache, and what to do instead."""

from __future__ import annotations

from kvservice.errors import UnsupportedDevice

# By torch's name of the device. ROCm is not among them: its torch calls it "cuda", and copies go through torch.
REFUSED = {
    "xpu": "an Intel GPU (XPU)",
    "hpu": "an Intel Gaudi (HPU)",
}


def check_device(kind: str) -> None:
    """Raises UnsupportedDevice for an engine on this kind of device (torch's name for it), which has no copies here."""
    if kind in REFUSED:
        raise UnsupportedDevice(
            f"the engine runs on {REFUSED[kind]}, whose KV cache cannot be copied to and from the pool: run it on CPU, "
            "CUDA or ROCm, or take the connector out of its configuration",
            device=kind,
        )
