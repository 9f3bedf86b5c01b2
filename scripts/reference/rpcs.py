"""docs/reference/rpcs.md, and a page of messages for each service and for engines, from the protos' comments."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from google.protobuf.message import Message

from kvservice.wire.frames import ANSWERS, QUESTIONS, FrameKind
from scripts.reference.markdown import cell

ROOT = Path(__file__).parent.parent.parent
PROTOS = ROOT / "protos" / "kvservice" / "wire" / "v1"

HEAD = """# RPCs

<!-- Made from protos/kvservice/wire/v1 by `make docs-reference`. Do not edit. -->

The services that shards and lookup partitions serve by gRPC, and the frames in which engines ask their shard, as the
protos in `protos/kvservice/wire/v1` describe them. They
are for the parts of kvservice and may change until the first release; for programs of yours there are the commands with
JSON output. Every RPC needs a deadline. A list is counted before it is decoded, and refused above its limit. Who may
call is in [roles and names](../howto/certificates.md#roles-and-names), and answers other than OK carry a
[reason](errors.md).
"""
ENGINES = "Engines"
ENGINES_SAID = (
    "Not by gRPC: frames on `shard.sock`, the Unix socket of a node's engines. "
    "[Formats](formats.md#frames-of-engines) has their heads."
)

MESSAGES = """# Messages of {service}

<!-- Made from protos/kvservice/wire/v1 by `make docs-reference`. Do not edit. -->

The fields of what the [calls of {service}](rpcs.md#{anchor}) ask and answer, with their numbers. "n × 16" says that so
many keys of 16 bytes are packed into one field.
"""

_SERVICE = re.compile(r"^service (\w+) \{$")
_RPC = re.compile(r"^  rpc (\w+)\((stream )?(\w+)\) returns \((stream )?(\w+)\);(?: *// ?(.*))?$")
_MESSAGE = re.compile(r"^ *message (\w+) \{(?:(.*)\})?(?: *// ?(.*))?$")
_FIELD = re.compile(r"^ +((?:repeated |optional )?[\w.]+(?:<[^>]+>)?) (\w+) = (\d+)(?: \[[^\]]*\])?;(?: *// ?(.*))?$")
_VALUE = re.compile(r"^ +([A-Z]\w*) = (\d+);(?: *// ?(.*))?$")
_COMMENT = re.compile(r"^ *// ?(.*)$")


@dataclass(slots=True)
class Entry:
    """A service with its calls, or a message with its fields."""

    name: str
    comment: str
    rows: list[tuple[str, ...]] = field(default_factory=list)


def parsed(text: str) -> Iterator[tuple[str, Entry]]:
    """("service" or "message", entry), in the order of the file. Comments above a line belong to it."""
    above: list[str] = []
    open_entries: list[tuple[str, Entry]] = []
    for line in text.splitlines():
        if match := _COMMENT.match(line):
            above.append(match[1])
            continue
        said = " ".join(above)
        above = []
        if match := _SERVICE.match(line):
            open_entries.append(("service", Entry(match[1], said)))
        elif match := _MESSAGE.match(line):
            entry = Entry(match[1], " ".join(filter(None, (said, match[3]))))
            if match[2] is not None:  # all of it in one line
                fields = [_FIELD.match(f" {part.strip()};") for part in match[2].split(";")]
                entry.rows += [(one[3], one[2], one[1], "") for one in fields if one]
                yield "message", entry
            else:
                open_entries.append(("message", entry))
        elif re.match(r"^ +(?:enum \w+|oneof \w+) \{$", line):
            open_entries.append(("inner", Entry(line.split()[1], said)))
        elif (match := _RPC.match(line)) and open_entries:
            asked, answered = (f"{match[2] or ''}{match[3]}", f"{match[4] or ''}{match[5]}")
            open_entries[-1][1].rows.append((match[1], asked, answered, " ".join(filter(None, (said, match[6])))))
        elif (match := _FIELD.match(line)) and open_entries:
            owner = next(entry for kind, entry in reversed(open_entries) if kind != "inner")
            one_of = f"one of `{open_entries[-1][1].name}`" if open_entries[-1][0] == "inner" else ""
            words = " ".join(filter(None, (said, match[4])))
            owner.rows.append((match[3], match[2], match[1], "; ".join(filter(None, (one_of, words)))))
        elif (match := _VALUE.match(line)) and open_entries:
            owner = next((entry for kind, entry in reversed(open_entries) if kind != "inner"), open_entries[-1][1])
            if not match[1].endswith("_UNSPECIFIED"):
                owner.rows.append(("", match[1], f"{open_entries[-1][1].name} {match[2]}", match[3] or said))
        elif line.strip() == "}" and open_entries:
            kind, entry = open_entries.pop()
            if kind != "inner":
                yield kind, entry


def entries(kind: str) -> list[Entry]:
    found = [
        entry for path in sorted(PROTOS.glob("*.proto")) for what, entry in parsed(path.read_text()) if what == kind
    ]
    return [frames(), *found] if kind == "service" else found


def frames() -> Entry:
    """The kinds of frames, as the calls of a service."""
    told = {
        FrameKind.CANCEL: ("empty", "–", "Gives up the call with its number."),
        FrameKind.HEARTBEAT: ("empty", "–", "From the shard every 2 seconds; the engine sends it back."),
        FrameKind.GOODBYE: ("–", "Failure", "From the shard: why it ends the connection."),
    }
    rows = [(kind.name, *told.get(kind, (_name(kind, QUESTIONS), _name(kind, ANSWERS), ""))) for kind in FrameKind]
    return Entry(ENGINES, ENGINES_SAID, list(rows))


def _name(kind: FrameKind, messages: dict[FrameKind, type[Message]]) -> str:
    return messages[kind].DESCRIPTOR.name if kind in messages else "empty"


def owners() -> dict[str, str]:
    """Message → the first service whose calls lead to it."""
    known = {message.name: message for message in entries("message")}
    found: dict[str, str] = {}
    for service in entries("service"):
        waiting = [name.removeprefix("stream ") for row in reversed(service.rows) for name in (row[2], row[1])]
        while waiting:
            name = waiting.pop()
            if name in known and name not in found:
                found[name] = service.name
                waiting += [word for row in known[name].rows for word in re.findall(r"\w+", row[2])]
    return found


def file_of(service: str) -> str:
    return f"messages-{service.removesuffix('Service').lower()}.md"


def link(name: str, of: dict[str, str]) -> str:
    """A name as it is, or with `stream ` before it, that leads to its fields."""
    bare = name.removeprefix("stream ")
    if bare not in of:  # a frame without a message
        return bare
    return f"{name.removesuffix(bare)}[`{bare}`]({file_of(of[bare])}#{bare.lower()})"


def services() -> str:
    parts, of = [HEAD], owners()
    for service in entries("service"):
        parts.append(f"\n## {service.name}\n\n")
        if service.comment:
            parts.append(f"{service.comment}\n\n")
        parts.append("| call | asks | answers | |\n|---|---|---|---|\n")
        for name, asks, says, what in service.rows:
            parts.append(f"| `{name}` | {link(asks, of)} | {link(says, of)} | {cell(what)} |\n")
    return "".join(parts)


def messages(service: str) -> str:
    parts, of = [MESSAGES.format(service=service, anchor=service.lower())], owners()
    for message in (one for one in entries("message") if of.get(one.name) == service):
        parts.append(f"\n## {message.name}\n\n")
        if message.comment:
            parts.append(f"{message.comment}\n\n")
        if message.rows:
            parts.append("| | field | type | |\n|---|---|---|---|\n")
            parts += [f"| {number} | `{name}` | {kind} | {cell(what)} |\n" for number, name, kind, what in message.rows]
        else:
            parts.append("No fields.\n")
    return "".join(parts)


PAGES = {
    "rpcs.md": services,
    **{file_of(service.name): partial(messages, service.name) for service in entries("service")},
}
