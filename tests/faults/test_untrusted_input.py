"""What a client, a tenant, a peer or a file says is text and numbers: nothing acts on it, and nothing waits for it."""

from __future__ import annotations

import io
import logging
import math
import os
import re
import stat
import struct
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType

from kvservice.auth.tenants import new_token, read_tenants
from kvservice.auth.token import Token
from kvservice.cli import blocks, explain, output, status
from kvservice.cli.output import Format
from kvservice.client.block_list import MEMORY, PRIMARY, BlockList, BlockRow
from kvservice.copying.memory import SharedMemory
from kvservice.core.directory.key_table import ROWS_MIN
from kvservice.core.directory.mirror import TABLE_AT, Feed, MirrorWriter, mirror_bytes
from kvservice.core.explain.records import REQUEST_ID_CHARS_MAX, RequestRecords, check_request_id
from kvservice.core.messages import RequestReport
from kvservice.core.segment.geometry import Geometry
from kvservice.discovery import MIRROR_NAME
from kvservice.errors import ConfigError, InvalidRequest, TransferError
from kvservice.lookup.mirror_file import MirrorSegment
from kvservice.lookup.mirror_reader import NodeMirror
from kvservice.memory.segment import Segment
from kvservice.observe.logs import EngineHandler, JsonFormatter, TextFormatter
from kvservice.private_files import check_directory, make_directory, write_private
from kvservice.proxy import bodies
from kvservice.transfer import mapped
from kvservice.transfer.mapped import MappedPeer
from kvservice.units import BlockKey, BootEpoch, MiB
from kvservice.wire import codec
from kvservice.wire.explain import decode_report, encode_report
from kvservice.wire.leaving import decode_progress
from kvservice.wire.v1 import shard_pb2
from tests.integration.engine import spec
from tests.unit.cli.overviews import make_overview

pytestmark = pytest.mark.faults

HOSTILE = [
    "a\n12:00:00.000 CRITICAL kvservice forged",
    "a\r\x1b[2J\x1b]0;title\x07",
    "a\ud800b",
    "a\u2028b\x85c",
    "[/]",
]
REPORT = RequestReport("", 4, 0, 0, 4, False, False, 4, False)


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("by", ["own process", "engine"])
def test_no_name_makes_a_line_of_its_own_in_a_log(name: str, by: str) -> None:
    stream = io.StringIO()
    last = logging.StreamHandler(stream)
    ours = logging.Logger("kvservice")
    if by == "engine":
        engine = logging.Logger("engine")
        engine.addHandler(last)
        ours.addHandler(EngineHandler(engine))
    else:
        last.setFormatter(TextFormatter())
        ours.addHandler(last)
    ours.warning("request %s is served without a hand-off", name, extra={"model": name})
    text = stream.getvalue()
    assert text.endswith("\n") and text[:-1].isprintable()


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_no_client_decides_how_long_a_line_of_a_log_is(formatter: logging.Formatter) -> None:
    name = "\n" * 9_000_000
    record = logging.makeLogRecord({"name": "kvservice", "levelname": "INFO", "msg": f"x {name}", "model": name})
    assert len(formatter.format(record)) < 1 << 17
    assert "\n" not in formatter.format(record)


@pytest.mark.parametrize("name", HOSTILE)
def test_no_request_id_keeps_its_engine_from_reporting(name: str) -> None:
    sent = encode_report(replace(REPORT, request_id=name * 9000)).SerializeToString()
    told = decode_report(shard_pb2.RequestReport.FromString(sent)).request_id
    assert told.isprintable() and 0 < len(told) <= REQUEST_ID_CHARS_MAX
    assert check_request_id(told) == told  # what was made readable is found by it


def _record(name: str) -> dict[str, Any]:
    return {
        "node": name,
        "model": name,
        "age_seconds": 1.0,
        "took_seconds": 0.0,
        "answered": True,
        "handoff_node": name,
        "blocks_asked": 1,
        "blocks": {"engine": 0, "local": 0, "fetched": 0, "missed": 1},
        "finished": True,
        "diagnosis": [{"start": 0, "count": 1, "outcome": "missed", "node": name, "miss_cause": None, "text": name}],
    }


def _print(draw: Callable[[Any], RenderableType], state: Any) -> None:
    output.write(state, lambda each, _: draw(each), Format.TABLE)


def _explained(name: str) -> None:
    _print(
        explain.draw,
        {
            "requests": [_record(name)],
            "request_id": name,
            "asked_for": name,
            "candidates": [name],
            "silent_nodes": [name],
            "unreadable": [name],
            "silent_lookups": [name],
            "hints": [name],
            "hosts": {name: name},
        },
    )
    _print(
        explain.draw,
        {
            "requests": [],
            "asked_for": name,
            "candidates": [],
            "keep_seconds": 900.0,
            "silent_nodes": [],
            "unreadable": [],
            "silent_lookups": [],
            "hints": [],
            "hosts": {},
            "refused_engines": [{"model": name, "node": name, "age_seconds": 1.0, "message": name}],
        },
    )


