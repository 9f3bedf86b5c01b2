"""Messages and formats are byte for byte what they were when these files were written.

Parts of different versions work together, and what one process wrote another one reads. A change here is a change of a
contract: whoever makes one decides whether the version grows (docs/howto/upgrade.md), runs
`make golden`, and commits the new files with the change.
"""

from __future__ import annotations

import pytest
from google.protobuf import message_factory, unknown_fields

from tests.golden.files import FOLDER, WIRE, dump, file_of, wire
from tests.golden.formats import FORMATS
from tests.golden.messages import bytes_of, descriptors

WHAT_TO_DO = "the bytes changed: decide whether the version grows, run `make golden`, and commit its files"
WRITTEN = dict(line.split(" ") for line in WIRE.read_text().splitlines())


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_has_the_bytes_of_its_file(name: str) -> None:
    assert dump(FORMATS[name]()) == file_of(name).read_text(), WHAT_TO_DO


@pytest.mark.parametrize("descriptor", descriptors(), ids=lambda one: one.name)
def test_a_message_has_the_bytes_of_its_line(descriptor: object) -> None:
    assert WRITTEN.get(descriptor.name) == bytes_of(descriptor).hex(), WHAT_TO_DO  # type: ignore[attr-defined, arg-type]


@pytest.mark.parametrize("descriptor", descriptors(), ids=lambda one: one.name)
def test_a_message_written_before_has_no_unknown_field(descriptor: object) -> None:
    """A field that was removed or renumbered would be skipped in silence."""
    message = message_factory.GetMessageClass(descriptor).FromString(  # type: ignore[arg-type]
        bytes.fromhex(WRITTEN[descriptor.name])  # type: ignore[attr-defined]
    )
    assert len(unknown_fields.UnknownFieldSet(message)) == 0, WHAT_TO_DO


def test_no_file_is_left_of_what_is_gone() -> None:
    assert {path.stem for path in FOLDER.glob("*.hex")} == set(FORMATS), WHAT_TO_DO
    assert WIRE.read_text() == wire(), WHAT_TO_DO
