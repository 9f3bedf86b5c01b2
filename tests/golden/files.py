"""`python -m tests.golden.files`: write what test_golden.py compares with. Run it by `make golden`, and read the diff.

wire.txt has a line for each message: its name, then the bytes of its examples. The formats have a file each, as a dump
of 16 bytes a line, so that a diff shows which field changed.
"""

from __future__ import annotations

from pathlib import Path

from tests.golden.formats import FORMATS
from tests.golden.messages import bytes_of, descriptors

FOLDER = Path(__file__).parent
WIRE = FOLDER / "wire.txt"


def file_of(name: str) -> Path:
    return FOLDER / f"{name}.hex"


def dump(data: bytes) -> str:
    """As hexdump does it: offset, bytes, and what of them is text."""
    lines = []
    for start in range(0, len(data), 16):
        line = data[start : start + 16]
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in line)
        lines.append(f"{start:06x}  {line.hex(' '):<47}  {text}\n")
    return "".join(lines)


def wire() -> str:
    return "".join(f"{one.name} {bytes_of(one).hex()}\n" for one in descriptors())


def main() -> None:
    WIRE.write_text(wire())
    for stale in FOLDER.glob("*.hex"):
        stale.unlink()
    for name, make in FORMATS.items():
        file_of(name).write_text(dump(make()))


if __name__ == "__main__":
    main()
