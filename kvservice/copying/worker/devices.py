"""Finds the device that a copy worker serves by the name it was started with."""

from __future__ import annotations

from kvservice.copying.device import HOST, Device, HostDevice


def device_named(name: str) -> Device:
    """The device: `cpu`, or a GPU by its UUID or its index in this process. Raises Unavailable if there is none."""
    if name == HOST:
        return HostDevice()
    from kvservice.copying.cuda.device import CudaDevice  # loads the driver

    return CudaDevice.find(name)
