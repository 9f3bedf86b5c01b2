"""Commands that study the cache without a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvservice.cli.exits import ExitCode
from kvservice.cli.output import Format
from kvservice.cli.tree import Output, command

GROUP = "Develop"
Policy = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="default, lru, plain-lru, s3-fifo or belady (the optimum). Repeat for more. Default: the first two and "
        "belady.",
    ),
]


def add(tree: typer.Typer) -> None:
    """Add this module's commands to the tree, in the order of the help."""
    command(
        tree,
        GROUP,
        "kvservice replay trace.jsonl --nodes 8 --capacity 10000 --plot replay.png",
        "kvservice replay trace.jsonl --nodes 1 --policy default --policy belady -o json",
        "kvservice replay trace.jsonl --nodes 1 --capacity 5000 --disk 20000 --disk 80000 --disk-write evicted",
    )(replay)
    command(
        tree, GROUP, "kvservice sim --seed 7", "kvservice sim --count 1000 --processes 4", "kvservice sim --nodes 1000"
    )(sim)


def replay(
    trace: Annotated[
        Path, typer.Argument(metavar="TRACE", help="JSON lines, as docs/howto/replay-your-traffic.md has them.")
    ],
    nodes: Annotated[
        int,
        typer.Option(min=1, max=256, metavar="N", help="Also simulate this capacity split over N nodes (1 = skip)."),
    ] = 8,
    capacity: Annotated[
        list[int] | None,
        typer.Option(
            min=1, metavar="N", help="Capacity of all nodes, in blocks. Repeat for more. Default: six values."
        ),
    ] = None,
    policy: Policy = None,
    disk: Annotated[
        list[int] | None,
        typer.Option(
            min=1, metavar="N", help="Also with disks below the memory: blocks of all of them. Repeat for more."
        ),
    ] = None,
    disk_write: Annotated[
        list[str] | None,
        typer.Option(metavar="WHEN", help="evicted, stored or reused. Repeat for more. Default: evicted."),
    ] = None,
    objects: Annotated[
        bool,
        typer.Option("--objects", help="Also with an object store that all nodes share, with room for everything."),
    ] = False,
    objects_write: Annotated[
        list[str] | None,
        typer.Option(metavar="WHEN", help="evicted, stored or reused. Repeat for more. Default: evicted."),
    ] = None,
    token_bytes: Annotated[
        str, typer.Option(metavar="SIZE", help="Bytes that one token takes in the cache, for figures in bytes.")
    ] = "128KiB",
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="Play only the first N requests.")] = None,
    warm_up: Annotated[
        float, typer.Option(min=0, max=0.9, metavar="SHARE", help="Share of the requests that is not counted.")
    ] = 0.0,
    processes: Annotated[int, typer.Option(min=1, max=256, metavar="N", help="Worker processes.")] = 1,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also draw a .png, .svg or .pdf file; needs matplotlib.")
    ] = None,
    output: Output = Format.TABLE,
) -> None:
    """Show what the cache would have found of a trace.

    It plays the requests through real eviction, directory and routing on simulated nodes."""
    from kvservice.cli import replay as run

    run.replay(
        trace,
        nodes=nodes,
        capacities=sorted(set(capacity or [])),
        policies=policy or [],
        disks=sorted(set(disk or [])),
        disk_writes=disk_write or ["evicted"],
        objects_writes=(objects_write or ["evicted"]) if objects else objects_write or [],
        token_bytes=token_bytes,
        limit=limit,
        warm_up=warm_up,
        processes=processes,
        plot=plot,
        form=output,
    )


def sim(
    seed: Annotated[
        int, typer.Option(metavar="N", help="Number of the schedule. The same number always plays the same events.")
    ] = 0,
    count: Annotated[
        int, typer.Option(min=1, metavar="N", help="Number of schedules to play, from --seed on, until one fails.")
    ] = 1,
    processes: Annotated[int, typer.Option(min=1, metavar="N", help="Worker processes when --count > 1.")] = 2,
    whole: Annotated[bool, typer.Option("--whole", help="Show a failing schedule whole, without reducing it.")] = False,
    nodes: Annotated[
        int,
        typer.Option(
            min=0,
            max=4096,
            metavar="N",
            help="Play one schedule with so many nodes. 0: two or three, as the seed says.",
        ),
    ] = 0,
    tiers: Annotated[
        bool, typer.Option("--tiers", help="With --count, play only schedules that have disks or an object store.")
    ] = False,
) -> None:
    """Play random faults against the real core.

    Time, network and memory are simulated."""
    from kvservice.cli import simulate as run

    if nodes:
        good = run.wide(seed, nodes, whole=whole)
    else:
        good = run.campaign(seed, count, processes, tiers=tiers) if count > 1 else run.tell(seed, whole=whole)
    raise typer.Exit(ExitCode.GOOD if good else ExitCode.PROBLEM)
