"""`python -m kvservice.lookup`: one lookup partition as a plain process, without Ray. SIGTERM and Ctrl-C end it
cleanly. TLS is as KVSERVICE_TLS_DIR and KVSERVICE_ALLOW_PLAINTEXT say."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys

from kvservice.config import tls_of_environment
from kvservice.core.directory.membership import FORGET_SECONDS, HIDE_SECONDS
from kvservice.errors import KVServiceError
from kvservice.lookup.process import serve
from kvservice.lookup.server import LookupServer


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m kvservice.lookup", description=__doc__)
    parser.add_argument(
        "--bind", required=True, metavar="ADDRESS", help="unix:/path on one machine; host:port with TLS, 0 = any port"
    )
    parser.add_argument("--partition", type=int, default=0, help="which lookup partition this is, from 0")
    parser.add_argument("--partition-count", type=int, default=1, help="how many there are")
    parser.add_argument(
        "--hide-seconds", type=float, default=HIDE_SECONDS, help="a node silent for this long is not given as holder"
    )
    parser.add_argument(
        "--forget-seconds",
        type=float,
        default=FORGET_SECONDS,
        help="and must announce everything again after this long",
    )
    return parser.parse_args(arguments)


async def run(given: argparse.Namespace) -> None:
    tls_dir, allow_plaintext = tls_of_environment()
    server = LookupServer(
        given.bind,
        given.partition,
        given.partition_count,
        hide_seconds=given.hide_seconds,
        forget_seconds=given.forget_seconds,
        tls_dir=tls_dir,
        allow_plaintext=allow_plaintext,
    )
    await serve(server, f"lookup partition {given.partition} of {given.partition_count}")


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        asyncio.run(run(parse_arguments()))
    except KVServiceError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
