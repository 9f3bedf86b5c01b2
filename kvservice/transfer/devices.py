"""The network devices of this machine that UCX may use for a service that listens at one address. Linux only.

Blocks for a few system calls, and while a name is resolved.
"""

from __future__ import annotations

import ctypes
import ipaddress
import socket
from pathlib import Path

LOOPBACK = "127.0.0.1"
LOOPBACK_DEVICE = "lo"
RDMA = Path("/sys/class/infiniband")


def devices_for(host: str) -> list[str]:
    """UCX's names of the network device with this address and of all ports of RDMA devices.

    RDMA devices are always included, because they check keys. The result is empty when UCX should use every device: for
    an address that means all of them, as 0.0.0.0 does, or one that no device of this machine has.
    """
    try:
        address = ipaddress.ip_address(_resolved(host))
        if address.is_unspecified:
            return []
        if address.is_loopback:
            return [LOOPBACK_DEVICE]
        names = [name for name, found in _addresses() if found == address]
    except (OSError, ValueError):
        return []
    return [*dict.fromkeys(names), *_rdma_ports()] if names else []


def _resolved(host: str) -> str:
    address: object = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    return str(address)


class _Address(ctypes.Structure):
    """struct sockaddr, the part that IPv4 and IPv6 share."""

    _fields_ = (("family", ctypes.c_ushort), ("port_and_more", ctypes.c_ubyte * 26))


class _InterfaceAddress(ctypes.Structure):
    """struct ifaddrs, up to the last field that is needed."""


_InterfaceAddress._fields_ = [
    ("next", ctypes.POINTER(_InterfaceAddress)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.POINTER(_Address)),
]
_ADDRESS_AT = {socket.AF_INET: (2, 4), socket.AF_INET6: (6, 16)}  # offset and length in the bytes after the family


def _addresses() -> list[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    """(device, address) for every address of every device. Raises OSError."""
    library = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_InterfaceAddress)()
    if library.getifaddrs(ctypes.byref(first)):
        raise OSError(ctypes.get_errno(), "getifaddrs")
    found = []
    try:
        at = first
        while at:
            entry = at.contents
            if entry.address and entry.address.contents.family in _ADDRESS_AT:
                start, length = _ADDRESS_AT[entry.address.contents.family]
                raw = bytes(entry.address.contents.port_and_more[start : start + length])
                found.append((entry.name.decode(), ipaddress.ip_address(raw)))
            at = entry.next
    finally:
        library.freeifaddrs(first)
    return found


def _rdma_ports() -> list[str]:
    """'mlx5_0:1' for each port; empty on a machine without RDMA."""
    return [f"{port.parent.parent.name}:{port.name}" for port in sorted(RDMA.glob("*/ports/*"))]