OWN = {"state", "evictions", "counters", "hit_rates"}  # of an overview: this process chooses these texts


def _everywhere(value: Any, name: str) -> Any:
    """The same value with `name` in place of each text that another process may have chosen."""
    if isinstance(value, str):
        return name
    if is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: getattr(value, field.name) for field in fields(value)}
        return type(value)(**{key: each if key in OWN else _everywhere(each, name) for key, each in parts.items()})
    if isinstance(value, dict):
        return {_everywhere(key, name): each for key, each in value.items()}
    return tuple(_everywhere(each, name) for each in value) if isinstance(value, tuple) else value


def _status(name: str) -> None:
    _print(lambda seen: status.draw(seen, True), _everywhere(make_overview(), name))


def _blocks(name: str) -> None:
    row = BlockRow(name, 1, name, 1, name, "00ff", name, 1, PRIMARY, MEMORY, 1.0, 1.0, 1)
    _print(lambda found: blocks.draw(found, blocks.Selection(), True), BlockList((row,), False, (name,)))


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("show", [_explained, _status, _blocks])
def test_no_name_acts_on_the_terminal_of_an_operator(
    show: Callable[[str], None], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(output, "console", lambda **_: Console(file=stream, width=200, color_system=None))
    show(name)
    stream.getvalue().encode()
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028]", stream.getvalue())
    if name == "[/]":
        assert "[/]" in stream.getvalue()


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0, -math.inf])
def test_no_peer_gives_a_lease_without_an_end(seconds: float) -> None:
    key = (BlockKey(bytes(16)),)
    with pytest.raises(InvalidRequest):
        codec.decode_located(shard_pb2.LocateReply(lease_seconds=seconds, handles=[shard_pb2.Handle()]), key)
    with pytest.raises(InvalidRequest):
        codec.decode_followed(shard_pb2.FollowReply(state="open", lease_seconds=seconds), key)


@pytest.mark.parametrize("count", ["\u00b2", "9" * 5000, "-1", "\u0663", ""])
def test_no_answer_about_a_drain_breaks_the_command(count: str) -> None:
    reply = shard_pb2.DrainReply(phase="gone", receivers=[f"n {count}", "m 7"])
    assert decode_progress(reply).receivers == (("m", 7),)


@pytest.mark.parametrize("inside", [b"[],", b"{},", b"0,", b'"",'])
def test_a_body_of_empty_values_is_refused_before_it_is_read(inside: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies.json, "loads", lambda _: pytest.fail("it was read"))
    with pytest.raises(InvalidRequest, match="more than"):
        bodies.read_body(b'{"prompt":[' + inside * (bodies.VALUES_MAX + 1) + b"0]}")


@pytest.mark.parametrize("member", ["prompt", "tools", "messages", "stop"])
def test_a_nested_body_is_refused_or_can_be_handed_off(member: str) -> None:
    refused = 0
    for depth in [1, *range(930, 1000), 5000, 100_000]:
        text = f'{{"prompt":"x","{member}":{"[" * depth}{"]" * depth}}}'
        try:
            body = bodies.read_body(text.encode())
        except InvalidRequest:
            refused += 1
            continue
        bodies.prefill_body(body, "0" * 32)
    assert refused >= 2


