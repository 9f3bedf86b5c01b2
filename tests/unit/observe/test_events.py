"""Every counter in the code has words in a table, and every name in a table is counted somewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvservice.observe.copy_worker_metrics import COPY_WORKER_COUNTERS
from kvservice.observe.events import (
    CONNECTOR_COUNTERS,
    CONNECTOR_EVENTS,
    LOOKUP_EVENTS,
    OFFLOADING_EVENTS,
    SERVER_EVENTS,
    SHARD_EVENTS,
    meaning,
)
from kvservice.observe.lookup_metrics import LOOKUP_COUNTERS
from kvservice.observe.metrics import COUNTERS, CUTS, GAUGES, transport_of

PRODUCT = Path(__file__).resolve().parents[3] / "kvservice"
COUNTED = re.compile(r'(?:[a-z]*counters\[|\b_?count(?:_error)?\()(f?)"([a-z_]+)(\{)?')
OF_LOOKUP = ("core/directory/directory.py", "core/directory/membership.py", "lookup/service.py", "lookup/watch.py")
OF_ROUTER = ("client/engine_stats.py",)
SHARD = ("auth", "core", "pool", "client", "lookup", "transfer", "shard")


def counted(*folders: str) -> Iterator[tuple[str, str]]:
    """(file, counter) of each place that counts; a name that is made at run time ends with x."""
    for folder in folders:
        for path in sorted((PRODUCT / folder).rglob("*.py")):
            for is_made, name, hole in COUNTED.findall(path.read_text()):
                yield path.relative_to(PRODUCT).as_posix(), name + "x" * bool(is_made and hole)


def of_shard() -> set[str]:
    found = {(file, name) for file, name in counted(*SHARD) if file not in (*OF_LOOKUP, *OF_ROUTER)}
    names = {f"transfer_{name}" if file.startswith("transfer/") else name for file, name in found}
    return {name for name in names if not name.startswith("takeover_x")} | {"takeover_ok"}


def test_every_counter_of_a_shard_has_words() -> None:
    cuts = {f"{name}_x" for name in CUTS}
    known = COUNTERS.keys() | GAUGES.keys() | cuts
    unknown = [
        name for name in of_shard() if name not in known and not transport_of(name) and not meaning(SHARD_EVENTS, name)
    ]
    composed = {"pull_x"}  # pull_ok, pull_stale, …: each has a metric
    assert set(unknown) <= composed, f"write into kvservice/observe what these count: {unknown}"


def test_every_counter_of_a_lookup_partition_has_words() -> None:
    found = {name for file, name in counted("core", "lookup") if file in OF_LOOKUP}
    assert len(found) > 10
    assert [name for name in found if name not in LOOKUP_COUNTERS and not meaning(LOOKUP_EVENTS, name)] == []


def test_every_counter_of_an_engine_has_words() -> None:
    of_servers = ("connector/sglang/", "connector/lmcache/")
    everywhere = list(counted("connector", "copying/engine"))
    assert [name for file, name in everywhere if file.startswith(of_servers) and not _of_server(name)] == []
    found = {name for file, name in everywhere if not file.startswith(of_servers)} - OFFLOADING_EVENTS.keys()
    assert len(found) > 40
    assert [name for name in found if name not in CONNECTOR_COUNTERS and not meaning(CONNECTOR_EVENTS, name)] == []


def _of_server(name: str) -> bool:
    return bool(meaning(SERVER_EVENTS, name) or meaning(CONNECTOR_EVENTS, name))


def test_the_tables_name_nothing_that_nobody_counts() -> None:
    text = "\n".join(path.read_text() for path in PRODUCT.rglob("*.py") if path.parent.name != "observe")
    names = [*SHARD_EVENTS, *LOOKUP_EVENTS, *CONNECTOR_EVENTS, *CONNECTOR_COUNTERS, *OFFLOADING_EVENTS, *SERVER_EVENTS]
    for name in names:
        word = name.removeprefix("transfer_").strip("*")
        assert f'"{word}' in text or f'"transfer_{word}' in text or f'{word}"' in text, name


def test_no_name_stands_in_two_tables() -> None:
    assert not COUNTERS.keys() & SHARD_EVENTS.keys()
    assert not CONNECTOR_COUNTERS.keys() & CONNECTOR_EVENTS.keys()
    assert not LOOKUP_COUNTERS.keys() & LOOKUP_EVENTS.keys()
    assert COPY_WORKER_COUNTERS


@pytest.mark.parametrize(
    ("event", "words"),
    [
        ("seal_stale", "stored blocks by"),
        ("reserve_failed", "calls to the pool"),
        ("copy_worker_blocks", "blocks that the copy worker"),
        ("failed_", None),
        ("never_heard_of", None),
    ],
)
def test_the_longest_name_that_fits_says_what_it_means(event: str, words: str | None) -> None:
    found = meaning(CONNECTOR_EVENTS, event)
    assert found is words if words is None else found is not None and found.startswith(words)
