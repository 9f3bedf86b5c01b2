"""Hostile messages, made from the descriptors of the wire contract: whatever a field's type allows, nothing it means.

A `Menu` holds values that are valid at the moment (ids, keys, slots), by the name of their field or the type of their
message: without them nothing would get past the first check. Everything is drawn from one seeded generator.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message

import kvservice.wire.v1
from kvservice.wire.versions import PROTOCOL_VERSION

VALID_ALWAYS: dict[str, list[object]] = {"protocol_version": [PROTOCOL_VERSION]}  # or nothing gets past that check
VALID, ABSENT = 0.75, 0.08  # of the fields that have a valid value; the rest is hostile
FEW = (0, 1, 1, 1, 2, 2, 3, 7)
MANY = (63, 512, 4097, 9000, 70_000, 400_000)
MANY_ODDS = 0.02
# Of one list: more than any server takes of a message. Gigabytes would hold the test's interpreter for many seconds.
LIST_BYTES_MAX = 6 << 20
_F = FieldDescriptor
U32, U64 = (1 << 32) - 1, (1 << 64) - 1
UNSIGNED = (0, 1, 2, 3, 15, 16, 63, 64, 255, 4095, 4096, 4097, 8192, 8193, 65_535, 65_536, 1 << 20, 1 << 31)
FLOATS = (
    0.0,
    -0.0,
    5e-324,
    0.001,
    0.01,
    0.5,
    1.0,
    59.9,
    600.0,
    3600.0,
    -1.0,
    -1e-9,
    1e18,
    1e308,
    math.inf,
    -math.inf,
    math.nan,
)
TEXTS = (
    "",
    "n7",
    "n8",
    "a",
    "\0",
    "../../etc/passwd",
    "ﬀ\U0001f980é",
    "%s%n{0}",
    "default",
    "x" * 128,
    "x" * 513,
    "é" * 600,
    "x" * 4096,
)
TEXTS_LARGE = ("x" * 100_000, "é" * 1_000_000)
BYTE_COUNTS = (0, 1, 8, 15, 16, 16, 17, 31, 32, 48, 64, 16 * 65, 4096, 4097)
BYTE_COUNTS_LARGE = (16 * 8192, 16 * 8193, 16 * 65_536, 16 * 65_537, 3_000_000)


@cache
def services() -> list[ServiceDescriptor]:
    """Every service of every generated module of kvservice.wire.v1."""
    found: dict[str, ServiceDescriptor] = {}
    for module in pkgutil.iter_modules(kvservice.wire.v1.__path__):
        if module.name.endswith("_pb2"):
            descriptor = importlib.import_module(f"kvservice.wire.v1.{module.name}").DESCRIPTOR
            found.update({service.full_name: service for service in descriptor.services_by_name.values()})
    return [found[name] for name in sorted(found)]


@cache
def methods() -> list[MethodDescriptor]:
    return [method for service in services() for method in service.methods]


def path_of(method: MethodDescriptor) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


@dataclass(slots=True)
class Menu:
    """Values that are valid now. Whole requests in it are sent with up to two of their fields drawn anew."""

    fields: dict[str, list[object]] = field(default_factory=dict)
    messages: dict[str, list[Message]] = field(default_factory=dict)  # by the message's full name


class Fuzzer:
    def __init__(self, seed: str, menu: Menu) -> None:
        self._random = random.Random(seed)
        self._menu = menu

    def request(self, asked: Descriptor) -> bytes:
        """A message of this type, or one whose bytes were damaged on the way."""
        data = self.message(asked).SerializeToString()
        return self.damaged(data, asked) if self._random.random() < 0.3 else data

    def message(self, descriptor: Descriptor, depth: int = 0) -> Message:
        known = self._menu.messages.get(descriptor.full_name)
        made: Message = message_factory.GetMessageClass(descriptor)()
        drawn = list(descriptor.fields)
        if known and self._random.random() < VALID:
            made.CopyFrom(self._random.choice(known))
            drawn = self._random.sample(drawn, min(self._random.choice((0, 1, 1, 2)), len(drawn))) if depth == 0 else []
        for one in drawn:
            made.ClearField(one.name)
            if self._random.random() < ABSENT or depth > 4:
                continue
            if one.is_repeated:
                getattr(made, one.name).extend(self._list(one, depth))
            elif one.type == _F.TYPE_MESSAGE:
                getattr(made, one.name).CopyFrom(self.message(one.message_type, depth + 1))
            else:
                setattr(made, one.name, self._value(one, depth))
        return made

    def damaged(self, data: bytes, asked: Descriptor) -> bytes:
        """Flipped, cut, repeated, or spliced with a message of another type."""
        draw, found = self._random, bytearray(data)
        for _ in range(draw.choice((1, 1, 2, 5))):
            at = draw.randrange(len(found) + 1)
            kind = draw.randrange(5)
            if kind == 0 and found:
                found[at % len(found)] ^= 1 << draw.randrange(8)
            elif kind == 1:
                del found[at : at + draw.choice((1, 2, 16, 1 << 20))]
            elif kind == 2:
                found[at:at] = draw.randbytes(draw.choice((1, 2, 8, 40)))
            elif kind == 3:
                found[at:at] = found[at : at + draw.choice((1, 5, 40))] * draw.choice((1, 3, 200))
            else:
                other = draw.choice(methods()).input_type
                if other is not asked:
                    found[at:] = self.message(other).SerializeToString()
        return bytes(found[: 5 << 20])

    # -- inside ----

    def _list(self, one: FieldDescriptor, depth: int) -> Iterable[object]:
        draw = self._random
        count = draw.choice(MANY) if self._is_rare(depth) else draw.choice(FEW)
        if one.type == _F.TYPE_MESSAGE:
            made = [self.message(one.message_type, depth + 1) for _ in range(min(count, 8))]
            count = _bounded(count, sum(each.ByteSize() for each in made) // max(len(made), 1))
            return (made * (count // 8 + 1))[:count] if made else []
        if count > 16:
            value = self._value(one, depth)
            count = _bounded(count, len(value) if isinstance(value, (str, bytes)) else 1)
            return [value] * count  # one value many times: also the same id twice
        return [self._value(one, depth) for _ in range(count)]

    def _value(self, one: FieldDescriptor, depth: int) -> object:
        valid = self._menu.fields.get(one.name) or VALID_ALWAYS.get(one.name)
        if valid and self._random.random() < VALID:
            return self._packed(valid) if one.type == _F.TYPE_BYTES else self._random.choice(valid)
        return self._hostile(one, depth)

    def _packed(self, valid: list[object]) -> bytes:
        """One value, or several back to back, as keys travel."""
        draw = self._random
        chosen = draw.sample(valid, draw.randrange(1, len(valid) + 1)) if draw.random() < 0.5 else [draw.choice(valid)]
        return b"".join(one for one in chosen if isinstance(one, bytes))

    def _is_rare(self, depth: int) -> bool:
        """Now and then, and only on the outside: nested, it would be all that is sent."""
        return depth == 0 and self._random.random() < MANY_ODDS

    def _hostile(self, one: FieldDescriptor, depth: int) -> object:
        draw = self._random
        if one.type == _F.TYPE_BOOL:
            return draw.random() < 0.5
        if one.type in (_F.TYPE_FLOAT, _F.TYPE_DOUBLE):
            return draw.choice(FLOATS)
        if one.type == _F.TYPE_STRING:
            return draw.choice(TEXTS_LARGE if self._is_rare(depth) else TEXTS)
        if one.type == _F.TYPE_BYTES:
            return draw.randbytes(draw.choice(BYTE_COUNTS_LARGE if self._is_rare(depth) else BYTE_COUNTS))
        if one.type == _F.TYPE_ENUM:
            return draw.choice((0, 1, 2, 999, -1, (1 << 31) - 1))
        if one.type in (_F.TYPE_UINT64, _F.TYPE_FIXED64):
            return draw.choice((*UNSIGNED, U32, U32 + 1, U64, U64 - 1, 1 << 63, draw.getrandbits(64)))
        if one.type in (_F.TYPE_UINT32, _F.TYPE_FIXED32):
            return draw.choice((*UNSIGNED, U32, draw.getrandbits(32)))
        return draw.choice((*UNSIGNED[:-1], -1, -(1 << 31), draw.getrandbits(31)))  # signed: none in the contract today


def _bounded(count: int, size: int) -> int:
    """As many values of this size as a list may have."""
    return min(count, max(LIST_BYTES_MAX // max(size, 1), 1))
