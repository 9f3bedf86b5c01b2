"""Which device a copy worker serves, by the name it is started with."""

from __future__ import annotations

from kvservice.copying.device import HOST, Device, HostDevice


def device_named(name: str) -> Device:
    """`cpu`, a GPU's UUID, or its index among those this process sees. Raises Unavailable when there is none."""
    if name == HOST:
        return HostDevice()
    from kvservice.copying.cuda.device import CudaDevice  # loads the driver

    return CudaDevice.find(name)
