"""One example of every message of the wire contract, made from its descriptor: each field gets a value of its own."""

from __future__ import annotations

import importlib
import pkgutil

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

import kvservice.wire.v1

_F = FieldDescriptor


def descriptors() -> list[Descriptor]:
    """Every message of kvservice.wire.v1, by name; the entries of maps are no messages of their own."""
    found: dict[str, Descriptor] = {}
    for module in pkgutil.iter_modules(kvservice.wire.v1.__path__):
        if module.name.endswith("_pb2"):
            file = importlib.import_module(f"kvservice.wire.v1.{module.name}").DESCRIPTOR
            found.update(file.message_types_by_name)
    return [found[name] for name in sorted(found)]


def examples(descriptor: Descriptor) -> list[Message]:
    """With every field set. A message with a choice between fields has an example for each of them."""
    choices = [one for oneof in descriptor.oneofs for one in oneof.fields if len(oneof.fields) > 1]
    plain = [one for one in descriptor.fields if one not in choices]
    return [_example(descriptor, [*plain, one]) for one in choices] or [_example(descriptor, plain)]


def bytes_of(descriptor: Descriptor) -> bytes:
    """Of all its examples. Entries of maps are in the order of their keys."""
    return b"".join(message.SerializeToString(deterministic=True) for message in examples(descriptor))


def _example(descriptor: Descriptor, fields: list[FieldDescriptor]) -> Message:
    made: Message = message_factory.GetMessageClass(descriptor)()
    for one in fields:
        place = getattr(made, one.name)
        entry = one.message_type
        if entry is not None and entry.GetOptions().map_entry:
            for number in (1, 2):
                place[_scalar(entry.fields_by_name["key"], number)] = _scalar(entry.fields_by_name["value"], number)
        elif one.is_repeated and entry is not None:
            place.extend(examples(entry) * 2)
        elif one.is_repeated:
            place.extend([_scalar(one, one.number), _scalar(one, one.number + 1)])
        elif entry is not None:
            place.CopyFrom(examples(entry)[0])
            place.SetInParent()
        else:
            setattr(made, one.name, _scalar(one, one.number))
    return made


def _scalar(one: FieldDescriptor, number: int) -> object:
    """A value that another number would not have, and that is not the default."""
    if one.type == _F.TYPE_BOOL:
        return True
    if one.type == _F.TYPE_STRING:
        return f"text {number}"
    if one.type == _F.TYPE_BYTES:
        return bytes([number % 256]) * 16
    if one.type in (_F.TYPE_DOUBLE, _F.TYPE_FLOAT):
        return number + 0.5
    if one.type == _F.TYPE_ENUM:
        return one.enum_type.values[-1].number
    return 1000 + number
