"""What `kvservice status` says, and that it says it without colours and on 80 columns too."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from kvservice.cli import status, tenant_usage
from kvservice.cli.drawing import span
from kvservice.cli.output import Format
from kvservice.cli.status import draw, node_names
from kvservice.units import GiB
from tests.unit.cli.overviews import HOSTS, make_node, make_overview


def shown(width: int = 120, *, wide: bool = False, **changes: object) -> str:
    console = Console(width=width, highlight=False, no_color=True, file=io.StringIO())
    console.print(draw(replace(make_overview(), **changes), wide))  # type: ignore[arg-type]
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def test_the_head_says_what_runs_and_how_full_it_is() -> None:
    head = shown().splitlines()[:3]
    assert head == [
        "Service prod: 3 nodes (1 silent), 2 engines.",
        "Memory: 96.0 GiB of 128.0 GiB used (75 %), 32.0 GiB free.",
        "Lookup partitions: 1 of 2 answering.",
    ]


def test_the_head_says_what_pins_hold() -> None:
    pinned = [replace(make_node(number), pins=number, pinned_bytes=number * GiB) for number in range(3)]
    assert "32.0 GiB free. 1 pin holds 1.0 GiB of it." in shown(nodes=tuple(pinned[:2]))
    assert "32.0 GiB free. 3 pins hold 3.0 GiB of it." in shown(nodes=tuple(pinned))


@pytest.mark.parametrize(
    "said",
    [
        "gpu-a.rack1 (526d7a5fe830)  ok",  # the machine's name beside the id
        "reserved  writing",
        "75.0 %",  # hit rate
        "since start (2h 3m)  last 10 min   last min",
        "evicted since start: 240 for other blocks, 2 for blocks of their tenant, at its quota",
        "5 by `kvservice clear`",
        "d88a09957b84        2    75.0 %  gpu-a.rack1, gpu-b.rack1",  # a model's fingerprint, engines, rate, nodes
        "block_tokens  16               32",  # what differs in a refused engine
        "and 3 more fields",
        "gpu-a.rack1  gpu-b.rack1  21.0 GiB  8.4 GiB/s",
        "search  40.0 GiB  64.0 GiB",
        "cmpl-6f2a9c0e1  gpu-a.rack1  900.0 ms           120  110  12s",
        "problem: node 526d7a5fe832 at 10.0.0.6:34123: deadline exceeded\n`kvservice doctor`, on the machine",
    ],
)
def test_status_tells_operators(said: str) -> None:
    assert said in shown()


def test_details_of_developers_are_behind_wide() -> None:
    for detail in ("Mirrors of the directory", "boot epoch", "8,200 tokens/s", "by worth it finds", "slots"):
        assert (detail in shown(), detail in shown(wide=True)) == (False, True) or detail == "slots"


@pytest.mark.parametrize("width", [80, 100, 120, 200])
@pytest.mark.parametrize("wide", [False, True])
def test_no_line_exceeds_the_terminal_and_no_number_is_cut(width: int, wide: bool) -> None:
    text = shown(width, wide=wide)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for number in ("21.0 GiB", "8.4 GiB/s", "900.0 ms", "75.0 %", "32.0 GiB"):
        assert number in text


def test_a_narrow_terminal_cuts_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(status, "collect", lambda *_: make_overview())
    status.run(None, None, Format.TABLE)
    assert "gpu-a.rack1  16.0 GiB   2.0 GiB  1.0 GiB  40.0 GiB   5.0 GiB" in screen.getvalue()
    assert "quarantined" in screen.getvalue()
    assert " \n" not in screen.getvalue(), "blanks that fill a line make an empty one"


def test_names_of_others_are_shown_and_do_nothing() -> None:
    console = Console(width=200, highlight=False, file=io.StringIO(), force_terminal=True)
    console.print(draw(make_overview(model="[red]evil\x1b[2J\n[/nonsense]", tenant="[bold]"), True))
    text = str(console.file.getvalue())  # type: ignore[attr-defined]
    assert "\x1b[2J" not in text and "[red]evil" in text and "[bold]" in text


def test_two_nodes_of_one_machine_keep_their_ids() -> None:
    nodes = (make_node(0), replace(make_node(1), host=HOSTS[0]), make_node(2))
    assert list(node_names(make_overview(nodes)).values()) == ["526d7a5fe830", "526d7a5fe831", HOSTS[2]]


def test_a_service_that_nobody_uses_yet_says_so() -> None:
    text = shown(windows=(), models=(), engines=(), hits=(), refused=(), flows=(), slowest=(), tenants=())
    assert "No engine has asked for a block yet." in text and "No engine is attached." in text
    assert "Slowest" not in text


def test_a_restricted_overview_says_what_is_missing() -> None:
    assert "KVSERVICE_TOKEN_FILE" in shown(restricted=True)


@pytest.mark.parametrize(
    ("seconds", "said"), [(3.4, "3s"), (59.9, "59s"), (61, "1m"), (7500, "2h 5m"), (360_000, "4d 4h")]
)
def test_a_span_has_at_most_two_units(seconds: float, said: str) -> None:
    assert span(seconds) == said


def test_usage_has_the_words_of_status_for_tenants() -> None:
    """`kvservice tenants usage` said HOLDS where status says used, and USED for a share."""
    rows = [
        tenant_usage.Held("acme", "n0", GiB, 4 * GiB, 3, 2 * GiB, 8 * GiB),
        tenant_usage.Held("bob", "n0", 0, 0, 0, 0, 0),
    ]
    console = Console(width=120, highlight=False, no_color=True, file=io.StringIO())
    console.print(tenant_usage.draw(tenant_usage.Usage(rows), wide=False))
    lines = str(console.file.getvalue()).splitlines()  # type: ignore[attr-defined]
    assert lines[0].split("  ")[0] == "tenant" and "used" in lines[0] and "slots being filled" in lines[0]
    assert lines[1].split() == ["acme", "n0", *["1.0", "GiB", "4.0", "GiB", "25", "%", "2.0", "GiB", "8.0", "GiB", "3"]]
    assert lines[2].split() == ["bob", "n0", "0", "B", "-", "0", "B", "-", "0"]
