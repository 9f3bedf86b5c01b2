"""Bytes from another process -> a protobuf message, or InvalidRequest. Pure."""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from kvservice.errors import InvalidRequest

M = TypeVar("M", bound=Message)


def parse(wanted: type[M], data: bytes) -> M:
    """The message of this type. Raises InvalidRequest for bytes that are none."""
    made = wanted()
    try:
        made.ParseFromString(data)
    except DecodeError as error:
        raise InvalidRequest(f"these {len(data)} bytes are not a {made.DESCRIPTOR.name}") from error
    return made
