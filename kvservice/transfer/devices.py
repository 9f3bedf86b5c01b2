"""Which network devices of this machine UCX may use for a service that listens at one address. Linux only; blocks for a
few system calls, and for a name to be resolved."""

from __future__ import annotations

import ctypes
import ipaddress
import socket
from pathlib import Path

LOOPBACK = "127.0.0.1"
LOOPBACK_DEVICE = "lo"
RDMA = Path("/sys/class/infiniband")


def devices_for(host: str) -> list[str]:
    """UCX's names of the network device that has this address, and of all ports of RDMA devices, which check keys.

    Empty where UCX should use all there is: for an address that means every device, as 0.0.0.0 does, or one that no
    device of this machine has.
    """
    try:
        address = ipaddress.ip_address(_resolved(host.strip("[]")))
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
    """struct sockaddr, as far as IPv4 and IPv6 have it."""

    _fields_ = (("family", ctypes.c_ushort), ("port_and_more", ctypes.c_ubyte * 26))


class _InterfaceAddress(ctypes.Structure):
    """struct ifaddrs, up to what is needed."""


_InterfaceAddress._fields_ = [
    ("next", ctypes.POINTER(_InterfaceAddress)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.POINTER(_Address)),
]
_ADDRESS_AT = {socket.AF_INET: (2, 4), socket.AF_INET6: (6, 16)}  # start and length in what follows the family


def _addresses() -> list[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    """(device, address) of every address of every device. Raises OSError."""
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
    """'mlx5_0:1' of each; none on a machine without RDMA."""
    return [f"{port.parent.parent.name}:{port.name}" for port in sorted(RDMA.glob("*/ports/*"))]
