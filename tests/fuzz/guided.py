"""`python -m tests.fuzz.guided TARGET|all [--seconds 20]`: parsers under Atheris, which looks for ways through them.

A target takes bytes and may raise its parser's own error, and nothing else. `make fuzz` installs Atheris and runs all.
What breaks one is left as `crash-*` in the folder it ran in, and `... TARGET crash-FILE` runs it again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["kvservice"]):
    from kvservice.config import load_config
    from kvservice.connector.scheduler.handoff import decode_params, parse_transfer_params
    from kvservice.core.directory.directory import Directory
    from kvservice.core.messages import Handoff
    from kvservice.core.segment.header import pack_header
    from kvservice.errors import KVServiceError
    from kvservice.lookup.service import LookupServicer
    from kvservice.lookup.watch import WatchHub
    from kvservice.units import HandoffId, NodeId
    from kvservice.wire.codec import decode_spec, encode_spec
    from kvservice.wire.v1 import common_pb2, lookup_pb2, shard_pb2
    from kvservice.wire.versions import PROTOCOL_VERSION
    from tests.fuzz.test_codecs import decode_damaged, stored_by
    from tests.fuzz.test_parsers import BYTES_PARSERS, HEADER, JSON_PARSERS
    from tests.integration.engine import spec

from google.protobuf.message import DecodeError


def parser(parse: Callable[[bytes], object]) -> Callable[[bytes], None]:
    def run(data: bytes) -> None:
        try:
            parse(data)
        except KVServiceError:
            return

    return run


def transfer_params(data: bytes) -> object:
    try:
        given = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return parse_transfer_params(given)


def config(data: bytes) -> object:
    with tempfile.NamedTemporaryFile(suffix=".toml") as file:
        file.write(data)
        file.flush()
        return load_config(Path(file.name), environment={})


def attach(data: bytes) -> object:
    try:
        request = shard_pb2.AttachRequest.FromString(data)
    except DecodeError:
        return None
    return decode_spec(request)


LOOP = asyncio.new_event_loop()


class Plain:
    """A connection without certificates, as gRPC would describe it."""

    def auth_context(self) -> dict[str, list[bytes]]:
        return {}

    def invocation_metadata(self) -> tuple[()]:
        return ()


class Announcements:
    """One that lives through all inputs: its books are looked at after each."""

    def __init__(self) -> None:
        self._directory = Directory()
        self._now = 0.0
        hub = WatchHub(self._directory, lambda: self._now)
        self._servicer = LookupServicer(self._directory, hub, 0, 1, 1, lambda: self._now)

    def __call__(self, data: bytes) -> object:
        try:
            request = lookup_pb2.AnnounceRequest.FromString(data)
        except DecodeError:
            return None
        self._now += 0.1
        try:
            return LOOP.run_until_complete(self._servicer.announce(request, Plain()))  # type: ignore[arg-type]
        finally:
            self._directory.check_invariants()


TARGETS: dict[str, Callable[[], Callable[[bytes], object]]] = {
    **{name: lambda parse=parse: parse for name, (_, parse) in BYTES_PARSERS.items()},
    **{name: lambda parse=parse: parse for name, (_, parse) in JSON_PARSERS.items()},
    "transfer_params": lambda: transfer_params,
    "config": lambda: config,
    "attach": lambda: attach,
    "announce": Announcements,
    "planes": lambda: lambda data: decode_damaged("planes", data),
    "int8": lambda: lambda data: decode_damaged("int8", data),
}


def mixed() -> Callable[[bytes], object]:
    """All of them, by the first byte: for a short look at everything."""
    made = [parser(target()) for name, target in TARGETS.items() if name != "mixed"]
    return lambda data: made[data[0] % len(made)](data[1:]) if data else None


TARGETS["mixed"] = mixed


def seeds() -> dict[str, bytes]:
    """What is right, where to begin from."""
    keys = bytes(range(32))
    node = common_pb2.NodeInfo(node_id="n0", peer_address="127.0.0.1:1", epoch=3)
    announced = lookup_pb2.AnnounceRequest(
        node=node, partition_count=1, sequence=1, added=keys, full_begin=True, protocol_version=PROTOCOL_VERSION
    )
    return {
        **{name: whole for name, (whole, _) in BYTES_PARSERS.items()},
        **{name: b"\x01" + json.dumps(whole).encode() for name, (whole, _) in JSON_PARSERS.items()},
        "transfer_params": json.dumps(decode_params(Handoff(HandoffId(bytes(16)), NodeId("n0")))).encode(),
        "config": b'service = "a"\npool_bytes = "4GiB"\nlookup = "h:1,dns:///h:2"\n',
        "attach": encode_spec(spec()).SerializeToString(),
        "announce": announced.SerializeToString(),
        "planes": stored_by("planes")[2],
        "int8": stored_by("int8")[2],
        "mixed": b"\0" + pack_header(HEADER),
    }


def run_all(seconds: int) -> int:
    failed = []
    for name in TARGETS:
        done = subprocess.run([sys.executable, "-m", "tests.fuzz.guided", name, "--seconds", str(seconds)])
        failed += [name] if done.returncode else []
    print(f"{len(TARGETS)} targets, failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("target", choices=["all", *TARGETS])
    arguments.add_argument("again", nargs="?", help="a file with one input")
    arguments.add_argument("--seconds", type=int, default=20)
    arguments.add_argument("--corpus", type=Path, help="an empty folder for the inputs that are tried")
    options = arguments.parse_args()
    if options.target == "all":
        return run_all(options.seconds)
    if options.corpus is None:  # Atheris ends its process at once, so the folder belongs to another
        with tempfile.TemporaryDirectory() as corpus:
            return subprocess.call([sys.executable, "-m", "tests.fuzz.guided", *sys.argv[1:], "--corpus", corpus])
    print(f"== {options.target}", flush=True)
    (options.corpus / "seed").write_bytes(seeds()[options.target])
    search = [f"-max_total_time={options.seconds}", "-verbosity=0", str(options.corpus)]
    atheris.Setup([sys.argv[0], *([options.again] if options.again else search)], parser(TARGETS[options.target]()))
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
