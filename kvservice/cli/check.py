"""`kvservice check`: asks from anywhere whether every part of a service is there. For `helm test` and pipelines.

Unlike `status` it can wait, and it needs no shard on this machine if it is told whom to ask.
"""

from __future__ import annotations

import socket
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from kvservice.cli.progress import Progress
from kvservice.errors import ConfigError, NoService
from kvservice.units import bracketed, counted, endpoint_of, format_bytes

if TYPE_CHECKING:
    from kvservice.client.overview import Overview

CALL_SECONDS = 3.0  # For one RPC. A part that takes longer counts as missing in this round.
POLL_SECONDS = 1.0  # Between two rounds of questions while it waits.
# RPCs and scrapes at once, so that a large service is asked in seconds without a burst of connections.
ASKED_AT_ONCE = 16
MEMORY_METRIC = "kvservice_segment_bytes{"


def run(
    lookup: Sequence[str] | None, metrics: Sequence[str], nodes: int, wait_seconds: float, service: str | None = None
) -> tuple[list[str], str]:
    """Ask until nothing is wrong or the time is over; blocks. Returns (what is wrong, or nothing; what was seen).
    Without `lookup` the setting of this name says whom to ask, and without that and `metrics` this machine's service
    of this name is asked, or the only one. Raises NoService if there is none, ConfigError if there are several,
    or for an address of metrics that is none."""
    from kvservice.config import load_config

    endpoints = {name: _endpoint(name) for name in metrics}
    lookups = load_config(lookup=",".join(lookup) if lookup else None).lookup
    deadline = time.monotonic() + wait_seconds
    with Progress("waiting") as progress:
        while True:
            try:
                problems, seen = _round(lookups, endpoints, nodes) if lookups or metrics else _ask_here(service, nodes)
            except NoService as error:  # it may still start
                if time.monotonic() >= deadline:
                    raise
                problems, seen = [error.message], ""
            if not problems or time.monotonic() >= deadline:
                return problems, seen
            progress.update(problems[0])
            time.sleep(POLL_SECONDS)


def _endpoint(name: str) -> tuple[str, int]:
    """Raises ConfigError for an address of metrics that is none."""
    if (found := endpoint_of(name)) is None:
        raise ConfigError(f"--metrics is {name!r}; give HOST:PORT", key="metrics")
    return found


def _round(lookups: Sequence[str], metrics: Mapping[str, tuple[str, int]], nodes: int) -> tuple[list[str], str]:
    """`metrics`: by name, the address and port."""
    problems: list[str] = []
    seen: list[str] = []
    if lookups:
        found, words = _ask_directory(lookups, nodes)
        problems += found
        seen.append(words)
    if metrics:
        found, words = _ask_metrics(metrics, nodes)
        problems += found
        seen.append(words)
    return problems, "; ".join(seen)


def _ask_directory(lookups: Sequence[str], nodes: int) -> tuple[list[str], str]:
    from kvservice.cli import status
    from kvservice.client.members import tls_beside

    return _judge(status.read_overview("", lookups, {}, tls_beside()), nodes)


def _ask_here(service: str | None, nodes: int) -> tuple[list[str], str]:
    from kvservice.cli import status
    from kvservice.client.members import find_members

    members = find_members(service)
    seen = status.read_overview(members.service, members.lookups, members.known, members.tls)
    problems, words = _judge(seen, nodes)
    if (count := len(members.known)) < nodes and not members.lookups:  # else the lookup partitions say so
        problems.append(f"{counted(count, 'shard')} registered on this machine, but {nodes} are expected")
    return problems, words


def _judge(seen: Overview, nodes: int) -> tuple[list[str], str]:
    from kvservice.client.lookup_overview import misplaced

    problems = [*seen.problems, *misplaced(seen.lookups)]
    staying = sum(not node.error and node.state != "draining" for node in seen.nodes)
    for row in seen.lookups:
        known = f"lookup partition {row.address} knows {counted(row.nodes_alive, 'node')}"
        if not row.error and row.nodes_alive < nodes:
            problems.append(f"{known}, but {nodes} are expected")
        elif not row.error and row.nodes_alive < staying:
            answered = f"{counted(staying, 'cache shard')} answered"
            problems.append(f"{known}, but {answered}: the log of one that is missing says why")
    problems += [f"node {node.label} is draining" for node in seen.nodes if node.state == "draining"]
    pool = sum(node.pool.total_bytes for node in seen.nodes)
    parts = (
        _answering([not row.error for row in seen.lookups], "lookup partition"),
        _answering([not node.error for node in seen.nodes], "cache shard"),
        format_bytes(pool),
    )
    return problems, ", ".join(parts)


def _answering(answers: Sequence[bool], thing: str) -> str:
    """'2 cache shards', or '1 of 2 cache shards' if one does not answer."""
    missing = "" if all(answers) else f"{sum(answers):,} of "
    return missing + counted(len(answers), thing)


def _ask_metrics(metrics: Mapping[str, tuple[str, int]], nodes: int) -> tuple[list[str], str]:
    problems: list[str] = []
    places: set[tuple[str, int]] = set()
    for name, endpoint in metrics.items():
        try:
            rows: list[Any] = socket.getaddrinfo(*endpoint, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            problems.append(f"{name}: {error}")
            continue
        places |= {(str(row[4][0]), endpoint[1]) for row in rows}
    with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
        answers = dict(zip(sorted(places), pool.map(_scrape, sorted(places)), strict=True))
    problems += [f"{bracketed(address)}:{port}: {answer}" for (address, port), answer in answers.items() if answer]
    good = list(answers.values()).count("")
    if good < nodes:
        problems.append(f"the metrics of {counted(good, 'shard')} answer, but {nodes} are expected")
    return problems, f"metrics of {counted(good, 'shard')}"


def _scrape(place: tuple[str, int]) -> str:
    """ "" or what is wrong with the shard's metrics at this address and port. Blocks."""
    address, port = place
    try:
        with urllib.request.urlopen(f"http://{bracketed(address)}:{port}/metrics", timeout=CALL_SECONDS) as reply:
            text = reply.read().decode()
    except urllib.error.HTTPError as error:
        return str(error)
    except urllib.error.URLError as error:  # what it says is its cause, and not "<urlopen error …>"
        return str(getattr(error.reason, "strerror", None) or error.reason)
    except (OSError, ValueError) as error:
        return str(error)
    return "" if MEMORY_METRIC in text else "answers, but has no shard"
