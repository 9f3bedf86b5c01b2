"""`python -m tests.integration.next_version shard --node …`: `kvservice` of the next protocol version, which serves
clients of this one as well."""

from __future__ import annotations


def main() -> None:
    from kvservice.wire import versions

    versions.PROTOCOL_VERSION += 1  # before any module takes it over

    from kvservice.cli.main import app

    app(prog_name="kvservice")


if __name__ == "__main__":
    main()
