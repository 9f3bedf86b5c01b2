"""NewTypes that keep ids, hashes and sizes apart, and functions that format counts and sizes. Pure; any thread."""

from __future__ import annotations

import re
from typing import NewType

BlockHash = NewType("BlockHash", bytes)  # the engine's own chained hash of one token block, usually 32 bytes
BlockKey = NewType("BlockKey", bytes)  # 16 bytes: tenant- and fingerprint-bound name of one block, see core.block.keys
SpanRoute = NewType("SpanRoute", int)  # uint32 that places a span of a chain on a lookup partition, see core.block.keys
NodeId = NewType("NodeId", str)  # name of one node's shard; it stays the same over restarts and is unique in a service
BootEpoch = NewType("BootEpoch", int)  # uint64 > 0; grows with every start of one shard
SlotIndex = NewType("SlotIndex", int)  # slab_index << 16 | index in the slab, see core.segment.geometry
Generation = NewType("Generation", int)  # uint64; odd while the slot is being written, even when it is not
LeaseId = NewType("LeaseId", int)  # uint64, single use within one boot epoch
AttachmentId = NewType("AttachmentId", int)  # uint64, one attached engine within one boot epoch
HandoffId = NewType("HandoffId", bytes)  # 16 random bytes, one prompt handed from a prefill to a decode engine

NAME_CHARS_MAX = 512  # of a model, namespace, tenant, node or address: more than any real name; a longer one is refused

KiB = 1 << 10  # bytes
MiB = 1 << 20
GiB = 1 << 30

_SUFFIXES = {"": 1, "k": KiB, "m": MiB, "g": GiB, "t": GiB << 10}
PORT_MAX = 65_535  # of TCP
_ENDPOINT = re.compile(r"([^/]*):([0-9]{1,5})")
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:([kmgt])i?)?b?\s*", re.IGNORECASE)  # 4G, 4GB, 4Gi and 4GiB mean the same


def bracketed(host: str) -> str:
    """The host as it is written before a port: an IPv6 address gets brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def endpoint_of(address: str) -> tuple[str, int] | None:
    """Host, without brackets, and port. None if the address is not host:port, such as ray://…"""
    found = _ENDPOINT.fullmatch(address)
    return (found[1].strip("[]"), int(found[2])) if found and int(found[2]) <= PORT_MAX else None


def div_ceil(dividend: int, divisor: int) -> int:
    """The smallest integer that is at least dividend / divisor. The divisor is positive."""
    return -(-dividend // divisor)


def align_up(value: int, alignment: int) -> int:
    """The smallest multiple of `alignment` that is at least `value`."""
    return div_ceil(value, alignment) * alignment


def printable(text: str) -> str:
    """Somebody else's text on one line, safe for logs, terminals and protobuf.

    Line ends and terminal codes become escapes, because a log or a terminal would act on them. So do lone surrogates,
    which protobuf refuses.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def counted(count: int, thing: str) -> str:
    """'1 node', '2 nodes'."""
    return f"{count:,} {thing}" + ("" if count == 1 else "s")


def format_bytes(count: int) -> str:
    """A size with a binary unit, for messages only: 737280 -> '720.0 KiB'."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{int(size)} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


BYTES_MAX = 1 << 60  # an exbibyte: more than any machine has, and far inside 64 bits. parse_bytes refuses more.


def parse_bytes(text: str | int) -> int:
    """The bytes of '512MiB', '4g', '1.5 GiB' or a plain count. Raises ValueError with the text in it."""
    if isinstance(text, int):
        return text
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"not a size: {text!r} (write it like 512MiB, 4GiB or 1073741824)")
    size = float(match.group(1)) * _SUFFIXES[(match.group(2) or "").lower()]
    if size > BYTES_MAX:
        raise ValueError(f"{text[:80]!r} is more than any machine has")
    return int(size)