def _dumped(address: int) -> bool:
    """Whether a core dump has the mapping with this address in it, as far as the mapping says."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(span[1], 16) <= address < int(span[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return "dd" not in line.split()
    raise AssertionError("no such mapping")


def test_no_core_dump_holds_blocks(tmp_path: Path) -> None:
    geometry = Geometry(MiB, 2)
    named, nameless = Segment.create(tmp_path / "s", geometry, "n"), Segment.nameless(tmp_path, geometry, "n")
    memory = SharedMemory.make(MiB)
    try:
        assert [_dumped(one.address) for one in (named, nameless, memory)] == [False] * 3
        assert _dumped(id(named))  # the reader of smaps tells one from the other
    finally:
        memory.close()
        nameless.close()
        named.close()


def test_a_peer_names_a_segment_of_this_user_and_no_other_file(tmp_path: Path) -> None:
    geometry = Geometry(MiB, 2)
    mine, theirs = Segment.create(tmp_path / "a", geometry, "a"), Segment.create(tmp_path / "b", geometry, "b")
    honest = mapped.describe(theirs)

    def naming(path: Path) -> bytes:
        status = path.stat()
        numbers = status.st_dev.to_bytes(8, "little") + status.st_ino.to_bytes(8, "little")
        return honest[:44] + numbers + honest[60:68] + os.fsencode(path)

    secret, pipe, link = tmp_path / "secret", tmp_path / "pipe", tmp_path / "link"
    secret.write_bytes(bytes(geometry.segment_bytes))
    os.mkfifo(pipe)
    link.symlink_to(theirs.path)
    try:
        MappedPeer(honest, theirs.epoch).close()
        MappedPeer(naming(theirs.path), theirs.epoch).close()
        for path in (secret, pipe, link, Path("/dev/zero"), mine.path):
            with pytest.raises(TransferError):
                MappedPeer(naming(path), BootEpoch(theirs.epoch + (path == mine.path)))
        with pytest.raises(TransferError, match="another machine"):
            MappedPeer(honest[:8] + b"0" * 36 + honest[44:], theirs.epoch)
        if os.geteuid() == 0:
            os.chown(theirs.path, 65534, -1)
            with pytest.raises(TransferError, match="of this user"):
                MappedPeer(honest, theirs.epoch)
    finally:
        theirs.close()
        mine.close()


TENANTS = '{"version": 1, "public_secret": "%s", "tenants": []}' % ("0" * 64)


def test_a_tenants_file_is_plain_and_not_writable_by_all(tmp_path: Path) -> None:
    path = tmp_path / "tenants.json"
    path.write_text(TENANTS)
    path.chmod(0o644)
    assert not read_tenants(path).by_name
    path.chmod(0o646)
    with pytest.raises(ConfigError, match="everybody can write"):
        read_tenants(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="not a regular file"):  # a pipe would be waited for
        read_tenants(path)


def test_no_word_of_a_mirrors_heads_breaks_its_reader(tmp_path: Path) -> None:
    """Counts beyond the end of the file, above all: what lies there must be neither looked at nor mapped."""
    size = mirror_bytes(ROWS_MIN * 4)
    segment = MirrorSegment.create(tmp_path / "memory", size)
    segment.reserve(size)
    writer, mirror = MirrorWriter(segment.buffer, 1, epoch=1), NodeMirror(tmp_path)
    (tmp_path / MIRROR_NAME).symlink_to(segment.path)
    before, now = bytes(segment.buffer), 0.0
    try:
        for at in [*range(0, 192, 8), *range(4096, 4128, 8), *range(TABLE_AT, TABLE_AT + 64, 8)]:
            for word in (0, 1 << 20, 1 << 40, (1 << 64) - 1):
                segment.buffer[at : at + 8] = word.to_bytes(8, "little")
                mirror.close()
                for _ in range(3):
                    now += 10.0
                    reader = mirror.reader(now)
                    mirror.map_ahead(1 << 40)
                    if reader is not None:
                        assert reader.used_bytes <= size
                        assert reader.feed(0, now) in Feed and reader.resolve(bytes(64)) in (None, [])
            segment.buffer[at : at + 8] = before[at : at + 8]
        assert mirror.reader(now + 10.0) is not None
    finally:
        mirror.close()
        writer.close()
        segment.close()


def test_no_engine_takes_the_report_of_anothers_request() -> None:
    records, mine, theirs = RequestRecords(), spec(engine_id=bytes(16)), spec(engine_id=bytes([1] * 16))
    for op, each in enumerate((mine, theirs)):
        records.asked(op, each, "same", b"", 0, 0.0)
    records.reported(theirs, replace(REPORT, request_id="same"), 1.0)
    records.reported(mine, replace(REPORT, request_id="same", asked=7), 2.0)
    records.check_invariants()
    found = [
        (record.spec.engine_id, record.report and record.report.asked) for record in records.find("same", 3.0).records
    ]
    assert found == [(mine.engine_id, 7), (theirs.engine_id, 4)]


def test_no_error_shows_a_token_given_in_place_of_its_file(tmp_path: Path) -> None:
    token = new_token()
    with pytest.raises(ConfigError) as refused:
        Token.of_environment(token).metadata()
    assert token not in str(refused.value) and refused.value.__cause__ is None
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="not a regular file"):  # it would be waited for
        Token(path=str(tmp_path / "pipe")).metadata()


def test_a_directory_that_an_acl_opens_to_others_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    place.chmod(0o770)
    entries = [(1, 7, -1), (2, 7, 65534), (4, 0, -1), (16, 7, -1), (32, 0, -1)]  # user 65534 may write
    rules = b"".join(struct.pack("<HHi", tag, bits, who) for tag, bits, who in entries)
    try:
        os.setxattr(place, "system.posix_acl_access", struct.pack("<I", 2) + rules)
    except OSError as error:
        pytest.skip(f"no access lists here: {error}")
    with pytest.raises(ConfigError, match="other users can write"):
        check_directory(place)
    place.chmod(0o700)  # takes the right away
    make_directory(place)
    check_directory(place)


def test_private_files_stay_private(tmp_path: Path) -> None:
    """Neither the umask nor a link opens them."""
    victim, place = tmp_path / "victim", tmp_path / "place"
    victim.write_text("untouched")
    before = os.umask(0)
    try:
        make_directory(place)
        check_directory(place)
        (place / "secret").hardlink_to(victim)
        (place / f".secret.{os.getpid()}").symlink_to(victim)
        write_private(place / "secret", b"x")
    finally:
        os.umask(before)
    assert victim.read_text() == "untouched" and (place / "secret").read_bytes() == b"x"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (place, place / "secret")] == [0o700, 0o600]
