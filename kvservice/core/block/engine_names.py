"""What engines call their blocks: the namespaces and models of each fingerprint, as bytes of a file. Pure.

A block in a tier says the fingerprint of its engine and nothing else that a clear of a model or a namespace names. With
this file a node that starts again knows what such a clear covers. A fingerprint that it does not name is not known.

    offset  size  field
         0     8  magic        "KVSNAMES"
         8     4  version      1
        12     4  count        of rows
        16        rows, one after the other:
                  16  fingerprint  the first bytes of its digest
                   2  length       of the namespace in bytes, then the namespace in UTF-8
                   2  length       of the model in bytes, then the model in UTF-8
       end     4  crc          crc32 of everything before it

All numbers are little endian. A fingerprint has a row for each of its names.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping

NAMES_SUFFIX = ".names"  # of the file, behind the name of a disk's folder that it lies beside
FINGERPRINT_BYTES = 16  # as in the header of a block's file
NAMES_MAGIC, NAMES_VERSION = b"KVSNAMES", 1
_HEAD, _LENGTH, _CRC = struct.Struct("<8sII"), struct.Struct("<H"), struct.Struct("<I")

EngineNames = Mapping[bytes, frozenset[tuple[str, str]]]  # (namespace, model) of the engines of each fingerprint


def pack_names(names: EngineNames) -> bytes:
    rows = [(fingerprint, *name) for fingerprint, found in names.items() for name in sorted(found)]
    parts = [_HEAD.pack(NAMES_MAGIC, NAMES_VERSION, len(rows))]
    for fingerprint, *texts in rows:
        parts.append(fingerprint)
        parts += [_LENGTH.pack(len(data)) + data for data in (text.encode() for text in texts)]
    body = b"".join(parts)
    return body + _CRC.pack(zlib.crc32(body))


def unpack_names(data: bytes) -> EngineNames:
    """The names of a file; none when it is damaged or of another version. Any bytes are safe to give."""
    body = data[: -_CRC.size]
    if len(body) < _HEAD.size or _CRC.unpack(data[-_CRC.size :])[0] != zlib.crc32(body):
        return {}
    magic, version, count = _HEAD.unpack_from(body)
    if (magic, version) != (NAMES_MAGIC, NAMES_VERSION):
        return {}
    found: dict[bytes, frozenset[tuple[str, str]]] = {}
    place = _HEAD.size
    try:
        for _ in range(count):
            fingerprint, place = body[place : place + FINGERPRINT_BYTES], place + FINGERPRINT_BYTES
            namespace, place = _text(body, place)
            model, place = _text(body, place)
            found[fingerprint] = found.get(fingerprint, frozenset()) | {(namespace, model)}
    except (struct.error, UnicodeDecodeError):
        return {}
    return found if place == len(body) else {}


def _text(body: bytes, place: int) -> tuple[str, int]:
    """The text at this place, and the place behind it."""
    (length,) = _LENGTH.unpack_from(body, place)
    end = place + _LENGTH.size + length
    return body[place + _LENGTH.size : end].decode(), end
