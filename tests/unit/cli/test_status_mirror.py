"""The line of `kvservice status` about a node's mirror."""

from __future__ import annotations

from kvservice.cli.status import mirror_line


def test_mirror_line_says_how_fresh_it_is_and_why_it_was_not_used() -> None:
    counters = {
        "mirror_keys": 1234,
        "mirror_bytes": 8 << 20,
        "mirror_live_partitions": 2,
        "mirror_age_ms": 400,
        "mirror_answers": 70,
        "mirror_fallback_stale": 3,
        "mirror_fallback_syncing": 1,
    }
    assert mirror_line("n0", counters) == (
        "mirror of the directory at n0: 1,234 keys in 8.0 MiB, 2 lookup partitions live, 0.4 s old; "
        "answered 70, left to the lookup partitions 4 (stale 3, syncing 1)"
    )
